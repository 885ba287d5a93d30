"""Distillation of a teacher's next-token distributions.

Logits (or hidden states) of both are aligned with the token that they produce: pass ``logprobs.align`` of what a model
returned.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses.policy import clipped_policy_loss, log_ratio, masked
from jaxrl_llm.types import TokenTerms


def _log_probs(logits: Array, mask: Array, temperature: float) -> Array:
    """Log-probabilities with a uniform distribution outside the mask, so that nothing there can be NaN."""
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive")
    logits = jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)
    return jax.nn.log_softmax(logits / temperature, axis=-1)


def _expected(weights: Array, values: Array) -> Array:
    """``sum_v weights values``; a token of weight 0 counts 0 even where its value is infinite."""
    return jnp.sum(jnp.where(weights > 0, weights * jnp.where(weights > 0, values, 0.0), 0.0), axis=-1)


def forward_kl_loss(
    student_logits: Float[Array, "B T V"],
    teacher_logits: Float[Array, "B T V"],
    mask: Bool[Array, "B T"],
    *,
    temperature: float = 1.0,
) -> TokenTerms:
    """``KL(teacher || student)`` of each next-token distribution: covers all that the teacher does."""
    student = _log_probs(student_logits, mask, temperature)
    teacher = jax.lax.stop_gradient(_log_probs(teacher_logits, mask, temperature))
    return TokenTerms(jnp.where(mask, _expected(jnp.exp(teacher), teacher - student), 0.0), {})


def reverse_kl_loss(
    student_logits: Float[Array, "B T V"],
    teacher_logits: Float[Array, "B T V"],
    mask: Bool[Array, "B T"],
    *,
    temperature: float = 1.0,
) -> TokenTerms:
    """``KL(student || teacher)`` of each next-token distribution: keeps to what the teacher does.

    On the student's own samples this is on-policy distillation, arXiv:2306.13649.
    """
    student = _log_probs(student_logits, mask, temperature)
    teacher = jax.lax.stop_gradient(_log_probs(teacher_logits, mask, temperature))
    return TokenTerms(jnp.where(mask, _expected(jnp.exp(student), student - teacher), 0.0), {})


def jsd_loss(
    student_logits: Float[Array, "B T V"],
    teacher_logits: Float[Array, "B T V"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> TokenTerms:
    """Generalised Jensen-Shannon divergence: ``beta KL(p || m) + (1 - beta) KL(q || m)``, ``m = beta p + (1 - beta) q``
    with teacher ``p`` and student ``q``.

    Bounded, unlike both KLs. Divided by ``beta`` it tends to ``forward_kl_loss`` for beta to 0, divided by
    ``1 - beta`` to ``reverse_kl_loss`` for beta to 1.

    From "On-Policy Distillation of Language Models", arXiv:2306.13649, section 2 (generalized JSD).
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta} must lie in (0, 1); the ends are forward_kl_loss and reverse_kl_loss")
    student = _log_probs(student_logits, mask, temperature)
    teacher = jax.lax.stop_gradient(_log_probs(teacher_logits, mask, temperature))
    # a token impossible for both (-inf twice) is 0 in every term, and so must be its gradient
    both = jnp.isfinite(student) | jnp.isfinite(teacher)
    safe_student, safe_teacher = jnp.where(both, student, 0.0), jnp.where(both, teacher, 0.0)
    mixture = jnp.logaddexp(safe_teacher + jnp.log(beta), safe_student + jnp.log1p(-beta))
    of_teacher = _expected(jnp.exp(teacher), safe_teacher - mixture)
    of_student = _expected(jnp.exp(student), safe_student - mixture)
    return TokenTerms(jnp.where(mask, beta * of_teacher + (1 - beta) * of_student, 0.0), {})


