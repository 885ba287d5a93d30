"""Shuffled epochs: every prompt once an epoch, the order a function of the epoch; the cursor is the whole state."""

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Sampler


def make_epochs(seed: int = 0) -> Sampler:
    """Draws prompts in shuffled epochs; a draw may span two epochs.

    The state is ``(number of prompts, prompts drawn so far)``: a resumed run repeats and skips nothing. The order
    does not depend on the key of the draw.
    """

    def init(num_problems):
        # the permutation needs a static length: it is carried as an array of that length
        return jnp.zeros((), jnp.int32), jnp.arange(num_problems, dtype=jnp.int32)

    def draw(state, key, n):
        cursor, ids = state
        count = ids.shape[0]
        epochs = -(-n // count) + 1  # how many epochs a draw of n can touch
        first = cursor // count
        orders = jax.vmap(lambda e: jax.random.permutation(jax.random.fold_in(jax.random.key(seed), first + e), ids))(
            jnp.arange(epochs, dtype=jnp.int32)
        )
        at = cursor - first * count + jnp.arange(n, dtype=jnp.int32)
        return orders[at // count, at % count], (cursor + n, ids)

    def update(state, ids, scores, valid):
        return state

    return Sampler(init, draw, update)
