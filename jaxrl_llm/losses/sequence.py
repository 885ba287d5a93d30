"""Policy losses whose importance ratio belongs to the whole sequence; packed rows by ``segment_ids``."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce
from jaxrl_llm.losses.policy import MAX_LOG_RATIO, bounded_surrogate, masked
from jaxrl_llm.types import TokenTerms


def _mean(terms: Array, mask: Array, segment_ids: Array | None) -> Array:
    """Mean of each sequence at every one of its positions."""
    if segment_ids is not None:
        return reduce.segments(terms, mask, segment_ids)
    return jnp.broadcast_to(reduce.sequences(terms, mask, mode="mean")[:, None], terms.shape)


def gspo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    segment_ids: Int[Array, "B T"] | None = None,
) -> TokenTerms:
    """GSPO: the clipped surrogate with ``s_i = exp(mean_t (logp - old_logp))``, at every token of sequence i.

    Reduce with ``seq_mean``: the mean over the tokens of a sequence is then its one surrogate. ``seq_sum`` weighs it by
    its length, which is LUSPO ("Length-Unbiased Sequence Policy Optimization", arXiv:2602.05261). ``aux``: ``ratio``
    (``s_i``), and ``clipped``, 1 exactly where clipping removed the gradient.

    From "Group Sequence Policy Optimization", arXiv:2507.18071, eqs. 5 and 7.
    """
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    ratio = jnp.exp(sequence_log_ratio(logp, old_logp, mask, mode="mean", segment_ids=segment_ids))
    return _clipped(ratio, advantages, mask, clip_low, clip_high)


def gspo_token_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    segment_ids: Int[Array, "B T"] | None = None,
) -> TokenTerms:
    """GSPO-token: the value of GSPO, the gradient through each token: ``s_it = sg(s_i) pi / sg(pi)``.

    With one advantage per sequence value and gradient equal ``gspo_loss``; advantages may vary by token.

    From "Group Sequence Policy Optimization", arXiv:2507.18071, eqs. 13 and 14.
    """
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    sequence = sequence_log_ratio(logp, old_logp, mask, mode="mean", segment_ids=segment_ids)
    sequence = jax.lax.stop_gradient(sequence)
    ratio = jnp.exp(sequence + (logp - jax.lax.stop_gradient(logp)))  # the bracket first: it is exactly 0
    return _clipped(ratio, advantages, mask, clip_low, clip_high)


def _clipped(ratio: Array, advantages: Array, mask: Array, clip_low: float, clip_high: float) -> TokenTerms:
    if not 0 <= clip_low < 1 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low} must lie in [0, 1) and clip_high={clip_high} must not be negative")
    if clip_low == 0 or clip_high == 0:  # at a ratio of 1 clip and minimum would share their gradients out
        return bounded_surrogate(ratio, advantages, mask, low=1 - clip_low, high=1 + clip_high)
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    cut = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    aux = {"ratio": jnp.where(mask, ratio, 0.0), "clipped": (cut & mask).astype(jnp.float32)}
    return TokenTerms(-jnp.where(mask, surrogate, 0.0), aux)


def gmpo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    segment_ids: Int[Array, "B T"] | None = None,
) -> TokenTerms:
    """GMPO: the geometric mean of token ratios, each clipped in log space on its harmful side.

    ``-A_i exp(mean_t c_t)``, ``c_t = sgn(A) min(sgn(A) l_t, sgn(A) clip(l_t, -clip_low, clip_high))``,
    ``l = logp - old_logp``. One advantage per sequence; reduce with ``seq_mean``. ``aux``: ``ratio``, the clipped
    geometric mean, and ``clipped``, 1 for the tokens whose gradient clipping removed.

    From "Geometric-Mean Policy Optimization", arXiv:2507.20673, eq. 4 (0.4 on both sides: ratios in
    ``[e^-0.4, e^0.4]``). Unequal bounds are those of verl's and TRL's GMPO (``clip_ratio_low``, ``epsilon_high``).
    """
    if clip_low <= 0 or clip_high <= 0:
        raise ValueError(f"clip_low={clip_low} and clip_high={clip_high} must be positive: they bound log ratios")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    difference, sign = logp - jax.lax.stop_gradient(old_logp), jnp.sign(advantages)
    bounded = jnp.clip(difference, -clip_low, clip_high)
    used = sign * jnp.minimum(sign * difference, sign * bounded)
    # the mean is held, not its tokens: one token far off must not hide behind a bound of its own
    ratio = jnp.exp(jnp.clip(_mean(used, mask, segment_ids), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    cut = mask & (sign * difference > sign * bounded)
    aux = {"ratio": jnp.where(mask, ratio, 0.0), "clipped": cut.astype(jnp.float32)}
    return TokenTerms(-jnp.where(mask, ratio * advantages, 0.0), aux)


def vespo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    power: tuple[float, float] = (2.0, 3.0),
    decay: tuple[float, float] = (3.0, 2.0),
    segment_ids: Int[Array, "B T"] | None = None,
) -> TokenTerms:
    """VESPO: REINFORCE weighted by a smooth kernel of the sequence's ratio: ``-sg(W^k exp(l (1 - W))) A logp``.

    ``W = exp(sum_t (logp - old_logp))``; ``(k, l)`` are the first of ``power`` and ``decay`` where A >= 0 and the
    second where A < 0. The kernel is 1 at ``W = 1`` and tends to 0 on both sides: a sequence that drifted far trains
    nothing, whatever its length, and no token is cut.

    ``aux``: ``ratio`` (``W``), and ``weight``, the kernel.

    From "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training",
    arXiv:2602.10693, section 3.4, as in TRL's GRPOTrainer (whose defaults these are). Where the sampler is not the
    trainer, pass its log-probabilities as ``old_logp``.

    >>> import jax.numpy as jnp
    >>> one, old = jnp.ones((1, 2)), jnp.zeros((1, 2))
    >>> terms = vespo_loss(old + jnp.log(0.5) / 2, old, one, one > 0)
    >>> round(float(terms.aux["weight"][0, 0]), 4)  # 0.5^2 e^1.5
    1.1204
    """
    if min(power) < 0 or min(decay) <= 0:
        raise ValueError(f"power={power} must not be negative and decay={decay} must be positive")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    log = jax.lax.stop_gradient(sequence_log_ratio(logp, old_logp, mask, segment_ids=segment_ids))
    k, decays = (jnp.where(advantages >= 0, *pair) for pair in (power, decay))
    weight = jnp.where(mask, jnp.exp(k * log + decays * (1.0 - jnp.exp(log))), 0.0)
    aux = {"ratio": jnp.where(mask, jnp.exp(log), 0.0), "weight": weight}
    return TokenTerms(-weight * advantages * logp, aux)


def loop_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    eps: float = 0.1,
    segment_ids: Int[Array, "B T"] | None = None,
) -> TokenTerms:
    """LOOP: ``-min(w A, clip(w, 1/(1+eps), 1+eps) A)``, ``w = exp(sum (logp - old_logp))`` over the token's segment.

    Segments choose whose probability is a ratio: the whole row (None: per trajectory), turns (``turn + 1``: per turn),
    or each token (``1, 2, ..., T``: per token, where it is ``clipped_policy_loss``). Ids lie in ``[0, T]``; the
    advantage is one number in a segment. Reduce with ``seq_mean``: of equally long segments that is the mean of their
    surrogates. ``aux``: ``ratio`` (``w``), and ``clipped``, 1 exactly where clipping removed the gradient.

    From "Reinforcement Learning for Long-Horizon Interactive LLM Agents" (LOOP), arXiv:2502.01600, section 4. Differs
    from the paper in weighing turns of different length by their tokens.

    >>> import jax.numpy as jnp
    >>> logp, old, one = jnp.log(jnp.array([[1.5, 0.5]])), jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> each = loop_loss(logp, old, one, one > 0, segment_ids=jnp.array([[1, 2]])).loss
    >>> whole = loop_loss(logp, old, one, one > 0).loss
    >>> [[round(float(x), 4) for x in terms[0]] for terms in (each, whole)]
    [[-1.1, -0.5], [-0.75, -0.75]]
    """
    if eps < 0:
        raise ValueError(f"eps={eps} must not be negative")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    ratio = jnp.exp(sequence_log_ratio(logp, old_logp, mask, segment_ids=segment_ids))
    return _clipped(ratio, jax.lax.stop_gradient(advantages), mask, eps / (1 + eps), eps)


def sequence_log_ratio(
    logp: Float[Array, "B T"],
    anchor: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    mode: str = "sum",
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """``log pi(y)/mu(y)`` of the sequence (``sum``) or its mean per token (``mean``), at each of its positions.

    Sum or mean are held in +-20, so that their exponential stays finite; no single token is.
    """
    logp, anchor = masked(mask, logp, anchor)
    difference = logp - jax.lax.stop_gradient(anchor)
    if segment_ids is not None:
        values = reduce.segments(difference, mask, segment_ids, mode=mode)
    else:
        values = jnp.broadcast_to(reduce.sequences(difference, mask, mode=mode)[:, None], difference.shape)
    return jnp.clip(values, -MAX_LOG_RATIO, MAX_LOG_RATIO)
