"""Mathematical answers in LaTeX or plain form, compared by value with math-verify (extra ``tasks``).

Comparing symbolic expressions can run for minutes or eat all memory. The timers of math-verify itself are signals,
which work in a main thread only, so they are off here: run this verifier in a ``pool.VerifierPool``.
"""

import logging
from typing import Any

from jaxrl_llm.errors import extra_module
from jaxrl_llm.verifiers.verdict import Verdict

MAX_CHARACTERS = 20_000


def prepare() -> None:
    """Imports math-verify; the pool calls it before the clock runs.

    Raises:
      UserError: when the extra is not installed.
    """
    math_verify = extra_module("math_verify", "the math verifier needs", "tasks")
    for name in ("math_verify", "math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns about every timeout that is off
    math_verify.parse("$1$", parsing_timeout=0)  # builds its regular expressions


def verify(answer: dict[str, Any], response: str) -> Verdict:
    """1 when the last mathematical answer of the response equals ``answer["value"]``, 0 elsewhere.

    A reference that does not parse is an invalid verdict: the data are wrong, not the model.

    >>> verify({"value": "\\\\frac{1}{2}"}, "So it is $0.5$.").value
    1.0
    """
    prepare()
    import math_verify

    # without a delimiter only plain numbers are found, so a bare reference gets one
    reference = str(answer["value"])
    gold = math_verify.parse(reference if "$" in reference else f"${reference}$", parsing_timeout=0)
    if not gold:
        return Verdict(0.0, False, f"reference answer {reference[:40]!r} does not parse")
    try:
        given = math_verify.parse(response[-MAX_CHARACTERS:], parsing_timeout=0)
        if not given:
            return Verdict(0.0, True, "no mathematical answer found")
        right = math_verify.verify(gold, given, timeout_seconds=0)
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError) as error:
        return Verdict(0.0, True, f"not comparable: {type(error).__name__}")
    return Verdict(1.0, True, "right") if right else Verdict(0.0, True, f"{str(given[0])[:40]} is not {reference[:40]}")
