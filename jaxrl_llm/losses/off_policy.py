"""Policy losses that hold for samples of any origin: group-relative REINFORCE, mirror descent, reward consistency."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce
from jaxrl_llm.advantages.group import group_sum
from jaxrl_llm.losses.correction import masked_weights, mismatch_ratio
from jaxrl_llm.losses.policy import cispo_loss, clipped_policy_loss, log_ratio, masked
from jaxrl_llm.losses.sequence import sequence_log_ratio
from jaxrl_llm.types import TokenTerms

Ratio = Float[Array, "B T"]


def token_ratio(logp: Ratio, old_logp: Ratio, mask: Bool[Array, "B T"]) -> Ratio:
    """``pi / pi_old`` of each token, 1 outside the mask."""
    return jnp.exp(log_ratio(*masked(mask, logp, old_logp)))


def mean_ratio(logp: Ratio, old_logp: Ratio, mask: Bool[Array, "B T"]) -> Ratio:
    """GSPO's geometric mean of the ratios of a sequence, at each of its tokens."""
    return jnp.exp(sequence_log_ratio(logp, old_logp, mask, mode="mean"))


def sequence_ratio(logp: Ratio, old_logp: Ratio, mask: Bool[Array, "B T"]) -> Ratio:
    """``pi(y) / pi_old(y)`` of the sequence, the product of its tokens' ratios, at each of its tokens."""
    return jnp.exp(sequence_log_ratio(logp, old_logp, mask))


def keep_all(ratio: Ratio, advantages: Ratio) -> Bool[Array, "B T"]:
    """No clipping."""
    return jnp.ones(ratio.shape, bool)


def keep_one_side(ratio: Ratio, advantages: Ratio, *, clip_low: float = 0.2, clip_high: float = 0.2):
    """PPO's tokens: those not yet moved past the bound in the direction of their advantage."""
    up = (advantages >= 0) & (ratio <= 1 + clip_high)
    return up | ((advantages <= 0) & (ratio >= 1 - clip_low))


def keep_two_sides(ratio: Ratio, advantages: Ratio, *, clip_low: float = 0.2, clip_high: float = 0.2):
    """Only tokens whose ratio is still near 1, whatever the advantage."""
    return (ratio >= 1 - clip_low) & (ratio <= 1 + clip_high)


def keep_ring(
    ratio: Ratio,
    advantages: Ratio,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    far_low: float = 0.6,
    far_high: float = 2.0,
):
    """``keep_two_sides``, and tokens that are far off on the side where the update brings them back.

    >>> import jax.numpy as jnp
    >>> keep_ring(jnp.array([[0.3, 0.7, 1.1, 1.3]]), jnp.ones((1, 4)))[0].tolist()
    [True, False, True, False]
    """
    near = keep_two_sides(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    below = (advantages >= 0) & (ratio <= 1 - far_low)
    return near | below | ((advantages <= 0) & (ratio >= 1 + far_high))


def unweighted(ratio: Ratio, advantages: Ratio) -> Ratio:
    """No importance sampling."""
    return jnp.ones(ratio.shape, jnp.float32)


def importance_weights(ratio: Ratio, advantages: Ratio) -> Ratio:
    """The ratio itself."""
    return ratio.astype(jnp.float32)


def advantage_weights(ratio: Ratio, advantages: Ratio, *, temperature: float = 1.0) -> Ratio:
    """RED-Weight: ``exp(A / temperature)``, not normalised."""
    return jnp.exp(advantages.astype(jnp.float32) / temperature)


def rec_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    keep: Callable[[Ratio, Ratio], Bool[Array, "B T"]] = keep_one_side,
    weigh: Callable[[Ratio, Ratio], Ratio] = unweighted,
    ratio_of: Callable[[Ratio, Ratio, Bool[Array, "B T"]], Ratio] = token_ratio,
) -> TokenTerms:
    """Group-relative REINFORCE with clipping (REC): ``-sg(A W M) logp``, ``W`` and ``M`` functions of ``(rho, A)``.

    ``keep_one_side`` with ``importance_weights`` has exactly the gradient of PPO's clipped surrogate; ``unweighted``
    drops the importance ratio and keeps the clip; ``keep_all`` and ``unweighted`` is REINFORCE.

    ``aux``: ``ratio``, and ``clipped``, 1 for tokens without gradient.

    From "Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm", arXiv:2509.24203, section 4.

    Args:
      keep: ``M``: ``keep_all``, ``keep_one_side``, ``keep_two_sides`` or ``keep_ring``.
      weigh: ``W``: ``unweighted``, ``importance_weights`` or ``advantage_weights``.
      ratio_of: ``token_ratio`` or ``mean_ratio``.
    """
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    ratio = jax.lax.stop_gradient(ratio_of(logp, old_logp, mask))
    kept = keep(ratio, advantages) & mask
    weight = jnp.where(kept, advantages * weigh(ratio, advantages), 0.0)
    aux = {"ratio": jnp.where(mask, ratio, 0.0), "clipped": (mask & ~kept).astype(jnp.float32)}
    return TokenTerms(-weight * logp, aux)


