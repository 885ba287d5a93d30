"""Losses of several responses at once that come in levels, in an order, or as the verdict of a judge on two."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.curriculum.pairs import level_pairs
from jaxrl_llm.losses.policy import masked
from jaxrl_llm.types import PairTerms, TokenTerms


def trpa_loss(
    mean_log_ratio: Float[Array, " B"],
    levels: Int[Array, " B"],
    group_ids: Int[Array, " B"],
    *,
    pairs_of: Callable[..., Array] = level_pairs,
    beta: float = 0.1,
    kappa: float = 2.5,
) -> PairTerms:
    """Row ``i``: its share of the mean over all pairs of ``-log sigmoid(beta c_i (u_i - u_j))``; sums are the loss.

    ``u`` is the *token mean* of ``log pi - log ref``; a pair is two responses to one prompt of which ``i`` is of the
    better level; ``c_i = kappa`` where level 1 (wholly right) wins, else 1. Where the batch holds no pair at all:
    ``-log sigmoid(s u)``, s = 1 for level 1 and -1 otherwise. The mean of ``loss`` over the batch is the paper's loss.

    From "Trust Region Preference Approximation", arXiv:2504.04524, section 3, as in its published code; its trust
    region (``losses.kl.k3_gradient_terms`` to the policy that sampled) is added outside.

    ``aux``: ``pairs`` of each row as winner.

    >>> import jax.numpy as jnp
    >>> u, levels = jnp.array([0.2, -0.1, -0.3]), jnp.array([1, 2, 4])
    >>> round(float(trpa_loss(u, levels, jnp.zeros(3, jnp.int32)).loss.mean()), 5)
    0.65738
    """
    if beta <= 0 or kappa <= 0:
        raise ValueError(f"beta={beta} and kappa={kappa} must be positive")
    u = mean_log_ratio.astype(jnp.float32)
    wins = pairs_of(levels, group_ids)
    sharpness = beta * jnp.where(levels == 1, kappa, 1.0)
    each = -jax.nn.log_sigmoid(sharpness[:, None] * (u[:, None] - u[None, :]))
    count = jnp.sum(wins.astype(jnp.float32), axis=1)
    total = jnp.sum(count)
    of_pairs = jnp.sum(jnp.where(wins, each, 0.0), axis=1) * (u.shape[0] / jnp.maximum(total, 1.0))
    alone = -jax.nn.log_sigmoid(jnp.where(levels == 1, 1.0, -1.0) * u)
    return PairTerms(jnp.where(total > 0, of_pairs, alone), {"pairs": count})


def rrhf_loss(
    mean_logp: Float[Array, "P K"], logp: Float[Array, " P"], *, likelihood: float = 1.0
) -> Float[Array, " P"]:
    """``sum_{i<j} relu(p_j - p_i) - likelihood log pi(y_0)``, responses in the order of the ranking, best first.

    From "RRHF", arXiv:2304.05302, eq. 3-5.

    Args:
      mean_logp: length-normalised log-probabilities.
      logp: sum for the best response.

    >>> import jax.numpy as jnp
    >>> round(float(rrhf_loss(jnp.array([[-1.0, -0.6, -1.5]]), jnp.zeros(1))[0]), 4)
    0.4
    """
    p = mean_logp.astype(jnp.float32)
    later = jnp.arange(p.shape[1])[None, :, None] < jnp.arange(p.shape[1])[None, None, :]
    over = jnp.where(later, jax.nn.relu(p[:, None, :] - p[:, :, None]), 0.0)
    return jnp.sum(over, axis=(1, 2)) - likelihood * logp.astype(jnp.float32)


def pro_loss(
    mean_logp: Float[Array, "P K"], logp: Float[Array, " P"], *, likelihood: float = 1.0
) -> Float[Array, " P"]:
    """``-sum_k log(e^{p_k} / sum_{j >= k} e^{p_j}) - likelihood log pi(y_0)``: the order's own likelihood.

    From "Preference Ranking Optimization for Human Alignment", arXiv:2306.17492, eq. 6 with equal temperatures.
    """
    p = mean_logp.astype(jnp.float32)
    rest = jnp.flip(jax.lax.cumlogsumexp(jnp.flip(p, axis=1), axis=1), axis=1)
    return jnp.sum(rest - p, axis=1) - likelihood * logp.astype(jnp.float32)


def verdict_loss(forward: Float[Array, " B"], backward: Float[Array, " B"], *, consistency: float = 1.0) -> PairTerms:
    """``-1/2 [log p_wl + log(1 - p_lw)] + c (p_wl + p_lw - 1)^2`` with ``p = sigmoid(score)``.

    ``forward`` is the score of "the first is better" with the winner first, ``backward`` with the winner second. The
    second term takes out a preference for a position.

    From "Pairwise RL", arXiv:2504.04950. Differs from the paper in that the weights of the two terms are a
    reconstruction.

    ``aux``: ``accuracy`` over both orders, ``inconsistency`` ``|p_wl + p_lw - 1|``.

    >>> import jax.numpy as jnp
    >>> terms = verdict_loss(jnp.array([1.2]), jnp.array([-0.8]))
    >>> round(float(terms.aux["inconsistency"][0] ** 2), 6)
    0.00617
    """
    if consistency < 0:
        raise ValueError(f"consistency={consistency} must not be negative")
    forward, backward = forward.astype(jnp.float32), backward.astype(jnp.float32)
    gap = jax.nn.sigmoid(forward) + jax.nn.sigmoid(backward) - 1.0
    loss = -0.5 * (jax.nn.log_sigmoid(forward) + jax.nn.log_sigmoid(-backward)) + consistency * gap**2
    right = 0.5 * ((forward > 0).astype(jnp.float32) + (backward < 0).astype(jnp.float32))
    return PairTerms(loss, {"accuracy": right, "inconsistency": jnp.abs(jax.lax.stop_gradient(gap))})


def win_probability(forward: Float[Array, " B"], backward: Float[Array, " B"]) -> Float[Array, " B"]:
    """``(p_yz + 1 - p_zy) / 2`` from the scores of both orders: swapping the responses gives one minus it.

    >>> import jax.numpy as jnp
    >>> round(float(win_probability(jnp.array([1.2]), jnp.array([-0.8]))[0]), 5)
    0.72925
    """
    return 0.5 * (jax.nn.sigmoid(forward.astype(jnp.float32)) + jax.nn.sigmoid(-backward.astype(jnp.float32)))


def win_logit(forward: Float[Array, " B"], backward: Float[Array, " B"], *, bound: float = 5.0) -> Float[Array, " B"]:
    """``log P / (1 - P)`` of ``win_probability``, clipped: the scale of a Bradley-Terry reward, 0 for a tie."""
    p = jnp.clip(win_probability(forward, backward), 1e-6, 1.0 - 1e-6)
    return jnp.clip(jnp.log(p) - jnp.log1p(-p), -bound, bound)


def sppo_loss(
    logp: Float[Array, " B"], ref_logp: Float[Array, " B"], win_chance: Float[Array, " B"], *, eta: float = 1e3
) -> PairTerms:
    """SPPO: ``(log(pi / pi_t) - eta (P - 1/2))^2`` of each response.

    ``P`` is its chance to win against the policy's other responses, ``pi_t`` is the policy of the last round
    (``ref_logp``). At the optimum the policy is ``pi_t exp(eta P)`` up to a constant, one step of multiplicative
    weights. Chances of 1 and 0 for the responses of a pair are the hard form (TRL's ``sppo_hard``, with ``eta = 1 /
    beta``). No gradient to the chances.

    From "Self-Play Preference Optimization for Language Model Alignment", arXiv:2405.00675, eq. 4.7.

    >>> import jax.numpy as jnp
    >>> sppo_loss(jnp.array([-1.0]), jnp.array([-3.0]), jnp.array([0.75]), eta=4.0).loss.tolist()  # (2 - 1)^2
    [1.0]
    """
    if eta <= 0:
        raise ValueError(f"eta={eta} must be positive: it is the step size of the game")
    ratio = logp.astype(jnp.float32) - jax.lax.stop_gradient(ref_logp.astype(jnp.float32))
    goal = eta * (jax.lax.stop_gradient(win_chance.astype(jnp.float32)) - 0.5)
    return PairTerms((ratio - goal) ** 2, {"log_ratio": jax.lax.stop_gradient(ratio)})


def nash_md_loss(
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    win_chance: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.1,
) -> TokenTerms:
    """Nash-MD: ``-(P - 1/2) logp_t + beta sg(logp_t - ref_logp_t) logp_t``; reduce with ``seq_sum``.

    The gradient of the chance to win against the mixture of policy and reference, and of the token-level KL to the
    reference, by score functions. No gradient to the chances.

    Args:
      win_chance: of each response of the policy against one drawn from ``geometric_mixture``.

    From "Nash Learning from Human Feedback", arXiv:2312.00886, section 7, as in TRL's NashMDTrainer.

    >>> import jax.numpy as jnp
    >>> one, mask = jnp.ones((1, 1)), jnp.ones((1, 1), bool)
    >>> float(nash_md_loss(-one, -3 * one, jnp.array([1.0]), mask, beta=0.5).loss[0, 0])  # (0.5 * 2 - 0.5) * -1
    -0.5
    """
    if beta < 0:
        raise ValueError(f"beta={beta} must not be negative")
    logp, ref_logp = masked(mask, logp, ref_logp)
    chance = jnp.where(jnp.any(mask, axis=1), win_chance.astype(jnp.float32), 0.5)
    gap = jax.lax.stop_gradient(logp - ref_logp)
    return TokenTerms((beta * gap - (jax.lax.stop_gradient(chance) - 0.5)[:, None]) * logp, {"reference_gap": gap})


def geometric_mixture(
    logits: Float[Array, "... V"], ref_logits: Float[Array, "... V"], *, share: float = 0.5
) -> Float[Array, "... V"]:
    """Log-probabilities of ``pi^(1 - share) ref^share`` of each next-token distribution: Nash-MD's opponent.

    From "Nash Learning from Human Feedback", arXiv:2312.00886, section 7.

    >>> import jax.numpy as jnp
    >>> p, q = jnp.log(jnp.array([0.9, 0.1])), jnp.log(jnp.array([0.1, 0.9]))
    >>> [round(float(x), 4) for x in jnp.exp(geometric_mixture(p, q))]
    [0.5, 0.5]
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} must lie in [0, 1]")
    if share in (0, 1):  # 0 times -inf is no number
        return jax.nn.log_softmax((logits if share == 0 else ref_logits).astype(jnp.float32), axis=-1)
    mixed = (1.0 - share) * logits.astype(jnp.float32) + share * ref_logits.astype(jnp.float32)
    return jax.nn.log_softmax(mixed, axis=-1)