def chunked_terms(
    terms: Callable[..., TokenTerms], mask: Bool[Array, "B T"], *arrays: Array, chunk: int = 128
) -> TokenTerms:
    """``terms(mask, *arrays)`` of ``chunk`` time steps at a time, recomputed in the backward pass.

    What ``terms`` forms of a step, such as its logits, exists for one chunk only: never ``[B, T, V]``. Outside the mask
    the floats of the arrays are 0, as a NaN there would reach the weights of a head.

    Args:
      terms: of each step by itself: it may not look from one step to another.
      arrays: ``[B, T, ...]``.

    >>> import jax.numpy as jnp
    >>> square = lambda mask, x: TokenTerms(jnp.sum(x, axis=-1) ** 2, {})
    >>> chunked_terms(square, jnp.ones((1, 3), bool), jnp.ones((1, 3, 2)), chunk=2).loss.tolist()
    [[4.0, 4.0, 4.0]]
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 time step")
    rows, steps = mask.shape
    size = min(chunk, steps)
    count = -(-steps // size)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, count * size - steps)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, count, size, *x.shape[2:]), 1, 0)

    def clean(x: Array) -> Array:
        inside = jnp.expand_dims(mask, tuple(range(2, x.ndim)))
        return jnp.where(inside, x, 0.0) if jnp.issubdtype(x.dtype, jnp.floating) else x

    parts = tuple(split(x) for x in (mask, *map(clean, arrays)))
    _, out = jax.lax.scan(lambda _, part: (None, jax.checkpoint(terms)(*part)), None, parts)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, count * size)[:, :steps], out)


def chunked_forward_kl_loss(
    student_hidden: Float[Array, "B T D"],
    student_unembed: Callable[[Array], Array],
    teacher_hidden: Float[Array, "B T E"],
    teacher_unembed: Callable[[Array], Array],
    mask: Bool[Array, "B T"],
    *,
    temperature: float = 1.0,
    chunk: int = 128,
) -> TokenTerms:
    """``forward_kl_loss`` from hidden states: logits of ``chunk`` time steps exist at once, never ``[B, T, V]``.

    Args:
      student_unembed: hidden states ``[..., D]`` to logits ``[..., V]``; its parameters get gradients. The teacher's
        width may differ, its vocabulary may not.
    """

    def terms(keep: Array, student: Array, teacher: Array) -> TokenTerms:
        return forward_kl_loss(student_unembed(student), teacher_unembed(teacher), keep, temperature=temperature)

    return chunked_terms(terms, mask, student_hidden, jax.lax.stop_gradient(teacher_hidden), chunk=chunk)


def chunked_reverse_kl_loss(
    student_hidden: Float[Array, "B T D"],
    student_unembed: Callable[[Array], Array],
    teacher_hidden: Float[Array, "B T E"],
    teacher_unembed: Callable[[Array], Array],
    mask: Bool[Array, "B T"],
    *,
    temperature: float = 1.0,
    chunk: int = 128,
) -> TokenTerms:
    """``reverse_kl_loss`` from hidden states: logits of ``chunk`` time steps exist at once, never ``[B, T, V]``.

    Arguments as in ``chunked_forward_kl_loss``.
    """

    def terms(keep: Array, student: Array, teacher: Array) -> TokenTerms:
        return reverse_kl_loss(student_unembed(student), teacher_unembed(teacher), keep, temperature=temperature)

    return chunked_terms(terms, mask, student_hidden, jax.lax.stop_gradient(teacher_hidden), chunk=chunk)


def sampled_reverse_kl_loss(
    logp: Float[Array, "B T"], teacher_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> TokenTerms:
    """Reverse KL from the student's sampled tokens alone: ``sg(logp - teacher_logp) logp``, unbiased on-policy."""
    logp, teacher_logp = masked(mask, logp, teacher_logp)
    gap = jax.lax.stop_gradient(logp - teacher_logp)
    return TokenTerms(gap * logp, {"teacher_gap": gap})


def top_k_distillation_loss(
    student_logits: Float[Array, "B T V"],
    teacher_logits: Float[Array, "B T V"],
    mask: Bool[Array, "B T"],
    *,
    k: int = 100,
    tail: bool = False,
    divergence: Callable[[Array, Array, Array], TokenTerms] = reverse_kl_loss,
) -> TokenTerms:
    """A divergence over the student's ``k`` likeliest tokens: both distributions restricted to them and normalised.

    Args:
      tail: what the ``k`` tokens leave over is one more token of both, instead of being left out. ``k = V`` is the
      whole
        divergence either way.
      divergence: ``forward_kl_loss``, ``reverse_kl_loss`` or ``jsd_loss``, with its settings bound.

    From TRL's SDPOTrainer and SDFTTrainer (``distillation_topk``, ``distillation_add_tail``).

    >>> import jax.numpy as jnp
    >>> s, t = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]])), jnp.log(jnp.array([[[0.25, 0.15, 0.6]]]))
    >>> one = jnp.ones((1, 1), bool)
    >>> both = [top_k_distillation_loss(s, t, one, k=2, tail=tail).loss[0, 0] for tail in (False, True)]
    >>> [round(abs(float(x)), 4) for x in both]  # proportional on the two; 0.8 log 2 + 0.2 log(0.2 / 0.6)
    [0.0, 0.3348]
    """
    if not 1 <= k <= student_logits.shape[-1]:
        raise ValueError(f"k={k} must lie between 1 and the vocabulary of {student_logits.shape[-1]} tokens")
    student, teacher = _log_probs(student_logits, mask, 1.0), _log_probs(teacher_logits, mask, 1.0)
    _, likeliest = jax.lax.top_k(jax.lax.stop_gradient(student), k)
    parts = [jnp.take_along_axis(x, likeliest, axis=-1) for x in (student, teacher)]
    if tail and k < student_logits.shape[-1]:
        parts = [jnp.concatenate([x, _left_over(x)], axis=-1) for x in parts]
    return divergence(parts[0], parts[1], mask)


