"""Trap 16, vocabulary padding: added rows take no mass and are never drawn, in sampler and trainer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.train.methods.builders import score_tokens
from tests import close
from tests.models_for_tests import small_config


def test_padded_and_unpadded_vocabulary_agree():
    wide = make_policy(small_config(padded_vocab_size=128))
    params = wide.init(jax.random.key(0))
    # padding rows that would dominate if they were not masked
    params["embed"] = params["embed"].at[24:].set(50.0)
    narrow = make_policy(small_config())
    cut = dict(params, embed=params["embed"][:24])
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 24, (4, 3)), jnp.int32)
    keys = jax.random.split(jax.random.key(0), 4)

    def run(policy, params, temperature):
        valid = jnp.ones_like(tokens, bool)
        sample = partial(generate, policy, group_size=1, max_new_tokens=6, eos_ids=(2,), temperature=temperature)
        return jax.jit(sample)(params, tokens, valid, keys)

    padded, plain = run(wide, params, 0.0), run(narrow, cut, 0.0)
    np.testing.assert_array_equal(padded.tokens, plain.tokens)
    close.assert_same_forward(padded.sampler_logp, plain.sampler_logp)
    drawn = run(wide, params, 2.0)
    assert int(drawn.tokens.max()) < 24
    scored = [jax.jit(partial(score_tokens, m))(p, drawn) for m, p in ((wide, params), (narrow, cut))]
    for a, b in zip(*scored, strict=True):
        close.assert_same_forward(a, b)
    gradient = jax.jit(jax.grad(lambda p: score_tokens(wide, p, drawn)[0].sum()))(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
