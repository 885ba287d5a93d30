"""Distillation of a teacher's next-token distributions; logits of both are aligned with the token they produce."""

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


def sampled_reverse_kl_loss(
    logp: Float[Array, "B T"], teacher_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> TokenTerms:
    """Reverse KL from the student's sampled tokens alone: ``sg(logp - teacher_logp) logp``, unbiased on-policy."""
    logp, teacher_logp = masked(mask, logp, teacher_logp)
    gap = jax.lax.stop_gradient(logp - teacher_logp)
    return TokenTerms(gap * logp, {"teacher_gap": gap})