def _left_over(log_probs: Array) -> Array:
    """``log(1 - sum exp)``, held where rounding leaves nothing."""
    mass = jnp.minimum(jax.nn.logsumexp(log_probs, axis=-1, keepdims=True), -1e-7)
    return jnp.log(-jnp.expm1(mass))


def _capped_ratio(logp: Array, old_logp: Array, mask: Array, cap: float) -> Array:
    if cap <= 0:
        raise ValueError(f"cap={cap} must be positive")
    logp, old_logp = masked(mask, logp, old_logp)
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio(logp, old_logp)), cap))


def sdpo_loss(
    student_logits: Float[Array, "B T V"],
    teacher_logits: Float[Array, "B T V"],
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 2.0,
    divergence: Callable[[Array, Array, Array], TokenTerms] = reverse_kl_loss,
) -> TokenTerms:
    """SDPO: ``sg(min(exp(logp - old_logp), cap)) D(student_t, teacher_t)`` on the student's own responses.

    The teacher is the policy itself, shown more: a right response of the group, or the environment's feedback, before
    the same tokens; no gradient flows into it. Mask the rows that have no such context. The weight corrects for samples
    of an older policy.

    ``aux``: ``ratio``, the capped weight.

    Args:
      divergence: of each next-token distribution; ``top_k_distillation_loss`` for its approximation.

    From "Reinforcement Learning via Self-Distillation" (SDPO), arXiv:2601.20802, eq. 1 (v2), the weight as in its
    released code and TRL's SDPOTrainer. Differs from the paper in that weight: its eq. 13 clips the ratio of each
    token of the vocabulary as PPO does, beside a capped ratio of the old policy to the sampler.

    >>> import jax.numpy as jnp
    >>> s, t, one = jnp.log(jnp.array([[[0.5, 0.5]]])), jnp.log(jnp.array([[[0.8, 0.2]]])), jnp.ones((1, 1), bool)
    >>> p = jnp.log(jnp.array([[0.5]]))
    >>> round(float(sdpo_loss(s, t, p, p - 9.0, one).loss[0, 0]), 4)  # 2 (0.5 log(0.5/0.8) + 0.5 log(0.5/0.2))
    0.4463
    """
    ratio = _capped_ratio(logp, old_logp, mask, cap)
    terms = divergence(student_logits, teacher_logits, mask)
    return TokenTerms(ratio * terms.loss, {"ratio": jnp.where(mask, ratio, 0.0)})


def sdft_loss(
    student_logits: Float[Array, "B T V"],
    teacher_logits: Float[Array, "B T V"],
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 2.0,
    k: int = 100,
    beta: float = 0.5,
) -> TokenTerms:
    """SDFT: ``sdpo_loss`` with a teacher that is shown a demonstration, by ``jsd_loss`` over ``min(k, V)`` tokens.

    Supervised fine-tuning without off-policy tokens: the student writes, the policy that has seen the demonstration
    tells it what it would have written next.

    From "Self-Distillation Enables Continual Learning" (SDFT), arXiv:2601.19897, eq. 1 (v1), as in TRL's SDFTTrainer,
    whose defaults these are. Differs from the paper in the divergence, there ``reverse_kl_loss``, and in the weight,
    there none.

    >>> import jax.numpy as jnp
    >>> s, one = jnp.log(jnp.array([[[0.5, 0.5]]])), jnp.ones((1, 1), bool)
    >>> p = jnp.log(jnp.array([[0.5]]))
    >>> abs(float(sdft_loss(s, s + 3.0, p, p, one).loss[0, 0])) < 1e-6  # a teacher that agrees
    True
    """
    near = functools.partial(
        top_k_distillation_loss, k=min(k, student_logits.shape[-1]), divergence=functools.partial(jsd_loss, beta=beta)
    )
    return sdpo_loss(student_logits, teacher_logits, logp, old_logp, mask, cap=cap, divergence=near)


