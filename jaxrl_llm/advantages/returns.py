"""Returns and advantages along a sequence, from per-token rewards and values.

The "next value" of a trained token is that of the next *trained* token: prompt, tool output and padding in between are
stepped over, so a hole in the mask changes nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm import reduce


def _check(gamma: float, lam: float) -> None:
    if not 0 <= gamma <= 1 or not 0 <= lam <= 1:
        raise ValueError(f"gamma={gamma} and lam={lam} must lie in [0, 1]")


def gae_advantages(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    bootstrap: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Generalised advantage estimation: ``(advantages, returns)``, both 0 outside the mask, no gradient.

    ``delta_t = r_t + gamma V_next - V_t``, ``A_t = delta_t + gamma lam A_next``, ``return_t = A_t + V_t``.

    Args:
      values: value of the state *before* the token at that index is chosen.
      bootstrap: value after the last trained token: 0 where the sequence really ended, the critic's estimate where it
        was truncated.

    From "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv:1506.02438, eq. 16.
    """
    _check(gamma, lam)
    return _gae(rewards, values, bootstrap, mask, gamma, lam)


def _gae(
    rewards: Array, values: Array, bootstrap: Array, mask: Array, gamma: float, lam: float | Array
) -> tuple[Array, Array]:
    """``gae_advantages`` with one ``lam``, or one of each row."""
    reduce.check_tokens(mask, rewards, values)
    reduce.check_rows(mask, bootstrap)
    rewards, values = (jnp.where(mask, x.astype(jnp.float32), 0.0) for x in (rewards, values))

    def step(carry, column):
        following, advantage = carry
        reward, value, trained = column
        new = reward + gamma * following - value + gamma * lam * advantage
        carry = (jnp.where(trained, value, following), jnp.where(trained, new, advantage))
        return carry, jnp.where(trained, new, 0.0)

    columns = (jnp.moveaxis(rewards, 1, 0), jnp.moveaxis(values, 1, 0), jnp.moveaxis(mask, 1, 0))
    start = (bootstrap.astype(jnp.float32), jnp.zeros(bootstrap.shape, jnp.float32))
    _, advantages = jax.lax.scan(step, start, columns, reverse=True)
    advantages = jax.lax.stop_gradient(jnp.moveaxis(advantages, 0, 1))
    return advantages, jax.lax.stop_gradient(jnp.where(mask, advantages + values, 0.0))


