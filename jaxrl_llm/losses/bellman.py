"""Bellman consistency: what a policy and its values must satisfy on any trajectory, whoever wrote it.

With a reward at the end and KL to a reference, the optimum has ``V(s_t) - V(s_{t+1}) = r_t - beta log(pi / ref)`` at
every token, so that ``V(s_t) + beta D_t = R`` where ``D_t`` sums the log-ratios from token t on.

Of the uniformly random policy, whose own log-probabilities are the values: ``next_values``, ``rover_loss``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses.policy import masked
from jaxrl_llm.types import TokenTerms


def _check_beta(beta: float) -> None:
    if beta <= 0:
        raise ValueError(f"beta={beta} must be positive: it is the weight of the KL to the reference")


def sums_from(terms: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``D_t = sum_{i >= t} terms_i`` over the masked tokens, 0 outside the mask.

    >>> sums_from(jnp.array([[0.5, 0.25, 1.0]]), jnp.array([[True, False, True]])).tolist()
    [[1.5, 0.0, 1.0]]
    """
    (terms,) = masked(mask, terms)
    return jnp.where(mask, jnp.cumsum(terms[:, ::-1], axis=1)[:, ::-1], 0.0)


def first_tokens(mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """The first masked token of each row: a response that is one step."""
    return mask & (jnp.cumsum(mask.astype(jnp.int32), axis=1) == 1)


def starts_after(ends: Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Masked tokens that begin a step: the first one, and each that follows a token in ``ends`` at once.

    >>> starts_after(jnp.array([[False, True, False, True]]), jnp.ones((1, 4), bool)).tolist()
    [[True, False, True, False]]
    """
    after = jnp.pad(ends[:, :-1] & mask[:, :-1], ((0, 0), (1, 0)))
    return mask & (after | first_tokens(mask))


def soft_value_loss(
    values: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    rewards: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.03,
) -> TokenTerms:
    """``(V_t + beta sg(D_t) - R)^2`` with ``D_t`` the sum of ``logp - ref_logp`` from token t on.

    The critic's half of soft Bellman consistency; a policy that is the reference makes it a regression on the reward.
    Reduce with ``seq_mean``, over the tokens that begin a step where steps are what is decided.

    ``aux``: ``residual``, the absolute value of the bracket.

    From "Offline Reinforcement Learning for LLM Multi-Step Reasoning", arXiv:2412.16145, section 3 (OREO).

    Args:
      values: of the state in which each token is chosen (``heads.state_values``).
      rewards: of each response, paid at its end.

    >>> values, d, mask = jnp.array([[0.5, 0.8]]), jnp.array([[0.2, -0.4]]), jnp.ones((1, 2), bool)
    >>> terms = soft_value_loss(values, d, 0 * d, jnp.array([1.0]), mask, beta=0.5)
    >>> [round(float(x), 4) for x in terms.loss[0]]
    [0.36, 0.16]
    """
    _check_beta(beta)
    values, logp, ref_logp = masked(mask, values, logp, ref_logp)
    later = jax.lax.stop_gradient(sums_from(logp - ref_logp, mask))
    rewards = jax.lax.stop_gradient(rewards.astype(jnp.float32))[:, None]
    gap = jnp.where(mask, values + beta * later - rewards, 0.0)
    return TokenTerms(gap**2, {"residual": jnp.abs(gap)})


def soft_policy_loss(
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    values: Float[Array, "B T"],
    rewards: Float[Array, " B"],
    starts: Bool[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.03,
) -> TokenTerms:
    """``(sg(V_t) + beta (d_t + sg(D_{t+1})) - R)^2`` at the tokens that begin a step, ``d = logp - ref_logp``.

    The policy's half of soft Bellman consistency. ``d_t`` is the sum over the step that begins at t and has the
    gradient; what comes after the step is stopped. Every token its own step is the token form, ``first_tokens`` the
    response form. Tokens that begin no step have no term of their own: reduce with ``seq_mean`` over ``starts & mask``.

    ``aux``: ``residual``, the absolute value of the bracket, and ``advantage``, ``R - V_t - beta D_{t+1}``: what the
    step earns beyond its state, as the later policy goes on.

    From "Offline Reinforcement Learning for LLM Multi-Step Reasoning", arXiv:2412.16145, section 3 (OREO), as in its
    released trainer.

    Args:
      values: of the state in which each token is chosen; no gradient.
      starts: which tokens begin a step; the first masked token always does.

    >>> values, d, mask = jnp.array([[0.5, 0.8]]), jnp.array([[0.2, -0.4]]), jnp.ones((1, 2), bool)
    >>> terms = soft_policy_loss(d, 0 * d, values, jnp.array([1.0]), mask, mask, beta=0.5)
    >>> [round(float(x), 4) for x in terms.loss[0]]
    [0.36, 0.16]
    """
    _check_beta(beta)
    logp, ref_logp, values = masked(mask, logp, ref_logp, values)
    begins = mask & (starts | first_tokens(mask))
    onwards = sums_from(logp - jax.lax.stop_gradient(ref_logp), mask)
    # the next token that begins a step, T where there is none, and what is summed from there on
    width = mask.shape[1]
    columns = jnp.where(begins, jnp.arange(width, dtype=jnp.int32)[None, :], width)
    ahead = jax.lax.cummin(columns, axis=1, reverse=True)
    ahead = jnp.pad(ahead[:, 1:], ((0, 0), (0, 1)), constant_values=width)
    after = jnp.take_along_axis(jnp.pad(onwards, ((0, 0), (0, 1))), ahead, axis=1)
    later, values, rewards = jax.lax.stop_gradient((after, values, rewards.astype(jnp.float32)[:, None]))
    gap = jnp.where(begins, values + beta * (onwards - after + later) - rewards, 0.0)
    advantage = jnp.where(begins, rewards - values - beta * later, 0.0)
    return TokenTerms(gap**2, {"residual": jnp.abs(gap), "advantage": advantage})


def next_values(
    mean_logp: Float[Array, "B T"], old_mean_logp: Float[Array, "B T"], mask: Bool[Array, "B T"], *, rho: float = 1.0
) -> Float[Array, "B T"]:
    """``rho mean_v (log pi(v | s_{t+1}) - log pi_old(v | s_{t+1}))`` at token t; 0 after the last trained token.

    The mean of ``Q`` over all tokens in the next state: its value under the uniform policy.

    Args:
      mean_logp: ``logprobs.mean_logprobs``, of the distribution from which the token at each index was chosen.
    """
    mean_logp, old_mean_logp = masked(mask, mean_logp, old_mean_logp)
    value = rho * (mean_logp - old_mean_logp)
    following = jnp.pad(value[:, 1:], ((0, 0), (0, 1)))
    goes_on = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    return jnp.where(mask & goes_on, following, 0.0)


def rover_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    mean_logp: Float[Array, "B T"],
    old_mean_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    rho: float = 1.0,
    bootstrap: float = 1.0,
) -> TokenTerms:
    """ROVER: ``(Q_t - sg(A_t + bootstrap V_{t+1}))^2`` with ``Q_t = rho (logp - old_logp)``.

    ``V_{t+1}`` is ``next_values``: Bellman's equation of the uniformly random policy, whose values only need the
    policy's own log-probabilities. At ``logp = old_logp`` the gradient is ``2 rho`` times that of REINFORCE.

    ``aux``: ``value_error``, ``|Q - target|``, and ``next_value``.

    From "Random Policy Valuation is Enough for LLM Reasoning with Verifiable Rewards", arXiv:2509.24981, section 4; the
    reward of a response, centred in its group, is paid at every token, as in its published code.

    Args:
      mean_logp: mean log-probability over the vocabulary in the state of each token, of the policy and, old, of the
        policy that began the updates.
      advantages: centred reward of the response, at each of its tokens.
      rho: temperature of the softmax over Q that is the policy.
      bootstrap: weight of the next state's value; 0 regresses on the reward alone.

    >>> import jax.numpy as jnp
    >>> now, old = jnp.log(jnp.array([[0.5, 0.25]])), jnp.log(jnp.array([[0.4, 0.5]]))
    >>> mean, old_mean = jnp.array([[0.0, -1.15525]]), jnp.array([[0.0, -1.14734]])
    >>> terms = rover_loss(now, old, mean, old_mean, jnp.full((1, 2), 0.5), jnp.ones((1, 2), bool))
    >>> [round(float(x), 4) for x in terms.aux["next_value"][0]], round(float(terms.loss.sum() / 2), 3)
    ([-0.0079, 0.0], 0.748)
    """
    if rho <= 0:
        raise ValueError(f"rho={rho} must be positive: it is the temperature of the policy over Q")
    value = next_values(mean_logp, old_mean_logp, mask, rho=rho)
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    q = rho * (logp - jax.lax.stop_gradient(old_logp))
    target = jax.lax.stop_gradient(advantages + bootstrap * value)
    error = jnp.where(mask, q - target, 0.0)
    return TokenTerms(error**2, {"value_error": jnp.abs(error), "next_value": value})


def uniform_policy_values(rewards: Float[Array, " leaves"], actions: int) -> list[Float[Array, "nodes actions"]]:
    """``Q^U(s, a)`` of a full tree with ``actions`` choices a step, exactly: mean reward of the leaves under each edge.

    One array a depth, ``[actions^depth, actions]``, the root first. An edge has a positive value exactly where a leaf
    of positive reward lies below it, so the greedy policy over it is optimal for rewards of 0 and 1.

    From arXiv:2509.24981, theorem 1.

    >>> import jax.numpy as jnp
    >>> [q.tolist() for q in uniform_policy_values(jnp.array([1.0, 0, 0, 0]), 2)]
    [[[0.5, 0.0]], [[1.0, 0.0], [0.0, 0.0]]]
    """
    if actions < 2:
        raise ValueError(f"actions={actions} must be at least 2")
    levels, values = [], rewards.astype(jnp.float32)
    while values.shape[0] > 1:
        if values.shape[0] % actions:
            raise ValueError(f"{rewards.shape[0]} leaves are no power of actions={actions}")
        edges = values.reshape(-1, actions)
        levels.insert(0, edges)
        values = jnp.sum(edges, axis=1) / actions
    return levels
