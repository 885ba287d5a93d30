"""A retriever over documents of token ids, jittable: BM25 scores and the best documents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def bm25_scores(
    query: Int[Array, " Q"], documents: Int[Array, "D L"], *, k1: float = 1.5, b: float = 0.75
) -> Float[Array, " D"]:
    """``sum_q idf_q f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|))``, ``f`` how often document ``d`` holds ``q``.

    ``idf_q = ln(1 + (D - n_q + 1/2) / (n_q + 1/2))`` with ``n_q`` documents that hold ``q``. Id 0 is padding, in the
    query as in the documents; a query without a word of the documents scores 0 everywhere.

    From "The Probabilistic Relevance Framework: BM25 and Beyond" (Robertson and Zaragoza, 2009), section 3.5. Differs
    from the paper in the 1 inside the logarithm, which keeps the weight of a common word positive.

    >>> import jax.numpy as jnp
    >>> scores = bm25_scores(jnp.array([5, 0]), jnp.array([[5, 6], [6, 7]]), b=0.0)
    >>> [round(float(x), 4) for x in scores]
    [0.6931, 0.0]
    """
    if k1 < 0 or not 0 <= b <= 1:
        raise ValueError(f"k1={k1} must not be negative and b={b} must lie in [0, 1]")
    there = (documents[:, None, :] == query[None, :, None]) & (query > 0)[None, :, None]
    often = jnp.sum(there.astype(jnp.float32), axis=2)
    holders = jnp.sum((often > 0).astype(jnp.float32), axis=0)
    weight = jnp.log1p((documents.shape[0] - holders + 0.5) / (holders + 0.5))
    size = jnp.sum((documents > 0).astype(jnp.float32), axis=1)
    share = size * size.shape[0] / jnp.maximum(jnp.sum(size), 1.0)
    damped = often * (k1 + 1.0) / (often + k1 * (1.0 - b + b * share)[:, None] + 1e-9)
    return jnp.sum(weight[None, :] * damped, axis=1)


def best_documents(scores: Float[Array, " D"], *, count: int) -> tuple[Int[Array, " C"], Bool[Array, " C"]]:
    """``(ids, found)`` of the ``count`` best, best first; of equal ones the earlier; a score of 0 finds nothing.

    >>> import jax.numpy as jnp
    >>> ids, found = best_documents(jnp.array([0.0, 2.0, 1.0]), count=3)
    >>> ids.tolist(), found.tolist()
    ([1, 2, 0], [True, True, False])
    """
    if not 1 <= count <= scores.shape[0]:
        raise ValueError(f"count={count} must lie in [1, {scores.shape[0]}], the number of documents")
    values, ids = jax.lax.top_k(scores, count)
    return ids.astype(jnp.int32), values > 0
