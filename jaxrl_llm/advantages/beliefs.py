"""Rewards of turns from what a user model believes before and after each of them.

A belief is a distribution over ``V`` types of user. ``before[b, k]`` is held when turn ``k`` is chosen, ``after[b, k]``
when it has been answered; ``valid`` says which turns were taken. A potential is a function ``(beliefs [B K V],
types [B]) -> [B K]``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SMALLEST = 1e-6  # a belief is taken for at least this before its logarithm


def right_belief(beliefs: Float[Array, "B K V"], types: Int[Array, " B"]) -> Float[Array, "B K"]:
    """``b(u*)``: what is believed of the user's own type.

    From "Enhancing Personalized Multi-Turn Dialogue with Curiosity Reward" (CURIO), arXiv:2504.03206.
    """
    own = jnp.broadcast_to(types[:, None, None], (*beliefs.shape[:2], 1))
    return jnp.take_along_axis(beliefs.astype(jnp.float32), own, axis=2)[:, :, 0]


def log_right_belief(beliefs: Float[Array, "B K V"], types: Int[Array, " B"]) -> Float[Array, "B K"]:
    """``log max(b(u*), 1e-6)``.

    From "Enhancing Personalized Multi-Turn Dialogue with Curiosity Reward" (CURIO), arXiv:2504.03206.
    """
    return jnp.log(jnp.maximum(right_belief(beliefs, types), SMALLEST))


def certainty(beliefs: Float[Array, "B K V"], types: Int[Array, " B"]) -> Float[Array, "B K"]:
    """``-H(b) = sum_u b(u) log b(u)``, 0 for a belief without doubt; right or wrong, ``types`` is not looked at.

    From "Enhancing Personalized Multi-Turn Dialogue with Curiosity Reward" (CURIO), arXiv:2504.03206.
    """
    chance = beliefs.astype(jnp.float32)
    return jnp.sum(chance * jnp.log(jnp.maximum(chance, SMALLEST)), axis=2)


def _counted(valid: Array, *beliefs: Array) -> list[Array]:
    """Beliefs of turns that were taken, even ones elsewhere; no gradient."""
    even = 1.0 / beliefs[0].shape[2]
    return [jax.lax.stop_gradient(jnp.where(valid[:, :, None], b.astype(jnp.float32), even)) for b in beliefs]


def level_rewards(
    before: Float[Array, "B K V"],
    after: Float[Array, "B K V"],
    types: Int[Array, " B"],
    valid: Bool[Array, "B K"],
    *,
    potential: Callable[..., Array] = right_belief,
    gamma: float = 1.0,
) -> Float[Array, "B K"]:
    """``Phi(after)``, paid at every turn for as long as it lasts: CURIO's Acc, and with ``certainty`` its Ent.

    Another turn earns again what is known already, or costs it where ``Phi < 0``: longer or shorter dialogues are
    preferred for themselves. ``before`` and ``gamma`` are there for the sake of the others and do nothing.

    From "Enhancing Personalized Multi-Turn Dialogue with Curiosity Reward" (CURIO), arXiv:2504.03206.

    >>> import jax.numpy as jnp
    >>> b, c = jnp.array([[[0.5, 0.5], [0.75, 0.25]]]), jnp.array([[[0.75, 0.25], [0.75, 0.25]]])
    >>> level_rewards(b, c, jnp.array([0]), jnp.ones((1, 2), bool)).tolist()
    [[0.75, 0.75]]
    """
    (after,) = _counted(valid, after)
    return jnp.where(valid, potential(after, types), 0.0)


def shaped_rewards(
    before: Float[Array, "B K V"],
    after: Float[Array, "B K V"],
    types: Int[Array, " B"],
    valid: Bool[Array, "B K"],
    *,
    potential: Callable[..., Array] = right_belief,
    gamma: float = 1.0,
    end: float = 1.0,
) -> Float[Array, "B K"]:
    """``gamma Phi(after) - Phi(before)``: CURIO's DiffAcc; with ``log_right_belief`` DiffLogAcc, ``certainty`` DiffEnt.

    At ``gamma = 1`` the turns of an episode sum to ``Phi(last) - Phi(first)``, so that a turn which teaches nothing
    earns nothing. That last belief is an aim of its own: which policy is best cannot change only where the potential
    after the end counts as 0, that is at ``end=0``.

    Args:
      gamma: the discount of the returns.
      end: factor of the potential after an episode's last valid turn; 1 in the paper.

    From "Enhancing Personalized Multi-Turn Dialogue with Curiosity Reward" (CURIO), arXiv:2504.03206. Differs from the
    paper in naming ``end``.

    >>> import jax.numpy as jnp
    >>> b, c = jnp.array([[[0.5, 0.5], [0.75, 0.25]]]), jnp.array([[[0.75, 0.25], [0.25, 0.75]]])
    >>> shaped_rewards(b, c, jnp.array([0]), jnp.ones((1, 2), bool)).tolist()
    [[0.25, -0.5]]
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma} must lie in [0, 1]")
    before, after = _counted(valid, before, after)
    more = jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    if end != 1:  # there both factors are the same; elsewhere a turn that counts may follow after a hole
        more = jnp.cumsum(valid[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1] > 1
    kept = jnp.where(more, gamma, gamma * end)
    return jnp.where(valid, kept * potential(after, types) - potential(before, types), 0.0)


def information_rewards(
    before: Float[Array, "B K V"],
    after: Float[Array, "B K V"],
    types: Int[Array, " B"],
    valid: Bool[Array, "B K"],
    *,
    gamma: float = 1.0,
) -> Float[Array, "B K"]:
    """``KL(after || before)``: CURIO's InfoGain, how far a turn moved the belief.

    Never negative: a turn that misleads earns like one that teaches. ``types`` and ``gamma`` do nothing.

    From "Enhancing Personalized Multi-Turn Dialogue with Curiosity Reward" (CURIO), arXiv:2504.03206.

    >>> import jax.numpy as jnp
    >>> b, c = jnp.full((1, 1, 4), 0.25), jnp.array([[[0.5, 0.5, 0.0, 0.0]]])
    >>> round(float(information_rewards(b, c, jnp.array([0]), jnp.ones((1, 1), bool))[0, 0]), 4)
    0.6931
    """
    before, after = _counted(valid, before, after)
    moved = jnp.log(jnp.maximum(after, SMALLEST)) - jnp.log(jnp.maximum(before, SMALLEST))
    return jnp.where(valid, jnp.sum(after * moved, axis=2), 0.0)