def _sequence_sums(logp: Array, anchor: Array, mask: Array) -> Array:
    """``log pi(y) / anchor(y)`` of each row, not clamped: what drifted far must be pulled back."""
    return reduce.sequences(logp - jax.lax.stop_gradient(anchor), mask)


def mirror_descent_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    tau: float = 0.1,
) -> TokenTerms:
    """Kimi k1.5's squared surrogate ``(A_i - tau log(pi(y_i) / pi_old(y_i)))^2``, at every token of sequence i.

    ``A_i = r_i - mean`` (or minus ``tau log mean exp(r / tau)``); samples of any origin. Reduce with ``seq_mean``: the
    gradient of a token is then ``-2 tau (A_i - tau log ratio)``, which at ``pi = pi_old`` is ``2 tau`` times REINFORCE.

    ``aux``: ``surrogate_error``, the absolute value of the bracket.

    From "Kimi k1.5", arXiv:2501.12599, section 2.3.2, eqs. 2 and 3.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda x: mirror_descent_loss(x, jnp.zeros((1, 1)), jnp.array([[0.5]]), jnp.array([[True]])).loss[0, 0]
    >>> value, slope = jax.value_and_grad(f)(jnp.array([[0.3]]))
    >>> round(float(value), 4), round(float(slope[0, 0]), 4)
    (0.2209, -0.094)
    """
    if tau <= 0:
        raise ValueError(f"tau={tau} must be positive: it weighs the distance from the old policy")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    gap = jax.lax.stop_gradient(advantages) - tau * _sequence_sums(logp, old_logp, mask)[:, None]
    gap = jnp.where(mask, gap, 0.0)
    return TokenTerms(gap**2, {"surrogate_error": jnp.abs(gap)})


def regularised_rewards(
    rewards: Float[Array, " B"],
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float,
) -> Float[Array, " B"]:
    """``R_i = r_i - beta log(pi(y_i) / ref(y_i))``, with the gradient of ``logp``: equal for all y at the optimum."""
    logp, ref_logp = masked(mask, logp, ref_logp)
    return rewards.astype(jnp.float32) - beta * _sequence_sums(logp, ref_logp, mask)


def _deviations(values: Array, group_ids: Array, used: Array) -> tuple[Array, Array]:
    """Distance from the group's mean and the number of used members."""
    count = group_sum(used.astype(jnp.float32), group_ids)
    mean = group_sum(jnp.where(used, values, 0.0), group_ids) / jnp.maximum(count, 1.0)
    return jnp.where(used, values - mean, 0.0), count


