"""Entropy terms and the covariance mechanisms that keep it from collapsing."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce
from jaxrl_llm.losses.policy import clipped_policy_loss, log_ratio, masked
from jaxrl_llm.types import TokenTerms


def entropy_bonus_terms(entropy: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``-H_t``: add with a coefficient to a loss. ``entropy`` is exact, from ``logprobs``, and keeps its gradient.

    >>> import jax.numpy as jnp
    >>> entropy_bonus_terms(jnp.array([[0.5, 2.0]]), jnp.array([[True, False]])).tolist()
    [[-0.5, 0.0]]
    """
    (entropy,) = masked(mask, entropy)
    return jnp.where(mask, -entropy, 0.0)


def targeted_entropy_terms(
    entropy: Float[Array, "B T"], mask: Bool[Array, "B T"], *, target: float = 0.55
) -> Float[Array, "B T"]:
    """``sign(H - target) (H_t - target)``: its token mean is ``|H - target|``, H the mean entropy of the mask.

    Add it with a coefficient to a loss that is a token mean: entropy is held from both sides, with a push of constant
    strength, none at the target. H is that of the tokens given: micro-batches of a step have each its own.

    From "Confucius3-Math: A Lightweight High-Performance Reasoning LLM for Chinese K-12 Mathematics Learning",
    arXiv:2506.18330, section 3.1 (there with coefficient 0.001).

    >>> import jax.numpy as jnp
    >>> terms = targeted_entropy_terms(jnp.array([[0.5, 1.0]]), jnp.array([[True, True]]), target=0.55)
    >>> round(float(terms.mean()), 4)
    0.2
    """
    if target < 0:
        raise ValueError(f"target={target} is no entropy; it must not be negative")
    (entropy,) = masked(mask, entropy)
    count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
    mean = jnp.sum(jnp.where(mask, entropy, 0.0)) / count
    side = jax.lax.stop_gradient(jnp.sign(mean - target))
    return jnp.where(mask, side * (entropy - target), 0.0)


def adapted_entropy_coefficient(
    coefficient: Float[Array, ""],
    entropy: Float[Array, ""],
    *,
    target: float,
    step: float = 0.005,
    low: float = 0.0,
    high: float = 1.0,
) -> Float[Array, ""]:
    """The coefficient of the next step's entropy bonus: one ``step`` up while ``entropy <= target``, else one down.

    Held in ``[low, high]``. No gradient. It is applied (``applied_entropy_coefficient``) only while the entropy is at
    or below its target, so that the bonus holds a floor and never pushes beyond it.

    Args:
      entropy: mean over the tokens of the step just taken, in nats.

    From "Skywork Open Reasoner 1 Technical Report", arXiv:2505.22312, eq. 3.2 (v2; adaptive entropy control), as in
    TRL's GRPOTrainer (``use_adaptive_entropy``), whose defaults these are. Differs from the paper in the bounds, which
    it has not, and in going up at ``entropy = target``, where it names neither.

    >>> import jax.numpy as jnp
    >>> c, low = jnp.float32(0.01), jnp.float32(0.1)
    >>> [round(float(adapted_entropy_coefficient(c, h, target=0.2)), 4) for h in (low, 3 * low)]
    [0.015, 0.005]
    """
    if step <= 0 or low > high:
        raise ValueError(f"step={step} must be positive and low={low} at most high={high}")
    moved = coefficient.astype(jnp.float32) + jnp.where(entropy <= target, step, -step)
    return jax.lax.stop_gradient(jnp.clip(moved, low, high))


def applied_entropy_coefficient(
    coefficient: Float[Array, ""], entropy: Float[Array, ""], *, target: float
) -> Float[Array, ""]:
    """``coefficient`` while the entropy of the last step is at or below its target, else 0; no gradient.

    From arXiv:2505.22312, eq. 3.2, as ``adapted_entropy_coefficient``. Differs from the paper in the entropy, there
    that of the same step's samples.

    >>> import jax.numpy as jnp
    >>> float(applied_entropy_coefficient(jnp.float32(0.5), jnp.float32(0.3), target=0.2))
    0.0
    """
    return jax.lax.stop_gradient(jnp.where(entropy <= target, coefficient.astype(jnp.float32), 0.0))