def sampled_self_distillation_loss(
    logp: Float[Array, "B T"],
    teacher_logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 2.0,
) -> TokenTerms:
    """The sampled-token form of ``sdpo_loss`` and ``sdft_loss``: ``sg(min(rho, cap) (logp - teacher_logp)) logp``.

    From TRL's SDPOTrainer (``sampled_token``).

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((1, 1))
    >>> float(sampled_self_distillation_loss(-one, -2 * one, -one, one > 0).loss[0, 0])
    -1.0
    """
    ratio = _capped_ratio(logp, old_logp, mask, cap)
    terms = sampled_reverse_kl_loss(logp, teacher_logp, mask)
    return TokenTerms(ratio * terms.loss, terms.aux | {"ratio": jnp.where(mask, ratio, 0.0)})


def iw_opd_loss(
    logp: Float[Array, "B T"],
    teacher_logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 0.5,
    eps: float = 1e-8,
) -> TokenTerms:
    """Importance-weighted on-policy distillation: ``-sg(w_t A_t) logp_t`` with ``A_t = teacher_logp_t - old_logp_t``.

    ``w_t = 1 + gamma (1 - sum_{s < t} |A_s| / sum_s |A_s|)``: from ``1 + gamma`` at the first token to 1 where all of
    the response's disagreement lies behind: early tokens, which decide what follows, count more. Reduce with
    ``token_mean``.

    ``aux``: ``weight``.

    From "On the Position Bias of On-Policy Distillation", arXiv:2606.22600, as in TRL's IWOPDTrainer.

    >>> import jax.numpy as jnp
    >>> old, one = -jnp.ones((1, 2)), jnp.ones((1, 2), bool)
    >>> iw_opd_loss(old, jnp.array([[-4.0, 0.0]]), old, one).aux["weight"].tolist()  # |A| is 3 and 1
    [[1.5, 1.125]]
    """
    if gamma < 0:
        raise ValueError(f"gamma={gamma} must not be negative: it weighs early tokens up")
    logp, teacher_logp, old_logp = masked(mask, logp, teacher_logp, old_logp)
    gap = jax.lax.stop_gradient(teacher_logp - old_logp)
    size = jnp.abs(gap)
    before = jnp.cumsum(size, axis=1) - size
    weight = 1.0 + gamma * (1.0 - before / jnp.maximum(jnp.sum(size, axis=1, keepdims=True), eps))
    weight = jnp.where(mask, weight, 0.0)
    return TokenTerms(-weight * gap * logp, {"weight": weight})


