"""Credit from the tree that the responses of a group form: where two of them part, the values of branches differ."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages.group import from_lowest, group_normalized_advantages, group_spread, group_sum


def prefix_values(
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Mean reward, and number, of the group's members that share the response up to and including each token.

    In columns before the response every member of the group shares it; members with an invalid reward never count. A
    finished response differs from one that goes on. Memory ``B^2``, time ``B^2 T``.

    >>> import jax.numpy as jnp
    >>> tokens, mask = jnp.array([[1, 2], [1, 3], [4, 5], [4, 6]]), jnp.ones((4, 2), bool)
    >>> values, sharing = prefix_values(tokens, mask, jnp.array([1.0, 0, 0, 0]), jnp.zeros(4, jnp.int32))
    >>> values[0].tolist(), sharing[0].tolist()
    ([0.5, 1.0], [2.0, 1.0])
    """
    counted = jnp.ones(rewards.shape, bool) if valid is None else valid
    rewards = jnp.where(counted, rewards.astype(jnp.float32), 0.0)
    start = (group_ids[:, None] == group_ids[None, :]) & counted[None, :]

    def step(same, column):
        token, trained = column
        both = trained[:, None] & trained[None, :] & (token[:, None] == token[None, :])
        neither = ~trained[:, None] & ~trained[None, :]
        same = same & (both | neither)
        weight = same.astype(jnp.float32)
        count = jnp.sum(weight, axis=1)
        return same, (weight @ rewards / jnp.maximum(count, 1.0), count)

    columns = jnp.moveaxis(tokens, 1, 0), jnp.moveaxis(mask, 1, 0)
    _, (values, sharing) = jax.lax.scan(step, start, columns)
    return jnp.moveaxis(values, 0, 1), jnp.moveaxis(sharing, 0, 1)


def branch_differences(
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, "B T"]:
    """``V(s_{t+1}) - V(s_t)``: what choosing token t changed in the mean reward of those who share the prefix.

    Exactly 0 but where the prefix's members part; over a response it sums to its leaf's value minus the group's mean.
    """
    rewards = from_lowest(rewards, group_ids, valid=valid)
    values, sharing = prefix_values(tokens, mask, rewards, group_ids, valid=valid)
    whole = _group_mean(rewards, group_ids, valid)
    before = jnp.concatenate([whole[0][:, None], values[:, :-1]], axis=1)
    sharing_before = jnp.concatenate([whole[1][:, None], sharing[:, :-1]], axis=1)
    return jnp.where(mask & (sharing < sharing_before), values - before, 0.0)


def _group_mean(rewards: Array, group_ids: Array, valid: Array | None) -> tuple[Array, Array]:
    counted = jnp.ones(rewards.shape, bool) if valid is None else valid
    count = group_sum(counted.astype(jnp.float32), group_ids)
    total = group_sum(jnp.where(counted, rewards.astype(jnp.float32), 0.0), group_ids)
    return total / jnp.maximum(count, 1.0), count


def tempo_advantages(
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
    outcome: float = 1.0,
    branch: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, "B T"]:
    """TEMPO: ``(outcome (r_i - mean) + branch (V(s_{t+1}) - V(s_t))) / (std + eps)`` at token t of response i.

    ``branch=0``, or a group whose responses never share a prefix after the root's, leaves GRPO's advantage on every
    token (the first token then has it twice). A group of equal rewards gets exactly 0.

    Args:
      outcome: weight of the response's own advantage; 0 leaves the branches alone.
      branch: weight of the differences between branches.

    From "Exploiting Tree Structure for Credit Assignment in RL Training of LLMs", arXiv:2509.18314, section 3. Differs
    from the paper in naming the two weights, which it sets to 1.

    >>> import jax.numpy as jnp
    >>> tokens, mask = jnp.array([[1, 2], [1, 3], [4, 5], [4, 6]]), jnp.ones((4, 2), bool)
    >>> r, ids = jnp.array([1.0, 0, 0, 0]), jnp.zeros(4, jnp.int32)
    >>> a = tempo_advantages(tokens, mask, r, ids, ddof=0, eps=0.0)
    >>> [[round(float(x), 4) for x in row] for row in a]
    [[2.3094, 2.8868], [0.0, -1.7321], [-1.1547, -0.5774], [-1.1547, -0.5774]]
    """
    counted = jnp.ones(rewards.shape, bool) if valid is None else valid
    own = group_normalized_advantages(rewards, group_ids, valid=valid, ddof=ddof, eps=eps)
    rewards = from_lowest(rewards, group_ids, valid=valid)
    mean, count = _group_mean(rewards, group_ids, valid)
    centred = jnp.where(counted, rewards - mean, 0.0)
    squares = group_sum(centred**2, group_ids)
    deviation = jnp.sqrt(jnp.maximum(squares / jnp.maximum(count - ddof, 1.0), 1e-12)) + eps
    change = branch_differences(tokens, mask, rewards, group_ids, valid=valid) / deviation[:, None]
    usable = group_spread(rewards, group_ids, valid=valid) > 0
    values = outcome * own[:, None] + branch * change
    return jnp.where(mask & (counted & usable)[:, None], values, 0.0)