def length_adaptive_gae_advantages(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    bootstrap: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 1.0,
    alpha: float = 0.05,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """VAPO: ``gae_advantages`` with ``lam = 1 - 1 / (alpha l)`` of a response of ``l`` trained tokens, at least 0.

    The weights of its errors then sum to ``alpha l``: a long response looks as far ahead, for its length, as a short
    one. The returns, the critic's targets, are those of ``lam = 1`` (decoupled GAE). Arguments as in
    ``gae_advantages``.

    From "VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks", arXiv:2504.05118, section
    3.2 (length-adaptive GAE, ``alpha = 0.05``) and 3.1 (decoupled).

    >>> import jax.numpy as jnp
    >>> mask, zeros = jnp.ones((1, 4), bool), jnp.zeros((1, 4))
    >>> a, g = length_adaptive_gae_advantages(jnp.array([[0.0, 0, 0, 8]]), zeros, zeros[:, 0], mask, alpha=0.5)
    >>> a.tolist(), g.tolist()  # lam = 1 - 1 / 2
    ([[1.0, 2.0, 4.0, 8.0]], [[8.0, 8.0, 8.0, 8.0]])
    """
    if alpha <= 0:
        raise ValueError(f"alpha={alpha} must be positive")
    length = jnp.sum(mask.astype(jnp.float32), axis=1)
    lam = jnp.maximum(1.0 - 1.0 / (alpha * jnp.maximum(length, 1.0)), 0.0)
    advantages = _gae(rewards, values, bootstrap, mask, gamma, lam)[0]
    return advantages, lambda_returns(rewards, values, bootstrap, mask, gamma=gamma, lam=1.0)


def lambda_returns(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    bootstrap: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Float[Array, "B T"]:
    """``G_t = r_t + gamma ((1 - lam) V_next + lam G_next)``; lam = 1 is Monte Carlo, lam = 0 one-step TD."""
    return gae_advantages(rewards, values, bootstrap, mask, gamma=gamma, lam=lam)[1]


def discounted_returns(
    rewards: Float[Array, "B T"], mask: Bool[Array, "B T"], *, gamma: float = 1.0
) -> Float[Array, "B T"]:
    """Reward to go over trained tokens: ``G_t = r_t + gamma G_next``."""
    reduce.check_tokens(mask, rewards)
    zeros = jnp.zeros(rewards.shape, jnp.float32)
    return lambda_returns(rewards, zeros, zeros[:, 0], mask, gamma=gamma, lam=1.0)


def n_step_returns(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    bootstrap: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    steps: int,
    gamma: float = 1.0,
) -> Float[Array, "B T"]:
    """``G_t = r_t + gamma r_t' + ... + gamma^n V`` over the next ``steps`` *trained* tokens; 0 outside the mask.

    A sequence with fewer tokens left ends in ``bootstrap`` (0 after a true end) at the power of gamma reached.
    Arguments as in ``gae_advantages``; ``steps = 1`` is lambda 0.

    From Sutton and Barto, "Reinforcement Learning: An Introduction", eq. 7.1.

    >>> import jax.numpy as jnp
    >>> rewards, values = jnp.array([[1.0, 2.0, 4.0]]), jnp.array([[0.0, 8.0, 16.0]])
    >>> n_step_returns(rewards, values, jnp.zeros(1), jnp.ones((1, 3), bool), steps=2, gamma=0.5).tolist()
    [[6.0, 4.0, 4.0]]
    """
    _check(gamma, 0.0)
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    reduce.check_tokens(mask, rewards, values)
    reduce.check_rows(mask, bootstrap)
    rewards, values = (jnp.where(mask, x.astype(jnp.float32), 0.0) for x in (rewards, values))

    def step(later, column):
        # later[:, k] is the k-step return from the next trained token; k = 0 is its value
        reward, value, trained = column
        new = reward[:, None] + gamma * later
        carry = jnp.concatenate([value[:, None], new[:, :-1]], axis=1)
        return jnp.where(trained[:, None], carry, later), jnp.where(trained, new[:, -1], 0.0)

    start = jnp.broadcast_to(bootstrap.astype(jnp.float32)[:, None], (bootstrap.shape[0], steps))
    columns = (jnp.moveaxis(rewards, 1, 0), jnp.moveaxis(values, 1, 0), jnp.moveaxis(mask, 1, 0))
    _, out = jax.lax.scan(step, start, columns, reverse=True)
    return jax.lax.stop_gradient(jnp.moveaxis(out, 0, 1))


def at_last_token(values: Float[Array, " B"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """A sequence's reward at its last trained token, 0 elsewhere."""
    reduce.check_rows(mask, values)
    last = mask & (jnp.cumsum(mask[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1] == 1)
    return jnp.where(last, values.astype(jnp.float32)[:, None], 0.0)


def terminal_advantages(
    rewards: Float[Array, " B"], mask: Bool[Array, "B T"], *, lam: float = 0.95
) -> Float[Array, "B T"]:
    """``lam^(trained tokens still to come) R``: GAE of one reward at the end without a critic (``V = 0``, gamma 1).

    The last trained token gets ``R``; no gradient, 0 outside the mask. See ``length_pressure`` for what it does to
    lengths.

    From "Concise Reasoning via Reinforcement Learning", arXiv:2504.05185, section 4.

    >>> import jax.numpy as jnp
    >>> terminal_advantages(jnp.array([8.0]), jnp.array([[True, False, True, True]]), lam=0.5).tolist()
    [[2.0, 0.0, 4.0, 8.0]]
    """
    _check(1.0, lam)
    reduce.check_rows(mask, rewards)
    ahead = jnp.cumsum(mask[:, ::-1].astype(jnp.float32), axis=1)[:, ::-1] - 1.0
    weight = jnp.where(mask, jnp.power(jnp.float32(lam), jnp.maximum(ahead, 0.0)), 0.0)
    return jax.lax.stop_gradient(jnp.where(mask, weight * rewards.astype(jnp.float32)[:, None], 0.0))


def length_pressure(
    rewards: Float[Array, " B"], length_tokens: Float[Array, " B"], *, lam: float
) -> Float[Array, " B"]:
    """PPO's token-mean loss of one response at ratio 1 without a critic: ``-R (1 - lam^T) / (T (1 - lam))``.

    Its size falls with the length ``T``: minimising it prefers long responses where ``R < 0`` and short ones where
    ``R > 0``. At ``lam = 1`` it is ``-R`` for every length: no preference.

    From "Concise Reasoning via Reinforcement Learning", arXiv:2504.05185, section 4.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 5) for x in length_pressure(jnp.array([-1.0, -1.0]), jnp.array([10.0, 20.0]), lam=0.95)]
    [0.80253, 0.64151]
    """
    _check(1.0, lam)
    rewards, length = rewards.astype(jnp.float32), jnp.maximum(length_tokens.astype(jnp.float32), 1.0)
    if lam == 1.0:
        return -rewards
    return -rewards * (1.0 - jnp.power(jnp.float32(lam), length)) / (length * (1.0 - lam))
