"""Trap 15, bfloat16 logits: products and log-sum-exp are float32, in sampler and trainer alike."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import logprobs
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.train.methods.builders import score_tokens
from tests import close
from tests.models_for_tests import small_config, small_model


def test_the_error_does_not_grow_with_the_vocabulary():
    rng = np.random.default_rng(0)
    for vocab in (64, 20_000):
        config = small_config(vocab_size=vocab, hidden_size=16)
        policy = make_policy(config, compute_dtype=jnp.bfloat16)
        params = {"embed": jnp.asarray(rng.normal(size=(vocab, 16)), jnp.float32).astype(jnp.bfloat16)}
        hidden = jnp.asarray(rng.normal(size=(1, 2, 16)), jnp.bfloat16)
        logits = policy.unembed(params, hidden)
        assert logits.dtype == jnp.float32
        tokens = jnp.array([[0, 3]], jnp.int32)
        got = logprobs.token_logprobs(logits, tokens)[0, 1]
        exact = np.asarray(hidden[0, 0], np.float64) @ np.asarray(params["embed"], np.float64).T
        want = exact[3] - np.log(np.exp(exact - exact.max()).sum()) - exact.max()
        close.assert_near(got, want)


def test_sampler_and_trainer_use_the_same_precision():
    policy = make_policy(small_config(), compute_dtype=jnp.bfloat16)
    params = small_model()[1]
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 24, (4, 3)), jnp.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    sample = jax.jit(partial(generate, policy, group_size=1, max_new_tokens=6, eos_ids=(2,)))
    out = sample(params, tokens, jnp.ones_like(tokens, bool), keys)
    assert out.sampler_logp.dtype == jnp.float32
    logp, _ = jax.jit(partial(score_tokens, policy))(params, out)
    gap = np.abs(np.asarray(logp - out.sampler_logp))[np.asarray(out.mask)]
    assert gap.max() < 0.1 and gap.mean() < 0.02  # bfloat16 activations, eight bits of mantissa, no bias
