"""Jittable verifiers over character tokens: state machines that read a response and judge it on the device.

They agree with the host verifiers of the same tasks (``verifiers.countdown.verify`` on the step form,
``verifiers.answers.verify_chain``), but for two things: a response that was cut before its end token is wrong (not
invalid), and so are blanks around Countdown steps, which the host strips.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxrl_llm.types import Rewards, Trajectories

MAX_DIGITS = 4
_OTHER, _DIGIT, _OPERATOR, _EQUALS, _COMMA, _HASH, _END = range(7)


def character_classes(
    encode: Callable[[str], list[int]], eos_ids: tuple[int, ...], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Class and value of every token id: digits carry their value, ``+ - * /`` carry 0, 1, 2, 3.

    Raises:
      ValueError: when a character that the verifiers read is not one token of its own.
    """
    classes, values = np.zeros(vocab_size, np.int32), np.zeros(vocab_size, np.int32)
    for text, kind in (("0123456789", _DIGIT), ("+-*/", _OPERATOR), ("=", _EQUALS), (",", _COMMA), ("#", _HASH)):
        for value, character in enumerate(text):
            ids = encode(character)
            if len(ids) != 1:
                raise ValueError(f"{character!r} is {len(ids)} tokens; jittable verifiers need one token a character")
            classes[ids[0]], values[ids[0]] = kind, value
    classes[list(eos_ids)] = _END
    return classes, values


def _columns(trajectories: Trajectories, classes: np.ndarray, values: np.ndarray):
    """Scan inputs ``[T, B]``: class, value, mask."""
    tokens = trajectories.tokens
    kinds, numbers = jnp.asarray(classes)[tokens], jnp.asarray(values)[tokens]
    return jnp.moveaxis(kinds, 1, 0), jnp.moveaxis(numbers, 1, 0), jnp.moveaxis(trajectories.mask, 1, 0)


def _take(values: Int[Array, "B S"], free: Bool[Array, "B S"], wanted: Int[Array, " B"]):
    """Takes the first free slot that holds ``wanted``: ``(found, free afterwards)``."""
    match = free & (values == wanted[:, None])
    first = match & (jnp.cumsum(match.astype(jnp.int32), axis=1) == 1)
    return jnp.any(match, axis=1), free & ~first


def _countdown_step(state: dict[str, Array], kind: Array, number: Array) -> dict[str, Array]:
    """Reads one character of ``a?b=c`` steps; ``phase`` 0, 1, 2 reads a, b, c."""
    s = dict(state)
    complete = s["digits"] > 0
    digit = kind == _DIGIT
    operator = (kind == _OPERATOR) & (s["phase"] == 0) & complete
    equals = (kind == _EQUALS) & (s["phase"] == 1) & complete
    closing = ((kind == _COMMA) | (kind == _END)) & (s["phase"] == 2) & complete
    s["ok"] &= (digit & (s["digits"] < MAX_DIGITS)) | operator | equals | closing
    has_a, free = _take(s["values"], s["free"], s["a"])
    has_b, free = _take(s["values"], free, s["b"])
    divides = (s["b"] != 0) & (s["current"] * s["b"] == s["a"])
    results = jnp.stack([s["a"] + s["b"], s["a"] - s["b"], s["a"] * s["b"]], axis=1) == s["current"][:, None]
    results = jnp.concatenate([results, divides[:, None]], axis=1)
    right = jnp.take_along_axis(results, s["operator"][:, None], axis=1)[:, 0]
    slot = jnp.arange(s["values"].shape[1])[None, :] == (s["inputs"] + s["steps"])[:, None]
    s["ok"] &= ~closing | (has_a & has_b & right)
    s["values"] = jnp.where(closing[:, None] & slot, s["current"][:, None], s["values"])
    s["free"] = jnp.where(closing[:, None], free | slot, s["free"])
    s["last"] = jnp.where(closing, s["current"], s["last"])
    s["steps"] = s["steps"] + closing.astype(jnp.int32)
    s["a"] = jnp.where(operator, s["current"], s["a"])
    s["b"] = jnp.where(equals, s["current"], s["b"])
    s["operator"] = jnp.where(operator, number, s["operator"])
    s["phase"] = jnp.where(operator, 1, jnp.where(equals, 2, jnp.where(closing, 0, s["phase"])))
    s["current"] = jnp.where(digit, jnp.minimum(s["current"], 10**MAX_DIGITS) * 10 + number, 0)
    s["digits"] = jnp.where(digit, s["digits"] + 1, 0)
    s["ended"] |= kind == _END
    return s