def agro_loss(
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    beta: float,
    ddof: int = 1,
) -> TokenTerms:
    """AGRO: half the variance of ``regularised_rewards`` within each group, at every token of its sequences.

    ``1/2 G / (G - ddof) (R_i - mean_group R)^2``; reduced with ``seq_mean`` its mean over a group is ``1/2 Var``. The
    gradient of a sequence's log-probability is ``-beta (R_i - mean)`` over the group's size (ddof 0): no importance
    ratio, whatever policy the samples came from; 0 at the optimum ``ref exp(r / beta)``.

    ``aux``: ``consistency_gap``, ``|R_i - mean|``.

    From "Any-Generation Reward Optimization", arXiv:2503.19612, section 3. The gradient through on-policy sampling is
    ``agro_sampling_terms``, the form at every prefix ``agro_token_loss``.

    Args:
      rewards: of each sequence; members without a masked token leave the group.
      ddof: 1 for the unbiased variance.
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be positive: it weighs the distance from the reference")
    used = jnp.any(mask, axis=1)
    values = regularised_rewards(jnp.where(used, rewards, 0.0), logp, ref_logp, mask, beta=beta)
    gap, count = _deviations(values, group_ids, used)
    scale = jax.lax.stop_gradient(count / jnp.maximum(count - ddof, 1.0))
    loss = jnp.where(mask, (0.5 * scale * gap**2)[:, None], 0.0)
    return TokenTerms(loss, {"consistency_gap": jnp.where(mask, jnp.abs(gap)[:, None], 0.0)})


def agro_sampling_terms(
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    beta: float,
) -> Float[Array, "B T"]:
    """The score-function part of on-policy AGRO: ``1/2 sg((R_i - mean)^2) log pi(y_i)``, at every token of sequence i.

    Added to ``agro_loss`` it gives the gradient of the variance also through the samples; both have the same optimum.

    From arXiv:2503.19612, section 3.
    """
    used = jnp.any(mask, axis=1)
    values = regularised_rewards(jnp.where(used, rewards, 0.0), logp, ref_logp, mask, beta=beta)
    gap, _ = _deviations(values, group_ids, used)
    (logp,) = masked(mask, logp)
    return jnp.where(mask, (0.5 * jax.lax.stop_gradient(gap**2) * reduce.sequences(logp, mask))[:, None], 0.0)


def agro_token_loss(
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float,
    ddof: int = 1,
) -> TokenTerms:
    """AGRO at every prefix: half the variance of what is left to earn, among those who have come the same way.

    ``R_it = r_i - beta sum_{s >= t} log(pi(y_is | y_i<s) / ref(y_is | y_i<s))`` is the same for all continuations of a
    prefix at the optimum, for there it is the prefix's soft value. ``1/2 n / (n - ddof) (R_it - mean R_jt)^2`` over the
    ``n`` members of the group that share ``y_i<t`` and go on, summed over t, divided by the number of depths at which
    two members of the group still agree, at every token of the sequence. Reduce with ``seq_mean``. Where all part at
    their first token it is ``agro_loss``; like that it needs no importance ratio and no value model. Memory ``B^2``,
    time ``B^2 T``.

    ``aux``: ``consistency_gap``, ``|R_it - mean|`` at token t; ``shared``, 1 where another member shares the prefix.

    From the consistency of "Any-Generation Reward Optimization", arXiv:2503.19612, section 3, at every state of the
    token-level decision process. Differs from the paper in being derived here from its sequence form: its own token
    form was not at hand.

    >>> import jax.numpy as jnp
    >>> ratio, mask = jnp.array([[0.2, 0.4], [0.2, -0.2], [-0.6, 0.0]]), jnp.ones((3, 2), bool)
    >>> y, r, ids = jnp.array([[1, 2], [1, 3], [4, 5]]), jnp.array([1.0, 0.0, 0.0]), jnp.zeros(3, jnp.int32)
    >>> terms = agro_token_loss(ratio, 0 * ratio, r, ids, y, mask, beta=0.5, ddof=0)
    >>> [round(float(x), 4) for x in terms.loss[:, 0]]
    [0.0642, 0.0584, 0.0003]
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be positive: it weighs the distance from the reference")
    used = jnp.any(mask, axis=1)
    logp, ref_logp = masked(mask, logp, ref_logp)
    ratio = jnp.where(mask, logp - jax.lax.stop_gradient(ref_logp), 0.0)
    left = jnp.cumsum(ratio[:, ::-1], axis=1)[:, ::-1]  # from each token to the end
    values = jnp.where(used, rewards, 0.0).astype(jnp.float32)[:, None] - beta * left

    def step(same: Array, column: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        token, chosen, value = column
        both = chosen[:, None] & chosen[None, :]
        weight = (same & both).astype(jnp.float32)
        count = jnp.sum(weight, axis=1)
        mean = weight @ value / jnp.maximum(count, 1.0)
        neither = ~chosen[:, None] & ~chosen[None, :]
        return same & (neither | both & (token[:, None] == token[None, :])), (mean, count)

    start = (group_ids[:, None] == group_ids[None, :]) & used[:, None] & used[None, :]
    # deviations of those who share a prefix add up to 0, and they share its weight: a mean without gradient is exact
    seen = jax.lax.stop_gradient(jnp.where(mask, values, 0.0))
    columns = jnp.moveaxis(tokens, 1, 0), jnp.moveaxis(mask, 1, 0), jnp.moveaxis(seen, 1, 0)
    _, found = jax.lax.scan(step, start, columns)
    mean, count = (jnp.moveaxis(x, 0, 1) for x in found)
    shared = mask & (count > 1)
    gap = jnp.where(shared, values - mean, 0.0)
    own = jnp.sum(shared.astype(jnp.float32), axis=1)
    depths = jax.ops.segment_max(own, group_ids, num_segments=own.shape[0])[group_ids]
    terms = 0.5 * count / jnp.maximum(count - ddof, 1.0) * gap**2 / jnp.maximum(depths, 1.0)[:, None]
    loss = jnp.where(mask, jnp.sum(terms, axis=1, keepdims=True), 0.0)
    return TokenTerms(loss, {"consistency_gap": jnp.abs(gap), "shared": shared.astype(jnp.float32)})


def trajectory_balance_loss(
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    beta: float,
) -> TokenTerms:
    """TBA: ``(log Z + log pi(y_i) - log ref(y_i) - r_i / beta)^2`` with the group's own ``log Z``, at every token of i.

    ``log Z = mean_group(log ref - log pi + r / beta)``, the estimate of least variance (VarGrad). Samples of any
    origin, no importance ratio; 0 at ``ref exp(r / beta) / Z``. It is ``2 / beta^2`` times ``agro_loss`` with
    ``ddof=0``.

    ``aux``: ``balance_gap``, the absolute value of the bracket.

    From "Trajectory Balance with Asynchrony", arXiv:2503.18929. The paper stops the gradient of ``log Z``,
    which changes nothing: the brackets of a group add up to 0.

    Args:
      rewards: of each sequence; members without a masked token leave the group.
      beta: temperature of the target.
    """
    terms = agro_loss(logp, ref_logp, rewards, group_ids, mask, beta=beta, ddof=0)
    return TokenTerms(terms.loss * (2.0 / beta**2), {"balance_gap": terms.aux["consistency_gap"] / beta})


def gvpo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.1,
) -> TokenTerms:
    """GVPO: ``1/2 [beta (l_i - mean l) - (r_i - mean r)]^2`` over a group, at every token.

    ``l = log(pi(y) / pi_old(y))``. Times ``G / (G - 1)``, so that reduced with ``seq_mean`` a group's mean is the sum
    over it by ``G - 1``. It is ``agro_loss`` with the last policy in the place of the reference: the gradient of ``log
    pi(y_i)`` is ``-beta [(r_i - mean r) - beta (l_i - mean l)]``, weights that add up to 0, so that no partition
    function appears.

    ``aux``: as ``agro_loss``.

    From "GVPO: Group Variance Policy Optimization for Large Language Model Post-Training", arXiv:2504.19599, section 3,
    and its released recipe (the factor ``1 / (G - 1)``).

    >>> import jax.numpy as jnp
    >>> logp, old, mask = jnp.array([[-1.0], [-1.0]]), jnp.array([[-2.0], [-1.0]]), jnp.ones((2, 1), bool)
    >>> terms = gvpo_loss(logp, old, jnp.array([1.0, 0.0]), jnp.array([0, 0]), mask, beta=0.5)
    >>> terms.loss.ravel().tolist()  # 1/2 * 2 * (0.25 - 0.5)^2
    [0.0625, 0.0625]
    """
    return agro_loss(logp, old_logp, rewards, group_ids, mask, beta=beta, ddof=1)


