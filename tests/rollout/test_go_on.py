"""A rollout in parts: the tokens of one in one go under the same weights; what has ended stays as it is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.generate import generate, go_on
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods.builders import score_tokens
from tests import close
from tests.models_for_tests import small_model

EOS = (3, 7, 11)


def test_parts_under_the_same_weights_are_the_whole_and_later_ones_follow_the_new_weights():
    policy, params, _ = small_model()
    other = jax.tree.map(lambda x: 0.5 * x, params)
    prompts = jnp.asarray([[0, 0, 5, 6], [4, 9, 2, 8]], jnp.int32)
    valid = jnp.asarray([[False, False, True, True], [True] * 4])
    keys = sample_keys(jax.random.key(2), 0, jnp.arange(2), 4)
    first = jax.jit(partial(generate, policy, group_size=4, max_new_tokens=3, eos_ids=EOS))
    later = jax.jit(partial(go_on, policy, done=3, max_new_tokens=5, eos_ids=EOS))
    at_once = jax.jit(partial(generate, policy, group_size=4, max_new_tokens=8, eos_ids=EOS))
    whole, begun = (roll(params, prompts, valid, keys) for roll in (at_once, first))
    assert bool(begun.truncated.any()) and not bool(begun.truncated.all())  # some ended in the first part
    found = later(params, begun, keys)
    for name in ("tokens", "mask", "segment_ids", "positions", "truncated", "group_ids", "problem_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), err_msg=name)
    close.assert_same_forward(found.sampler_logp, whole.sampler_logp)

    mixed = later(other, begun, keys)
    np.testing.assert_array_equal(mixed.tokens[:, :7], begun.tokens)
    np.testing.assert_array_equal(mixed.tokens[~begun.truncated, 7:], 0)
    logp = jax.jit(lambda p, rows: score_tokens(policy, p, rows)[0])
    old, new = (np.asarray(logp(p, mixed)) for p in (params, other))
    mask = np.asarray(mixed.mask)
    want = np.where(np.arange(12)[None] < 7, old, new)
    close.assert_same_forward(np.where(mask, mixed.sampler_logp, 0), np.where(mask, want, 0))
    with pytest.raises(ValueError, match="done=7 must lie in 1 .. 6"):
        go_on(policy, params, begun, keys, done=7, max_new_tokens=5, eos_ids=EOS)
