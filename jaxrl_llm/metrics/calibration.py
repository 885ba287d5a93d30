"""How far stated confidences agree with what is right.

``confidence [N]`` in [0, 1], ``right [N]``, and optionally ``valid [N]``: items without a readable confidence are left
out of every figure; report their share beside it. Undefined figures (no item, one class alone) are NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

BINS = 10


class Reliability(NamedTuple):
    """The reliability curve: per bin its share of the items, its accuracy and its mean confidence (0 where empty)."""

    share: Float[Array, " M"]
    accuracy: Float[Array, " M"]
    confidence: Float[Array, " M"]


def _items(confidence: Array, right: Array, valid: Array | None) -> tuple[Array, Array, Array]:
    """Confidence clipped to [0, 1], right and weight as floats; what is invalid is 0 everywhere."""
    valid = jnp.ones(confidence.shape, bool) if valid is None else valid
    clipped = jnp.where(valid, jnp.clip(confidence.astype(jnp.float32), 0.0, 1.0), 0.0)
    return clipped, (valid & right).astype(jnp.float32), valid.astype(jnp.float32)


def _mean(values: Array, weight: Array) -> Array:
    total = jnp.sum(weight)
    return jnp.where(total > 0, jnp.sum(values * weight) / jnp.maximum(total, 1.0), jnp.nan)


def _binned(index: Array, confidence: Array, right: Array, weight: Array, bins: int) -> Reliability:
    count, hits, sums = (
        jax.ops.segment_sum(x, index, num_segments=bins) for x in (weight, right * weight, confidence * weight)
    )
    each = jnp.maximum(count, 1.0)
    return Reliability(count / jnp.maximum(jnp.sum(weight), 1.0), hits / each, sums / each)


def reliability(
    confidence: Float[Array, " N"],
    right: Bool[Array, " N"],
    valid: Bool[Array, " N"] | None = None,
    *,
    bins: int = BINS,
) -> Reliability:
    """Equal-width bins: ``bin = min(floor(c * bins), bins - 1)``; ``c * bins`` within 1e-4 below an edge counts as it.

    Raises:
      ValueError: for less than one bin.
    """
    if bins < 1:
        raise ValueError(f"bins={bins} must be at least 1")
    confidence, hit, weight = _items(confidence, right, valid)
    # 0.7 * 10 may be 6.9999995 in float32: without the nudge a stated 70 % would fall among the sixties
    index = jnp.minimum(jnp.floor(confidence * bins + 1e-4).astype(jnp.int32), bins - 1)
    return _binned(index, confidence, hit, weight, bins)


def equal_mass_reliability(
    confidence: Float[Array, " N"],
    right: Bool[Array, " N"],
    valid: Bool[Array, " N"] | None = None,
    *,
    bins: int = BINS,
) -> Reliability:
    """Bins of as equal counts as possible: the item of rank ``k`` of ``n`` (stable order) is in bin ``k bins // n``."""
    if bins < 1:
        raise ValueError(f"bins={bins} must be at least 1")
    confidence, hit, weight = _items(confidence, right, valid)
    order = jnp.argsort(jnp.where(weight > 0, confidence, 2.0), stable=True)  # invalid items last
    ranks = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32))
    count = jnp.maximum(jnp.sum(weight).astype(jnp.int32), 1)
    return _binned(jnp.minimum(ranks * bins // count, bins - 1), confidence, hit, weight, bins)


def _total(curve: Reliability, gap: Array) -> Array:
    return jnp.where(jnp.sum(curve.share) > 0, gap, jnp.nan)


def expected_error(curve: Reliability) -> Float[Array, ""]:
    """ECE: ``sum_m share_m |accuracy_m - confidence_m|`` of either kind of bins.

    >>> import jax.numpy as jnp
    >>> c, y = jnp.array([0.9, 0.9, 0.8, 0.6, 0.55]), jnp.array([True, False, True, True, False])
    >>> round(float(expected_error(reliability(c, y))), 4)
    0.39
    """
    return _total(curve, jnp.sum(curve.share * jnp.abs(curve.accuracy - curve.confidence)))


def maximum_error(curve: Reliability) -> Float[Array, ""]:
    """MCE: ``max_m |accuracy_m - confidence_m|`` over the bins that hold an item."""
    gaps = jnp.where(curve.share > 0, jnp.abs(curve.accuracy - curve.confidence), 0.0)
    return _total(curve, jnp.max(gaps))


def brier(
    confidence: Float[Array, " N"], right: Bool[Array, " N"], valid: Bool[Array, " N"] | None = None
) -> Float[Array, ""]:
    """``mean (c - y)^2``.

    >>> import jax.numpy as jnp
    >>> c, y = jnp.array([0.9, 0.9, 0.8, 0.6, 0.55]), jnp.array([True, False, True, True, False])
    >>> round(float(brier(c, y)), 4)
    0.2645
    """
    confidence, hit, weight = _items(confidence, right, valid)
    return _mean((confidence - hit) ** 2, weight)


def overconfidence(
    confidence: Float[Array, " N"], right: Bool[Array, " N"], valid: Bool[Array, " N"] | None = None
) -> Float[Array, ""]:
    """``mean c - mean y``: positive where more is claimed than holds."""
    confidence, hit, weight = _items(confidence, right, valid)
    return _mean(confidence - hit, weight)


def auroc(
    confidence: Float[Array, " N"], right: Bool[Array, " N"], valid: Bool[Array, " N"] | None = None
) -> Float[Array, ""]:
    """``P(c_right > c_wrong) + P(c_right = c_wrong) / 2``; NaN where all are right or all are wrong.

    By ranks, ties sharing their mean rank: memory linear in ``N``.

    >>> import jax.numpy as jnp
    >>> c, y = jnp.array([0.9, 0.9, 0.8, 0.6, 0.55]), jnp.array([True, False, True, True, False])
    >>> round(float(auroc(c, y)), 6)
    0.583333
    """
    confidence, hit, weight = _items(confidence, right, valid)
    shown = jnp.where(weight > 0, confidence, 2.0)  # above every confidence: they shift no rank below
    ordered = jnp.sort(shown)
    below = jnp.searchsorted(ordered, shown, side="left").astype(jnp.float32)
    up_to = jnp.searchsorted(ordered, shown, side="right").astype(jnp.float32)
    rank = 0.5 * (below + up_to + 1.0)
    hits, count = jnp.sum(hit), jnp.sum(weight)
    misses = count - hits
    wins = jnp.sum(rank * hit) - 0.5 * hits * (hits + 1.0)
    return jnp.where((hits > 0) & (misses > 0), wins / jnp.maximum(hits * misses, 1.0), jnp.nan)


def normalized_cross_entropy(
    confidence: Float[Array, " N"],
    right: Bool[Array, " N"],
    valid: Bool[Array, " N"] | None = None,
    *,
    eps: float = 1e-3,
) -> Float[Array, ""]:
    """NCE: ``(H(p) - CE) / H(p)``: 1 for an oracle, 0 for the base rate ``p`` stated every time, negative below it.

    ``CE = -mean(y log c + (1 - y) log(1 - c))``, ``c`` clipped to ``[eps, 1 - eps]``; NaN where only one class occurs.
    """
    confidence, hit, weight = _items(confidence, right, valid)
    rate = _mean(hit, weight)
    stated = jnp.clip(confidence, eps, 1.0 - eps)
    cost = -_mean(hit * jnp.log(stated) + (1.0 - hit) * jnp.log1p(-stated), weight)
    mixed = (rate > 0) & (rate < 1)
    inside = jnp.where(mixed, rate, 0.5)
    entropy = -(inside * jnp.log(inside) + (1.0 - inside) * jnp.log1p(-inside))
    return jnp.where(mixed, (entropy - cost) / entropy, jnp.nan)


def summary(
    confidence: Float[Array, " N"],
    right: Bool[Array, " N"],
    valid: Bool[Array, " N"] | None = None,
    *,
    bins: int = BINS,
) -> dict[str, Float[Array, ""]]:
    """Every figure of this module by name; ``readable`` is the share of valid items."""
    curve = reliability(confidence, right, valid, bins=bins)
    mass = equal_mass_reliability(confidence, right, valid, bins=bins)
    items = confidence, right, valid
    return {
        "ece": expected_error(curve),
        "mce": maximum_error(curve),
        "adaptive_ece": expected_error(mass),
        "brier": brier(*items),
        "auroc": auroc(*items),
        "overconfidence": overconfidence(*items),
        "nce": normalized_cross_entropy(*items),
        "readable": _mean(_items(*items)[2], jnp.ones(confidence.shape, jnp.float32)),
    }
