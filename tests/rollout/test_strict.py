"""Strict rollouts: sampler and trainer agree to the last bit, for every family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.strict import generate_strict
from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss, score_tokens
from jaxrl_llm.train.methods.shared_prompt import share_prompts
from jaxrl_llm.train.step import accumulate
from jaxrl_llm.types import Rewards
from tests import close
from tests.models_for_tests import ALL_FAMILIES, small_model

PROMPTS = jnp.array([[0, 0, 7, 8], [9, 3, 1, 6], [0, 4, 4, 1]], jnp.int32)
KEYS = jax.random.split(jax.random.key(3), 6)
SETTINGS = {"group_size": 2, "max_new_tokens": 7, "eos_ids": (2, 5), "temperature": 0.9}
SCORES = {"whole": score_tokens, "shared": share_prompts(2, 7)}
SOME = ("qwen3", "gemma2")


def _batch(policy, params, rows):
    estimate = make_estimate(policy, lambda rows, rewards: rows.mask.astype(jnp.float32))
    size = rows.tokens.shape[0]
    return estimate(params, {}, rows, Rewards(jnp.ones(size), jnp.ones(size, bool)))


@pytest.mark.parametrize("family", [f if f in SOME else pytest.param(f, marks=pytest.mark.slow) for f in ALL_FAMILIES])
@pytest.mark.parametrize("score", ["whole", pytest.param("shared", marks=pytest.mark.slow)])
def test_the_gap_of_an_update_is_exactly_zero(family, score):
    policy, params, _ = small_model(family)
    score = SCORES[score]
    rows = jax.jit(lambda p: generate_strict(policy, p, PROMPTS, PROMPTS > 0, KEYS, score=score, **SETTINGS))(params)
    loss = make_policy_loss(policy, clipped_policy_loss, temperature=0.9, score=score)
    _, _, metrics = jax.jit(accumulate, static_argnums=(0, 3))(loss, params, _batch(policy, params, rows), 1)
    for name in ("mean", "p50", "p99", "max"):
        assert float(metrics[f"kl/sampler_{name}"]) == 0.0, name
    assert rows.mask.any() and (np.asarray(rows.sampler_logp)[np.asarray(rows.mask)] < 0).all()


def test_tokens_are_those_of_the_cached_rollout_and_of_the_scored_distribution():
    policy, params, _ = small_model()
    strict = jax.jit(lambda p: generate_strict(policy, p, PROMPTS, PROMPTS > 0, KEYS, score=score_tokens, **SETTINGS))(
        params
    )
    cached = jax.jit(lambda p: generate(policy, p, PROMPTS, PROMPTS > 0, KEYS, **SETTINGS))(params)
    np.testing.assert_array_equal(strict.tokens, cached.tokens)
    close.assert_same_forward(strict.sampler_logp, cached.sampler_logp, temperature=0.9)
    logits = policy.unembed(params, policy.hidden(params, strict.tokens, strict.positions, strict.segment_ids))
    want = logprobs.token_logprobs(logits, strict.tokens, temperature=0.9, segment_ids=strict.segment_ids)
    keep = np.asarray(strict.mask)
    close.assert_same_forward(
        np.asarray(strict.sampler_logp)[keep], np.asarray(want)[keep], temperature=0.9, columns=keep.shape[1]
    )
