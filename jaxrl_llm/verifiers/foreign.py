"""Scorers of other packages read model text, so they are asked in the sandbox: one shared set of warm workers."""

import functools
import math
import os
from collections.abc import Callable
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.sandbox.records import Called, Limits
from jaxrl_llm.verifiers.verdict import Verdict

LIMITS = Limits(cpu_s=3.0, wall_s=30.0, memory_mb=1024)
TIMEOUT_S = 120.0  # of an item in a pool: the sandbox has its own, smaller limits, and is asked twice at most
OWN_DOING = ("raised", "cpu", "memory", "output", "killed")


@functools.cache
def sandbox(module: str) -> Sandbox:
    """Of this process: workers that hold a module, started when they are needed, at most one a core."""
    return Sandbox(workers=os.cpu_count() or 1, limits=LIMITS, modules=(module,))


def ask(function: str, *arguments: Any) -> Called:
    """``module:function`` of plain arguments, some of them model text."""
    return sandbox(function.partition(":")[0]).call(function, *arguments)


def ask_trusted(function: str, *arguments: Any, limits: Limits) -> Any:
    """The value of a function that reads no model text, in a fresh process with hash seed 0.

    Raises:
      UserError: with what it raised.
    """
    called = sandbox(function.partition(":")[0]).call_fresh(function, *arguments, limits=limits)
    if called.status != "ok":
        raise UserError((called.reason.splitlines() or [called.status])[-1])
    return called.value


def verdict(called: Called, reference: Callable[[], Called], reason: Callable[[float], str]) -> Verdict:
    """A scorer's value as a verdict.

    An answer that the scorer fails on, dies of, or spends its limits on is wrong: 0. Where the scorer fails on the
    reference too, or the sandbox failed, or no processor was free, the verdict is invalid.

    Args:
      reference: the scorer of its own reference answer; asked only after a failure.
      reason: of a value in [0, 1].
    """
    if called.status == "ok":
        value = float(called.value)
        if math.isfinite(value) and 0.0 <= value <= 1.0:
            return Verdict(value, True, reason(value))
        called = called._replace(status="raised", reason=f"scored {value}, which is not in [0, 1]")
    if called.status not in OWN_DOING:
        return Verdict(0.0, False, f"not judged: {called.reason}")
    again = reference()
    if again.status != "ok":
        return Verdict(0.0, False, f"the scorer fails on its own answer: {again.reason}")
    return Verdict(0.0, True, f"not readable: {called.reason}")
