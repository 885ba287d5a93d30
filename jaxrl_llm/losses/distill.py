"""Distillation of a teacher's next-token distributions.

Logits (or hidden states) of both are aligned with the token that they produce: pass ``logprobs.align`` of what a model
returned.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses.policy import masked
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


def _hidden(student: Array, teacher: Array, mask: Array) -> tuple[Array, Array]:
    """Hidden states replaced outside the mask (a NaN there would reach the weights of the head), teacher's stopped."""
    student, teacher = (jnp.where(mask[..., None], x, 0.0) for x in (student, teacher))
    return student, jax.lax.stop_gradient(teacher)


def _in_chunks(
    loss: Callable[[Array, Array, Array], Array], student: Array, teacher: Array, mask: Array, chunk: int
) -> Array:
    """``loss(student, teacher, mask)`` over chunks of time steps, recomputed in the backward pass."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 time step")
    steps = mask.shape[1]
    size = min(chunk, steps)
    count = -(-steps // size)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, count * size - steps)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    parts = (split(student), split(teacher), split(mask))
    _, out = jax.lax.scan(lambda _, part: (None, jax.checkpoint(loss)(*part)), None, parts)
    return jnp.moveaxis(out, 0, 1).reshape(mask.shape[0], count * size)[:, :steps]


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

    def loss(student: Array, teacher: Array, keep: Array) -> Array:
        student, teacher = _hidden(student, teacher, keep)
        return forward_kl_loss(student_unembed(student), teacher_unembed(teacher), keep, temperature=temperature).loss

    return TokenTerms(_in_chunks(loss, student_hidden, teacher_hidden, mask, chunk), {})


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

    def loss(student: Array, teacher: Array, keep: Array) -> Array:
        student, teacher = _hidden(student, teacher, keep)
        return reverse_kl_loss(student_unembed(student), teacher_unembed(teacher), keep, temperature=temperature).loss

    return TokenTerms(_in_chunks(loss, student_hidden, teacher_hidden, mask, chunk), {})


def sampled_reverse_kl_loss(
    logp: Float[Array, "B T"], teacher_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> TokenTerms:
    """Reverse KL from the student's sampled tokens alone: ``sg(logp - teacher_logp) logp``, unbiased on-policy."""
    logp, teacher_logp = masked(mask, logp, teacher_logp)
    gap = jax.lax.stop_gradient(logp - teacher_logp)
    return TokenTerms(gap * logp, {"teacher_gap": gap})