def minillm_loss(
    logp: Float[Array, "B T"],
    teacher_logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 1.0,
    length_normalised: bool = True,
    clip: float = 0.2,
) -> TokenTerms:
    """MiniLLM: the reverse KL of whole responses; a token answers for what the teacher says of all that follows it.

    ``A_t = sum_{s >= t} gamma^(s - t) d_s / sum_{s >= t} gamma^(s - t)`` with ``d_s = teacher_logp_s - old_logp_s``,
    over the tokens of the mask, in ``clipped_policy_loss``. ``gamma = 0`` is the sampled reverse KL of each token.
    Reduce with ``token_mean``.

    Args:
      length_normalised: divide by the weights of what follows, so that early tokens do not answer for more.

    ``aux``: ``advantage``, and those of ``clipped_policy_loss``.

    From "MiniLLM: Knowledge Distillation of Large Language Models", arXiv:2306.08543, section 2.2. Differs from the
    paper, as TRL's MiniLLMTrainer, in that responses are the student's own, not drawn from a mixture with the teacher;
    its single-step part, the exact reverse KL of the next token, is ``reverse_kl_loss``, and ``reverse_kl`` alone is
    what ``jaxrl distil`` does without a ``--loss``.

    >>> import jax.numpy as jnp
    >>> old, one = -jnp.ones((1, 2)), jnp.ones((1, 2), bool)
    >>> minillm_loss(old, jnp.array([[-4.0, 0.0]]), old, one).aux["advantage"].tolist()  # d is -3 and 1
    [[-1.0, 1.0]]
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma} must lie in [0, 1]: it discounts later tokens")
    logp, teacher_logp, old_logp = masked(mask, logp, teacher_logp, old_logp)
    gap = jax.lax.stop_gradient(teacher_logp - old_logp)

    def follow(behind: Array, column: tuple[Array, Array]) -> tuple[Array, Array]:
        now, there = column
        behind = jnp.where(there, now + gamma * behind, behind)
        return behind, behind

    def to_go(x: Array) -> Array:
        return jax.lax.scan(follow, jnp.zeros_like(x[:, 0]), (x.T, mask.T), reverse=True)[1].T

    weights = to_go(jnp.ones_like(gap)) if length_normalised else jnp.ones_like(gap)
    advantage = jnp.where(mask, to_go(gap) / jnp.where(mask, weights, 1.0), 0.0)
    terms = clipped_policy_loss(logp, old_logp, advantage, mask, clip_low=clip, clip_high=clip)
    return TokenTerms(terms.loss, terms.aux | {"advantage": advantage})


def span_log_probs(logp: Float[Array, "B T"], spans: Int[Array, "B C 2"]) -> Float[Array, "B C"]:
    """The log-probability of all tokens of each span but its last: the chain that ``merged_log_probs`` begins with.

    >>> import jax.numpy as jnp
    >>> span_log_probs(jnp.array([[-1.0, -2.0, -4.0]]), jnp.array([[[0, 3], [1, 2], [0, 0]]])).tolist()
    [[-3.0, 0.0, 0.0]]
    """
    first, last = spans[..., 0], spans[..., 1] - 1
    columns = jnp.arange(logp.shape[1])[None, None, :]
    earlier = (columns >= first[..., None]) & (columns < last[..., None])
    return jnp.sum(jnp.where(earlier, logp.astype(jnp.float32)[:, None, :], 0.0), axis=-1)


def merged_log_probs(
    logits: Float[Array, "B T V"], logp: Float[Array, "B T"], spans: Int[Array, "B C 2"]
) -> Float[Array, "B C V"]:
    """Next-token distributions over pieces of text that two tokenizers share: what a span's last token could have been.

    ``log p(v at the span's last token) + sum of logp of the tokens before it in the span``: the chain rule with the
    tokens that were written. Not normalised for spans of several tokens. Empty spans give a distribution of zeros.

    Args:
      logits: aligned with the tokens that they produce.
      logp: of the tokens themselves.
      spans: first token and one past the last of each piece, where the tokenizers agree on both ends (byte offsets).

    From TRL's GOLDTrainer (``uld_token_merge_strategy="bayesian"``); GOLD: "Unlocking On-Policy Distillation for Any
    Model Family" (Patiño et al., 2025).

    >>> import jax.numpy as jnp
    >>> logits = jnp.log(jnp.array([[[0.5, 0.5], [0.9, 0.1]]]))
    >>> merged = merged_log_probs(logits, jnp.log(jnp.array([[0.5, 0.1]])), jnp.array([[[0, 2]]]))
    >>> [round(float(x), 4) for x in jnp.exp(merged[0, 0])]
    [0.45, 0.05]
    """
    last, used = jnp.maximum(spans[..., 1] - 1, 0), spans[..., 1] > spans[..., 0]
    picked = jnp.take_along_axis(logits.astype(jnp.float32), last[..., None], axis=1)
    picked = jnp.where(used[..., None], picked, 0.0)
    merged = jax.nn.log_softmax(picked, axis=-1) + span_log_probs(logp, spans)[..., None]
    return jnp.where(used[..., None], merged, -jnp.inf)


def _sorted_distance(student: Array, teacher: Array) -> Array:
    """``sum_i |s_(i) - t_(i)|`` of probabilities in descending order, the shorter vocabulary filled with zeros."""
    size = max(student.shape[-1], teacher.shape[-1])
    rows = (
        jnp.pad(-jnp.sort(-x, axis=-1), [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]) for x in (student, teacher)
    )
    return jnp.sum(jnp.abs(next(rows) - next(rows)), axis=-1)


def _chances(log_probs: Array, mask: Array) -> tuple[Array, Array]:
    """Log-probabilities and probabilities, 0 outside the mask; impossible tokens have neither value nor gradient."""
    log_probs = jnp.where(mask[..., None], log_probs.astype(jnp.float32), -jnp.inf)
    possible = jnp.isfinite(log_probs)
    safe = jnp.where(possible, log_probs, 0.0)
    return safe, jnp.where(possible, jnp.exp(safe), 0.0)


def uld_loss(
    student_log_probs: Float[Array, "B T V"], teacher_log_probs: Float[Array, "B T W"], mask: Bool[Array, "B T"]
) -> TokenTerms:
    """Universal logit distillation: L1 distance of both sorted distributions; the vocabularies may differ.

    From "Towards Cross-Tokenizer Distillation: the Universal Logit Distillation Loss for LLMs", arXiv:2402.12030, eq.
    4.

    >>> import jax.numpy as jnp
    >>> s, t = jnp.log(jnp.array([[[0.2, 0.8]]])), jnp.log(jnp.array([[[0.5, 0.2, 0.3]]]))
    >>> round(float(uld_loss(s, t, jnp.ones((1, 1), bool)).loss[0, 0]), 4)  # 0.3 + 0.1 + 0.2
    0.6
    """
    student, teacher = _chances(student_log_probs, mask)[1], _chances(teacher_log_probs, mask)[1]
    return TokenTerms(jnp.where(mask, _sorted_distance(student, jax.lax.stop_gradient(teacher)), 0.0), {})


def gold_loss(
    student_log_probs: Float[Array, "B T V"],
    teacher_log_probs: Float[Array, "B T W"],
    mask: Bool[Array, "B T"],
    student_ids: Int[Array, " M"],
    teacher_ids: Int[Array, " M"],
    *,
    beta: float = 0.5,
    matched_weight: float | None = None,
    unmatched_weight: float | None = None,
) -> TokenTerms:
    """GOLD: JSD over the tokens that both vocabularies have, ``uld_loss`` over the others, each with its weight.

    Over matched tokens ``beta sum p log(p / m) + (1 - beta) sum q log(q / m)`` with ``m = beta p + (1 - beta) q``,
    teacher ``p`` and student ``q``, not normalised among them.

    ``aux``: ``matched`` and ``unmatched``, before their weights.

    Args:
      student_log_probs, teacher_log_probs: of the same pieces of text, see ``merged_log_probs``.
      student_ids, teacher_ids: the ``M`` tokens of equal text in both vocabularies, in the same order.
      matched_weight, unmatched_weight: by default ``M / W`` and ``1 - M / W``.

    From TRL's GOLDTrainer (``uld_use_hybrid_loss``); GOLD: "Unlocking On-Policy Distillation for Any Model Family"
    (Patiño et al., 2025). Differs from it where one vocabulary lies wholly in the other: what the larger one has more
    counts as unmatched, not as nothing.

    >>> import jax.numpy as jnp
    >>> s, t, ids = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]])), jnp.log(jnp.array([[[0.5, 0.4, 0.1]]])), jnp.array([0])
    >>> terms = gold_loss(s, t, jnp.ones((1, 1), bool), ids, ids)
    >>> [round(float(terms.aux[k][0, 0]), 4) for k in ("matched", "unmatched")]
    [0.0, 0.2]
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta} must lie in (0, 1)")
    if (matched_weight is None) != (unmatched_weight is None):
        raise ValueError(
            f"matched_weight={matched_weight} and unmatched_weight={unmatched_weight}: give both or neither"
        )
    if matched_weight is None:
        matched_weight = student_ids.shape[0] / teacher_log_probs.shape[-1]
        unmatched_weight = 1.0 - matched_weight
    teacher_log_probs = jax.lax.stop_gradient(teacher_log_probs)
    (log_q, q), (log_p, p) = _chances(student_log_probs, mask), _chances(teacher_log_probs, mask)
    own, other = (x[..., student_ids] for x in (log_q, q)), (x[..., teacher_ids] for x in (log_p, p))
    (log_q_both, q_both), (log_p_both, p_both) = tuple(own), tuple(other)
    mixture = jnp.log(jnp.maximum(beta * p_both + (1.0 - beta) * q_both, 1e-37))
    each = beta * p_both * (log_p_both - mixture) + (1.0 - beta) * q_both * (log_q_both - mixture)
    matched = jnp.where(mask, jnp.sum(each, axis=-1), 0.0)
    rest = _sorted_distance(q.at[..., student_ids].set(0.0), p.at[..., teacher_ids].set(0.0))
    unmatched = jnp.where(mask, rest, 0.0)
    return TokenTerms(
        matched_weight * matched + unmatched_weight * unmatched, {"matched": matched, "unmatched": unmatched}
    )
