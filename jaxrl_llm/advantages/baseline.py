"""Baselines of least variance at each token: the optimal token baseline, by place or by trained token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages.returns import discounted_returns


def _least_variance(returns: Array, energy: Array, group_ids: Array, mask: Array, lone_tokens: bool) -> Array:
    """``G - sum_group W G / sum_group W`` at each column, ``W`` the running sum of ``energy``."""
    rows = returns.shape[0]
    total = jnp.where(mask, jnp.cumsum(jnp.where(mask, energy, 0.0), axis=1), 0.0)

    def over_group(x):
        return jax.ops.segment_sum(x, group_ids, num_segments=rows)[group_ids]

    low = jax.ops.segment_min(jnp.where(mask, returns, jnp.inf), group_ids, num_segments=rows)[group_ids]
    lifted = jnp.where(mask, returns - jnp.where(mask, low, 0.0), 0.0)  # equal returns give exactly 0
    weight = over_group(total)
    baseline = over_group(total * lifted) / jnp.where(weight > 0, weight, 1.0)
    alone = over_group(mask.astype(jnp.float32)) < 2
    advantage = jnp.where(alone, returns if lone_tokens else 0.0, lifted - baseline)
    return jnp.where(mask, advantage, 0.0)


def _energy(logp: Array, collision: Array, weights: Array | None, mask: Array) -> Array:
    """``1 - 2 p + sum p^2``, the squared length of the score of a token by the logits, times the squared weight."""
    logp, collision = (jnp.where(mask, x.astype(jnp.float32), 0.0) for x in (logp, collision))
    energy = jnp.maximum(1.0 - 2.0 * jnp.exp(logp) + collision, 0.0)
    return energy if weights is None else energy * jnp.where(mask, weights.astype(jnp.float32), 0.0) ** 2


def optimal_token_advantages(
    rewards: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    collision: Float[Array, "B T"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    weights: Float[Array, "B T"] | None = None,
    lone_tokens: bool = False,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, "B T"]:
    """Optimal token baseline: ``A_t = G_t - sum_j W_jt G_jt / sum_j W_jt`` over the group's members at the same column.

    ``G`` is the reward to go and ``W_t = sum_{s <= t} (1 - 2 p_s + sum_v p_v^2)``, the realised energy of the scores up
    to the token: a member whose gradient varies more tells more of the baseline that keeps the variance least. No
    gradient.

    Args:
      rewards: at each token (``returns.at_last_token``).
      logp: of the tokens under the policy that drew them.
      collision: ``logprobs.token_collision``.
      weights: importance weights of the tokens, squared into ``W``.
      lone_tokens: a token at a column that no other member reaches gets its return (no baseline), instead of 0.
      valid: rewards that count; the others get 0 and are in no baseline.

    From verl's ``compute_optimal_token_baseline_advantage`` (whose groups of one, and with ``handle_zero_tail`` whose
    tails, are ``lone_tokens=True``).

    >>> import jax.numpy as jnp
    >>> ids, mask, half = jnp.array([0, 0]), jnp.ones((2, 1), bool), jnp.full((2, 1), 0.5)
    >>> p = jnp.array([[0.5], [0.25]])  # energies 0.5 and 1
    >>> optimal_token_advantages(jnp.array([[3.0], [0.0]]), jnp.log(p), half, ids, mask).ravel().tolist()
    [2.0, -1.0]
    """
    mask = mask if valid is None else mask & valid[:, None]
    energy = _energy(logp, collision, weights, mask)
    found = _least_variance(discounted_returns(rewards, mask), energy, group_ids, mask, lone_tokens)
    return jax.lax.stop_gradient(found)


def optimal_trained_token_advantages(
    rewards: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    collision: Float[Array, "B T"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    weights: Float[Array, "B T"] | None = None,
    lone_tokens: bool = True,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, "B T"]:
    """``optimal_token_advantages`` with the k-th *trained* token of each member compared, not the same column.

    For responses with what the policy did not write (tools, other speakers) in the middle. Arguments as there.

    From verl's ``compute_multi_turn_optimal_token_baseline_advantage``, whose tails are its default too.

    >>> import jax.numpy as jnp
    >>> mask = jnp.array([[True, False], [False, True]])  # the first trained tokens of both
    >>> args = jnp.array([[3.0, 0.0], [0.0, 1.0]]), jnp.full((2, 2), jnp.log(0.5)), jnp.full((2, 2), 0.5)
    >>> optimal_trained_token_advantages(*args, jnp.array([0, 0]), mask).tolist()
    [[1.0, 0.0], [0.0, -1.0]]
    """
    mask = mask if valid is None else mask & valid[:, None]
    order = jnp.argsort(~mask, axis=1, stable=True)  # trained tokens first
    returns = jnp.where(mask, discounted_returns(rewards, mask), 0.0)
    energy = jnp.where(mask, _energy(logp, collision, weights, mask), 0.0)
    close = [jnp.take_along_axis(x, order, axis=1) for x in (returns, energy, mask)]
    found = _least_variance(close[0], close[1], group_ids, close[2], lone_tokens)
    back = jnp.take_along_axis(found, jnp.argsort(order, axis=1), axis=1)
    return jax.lax.stop_gradient(jnp.where(mask, back, 0.0))
