"""How much of a response stood in it before."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def repeated_share(tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], *, n: int) -> Float[Array, " B"]:
    """Share of the n-grams of each response that it has said before; 0 for a response that has none.

    They are sorted, so that equal ones lie side by side: ``n T`` numbers a response, and no table of pairs.

    >>> row, there = jnp.array([[1, 2, 1, 2, 1]]), jnp.ones((1, 5), bool)
    >>> float(repeated_share(row, there, n=2)[0])  # 12 21 12 21: the last two
    0.5
    """
    width = tokens.shape[1] - n + 1
    if width < 1:
        return jnp.zeros(tokens.shape[0], jnp.float32)
    grams = [tokens[:, k : k + width] for k in range(n)]
    whole = jnp.stack([mask[:, k : k + width] for k in range(n)]).all(axis=0)
    order = jnp.lexsort((*grams, ~whole), axis=1)
    *grams, whole = (jnp.take_along_axis(x, order, axis=1) for x in (*grams, whole))
    same = jnp.stack([gram[:, 1:] == gram[:, :-1] for gram in grams]).all(axis=0)
    again, count = whole[:, 1:] & same, jnp.sum(whole.astype(jnp.float32), axis=1)
    return jnp.sum(again.astype(jnp.float32), axis=1) / jnp.maximum(count, 1.0)
