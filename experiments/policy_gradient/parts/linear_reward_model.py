"""A small reward model fitted in place: a linear score on given features, by Bradley-Terry within groups."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce
from jaxrl_llm.losses.reward import bradley_terry_loss


class LinearReward(NamedTuple):
    """``scale (x . weight - mean)``: mean 0 and deviation 1 over what it was fitted to."""

    weight: Float[Array, " D"]
    mean: Float[Array, ""]
    scale: Float[Array, ""]

    def scores(self, features: Float[Array, "B D"]) -> Float[Array, " B"]:
        """The reward of each row, no gradient."""
        return jax.lax.stop_gradient((features.astype(jnp.float32) @ self.weight - self.mean) * self.scale)


def with_confidence(
    last: Float[Array, "B D"], logp: Float[Array, "B T"], entropy: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B D3"]:
    """Features of a response: its last state, and of its tokens the least log-probability, their sum, most entropy.

    Of the state alone a linear head learns little of what is right (R^2 .15 on new samples of arithmetic chains, with
    384 problems to learn from); of these three with it .6.

    >>> import jax.numpy as jnp
    >>> logp, there = jnp.array([[-9.0, -0.5, -2.0]]), jnp.array([[False, True, True]])
    >>> with_confidence(jnp.ones((1, 1)), logp, -logp, there).tolist()
    [[1.0, -2.0, -2.5, 2.0]]
    """
    logp, entropy = jnp.where(mask, logp, 0.0), jnp.where(mask, entropy, 0.0)
    three = jnp.stack([jnp.min(logp, axis=1), jnp.sum(logp, axis=1), jnp.max(entropy, axis=1)], axis=1)
    return jnp.concatenate([last.astype(jnp.float32), three.astype(jnp.float32)], axis=1)


def fit_linear(
    features: Float[Array, "B D"],
    truth: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    valid: Bool[Array, " B"] | None = None,
    steps: int = 100,
    learning_rate: float = 0.05,
    decay: float = 1e-3,
) -> LinearReward:
    """Fits all pairs of a group of which one member is truly better; without such a pair every score is 0.

    ``mean -log sigmoid(w . x_better - w . x_worse) + decay |w|^2`` by Adam from 0. All ``B^2`` pairs are formed: meant
    for a few hundred rows.

    Args:
      valid: rows whose truth is known; the others are in no pair. None: all.

    Raises:
      ValueError: where ``steps`` is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    x = jax.lax.stop_gradient(features.astype(jnp.float32))
    pairs = (group_ids[:, None] == group_ids[None, :]) & (truth[:, None] > truth[None, :])
    if valid is not None:
        pairs = pairs & valid[:, None] & valid[None, :]
    better, worse = (i.ravel() for i in jnp.indices(pairs.shape))

    def loss(weight):
        values = x @ weight
        return reduce.scalars(bradley_terry_loss(values[better], values[worse]).loss, pairs.ravel()) + decay * jnp.sum(
            weight**2
        )

    tx, weight = optax.adam(learning_rate), jnp.zeros((x.shape[1],), jnp.float32)

    def step(carry, _):
        weight, state = carry
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts with floats
            updates, state = tx.update(jax.grad(loss)(weight), state)
        return (weight + updates, state), None

    (weight, _), _ = jax.lax.scan(step, (weight, tx.init(weight)), None, steps)
    values = x @ weight
    mean = jnp.sum(values) / values.shape[0]
    deviation = jnp.sqrt(jnp.sum((values - mean) ** 2) / values.shape[0])
    return LinearReward(weight, mean, 1.0 / (deviation + 1e-3))
