"""Imitation and reinforcement in one loss, ``(1 - mu) L_RL + mu L_SFT``, with a share ``mu`` that is itself learned."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.types import Metrics, Params


class Balance(NamedTuple):
    """The share of imitation and what its next move rests on."""

    share: Float[Array, ""]  # mu
    pull: Float[Array, ""]  # moving average of dU / dmu
    size: Float[Array, ""]  # of its absolute value
    target: Float[Array, ""]  # entropy that is neither too much nor too little; NaN until the first measurement
    direction: Params  # grad L_SFT - grad L_RL before the last update
    params: Params  # that the next gradients belong to


def first_balance(params: Params, share: float | Float[Array, ""]) -> Balance:
    """Before the first update: nothing is known of the direction, so the share stays."""
    zero = jnp.zeros((), jnp.float32)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Balance(
        jnp.asarray(share, jnp.float32), zero, zero, jnp.float32(jnp.nan), zeros, jax.tree.map(jnp.copy, params)
    )


def inner(left: Params, right: Params) -> Float[Array, ""]:
    """Sum of the products of two trees, in float32."""
    products = jax.tree.map(lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), left, right)
    return sum(jax.tree.leaves(products), jnp.zeros((), jnp.float32))


def meta_gradient(utility_gradient: Params, direction: Params, *, learning_rate: float) -> Float[Array, ""]:
    """``dU/dmu = -eta <grad U(theta'), grad L_SFT - grad L_RL>`` through one step of gradient descent.

    ``theta' = theta - eta grad((1 - mu) L_RL + mu L_SFT)(theta)``: exact for that step, a surrogate where Adam steps.

    From "AMFT: Aligning LLM Reasoners by Meta-Learning the Optimal Imitation-Exploration Balance", arXiv:2508.06944.

    Args:
      utility_gradient: at ``theta'``, of what is to grow.
      direction: ``grad L_SFT - grad L_RL`` at ``theta``.

    L_RL = (th - 2)^2 / 2, L_SFT = th^2 / 2, U = -(th' - 2)^2 / 2, th = 1, mu = 1/2: th' = 1, dU/dth' = 1, and the
    direction is 1 - (-1):

    >>> import jax.numpy as jnp
    >>> round(float(meta_gradient({"th": jnp.float32(1.0)}, {"th": jnp.float32(2.0)}, learning_rate=0.1)), 4)
    -0.2
    """
    if learning_rate <= 0:
        raise ValueError(f"learning_rate={learning_rate} must be positive: it is the size of the inner step")
    return -learning_rate * inner(utility_gradient, direction)


def moved(
    balance: Balance,
    slope: Float[Array, ""],
    entropy: Float[Array, ""],
    *,
    rate: float = 0.02,
    entropy_rate: float = 0.02,
    decay: float = 0.9,
    low: float = 0.05,
    high: float = 0.95,
) -> Balance:
    """The balance after ``mu <- clip(mu + rate m + entropy_rate (H - H*) / H*, low, high)``.

    ``m`` in [-1, 1] is the moving average of the slope over that of its absolute value, so that no step exceeds
    ``rate`` whatever the scale of the gradients. Entropy above the first one measured asks for more imitation, entropy
    below it for less.

    From arXiv:2508.06944. Differs from its public code (TSYJ-He/AMFT) in the normalised slope and the relative distance
    of the entropies, where that code adds ``1e-4 dU/dmu`` and ``5e-4 (H* - H)`` as they are; in the sign of the latter,
    by which it imitates more where entropy is low; in its start of 0.5; and in the utility, there the likelihood of
    validation answers (whose gradient that code adds with the sign of a loss).

    Args:
      slope: ``meta_gradient``; rate or entropy_rate of 0 leaves a term out.

    >>> import jax.numpy as jnp
    >>> b = moved(first_balance({}, 0.9), jnp.float32(-0.2), jnp.float32(1.0))
    >>> round(float(b.share), 3), float(b.target)
    (0.88, 1.0)
    >>> round(float(moved(b, jnp.float32(0.0), jnp.float32(2.0), rate=0.0).share), 3)
    0.9
    """
    if not 0 <= low <= high <= 1:
        raise ValueError(f"low={low} and high={high} must satisfy 0 <= low <= high <= 1")
    pull = decay * balance.pull + (1 - decay) * slope
    size = decay * balance.size + (1 - decay) * jnp.abs(slope)
    target = jnp.where(jnp.isnan(balance.target), entropy, balance.target)
    wish = rate * pull / jnp.maximum(size, 1e-30)
    wish = wish + entropy_rate * (entropy - target) / jnp.maximum(target, 1e-6)
    return balance._replace(
        share=jnp.clip(balance.share + wish, low, high), pull=pull, size=size, target=target
    )  # fmt: skip


def learned(
    balance: Balance,
    reinforce: Callable[[Params, Any], tuple[Array, Metrics]],
    imitate: Callable[[Params, Any], Array],
    params: Params,
    batch: Any,
    *,
    learning_rate: float,
    **rates: float,
) -> Balance:
    """The balance for the next update, from the batch of the last one.

    The utility of the step before is the policy gradient of this batch, sampled after it from prompts that it did not
    train on: a held-out estimate that costs no rollout.

    Args:
      reinforce: loss whose metrics hold ``policy/entropy``; imitate: loss; both of ``(params, batch)``.
      params: after the update.
      rates: of ``moved``.
    """
    own, metrics = jax.grad(reinforce, has_aux=True)(balance.params, batch)
    theirs = jax.grad(imitate)(balance.params, batch)
    uphill = jax.tree.map(jnp.negative, own)
    slope = meta_gradient(uphill, balance.direction, learning_rate=learning_rate)
    new = moved(balance, slope, metrics["policy/entropy"], **rates)
    return new._replace(direction=jax.tree.map(jnp.subtract, theirs, own), params=params)


def never(done: Float[Array, ""]) -> Float[Array, ""]:
    """No imitation. ``done``: fraction of the steps made, here and below."""
    return jnp.zeros_like(done)


def always(done: Float[Array, ""]) -> Float[Array, ""]:
    """Imitation alone."""
    return jnp.ones_like(done)


def half(done: Float[Array, ""]) -> Float[Array, ""]:
    """As much of the one as of the other."""
    return jnp.full_like(done, 0.5)


def falling(done: Float[Array, ""]) -> Float[Array, ""]:
    """From 0.9 to 0.05 in a straight line."""
    return 0.9 - 0.85 * done


def at_first(done: Float[Array, ""]) -> Float[Array, ""]:
    """Imitation in the first 30 % of the steps, none afterwards: the usual two stages."""
    return jnp.where(done < 0.3, 1.0, 0.0)
