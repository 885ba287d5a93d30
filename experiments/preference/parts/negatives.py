"""Which negative examples are worth unlearning: marginal values and weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.types import Key

Direction = Any  # a tree like the parameters


def marginal_values(
    logp_of: Callable[[Any], Array], params: Any, gain: Direction, *, rate: float = 1.0
) -> Float[Array, " N"]:
    """``-rate <gain, grad log pi(y_i)>``: by how much the objective rises per unit of weight on example ``i``.

    One forward-mode pass gives all of them. From arXiv:2504.06659, section 4, with one inner step (the Hessian is the
    identity); for the implicit gradient give ``solved(...)`` as the gain.

    Args:
      logp_of: ``params -> [N]``, log-probabilities of the negative examples.
      gain: the gradient of the objective that is to rise.
    """
    return -rate * jax.jvp(logp_of, (params,), (gain,))[1]


def solved(
    inner: Callable[[Any], Array], params: Any, gain: Direction, *, damping: float = 0.1, iterations: int = 5
) -> Direction:
    """``(H + damping)^-1 gain`` by conjugate gradients, ``H`` the Hessian of the scalar ``inner``: never formed."""

    def product(direction):
        curved = jax.jvp(jax.grad(inner), (params,), (direction,))[1]
        return jax.tree.map(lambda c, d: c + damping * d, curved, direction)

    return jax.scipy.sparse.linalg.cg(product, gain, maxiter=iterations)[0]


# Weights of negative examples: ``(values [N], key, keep) -> [N]``, each in [0, 1].


def uniform(values: Float[Array, " N"], key: Key, keep: int) -> Float[Array, " N"]:
    """All alike, ``keep`` in sum."""
    return jnp.full(values.shape, keep / values.shape[0], jnp.float32)


def best(values: Float[Array, " N"], key: Key, keep: int) -> Float[Array, " N"]:
    """1 for the ``keep`` highest values that are positive."""
    _, chosen = jax.lax.top_k(values, keep)
    return jnp.zeros(values.shape, jnp.float32).at[chosen].set(1.0) * (values > 0).astype(jnp.float32)


def at_random(values: Float[Array, " N"], key: Key, keep: int) -> Float[Array, " N"]:
    """1 for any ``keep``."""
    return best(jax.random.uniform(key, values.shape), key, keep)


def priced(
    values: Float[Array, " N"], key: Key, keep: int, *, steps: int = 5, rate: float = 0.2, price: float = 0.3
) -> Float[Array, " N"]:
    """``best`` weighted by projected gradient from 1/2: ``w <- clip(w + rate (v / v_max - price), 0, 1)``.

    The price stands for the L1 term: what is worth less than ``price`` of the best example falls to 0.

    >>> import jax.numpy as jnp
    >>> [round(float(w), 2) for w in priced(jnp.array([1.0, 0.1, 0.3, -1.0]), jax.random.key(0), 3)]
    [1.0, 0.3, 0.5, 0.0]
    """
    share = values / jnp.maximum(jnp.max(values), 1e-12) - price
    return best(values, key, keep) * jnp.clip(0.5 + steps * rate * share, 0.0, 1.0)


def goes_on(weights: Float[Array, " N"]) -> Float[Array, " N"]:
    """1 for every example while one of them is worth unlearning, 0 for all where none is: the round changes nothing.

    Where no marginal value is positive, weights of 0 meet the first-order conditions of ``max_w J(theta(w))`` over
    [0, 1], and ``best`` and ``priced`` give no others. Derived from the objective of arXiv:2504.06659, whose own
    stopping rule was not at hand.

    >>> import jax.numpy as jnp
    >>> goes_on(jnp.array([0.0, 0.5])).tolist(), goes_on(jnp.array([0.0, 0.0])).tolist()
    ([1.0, 1.0], [0.0, 0.0])
    """
    return jnp.broadcast_to(jnp.any(weights > 0).astype(jnp.float32), weights.shape)