def make_countdown_verifier(classes: np.ndarray, values: np.ndarray) -> Callable[[Any, Trajectories], Rewards]:
    """1 for steps that use every number exactly once, are all right and end at the target; else 0.

    ``answers``: ``numbers [B, 4]`` (0 fills), ``target [B]``. See ``data.tasks.countdown`` for the form.
    """

    def verify(answers, trajectories):
        numbers, target = answers["numbers"].astype(jnp.int32), answers["target"].astype(jnp.int32)
        rows, width = numbers.shape
        zeros = jnp.zeros((rows,), jnp.int32)
        table = jnp.concatenate([numbers, jnp.zeros((rows, width), jnp.int32)], axis=1)
        start = {
            "values": table,
            "free": table > 0,
            "inputs": jnp.full((rows,), width, jnp.int32),
            "ok": jnp.ones((rows,), bool),
            "ended": jnp.zeros((rows,), bool),
        } | {k: zeros for k in ("phase", "current", "digits", "a", "b", "operator", "steps", "last")}

        def step(state, column):
            kind, number, mask = column
            after = _countdown_step(state, kind, number)
            keep = {k: mask.reshape((-1,) + (1,) * (v.ndim - 1)) for k, v in state.items()}
            return {k: jnp.where(keep[k], after[k], state[k]) for k in state}, None

        end, _ = jax.lax.scan(step, start, _columns(trajectories, classes, values))
        left = jnp.sum(end["free"].astype(jnp.int32), axis=1)
        right = end["ok"] & end["ended"] & (left == 1) & (end["steps"] > 0) & (end["last"] == target)
        return Rewards(right.astype(jnp.float32), jnp.ones((rows,), bool))

    return verify


def make_value_reader(
    classes: np.ndarray, values: np.ndarray, *, mark: str = "#"
) -> Callable[[Trajectories], tuple[Int[Array, " B"], Bool[Array, " B"]]]:
    """``(value, answered)``: the whole number after the last mark of an ended response; 0 and False without one.

    Args:
      mark: what stands before an answer: ``#``, or ``=`` of steps whose last result is the answer.
    """
    begins = {"#": _HASH, "=": _EQUALS}[mark]

    def read(trajectories):
        rows = trajectories.tokens.shape[0]
        zeros, no = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), bool)

        def step(state, column):
            current, digits, marked, ended = state
            kind, number, mask = column
            hashed, digit, end = kind == begins, kind == _DIGIT, kind == _END
            current_after = jnp.where(
                hashed, 0, jnp.where(digit, jnp.minimum(current, 10**MAX_DIGITS) * 10 + number, current)
            )
            digits_after = jnp.where(hashed, 0, digits + digit.astype(jnp.int32))
            marked_after = hashed | (marked & (digit | end))
            new = (current_after, digits_after, marked_after, ended | end)
            return tuple(jnp.where(mask, a, b) for a, b in zip(new, state, strict=True)), None

        (current, digits, marked, ended), _ = jax.lax.scan(
            step, (zeros, zeros, no, no), _columns(trajectories, classes, values)
        )
        answered = marked & ended & (digits > 0) & (digits <= MAX_DIGITS)
        return jnp.where(answered, current, 0), answered

    return read


def make_value_verifier(classes: np.ndarray, values: np.ndarray) -> Callable[[Any, Trajectories], Rewards]:
    """1 when the whole number after the last ``#`` equals ``answers["value"]``; else 0 (also when none is given)."""
    read = make_value_reader(classes, values)

    def verify(answers, trajectories):
        value, answered = read(trajectories)
        right = answered & (value == answers["value"])
        return Rewards(right.astype(jnp.float32), jnp.ones(right.shape, bool))

    return verify
