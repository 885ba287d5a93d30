"""The only place where anything is averaged.

Every mode is a sum over terms divided by a *total* that the caller may fix for the whole optimiser step
(``denominator`` of the whole batch): then micro-batches, packed rows and devices add up exactly.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MODES = ("token_mean", "seq_mean", "seq_sum", "constant")


def _check_mode(mode: str, length_tokens: int | None = None, *, needs_length: bool = False) -> None:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not one of {', '.join(MODES)}")
    if needs_length and mode == "constant" and length_tokens is None:
        raise ValueError("mode='constant' needs length_tokens, the generation budget that divides every sequence")


def check_tokens(mask: Array, *arrays: Array) -> None:
    """ValueError for an array of another shape than the mask, which would broadcast (a square batch hides it)."""
    for x in arrays:
        if x.shape != mask.shape:
            raise ValueError(f"an array of shape {x.shape} meets mask of shape {mask.shape}; spread it over the tokens")


def check_rows(mask: Array, *arrays: Array) -> None:
    """ValueError for an array that has not one number for each row of the mask."""
    for x in arrays:
        if mask.ndim != 2 or x.shape != mask.shape[:1]:
            raise ValueError(f"an array of shape {x.shape} meets mask of shape {mask.shape}; give one number a row")


def _segment_sums(terms: Array, mask: Array, segment_ids: Array | None) -> tuple[Array, Array]:
    """Sum and count of masked terms per sequence: ``[B, 1]``, or ``[B, S]`` with at most T packed segments."""
    terms = jnp.where(mask, terms.astype(jnp.float32), 0.0)
    counts = mask.astype(jnp.float32)
    if segment_ids is None:
        return terms.sum(1, keepdims=True), counts.sum(1, keepdims=True)
    width = terms.shape[1] + 1
    add = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=width))
    return add(terms, segment_ids), add(counts, segment_ids)


def denominator(
    mask: Bool[Array, "B T"], *, mode: str, segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, ""]:
    """The ``total`` of ``tokens`` for the whole step.

    ``token_mean``: masked tokens; ``seq_mean`` and ``seq_sum``: sequences with a masked token; ``constant``: all
    sequences (rows, or packed segments).
    """
    _check_mode(mode)
    if mode == "token_mean":
        return jnp.sum(mask.astype(jnp.float32))
    if mode == "constant":
        if segment_ids is None:
            return jnp.asarray(mask.shape[0], jnp.float32)
        _, present = _segment_sums(jnp.zeros(mask.shape), segment_ids > 0, segment_ids)
    else:
        _, present = _segment_sums(jnp.zeros(mask.shape), mask, segment_ids)
    return jnp.sum((present > 0).astype(jnp.float32))


def tokens(
    terms: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    mode: str = "token_mean",
    total: Float[Array, ""] | float | None = None,
    length_tokens: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Reduces per-token terms to a scalar.

    * ``token_mean``: ``sum(terms) / total``, total = number of masked tokens (DAPO).
    * ``seq_mean``: ``sum_i mean_t(terms_i) / total``, total = number of sequences (GRPO).
    * ``seq_sum``: ``sum_i sum_t(terms_i) / total``, total = number of sequences.
    * ``constant``: ``sum(terms) / (length_tokens * total)``, total = number of sequences (Dr.GRPO).

    Masked terms are replaced, so a NaN there is harmless; an empty mask gives 0.

    Args:
      total: denominator of the whole optimiser step, see ``denominator``; default: of this batch.
      length_tokens: the generation budget of mode ``constant``.
      segment_ids: packing; needed where a row holds several sequences.

    >>> import jax.numpy as jnp
    >>> terms, mask = jnp.array([[1.0, 3.0], [5.0, 9.0]]), jnp.array([[True, True], [True, False]])
    >>> float(tokens(terms, mask)), float(tokens(terms, mask, mode="seq_mean"))
    (3.0, 3.5)
    """
    _check_mode(mode, length_tokens, needs_length=True)
    check_tokens(mask, terms)
    if total is None:
        total = denominator(mask, mode=mode, segment_ids=segment_ids)
    total = jnp.maximum(jnp.asarray(total, jnp.float32), 1e-9)
    if mode == "seq_mean":
        sums, counts = _segment_sums(terms, mask, segment_ids)
        return jnp.sum(sums / jnp.maximum(counts, 1.0)) / total
    summed = jnp.sum(jnp.where(mask, terms.astype(jnp.float32), 0.0))
    return summed / (length_tokens * total) if mode == "constant" else summed / total


def sequences(terms: Float[Array, "B T"], mask: Bool[Array, "B T"], *, mode: str = "sum") -> Float[Array, " B"]:
    """Sum or mean of the masked terms of each row."""
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode={mode!r} is not one of sum, mean")
    check_tokens(mask, terms)
    sums, counts = _segment_sums(terms, mask, None)
    return (sums / jnp.maximum(counts, 1.0) if mode == "mean" else sums)[:, 0]


def segments(
    terms: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    mode: str = "mean",
) -> Float[Array, "B T"]:
    """Sum or mean of the masked terms of each packed sequence, at every position of that sequence."""
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode={mode!r} is not one of sum, mean")
    check_tokens(mask, terms, segment_ids)
    sums, counts = _segment_sums(terms, mask, segment_ids)
    values = sums / jnp.maximum(counts, 1.0) if mode == "mean" else sums
    return jnp.take_along_axis(values, segment_ids, axis=1)


def scalars(values: Float[Array, " B"], valid: Bool[Array, " B"] | None = None) -> Float[Array, ""]:
    """Mean of per-sequence values over the valid ones (0 where none is)."""
    valid = jnp.ones(values.shape, bool) if valid is None else valid
    count = jnp.maximum(jnp.sum(valid.astype(jnp.float32)), 1.0)
    return jnp.sum(jnp.where(valid, values.astype(jnp.float32), 0.0)) / count


def metrics(
    aux: dict[str, Float[Array, "B T"]], mask: Bool[Array, "B T"], *, prefix: str
) -> dict[str, Float[Array, ""]]:
    """Masked token means of diagnostics, named ``prefix/name``."""
    return {f"{prefix}/{name}": tokens(jax.lax.stop_gradient(value), mask) for name, value in aux.items()}
