"""Trap 2, cache positions under left padding: a prompt decodes alone as it does inside a ragged batch."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.rollout.generate import generate
from tests import close
from tests.models_for_tests import small_model


def test_greedy_decode_is_the_same_alone_and_in_a_ragged_batch():
    policy, params, _ = small_model()
    lengths = [1, 4, 6]
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 24, (3, 6)), jnp.int32)
    valid = jnp.arange(6)[None, :] >= 6 - jnp.asarray(lengths)[:, None]

    @jax.jit
    def greedy(tokens, valid):
        keys = jax.random.split(jax.random.key(0), tokens.shape[0])
        return generate(
            policy, params, tokens, valid, keys, group_size=1, max_new_tokens=6, eos_ids=(2,), temperature=0.0
        )

    ragged = greedy(tokens, valid)
    for row, length in enumerate(lengths):
        alone = greedy(tokens[row : row + 1, 6 - length :], jnp.ones((1, length), bool))
        np.testing.assert_array_equal(alone.tokens[0, length:], ragged.tokens[row, 6:])
        close.assert_same_forward(alone.sampler_logp[0, length:], ragged.sampler_logp[row, 6:], columns=12)