def a_star_po_loss(
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"],
    rewards: Float[Array, " B"],
    optimal_values: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 1e-3,
) -> TokenTerms:
    """A*-PO (A2PO): ``(beta log(pi(y) / ref(y)) - (r - V*(x)))^2`` at every token of its sequence.

    A regression without groups. ``V* = beta_1 log mean exp(r / beta_1)`` over samples of the *reference*, made once
    before training: ``advantages.off_policy.log_mean_exp_baseline``. One sample a prompt then suffices. Reduce with
    ``seq_mean``. It is ``mirror_descent_loss`` to the reference with the advantages ``r - V*``.

    ``aux``: ``surrogate_error``, the absolute value of the bracket.

    From "Accelerating RL for LLM Reasoning with Optimal Advantage Regression", arXiv:2505.20686, algorithm 1, as in
    TRL's A2POTrainer.

    >>> import jax.numpy as jnp
    >>> one, mask = jnp.ones((1, 1)), jnp.ones((1, 1), bool)
    >>> terms = a_star_po_loss(-one, -3 * one, jnp.array([1.0]), jnp.array([0.5]), mask, beta=0.5)
    >>> float(terms.loss[0, 0])  # (0.5 * 2 - 0.5)^2
    0.25
    """
    gain = rewards.astype(jnp.float32) - optimal_values.astype(jnp.float32)
    gain = jnp.where(jnp.any(mask, axis=1), gain, 0.0)
    return mirror_descent_loss(logp, ref_logp, jnp.where(mask, gain[:, None], 0.0), mask, tau=beta)


