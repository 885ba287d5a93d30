"""Exploration measured in hidden states: effective rank of a response, how it grows, advantages shaped by it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm import reduce
from jaxrl_llm.metrics import linalg

_TINY = 1e-8


def rank_of_singular_values(singular: Float[Array, "... K"]) -> Float[Array, "..."]:
    """``exp(-sum p log p)`` with ``p = s / sum s``: how many directions carry the spread, 0 without any.

    From "The effective rank: a measure of effective dimensionality" (Roy and Vetterli, 2007).

    >>> import jax.numpy as jnp
    >>> round(float(rank_of_singular_values(jnp.array([3.0, 1.0]))), 4)
    1.7548
    """
    singular = singular.astype(jnp.float32)
    total = jnp.sum(singular, axis=-1, keepdims=True)
    p = singular / jnp.maximum(total, _TINY)
    rank = jnp.exp(-jnp.sum(p * jnp.log(p + _TINY), axis=-1))
    return jnp.where(total[..., 0] > _TINY, rank, 0.0)


def rank_of_hidden_states(hidden: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Effective rank of the masked hidden states of each row, centred over its tokens; 0 below two tokens.

    Unchanged by rotating or scaling the states. Computed from the smaller of the two Gram matrices.
    """
    z = jnp.where(mask[:, :, None], hidden.astype(jnp.float32), 0.0)
    count = jnp.sum(mask.astype(jnp.float32), axis=1)
    mean = jnp.sum(z, axis=1) / jnp.maximum(count, 1.0)[:, None]
    z = jnp.where(mask[:, :, None], z - mean[:, None, :], 0.0)
    over = "btd,bsd->bts" if z.shape[1] <= z.shape[2] else "btd,bte->bde"
    eigenvalues = linalg.eigvalsh(jnp.einsum(over, z, z))
    # rounding leaves small positive eigenvalues where there are none, whose roots are not small
    floor = 1e-6 * jnp.max(eigenvalues, axis=-1, keepdims=True)
    singular = jnp.sqrt(jnp.where(eigenvalues > floor, eigenvalues, 0.0))
    return jax.lax.stop_gradient(jnp.where(count >= 2, rank_of_singular_values(singular), 0.0))


