"""How far the sampler's log-probabilities lie from the trainer's: mean, quantiles and largest, and when to stop.

Quantiles of a batch that is computed in parts do not add up, shares do: a loss counts which share of the tokens lies
below each of some gaps, ``train.step`` adds the shares of the parts and reads the quantiles off the sum.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm import reduce
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Metrics

NAMES = "kl/sampler_"  # how the names of these figures begin
LARGEST = "kl/sampler_max"
SHARES = "kl/sampler_shares"
QUANTILES = {"kl/sampler_p50": 0.5, "kl/sampler_p90": 0.9, "kl/sampler_p99": 0.99}
EDGES = np.concatenate([[0.0], np.logspace(-8, 1, 73), [np.inf]]).astype(np.float32)  # eight to a decade, in nats


def metrics_of(gap: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Metrics:
    """``kl/sampler_mean``, ``kl/sampler_max`` of absolute gaps, and shares that ``finished`` makes quantiles of."""
    gap = jnp.where(mask, gap, 0.0)
    below = (gap[:, :, None] <= jnp.asarray(EDGES)[None, None, :]) & mask[:, :, None]
    tokens = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
    return {
        "kl/sampler_mean": reduce.tokens(gap, mask),
        LARGEST: jnp.max(gap),
        SHARES: jnp.sum(below.astype(jnp.float32), axis=(0, 1)) / tokens,
    }


def quantile(shares: Float[Array, " K"], level: float) -> Float[Array, ""]:
    """The least of ``EDGES`` below which a share of ``level`` lies: at most 1.34 times the quantile; 0 is exact.

    >>> shares = jnp.asarray(EDGES >= 0.02, jnp.float32) * 0.5 + jnp.asarray(EDGES >= 0.5, jnp.float32) * 0.5
    >>> [round(float(quantile(shares, level)), 3) for level in (0.5, 0.9)]
    [0.024, 0.562]
    """
    reached = shares >= level - 1e-5
    # not even the last one is reached where nothing is masked in
    return jnp.where(jnp.any(reached), jnp.asarray(EDGES)[jnp.argmax(reached)], 0.0)


def finished(metrics: Metrics) -> Metrics:
    """The same metrics with ``QUANTILES`` in the place of the shares, where there are any."""
    if SHARES not in metrics:
        return metrics
    rest = {name: value for name, value in metrics.items() if name != SHARES}
    largest = metrics[LARGEST]
    return rest | {name: jnp.minimum(quantile(metrics[SHARES], level), largest) for name, level in QUANTILES.items()}


def check(figures: dict[str, float], most: float, step: int) -> None:
    """Raises UserError where the largest gap of a step exceeds ``most`` nats, or is no number; 0 never does.

    A step without the figure raises as well: a limit that nothing is held to must not look as if it were kept. A step
    that trains nothing has the figure, 0.
    """
    if not most:
        return
    if LARGEST not in figures:
        raise UserError(f"--most-gap {most:g}: the figures of step {step} have no {LARGEST} to hold to it; drop it")
    if not (gap := figures[LARGEST]) <= most:
        raise UserError(
            f"step {step}: the sampler's log-probabilities are up to {gap:.3g} nats off the trainer's "
            f"(99 % within {figures.get('kl/sampler_p99', float('nan')):.3g}), the limit is {most:g}; sample in "
            "the trainer's precision, or raise the limit and weigh tokens by losses.correction"
        )
