"""What traced programs compute, as hashes that do not depend on what was traced before: of programs, plans, updates.

The text of a jaxpr does: a function that several calls share is written once and has a number of its own, and which
calls share one is a matter of JAX's caches and settings.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval as pe

from jaxrl_llm.experiment import arms
from jaxrl_llm.train import offline, online, origins
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train.plan import Plan

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def of_program(jaxpr: Jaxpr | ClosedJaxpr, constants: Iterable[Any] = ()) -> bytes:
    """The same for programs that do the same operations, in the same order, on the same constants.

    Names of jitted functions and addresses do not count, and a function that is called twice counts like its two
    copies. Shapes, dtypes and the parameters of every operation do.

    Args:
      jaxpr: a traced program, ``jax.make_jaxpr(f)(...)``, or an open one.
      constants: of an open one, what its ``constvars`` hold.

    >>> inner = jax.jit(lambda x: 2 * x)
    >>> one, two = jax.make_jaxpr(lambda x: inner(inner(x)))(1.0), jax.make_jaxpr(lambda x: inner(x))(1.0)
    >>> of_program(one) == of_program(two)
    False
    """
    closed = isinstance(jaxpr, ClosedJaxpr)
    inner = jaxpr.jaxpr if closed else jaxpr
    return _program(inner, jaxpr.consts if closed else constants, {})


def _program(jaxpr: Jaxpr, constants: Iterable[Any], seen: dict[int, bytes]) -> bytes:
    if id(jaxpr) not in seen:
        seen[id(jaxpr)] = _equations(jaxpr, seen)
    digest = hashlib.sha256(seen[id(jaxpr)])
    for constant in constants:
        digest.update(_bytes(constant))
    return digest.digest()


def _equations(jaxpr: Jaxpr, seen: dict[int, bytes]) -> bytes:
    digest, numbers = hashlib.sha256(), {}

    def name(variable: Any) -> bytes:
        if isinstance(variable, Literal):
            return f"{variable.aval.str_short()} ".encode() + _bytes(variable.val)
        number = numbers.setdefault(id(variable), len(numbers))
        return f"{number}:{variable.aval.str_short()}".encode()

    def line(*parts: bytes) -> None:
        digest.update(b" ".join(parts) + b"\n")

    line(b"given", *map(name, [*jaxpr.constvars, *jaxpr.invars]))
    for equation in jaxpr.eqns:
        said = [f"{key}=".encode() + _value(value, seen) for key, value in sorted(equation.params.items())]
        said = [text for text in said if not text.startswith(b"name=")]
        inputs = list(map(name, equation.invars))
        line(equation.primitive.name.encode(), *said, b"of", *inputs, b"gives", *map(name, equation.outvars))
    line(b"returned", *map(name, jaxpr.outvars))
    return digest.digest()


def _value(value: Any, seen: dict[int, bytes]) -> bytes:
    """A parameter of an operation: programs by their own hash, arrays by their bytes, the rest by its text."""
    if isinstance(value, ClosedJaxpr):
        return _program(value.jaxpr, value.consts, seen).hex().encode()
    if isinstance(value, Jaxpr):
        return _program(value, (), seen).hex().encode()
    if isinstance(value, (tuple, list)):
        return b"(" + b",".join(_value(v, seen) for v in value) + b")"
    if isinstance(value, (set, frozenset)):
        return b"{" + b",".join(sorted(_value(v, seen) for v in value)) + b"}"
    if isinstance(value, (np.ndarray, jax.Array)):
        return _bytes(value)
    return _ADDRESS.sub("", repr(value)).encode()


def _bytes(constant: Any) -> bytes:
    """What a constant is: its bytes, or how it was made, where this process trained it."""
    origin = origins.origin_of(constant)
    if origin is not None:
        return _recipe(origin) + str(origin.place).encode()
    is_key = jnp.issubdtype(jnp.result_type(constant), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(constant) if is_key else constant).tobytes()


_RECIPES: list[tuple[origins.Origin, bytes]] = []  # the last ones: all leaves of some weights have one


def _recipe(origin: origins.Origin) -> bytes:
    for known, digest in _RECIPES:
        if known.program is origin.program and known.given is origin.given:
            return digest
    found = hashlib.sha256(of_program(jax.make_jaxpr(origin.program)(origin.given)))
    for leaf in jax.tree.leaves(origin.given):
        found.update(_bytes(leaf))
    _RECIPES[:] = [*_RECIPES[-7:], (origin, found.digest())]
    return found.digest()


def fingerprint(plan: Plan, traced: list[Any]) -> str:
    """The same for two arms that compute the same: programs, their constants, numbers of steps."""
    digest = hashlib.sha256(repr([stage.steps for stage in plan.stages]).encode())
    for one in traced:
        digest.update(of_program(one))
    return digest.hexdigest()


def _needed(closed: Any, outputs: list[bool]) -> tuple[Any, list[Any], list[bool]]:
    """A program without what these outputs do not need, the constants left in it, and which inputs it still reads."""
    jaxpr, inputs = pe.dce_jaxpr(closed.jaxpr, outputs)
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    kept = [(v, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True) if id(v) in read]
    return jaxpr.replace(constvars=[v for v, _ in kept]), [c for _, c in kept], list(inputs)


def _leaves(tree: Any) -> int:
    return len(jax.tree.leaves(tree))


def update_fingerprint(plan: Plan) -> str:
    """The same for two arms whose parameters go the same way: what only feeds metrics or the record is left out.

    Of every iteration what the next parameters need is followed through the state (moments, memories, curriculum) to
    a fixed point; the rest is dead code, however different it is. What is made of the parameters at the end counts, too
    (``Plan.finish``). Empty where Python takes part in the rollouts or the rewards, which no trace shows.
    """
    if plan.world is not None or (plan.on_host and plan.host_score):
        return ""
    key = jax.eval_shape(lambda: jax.random.key(0))
    first, params = jax.make_jaxpr(plan.init, return_shape=True)(key)
    digest = hashlib.sha256(repr([stage.steps for stage in plan.stages]).encode())
    digest.update(of_program(first))
    for stage in plan.stages:
        module = online if isinstance(stage.method, online.Online) else offline
        begin, state = jax.make_jaxpr(lambda p, k, s=stage: plans.start(s, p, k), return_shape=True)(params, key)
        one, (after, _) = jax.make_jaxpr(lambda s, m=module, x=stage.method: m.iterate(x, s), return_shape=True)(state)
        size = _leaves(state)
        others = [False] * (len(one.out_avals) - size)
        needed = [True] * _leaves(state.params) + [False] * (size - _leaves(state.params))
        while True:
            jaxpr, constants, inputs = _needed(one, [*needed, *others])
            grown = [a or b for a, b in zip(needed, inputs, strict=True)]
            if grown == needed:
                break
            needed = grown
        digest.update(of_program(jaxpr, constants))
        digest.update(of_program(*_needed(begin, needed)[:2]))
        params = after.params
    digest.update(of_program(jax.make_jaxpr(plan.finish)(params, key)))
    return digest.hexdigest()


def reads_sampler_logp(plan: Plan) -> bool:
    """Whether an update depends on the log-probabilities that the sampler gave its tokens, as a ratio to it does.

    Where none does, samples of older weights are trained as those of present ones. True for worlds in Python, whose
    episodes no trace shows, and where nothing is sampled.
    """
    if plan.world is not None:
        return True
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(plan.init, key)
    read = []
    for stage in plan.stages:
        state = jax.eval_shape(lambda p, k, s=stage: plans.start(s, p, k), params, key)
        if not isinstance(method := stage.method, online.Online):
            params = jax.eval_shape(lambda s, x=method: offline.iterate(x, s), state)[0].params
            continue
        drawn = jax.eval_shape(lambda s, x=method: online.begin(x, s), state)
        rewards = jax.eval_shape(arms.unscored, None, drawn.trajectories)
        given = (state, drawn, rewards)
        one, (after, _) = jax.make_jaxpr(lambda *x, m=method: online.finish(m, *x), return_shape=True)(*given)
        wanted = [True] * _leaves(after.params)
        *_, inputs = _needed(one, wanted + [False] * (len(one.out_avals) - len(wanted)))
        named = zip(jax.tree_util.tree_leaves_with_path(given), inputs, strict=True)
        read.append(any(is_read for (path, _), is_read in named if "sampler_logp" in jax.tree_util.keystr(path)))
        params = after.params
    return any(read) or not read


def same_updates(built: Mapping[str, Plan]) -> list[list[str]]:
    """Groups of arms whose parameters are updated by the same program."""
    groups: dict[str, list[str]] = {}
    for name, plan in built.items():
        if any(stage.steps for stage in plan.stages) and (found := update_fingerprint(plan)):
            groups.setdefault(found, []).append(name)
    return [names for names in groups.values() if len(names) > 1]
