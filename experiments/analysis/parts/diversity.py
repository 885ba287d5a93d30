"""How different the members of a set of responses are, ``[N, T]`` tokens of which ``mask`` tells the real ones."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAX_N = 5
BITS = 2**31


def _grams(tokens: Array, mask: Array, n: int, vocabulary: int) -> tuple[Array, Array]:
    """Numbers of all n-grams ``[M]``, sorted, and how many there are; those with masked tokens come last.

    Raises:
      ValueError: for a size of n-grams below 1, and for more tokens times kinds of tokens than 31 bits count.
    """
    width = tokens.shape[1] - n + 1
    if n < 1 or vocabulary**n >= BITS <= vocabulary * tokens.size:
        raise ValueError(f"n={n} with a vocabulary of {vocabulary} does not fit 31 bits; lower n or map rare tokens")
    if width < 1:
        return jnp.zeros((1,), jnp.int32), jnp.zeros((), jnp.float32)
    codes, real = jnp.zeros((tokens.shape[0], width), jnp.int32), jnp.ones((tokens.shape[0], width), bool)
    for k in range(n):
        if k and vocabulary**n >= BITS:  # a beginning is known by its place among all beginnings
            codes = jnp.searchsorted(jnp.sort(codes.reshape(-1)), codes).astype(jnp.int32)
        codes, real = codes * vocabulary + tokens[:, k : k + width], real & mask[:, k : k + width]
    codes = jnp.where(real, codes, jnp.iinfo(jnp.int32).max).reshape(-1)
    return jnp.sort(codes), jnp.sum(real.astype(jnp.float32))


def _unique(codes: Array) -> Array:
    fresh = jnp.concatenate([jnp.ones((1,), bool), codes[1:] != codes[:-1]])
    return jnp.sum((fresh & (codes < jnp.iinfo(jnp.int32).max)).astype(jnp.float32))


def distinct(tokens: Int[Array, "N T"], mask: Bool[Array, "N T"], *, n: int, vocabulary: int) -> Float[Array, ""]:
    """Distinct-n: different n-grams over all n-grams of the set, 0 without any.

    >>> import jax.numpy as jnp
    >>> both = jnp.array([[0, 1, 0], [0, 1, 2]])
    >>> float(distinct(both, both >= 0, n=1, vocabulary=5)), float(distinct(both, both >= 0, n=2, vocabulary=5))
    (0.5, 0.75)
    """
    codes, count = _grams(tokens, mask, n, vocabulary)
    return _unique(codes) / jnp.maximum(count, 1.0)


def expectation_adjusted(
    tokens: Int[Array, "N T"], mask: Bool[Array, "N T"], *, n: int, vocabulary: int
) -> Float[Array, ""]:
    """EAD: different n-grams over how many uniform tokens would give, ``V (1 - ((V - 1) / V)^C)``.

    ``C`` is the number of n-grams; unlike Distinct-n it does not fall with length alone, and it may exceed 1.

    From "Rethinking and Refining the Distinct Metric", arXiv:2202.13587, eq. 2.

    >>> import jax.numpy as jnp
    >>> both = jnp.array([[0, 1, 0], [0, 1, 2]])
    >>> round(float(expectation_adjusted(both, both >= 0, n=1, vocabulary=5)), 4)
    0.8132
    """
    codes, count = _grams(tokens, mask, n, vocabulary)
    expected = vocabulary * (1.0 - ((vocabulary - 1.0) / vocabulary) ** count)
    return _unique(codes) / jnp.maximum(expected, 1e-9)


def mean_adjusted(
    tokens: Int[Array, "N T"], mask: Bool[Array, "N T"], *, vocabulary: int, longest: int = MAX_N
) -> Float[Array, ""]:
    """Mean of ``expectation_adjusted`` over n = 1 .. ``longest``."""
    found = [expectation_adjusted(tokens, mask, n=n, vocabulary=vocabulary) for n in range(1, longest + 1)]
    return sum(found, jnp.zeros((), jnp.float32)) / longest


def dissimilarity(embeddings: Float[Array, "N D"]) -> Float[Array, ""]:
    """``1 -`` mean cosine over all pairs ``i < j``: 0 for identical responses.

    From "Understanding the Effects of RLHF on LLM Generalisation and Diversity", arXiv:2310.06452, section 4.
    """
    rows = embeddings.astype(jnp.float32)
    rows = rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    n = rows.shape[0]
    if n < 2:
        raise ValueError(f"{n} responses have no pairs")
    whole = jnp.sum(rows, axis=0)
    return 1.0 - (jnp.sum(whole * whole) - jnp.sum(rows * rows)) / (n * (n - 1))
