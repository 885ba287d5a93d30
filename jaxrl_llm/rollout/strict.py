"""Strict rollouts: what samples is the trainer's own forward pass, so that their gap is exactly zero.

A cache changes the order of sums, and so the last bits. Here every token is drawn from a pass over the whole rows, of
the shape that the trainer computes, and its log-probability is what the trainer's scoring function says. Slow: a check
of everything around the model, not a way to train.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrl_llm.models.adapters import policy_from_forward
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.types import Key, Params, Policy, Trajectories


def without_cache(policy: Policy) -> Policy:
    """The same policy with its tokens as the cache: every step runs ``hidden`` on all columns that a row will have."""
    whole = policy_from_forward(
        lambda params, *rows: policy.unembed(params, policy.hidden(params, *rows)), policy.vocab_size, policy.init
    )
    # generation keeps no column for the last token, the trainer's rows have it
    return whole._replace(init_cache=lambda batch, length: whole.init_cache(batch, length + 1))


def generate_strict(
    policy: Policy,
    params: Params,
    prompt_tokens: Int[Array, "P L"],
    prompt_valid: Bool[Array, "P L"],
    keys: Key,
    *,
    score: Callable[..., tuple[Array, Array]],
    temperature: float = 1.0,
    **settings,
) -> Trajectories:
    """``rollout.generate.generate`` with the trainer's log-probabilities, of rows that the trainer's pass sampled.

    Args:
      score: the trainer's, ``(policy, params, rows, *, temperature) -> (logp, entropy)``:
        ``train.methods.builders.score_tokens`` or ``train.methods.shared_prompt.share_prompts``.
      settings: the others of ``generate``.
    """
    rows = generate(
        without_cache(policy), params, prompt_tokens, prompt_valid, keys, temperature=temperature, **settings
    )
    logp, _ = score(policy, params, rows, temperature=temperature)
    return rows._replace(sampler_logp=jnp.where(rows.mask, logp, 0.0))
