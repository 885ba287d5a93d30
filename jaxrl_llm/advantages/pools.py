"""Adaptive rollout pools: how many responses a prompt gets, which of them train, and with which advantages.

A pool is a row of ``[P, C]`` arrays: up to ``C`` responses to one prompt in the order of generation; ``drawn`` says
which of them exist.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def _counts(right: Array, drawn: Array) -> tuple[Array, Array]:
    positive = jnp.cumsum((right & drawn).astype(jnp.int32), axis=1)
    return positive, jnp.cumsum((~right & drawn).astype(jnp.int32), axis=1)


def positive_exit(positive: Int[Array, "P R"], negative: Int[Array, "P R"]) -> Bool[Array, "P R"]:
    """Ada-pos: a prompt is done with its first right response."""
    return positive >= 1


def make_balanced_exit(keep: int):
    """Ada-balanced: done with ``keep // 2`` right and ``keep - keep // 2`` wrong responses."""
    if keep < 2:
        raise ValueError(f"keep={keep} must be at least 2 to hold both right and wrong responses")
    return lambda positive, negative: (positive >= keep // 2) & (negative >= keep - keep // 2)


def never_exit(positive: Int[Array, "P R"], negative: Int[Array, "P R"]) -> Bool[Array, "P R"]:
    """Every round for every prompt: a large fixed group."""
    return jnp.zeros(positive.shape, bool)


def rounds_drawn(right: Bool[Array, "P C"], *, per_round: int, done=positive_exit) -> Bool[Array, "P C"]:
    """Which responses of a pool of ``C / per_round`` rounds are ever drawn: all rounds up to the first that is done.

    The round that meets the condition counts in full.

    Args:
      done: ``(right so far, wrong so far) [P, rounds] -> bool``: ``positive_exit``, ``make_balanced_exit(n)`` or
        ``never_exit``.

    From "Reinforce-Ada", arXiv:2510.04996, algorithm 1.

    >>> import jax.numpy as jnp
    >>> rounds_drawn(jnp.array([[False, True, True, True]]), per_round=1).tolist()
    [[True, True, False, False]]
    """
    size = right.shape[1]
    if per_round < 1 or size % per_round:
        raise ValueError(f"per_round={per_round} must divide the {size} responses of a pool")
    positive, negative = _counts(right, jnp.ones(right.shape, bool))
    finished = done(positive[:, per_round - 1 :: per_round], negative[:, per_round - 1 :: per_round])
    # round k is drawn when no earlier round was done
    before = jnp.cumsum(finished.astype(jnp.int32), axis=1) - finished.astype(jnp.int32)
    return jnp.repeat(before == 0, per_round, axis=1)


def balanced_counts(
    positive: Int[Array, " P"], negative: Int[Array, " P"], keep: int
) -> tuple[Int[Array, " P"], Int[Array, " P"]]:
    """Right and wrong responses to train on: half and half (the odd one wrong), filled from the other class."""
    half = keep // 2
    right = jnp.minimum(jnp.maximum(half, keep - negative), positive)
    return right, jnp.minimum(keep - right, negative)


def earliest(
    right: Bool[Array, "P C"], drawn: Bool[Array, "P C"], wanted_right: Int[Array, " P"], wanted_wrong: Int[Array, " P"]
) -> Bool[Array, "P C"]:
    """The first ``wanted_right`` right and ``wanted_wrong`` wrong responses of each pool."""
    positive, negative = _counts(right, drawn)
    return drawn & jnp.where(right, positive <= wanted_right[:, None], negative <= wanted_wrong[:, None])


def pool_advantages(
    rewards: Float[Array, "P C"], members: Bool[Array, "P C"], *, std: bool = False, eps: float = 1e-6
) -> Float[Array, "P C"]:
    """``r - mean of the pool`` for every response, the mean over ``members`` only; 0 where fewer than two are members.

    With ``members`` the whole pool and a subset trained, these are Reinforce-Ada's global statistics; with
    ``members`` the trained responses they are those of a plain group.

    Args:
      std: divide by the sample standard deviation of the members.

    From "Reinforce-Ada", arXiv:2510.04996, section 3.

    >>> import jax.numpy as jnp
    >>> pool_advantages(jnp.array([[1.0, 1.0, 1.0, 0.0]]), jnp.ones((1, 4), bool)).tolist()
    [[0.25, 0.25, 0.25, -0.75]]
    """
    rewards = rewards.astype(jnp.float32)
    low = jnp.min(jnp.where(members, rewards, jnp.inf), axis=1, keepdims=True)  # sums of large numbers lose digits
    rewards = rewards - jax.lax.stop_gradient(jnp.where(jnp.isfinite(low), low, 0.0))
    count = jnp.sum(members.astype(jnp.float32), axis=1, keepdims=True)
    mean = jnp.sum(jnp.where(members, rewards, 0.0), axis=1, keepdims=True) / jnp.maximum(count, 1.0)
    centred = jnp.where(count > 1, rewards - mean, 0.0)
    if std:
        squares = jnp.sum(jnp.where(members, centred, 0.0) ** 2, axis=1, keepdims=True)
        deviation = jnp.sqrt(squares / jnp.maximum(count - 1.0, 1.0))
        centred = jnp.where(deviation > eps, centred / jnp.maximum(deviation, eps), 0.0)
    return centred


def cumulative_advantage(accuracy: Float[Array, " P"], rollouts: int, *, std: bool = False) -> Float[Array, " P"]:
    """Sum of ``|A|`` over a group of ``rollouts`` binary rewards: ``N 2a(1-a)``, with std ``N 2 sqrt(a(1-a))``.

    From "Depth-Breadth Synergy in RLVR", arXiv:2508.13755, section 3.
    """
    accuracy = accuracy.astype(jnp.float32)
    spread = accuracy * (1.0 - accuracy)
    return 2.0 * rollouts * (jnp.sqrt(jnp.maximum(spread, 0.0)) if std else spread)


def equal_treatment(accuracy: Float[Array, " P"], peak: float) -> Float[Array, " P"]:
    """DARS-ET: every hard prompt gets the cumulative advantage of the most favoured one."""
    return jnp.full(accuracy.shape, peak, jnp.float32)


def hardness_weighted(accuracy: Float[Array, " P"], peak: float) -> Float[Array, " P"]:
    """DARS-HW: up to twice as much, ``2 (1 - a)`` times the peak."""
    return 2.0 * (1.0 - accuracy.astype(jnp.float32)) * peak


def no_extra(accuracy: Float[Array, " P"], peak: float) -> Float[Array, " P"]:
    """No wish beyond the first stage: a plain group."""
    return jnp.zeros(accuracy.shape, jnp.float32)


def extra_rollouts(
    accuracy: Float[Array, " P"], *, rollouts: int, most: int, wish=equal_treatment, std: bool = False
) -> Int[Array, " P"]:
    """How many more responses a prompt gets in the second stage: ``ceil((wish - N S) / S)``, at most ``most - N``.

    ``S`` is the cumulative advantage of one rollout. Accuracy 0 counts as ``0.5 / N``; from 1/2 on there are none.

    Args:
      rollouts: N of the first stage.
      most: rollouts of both stages together.
      wish: cumulative advantage aimed at: ``equal_treatment``, ``hardness_weighted`` or ``no_extra``.

    From "Depth-Breadth Synergy in RLVR", arXiv:2508.13755, section 3.2 (DARS), with its released code.

    >>> import jax.numpy as jnp
    >>> extra_rollouts(jnp.array([0.0, 0.125, 0.25, 0.375, 0.5]), rollouts=8, most=32).tolist()
    [24, 11, 3, 1, 0]
    """
    if most < rollouts:
        raise ValueError(f"most={most} must be at least rollouts={rollouts} of the first stage")
    at = jnp.where(accuracy <= 1e-6, 0.5 / rollouts, accuracy.astype(jnp.float32))
    one = cumulative_advantage(at, 1, std=std)
    peak = float(rollouts) * (1.0 if std else 0.5)
    # 1e-4 off: float32 must not lift a whole number to the next one
    more = jnp.ceil((wish(at, peak) - rollouts * one) / jnp.maximum(one, 1e-9) - 1e-4)
    more = jnp.where(at >= 0.5, 0.0, jnp.clip(more, 0.0, most - rollouts))
    return more.astype(jnp.int32)