def growth(ranks: Float[Array, "B J"], valid: Bool[Array, "B J"]) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Velocity and acceleration of a series of ranks: ``(ERV, ERA)``, 0 where the series is too short.

    ``delta_j = m_j - mean(m_1 .. m_{j-1})``; ERV is the mean of ``delta_j`` from j = 2, ERA that of
    ``delta_j - delta_{j-1}`` from j = 3.

    Args:
      valid: a leading stretch of each row.

    >>> import jax.numpy as jnp
    >>> v, a = growth(jnp.array([[2.0, 3.0, 5.0, 4.0]]), jnp.ones((1, 4), bool))
    >>> round(float(v[0]), 4), round(float(a[0]), 4)
    (1.3889, -0.1667)
    """
    ranks = jnp.where(valid, ranks.astype(jnp.float32), 0.0)
    before = jnp.cumsum(ranks, axis=1)[:, :-1] / jnp.arange(1, ranks.shape[1], dtype=jnp.float32)[None, :]
    delta, used = ranks[:, 1:] - before, valid[:, 1:]
    turn, both = delta[:, 1:] - delta[:, :-1], used[:, 1:]
    return reduce.sequences(delta, used, mode="mean"), reduce.sequences(turn, both, mode="mean")


def _latest(hidden: Float[Array, "B T D"], mask: Bool[Array, "B T"], end: Array, most: int):
    """The last ``most`` of the first ``end`` masked states of each row, masked states in front: ``(states, mask)``."""
    width = min(most, hidden.shape[1])
    order = jnp.argsort(~mask, axis=1, stable=True)
    count = jnp.minimum(jnp.sum(mask.astype(jnp.int32), axis=1), end)
    first = jnp.maximum(count - width, 0)[:, None]
    place = jnp.minimum(first + jnp.arange(width, dtype=jnp.int32)[None, :], hidden.shape[1] - 1)
    taken = jnp.take_along_axis(order, place, axis=1)
    return jnp.take_along_axis(hidden, taken[:, :, None], axis=1), place < count[:, None]


def rank_figures(
    hidden: Float[Array, "B T D"], mask: Bool[Array, "B T"], *, stride: int = 40, most: int = 512
) -> Float[Array, "B 3"]:
    """Effective rank, its velocity and its acceleration of each response, the latter over prefixes ``stride`` apart.

    Prefixes are treated one after another, and of each at most its last ``most`` states count: no matrix is larger
    than ``[B, most, most]``.

    Args:
      hidden: of the response columns alone, to save work; masked tokens are skipped.

    From "Beyond the Exploration-Exploitation Trade-off: A Hidden State Approach for LLM Reasoning in RLVR" (VERL),
    arXiv:2509.23808, section 3; the cap on states is that of its code.
    """
    if stride < 1:
        raise ValueError(f"stride={stride} must be at least 1 token")
    if most < 2:
        raise ValueError(f"most={most} must be at least 2 states")
    width = mask.shape[1]
    length = jnp.sum(mask.astype(jnp.int32), axis=1, keepdims=True)
    ends = [stride * (j + 1) + 1 for j in range(max(1, (width - 1) // stride))]

    def rank(end: Array) -> Array:
        return rank_of_hidden_states(*_latest(hidden, mask, end, most))

    found = jax.lax.map(rank, jnp.asarray([*ends, width], jnp.int32)).T
    valid = jnp.asarray(ends, jnp.int32)[None, :] <= length
    return jnp.stack([found[:, -1], *growth(found[:, :-1], valid)], axis=1)


class RankAverages(NamedTuple):
    """Moving averages of the three figures, and whether there is one yet."""

    mean: Float[Array, "3"]
    started: Bool[Array, ""]


def no_averages() -> RankAverages:
    """Before the first batch: nothing is shaped."""
    return RankAverages(jnp.zeros((3,), jnp.float32), jnp.zeros((), bool))


def updated_averages(averages: RankAverages, figures: Float[Array, "B 3"], *, rate: float = 0.3) -> RankAverages:
    """``mean <- (1 - rate) mean + rate batch mean``, the first batch taken as it is."""
    new = jnp.sum(figures.astype(jnp.float32), axis=0) / figures.shape[0]
    mean = jnp.where(averages.started, (1 - rate) * averages.mean + rate * new, new)
    return RankAverages(mean, jnp.ones((), bool))


def deviations(figures: Float[Array, "B 3"], averages: RankAverages) -> Float[Array, "B 3"]:
    """Relative distance from the averages, within +-5; 0 before the first average."""
    mean = averages.mean[None, :]
    distance = (figures.astype(jnp.float32) - mean) / (jnp.abs(mean) + _TINY)
    return jnp.where(averages.started, jnp.clip(distance, -5.0, 5.0), 0.0)


def rank_bonus(
    deviation: Float[Array, "B 3"], *, gain: float = 1.0, explore: float | None = None, weight: float = 1.0
) -> Float[Array, " B"]:
    """``phi = weight (b tanh(d_ER) + (1 - b) tanh(d_ERV))`` with ``b = sigmoid(gain d_ERA)``.

    A rank that accelerates asks for exploration (a high rank), one that slows down for exploitation (a growing one).

    Args:
      explore: a fixed ``b`` in [0, 1] in place of the sigmoid.

    From arXiv:2509.23808, section 4; ``gain`` 2 in its scripts.

    >>> import jax.numpy as jnp
    >>> round(float(rank_bonus(jnp.array([[0.5, 1.0, 0.2]]))[0]), 4)
    0.5969
    """
    rank, velocity, change = (deviation[:, i].astype(jnp.float32) for i in range(3))
    share = jax.nn.sigmoid(gain * change) if explore is None else jnp.full(rank.shape, explore, jnp.float32)
    return weight * (share * jnp.tanh(rank) + (1 - share) * jnp.tanh(velocity))


def shaped_advantages(
    advantages: Float[Array, "B T"], bonus: Float[Array, " B"], *, kappa: float = 2.0
) -> Float[Array, "B T"]:
    """``A + min(max(phi, 0), |A| / kappa)``: never lower, never of the other sign, 0 stays 0.

    From arXiv:2509.23808, section 4. Differs from its code, which adds to the last token of a response alone.

    >>> import jax.numpy as jnp
    >>> shaped_advantages(jnp.array([[1.0], [-1.0], [0.0]]), jnp.array([0.8, 0.8, 0.8])).ravel().tolist()
    [1.5, -0.5, 0.0]
    """
    if kappa <= 1:
        raise ValueError(f"kappa={kappa} must be greater than 1, or a bonus could turn the sign of an advantage")
    advantages, bonus = advantages.astype(jnp.float32), bonus.astype(jnp.float32)
    return advantages + jnp.minimum(jax.nn.relu(bonus)[:, None], jnp.abs(advantages) / kappa)