def topr_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 1.0,
    ratio_of: Callable[[Ratio, Ratio, Bool[Array, "B T"]], Ratio] = sequence_ratio,
) -> TokenTerms:
    """TOPR: REINFORCE whose negative samples are weighted by the ratio up to ``cap``, positive ones not at all.

    ``-sg(w) A logp`` with ``w = 1`` where A > 0 and ``min(pi / mu, cap)`` elsewhere: a bad response that became
    unlikely is pushed no further, a good one is imitated however unlikely it is.

    ``aux``: ``ratio``, and ``weight``.

    Args:
      ratio_of: ``sequence_ratio`` (the paper), ``mean_ratio`` or ``token_ratio`` (as in Trinity-RFT).

    From "Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs", arXiv:2503.14286,
    section 3 (its truncation ``[., 0, 1]`` of negative samples).

    >>> import jax.numpy as jnp
    >>> logp, old, a = jnp.log(jnp.full((2, 1), 0.2)), jnp.log(jnp.full((2, 1), 0.4)), jnp.array([[1.0], [-1.0]])
    >>> [round(float(x), 4) for x in topr_loss(logp, old, a, a != 0).aux["weight"].ravel()]
    [1.0, 0.5]
    """
    if cap <= 0:
        raise ValueError(f"cap={cap} must be positive")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    ratio = jnp.where(mask, jax.lax.stop_gradient(ratio_of(logp, old_logp, mask)), 0.0)
    weight = jnp.where(mask, jnp.where(advantages > 0, 1.0, jnp.minimum(ratio, cap)), 0.0)
    return TokenTerms(-weight * advantages * logp, {"ratio": ratio, "weight": weight})


def aipo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 4.0,
) -> TokenTerms:
    """AIPO: REINFORCE on stale samples, weighted by the importance ratio up to a cap.

    ``-sg(min(pi / mu, cap)) A logp``

    ``cispo_loss`` with an open lower side. ``cap=inf`` is the plain importance weight.

    ``aux``: as ``cispo_loss``.

    From "LlamaRL", arXiv:2505.24034; its caps are 2 to 10.

    Args:
      old_logp: ``mu``, what the sampler recorded, whatever version of the weights and engine it was.
    """
    if cap < 1:
        raise ValueError(f"cap={cap} must be at least 1: on-policy ratios are 1")
    return cispo_loss(logp, old_logp, advantages, mask, clip_low=1.0, clip_high=cap - 1.0)


def decoupled_policy_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    cap: float = 5.0,
) -> TokenTerms:
    """Decoupled PPO: what the ratio is clipped around is not who sampled, and a weight makes up for the difference.

    ``-sg(w) min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` with ``rho = exp(logp - old)`` and
    ``w = exp(old - sampler)``, 0 where it exceeds ``cap``. With ``old = sampler`` it is ``clipped_policy_loss``.

    ``aux``: as ``clipped_policy_loss``; ``behaviour_weight``, ``w``; and ``capped``, 1 where the cap made it 0.

    From "Beyond Ten Turns: Unlocking Long-Horizon Agentic Search with Large-Scale Asynchronous RL", arXiv:2508.07976,
    and its published settings; the objective is that of "Batch size-invariance for policy optimization",
    arXiv:2110.00641, section 3. Reduce over all tokens: those beyond the cap count in the denominator.

    Args:
      old_logp: of the learner before this update, the proximal policy.
      sampler_logp: recorded token by token, of whatever versions of the weights.

    >>> import jax.numpy as jnp
    >>> old, sampler = jnp.log(jnp.array([[0.6, 0.6]])), jnp.log(jnp.array([[0.3, 0.1]]))
    >>> terms = decoupled_policy_loss(old, old, sampler, jnp.ones((1, 2)), jnp.ones((1, 2), bool))
    >>> [round(float(x), 4) + 0.0 for x in terms.loss[0]]
    [-2.0, 0.0]
    """
    if cap < 1:
        raise ValueError(f"cap={cap} must be at least 1: on-policy weights are 1")
    ratio = mismatch_ratio(old_logp, sampler_logp, mask)
    weight = masked_weights(ratio, mask, low=0.0, high=cap)
    terms = clipped_policy_loss(logp, old_logp, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    capped = (mask & (ratio > cap)).astype(jnp.float32)
    return TokenTerms(weight * terms.loss, terms.aux | {"behaviour_weight": weight, "capped": capped})