def sampled_entropy(logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """``-logp`` of the sampled token: an unbiased *value* of the entropy on-policy only. No gradient."""
    return jax.lax.stop_gradient(-jnp.where(mask, logp.astype(jnp.float32), 0.0))


def token_covariance(
    logp: Float[Array, "B T"], advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """``(logp - mean logp) (A - mean A)`` over the masked tokens; its mean is the covariance that drives entropy down.

    From "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv:2505.22617, eq. 9.
    """
    logp, advantages = masked(mask, logp, advantages)
    count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
    centred = (logp - jnp.sum(logp) / count) * (advantages - jnp.sum(advantages) / count)
    return jax.lax.stop_gradient(jnp.where(mask, centred, 0.0))


def clip_cov_keep(
    covariance: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    noise: Float[Array, "B T"],
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Bool[Array, "B T"]:
    """Clip-Cov: which tokens keep their gradient; ``fraction`` of all tokens, drawn at random among those whose
    covariance lies in ``[low, high]``, is detached.

    Args:
      noise: uniform numbers in [0, 1) that decide the draw.

    From arXiv:2505.22617, eq. 11.
    """
    inside = mask & (covariance >= low) & (covariance <= high)
    wanted = jnp.maximum(jnp.floor(fraction * jnp.sum(mask.astype(jnp.float32))), 1.0)
    order = jnp.where(inside, noise, 2.0).ravel()
    rank = jnp.argsort(jnp.argsort(order)).reshape(mask.shape).astype(jnp.float32)
    return mask & ~(inside & (rank < wanted))


def kl_cov_select(
    covariance: Float[Array, "B T"], mask: Bool[Array, "B T"], *, fraction: float = 2e-3
) -> Bool[Array, "B T"]:
    """KL-Cov: the ``fraction`` of tokens with the largest covariance, which get a KL penalty to the old policy.

    From arXiv:2505.22617, eq. 13.
    """
    wanted = jnp.maximum(jnp.floor(fraction * jnp.sum(mask.astype(jnp.float32))), 1.0)
    order = jnp.where(mask, -covariance, jnp.inf).ravel()
    rank = jnp.argsort(jnp.argsort(order)).reshape(mask.shape).astype(jnp.float32)
    return mask & (rank < wanted)


def clip_cov_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    noise: Float[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> TokenTerms:
    """PPO's clipped surrogate without the tokens that ``clip_cov_keep`` drops; only unclipped tokens can be drawn.

    Covariances are centred on the tokens given: micro-batches of a step are centred each on its own.

    Args:
      noise: uniform numbers in [0, 1), see ``clip_cov_keep``.

    ``aux``: ``ratio``, ``clipped`` (by PPO), ``dropped`` (by covariance). From arXiv:2505.22617.
    """
    terms = clipped_policy_loss(logp, old_logp, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    covariance = token_covariance(logp, advantages, mask)
    covariance = jnp.where(terms.aux["clipped"] > 0, -jnp.inf, covariance)
    keep = clip_cov_keep(covariance, mask, noise, fraction=fraction, low=low, high=high)
    aux = dict(terms.aux) | {"dropped": (mask & ~keep).astype(jnp.float32)}
    return TokenTerms(jnp.where(keep, terms.loss, 0.0), aux)


def kl_cov_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    fraction: float = 2e-3,
    coefficient: float = 1.0,
) -> TokenTerms:
    """``-rho A``, plus ``coefficient |logp - old_logp|`` for the tokens that ``kl_cov_select`` names; no clip.

    ``aux``: ``ratio``, ``clipped`` (always 0), ``penalised``. From arXiv:2505.22617; the absolute value for
    the KL term is that of the authors' code.
    """
    chosen = kl_cov_select(token_covariance(logp, advantages, mask), mask, fraction=fraction)
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    difference = log_ratio(logp, old_logp)
    ratio = jnp.exp(difference)
    # sign(0) = 0: at ratio 1 there is no distance and no gradient of it (that of abs would be 1)
    distance = jax.lax.stop_gradient(jnp.sign(difference)) * difference
    loss = -ratio * jax.lax.stop_gradient(advantages) + jnp.where(chosen, coefficient * distance, 0.0)
    aux = {
        "ratio": jnp.where(mask, ratio, 0.0),
        "clipped": jnp.zeros_like(ratio),
        "penalised": chosen.astype(jnp.float32),
    }
    return TokenTerms(jnp.where(mask, loss, 0.0), aux)


def _group_softmax(scores: Array, alive: Array, group_ids: Array) -> Array:
    """Softmax over the live members of each group, column by column; 0 for the others."""
    size = scores.shape[0]
    high = jax.ops.segment_max(jnp.where(alive, scores, -jnp.inf), group_ids, num_segments=size)[group_ids]
    raw = jnp.where(alive, jnp.exp(jnp.where(alive, scores - high, 0.0)), 0.0)
    total = jax.ops.segment_sum(raw, group_ids, num_segments=size)[group_ids]
    return raw / jnp.maximum(total, 1e-30)


def entropy_guided_weights(
    entropy: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    alpha: float = 0.3,
    temperature: float = 1.0,
) -> Float[Array, "B T"]:
    """EGSW: ``w_it = softmax_j((A_jt + alpha H_jt) / temperature)`` over the group's members alive at t; no gradient.

    The weights of a column sum to 1 over a group, so a loss shrinks by its live members (``live_members``). They do
    not know the sign of the advantage: a wrong response of high entropy is pushed down harder, too.

    From "Entropy-guided sequence weighting for efficient exploration in RL-based LLM fine-tuning", arXiv:2503.22456.
    Differs from the paper in ``alpha`` and ``temperature``, which it tunes per model without saying.

    Args:
      group_ids: members share a prompt, and so the column at which their responses begin.

    >>> import jax.numpy as jnp
    >>> entropy, advantages = jnp.array([[0.5], [1.5]]), jnp.array([[1.0], [-1.0]])
    >>> w = entropy_guided_weights(entropy, advantages, jnp.array([0, 0]), jnp.ones((2, 1), bool))
    >>> [round(float(x), 4) for x in w[:, 0]]
    [0.8455, 0.1545]
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive; a large one gives equal weights")
    entropy, advantages = masked(mask, entropy, advantages)
    return jax.lax.stop_gradient(_group_softmax((advantages + alpha * entropy) / temperature, mask, group_ids))


def entropy_guided_sequence_weights(
    entropy: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    alpha: float = 0.3,
    temperature: float = 1.0,
) -> Float[Array, "B T"]:
    """``entropy_guided_weights`` with one weight a sequence, from its mean advantage and its mean entropy."""
    means = [reduce.sequences(x, mask, mode="mean")[:, None] for x in masked(mask, entropy, advantages)]
    alive = jnp.any(mask, axis=1, keepdims=True)
    weights = entropy_guided_weights(*means, group_ids, alive, alpha=alpha, temperature=temperature)
    return jnp.where(mask, weights, 0.0)


def live_members(group_ids: Int[Array, " B"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """How many members of the group have a token in each column: times equal weights it gives 1; 0 off the mask."""
    alive = jax.ops.segment_sum(mask.astype(jnp.float32), group_ids, num_segments=mask.shape[0])[group_ids]
    return jnp.where(mask, alive, 0.0)
