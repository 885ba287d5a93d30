"""Shuffled epochs: every prompt once an epoch, the order a function of the epoch; the cursor is the whole state."""

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Sampler


def make_epochs(seed: int | None = 0) -> Sampler:
    """Draws prompts in shuffled epochs; a draw may span two epochs.

    The state is how many were drawn so far and an array as long as the prompts are many, and without a seed the key of
    the orders: a resumed run repeats and skips nothing.

    Args:
      seed: of the orders, which then do not depend on the key of a draw; None: they are those of the key of the first
        draw, so that seeds that run beside each other have orders of their own.
    """

    def init(num_problems):
        # the permutation needs a static length: it is carried as an array of that length
        first = jnp.zeros((), jnp.int32), jnp.arange(num_problems, dtype=jnp.int32)
        return first if seed is not None else (*first, jax.random.key_data(jax.random.key(0)))

    def draw(state, key, n):
        cursor, ids, *own = state
        own = [jnp.where(cursor == 0, jax.random.key_data(key), data) for data in own]
        base = jax.random.wrap_key_data(own[0]) if own else jax.random.key(seed)
        count = ids.shape[0]
        epochs = -(-n // count) + 1  # how many epochs a draw of n can touch
        first = cursor // count
        orders = jax.vmap(lambda e: jax.random.permutation(jax.random.fold_in(base, first + e), ids))(
            jnp.arange(epochs, dtype=jnp.int32)
        )
        at = cursor - first * count + jnp.arange(n, dtype=jnp.int32)
        return orders[at // count, at % count], (cursor + n, ids, *own)

    def update(state, ids, scores, valid):
        return state

    return Sampler(init, draw, update)
