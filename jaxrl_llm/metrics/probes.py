"""Linear probes: how well a logistic regression on frozen features tells two classes apart."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.metrics import linalg


class Probe(NamedTuple):
    """``logit = features . direction + bias``."""

    direction: Float[Array, " D"]
    bias: Float[Array, ""]


def fit(
    features: Float[Array, "N D"],
    positive: Bool[Array, " N"],
    used: Bool[Array, " N"] | None = None,
    *,
    ridge: float = 1e-2,
    iterations: int = 12,
) -> Probe:
    """Logistic regression by Newton's method: mean loss plus ``ridge / 2 |direction|^2`` (the bias is free).

    Args:
      used: rows that count; default: all.
    """
    if ridge <= 0:
        raise ValueError(f"ridge={ridge} must be positive: separable classes have no optimum without it")
    weight = jnp.ones(positive.shape, jnp.float32) if used is None else used.astype(jnp.float32)
    weight = weight / jnp.maximum(jnp.sum(weight), 1.0)
    rows = jnp.pad(features.astype(jnp.float32), ((0, 0), (0, 1)), constant_values=1.0)
    target, width = positive.astype(jnp.float32), rows.shape[1]
    penalty = ridge * jnp.where(jnp.arange(width) == width - 1, 1e-4, 1.0)

    def step(theta, _):
        chance = jax.nn.sigmoid(rows @ theta)
        slope = rows.T @ (weight * (chance - target)) + penalty * theta
        curve = (rows * (weight * chance * (1.0 - chance))[:, None]).T @ rows + jnp.diag(penalty)
        move = linalg.solve(curve, slope[:, None])[:, 0]
        # damped: far from the optimum a whole Newton step of a logistic loss may overshoot
        return theta - move / jnp.maximum(1.0, jnp.linalg.norm(move) / 3.0), None

    theta, _ = jax.lax.scan(step, jnp.zeros((width,), jnp.float32), None, iterations)
    return Probe(theta[:-1], theta[-1])


def logits(probe: Probe, features: Float[Array, "N D"]) -> Float[Array, " N"]:
    """Positive where the probe says yes."""
    return features.astype(jnp.float32) @ probe.direction + probe.bias


def separability(
    features: Float[Array, "N D"], positive: Bool[Array, " N"], fold: Int[Array, " N"], *, folds: int = 5,
    ridge: float = 1e-2,
) -> Float[Array, ""]:  # fmt: skip
    """Accuracy of the probe on folds that it has not seen, mean over rows: 0.5 is chance for equal classes.

    Args:
      fold: 0 .. folds - 1 for each row; rows that belong together (both responses of a pair) share one.
    """

    def held_out(k):
        probe = fit(features, positive, fold != k, ridge=ridge)
        right = (logits(probe, features) > 0) == positive
        return jnp.where(fold == k, right, False)

    hits = jax.vmap(held_out)(jnp.arange(folds, dtype=jnp.int32))
    return jnp.sum(hits.astype(jnp.float32)) / positive.shape[0]
