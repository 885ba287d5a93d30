"""Trap 4, end masking: the end token is trained, what follows is not, whichever id ended the sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.train.methods.builders import score_tokens
from tests import close
from tests.traps.tables import NEW, VOCAB, rollout, table_policy


def _always(token):
    return {"table": jnp.where(jnp.arange(VOCAB)[None, :] == token, 9.0, jnp.zeros((VOCAB, VOCAB)))}


def _one(params, prompt=(3, 4), eos_ids=(1, 2)):
    tokens = jnp.asarray([prompt], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 1)
    return rollout(params, tokens, jnp.ones_like(tokens, bool), keys, jnp.zeros(1, jnp.int32), group_size=1,
                   temperature=1e-3, eos_ids=eos_ids)  # fmt: skip


@pytest.mark.parametrize("end", [1, 2])
def test_each_id_ends_and_is_inside_the_mask(end):
    out = _one(_always(end))
    assert np.asarray(out.mask[0, 2:]).tolist() == [True] + [False] * (NEW - 1)
    assert int(out.tokens[0, 2]) == end and not bool(out.truncated[0])
    assert not np.any(out.tokens[0, 3:])  # nothing is appended after it


def test_an_id_that_is_not_an_end_goes_on_to_the_limit():
    out = _one(_always(1), eos_ids=(2,))
    assert np.asarray(out.mask[0, 2:]).all() and bool(out.truncated[0])


def test_an_end_id_inside_the_prompt_ends_nothing():
    out = _one(_always(4), prompt=(1, 2))
    assert np.asarray(out.mask[0]).tolist() == [False, False] + [True] * NEW


def test_every_trained_token_has_a_sampler_log_prob():
    tokens = jnp.full((4, 2), 3, jnp.int32)
    params = table_policy().init(jax.random.key(3))
    keys = jax.random.split(jax.random.key(1), 16)
    out = rollout(params, tokens, jnp.ones_like(tokens, bool), keys, jnp.arange(4, dtype=jnp.int32))
    logp, _ = score_tokens(table_policy(), params, out)
    keep = np.asarray(out.mask)
    close.assert_near(np.asarray(out.sampler_logp)[keep], np.asarray(logp)[keep])
    assert (np.asarray(out.sampler_logp)[keep] < 0).all() and not np.asarray(out.sampler_logp)[~keep].any()
