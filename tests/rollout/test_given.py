"""Given responses keep the layout of a rollout: what was sampled, given again, is the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.models.cache import EXPERTS
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.types import Trajectories
from tests import close
from tests.models_for_tests import chain_table, nano

NEW = 12


def _rollout(seed=0):
    policy, params, _, tokenizer = nano()
    ids = jnp.arange(4, dtype=jnp.int32)
    table = jax.tree.map(lambda x: x[ids], chain_table())
    keys = sample_keys(jax.random.key(seed), 0, ids, 2)
    numbers = {"group_size": 2, "max_new_tokens": NEW, "eos_ids": tokenizer.eos_ids, "problem_ids": ids}
    run = functools.partial(generate, policy, **numbers)
    return jax.jit(run)(params, table.tokens, table.valid, keys)


@pytest.mark.slow
def test_sampled_responses_given_again_are_the_same_rollout():
    rows, other = _rollout(0), _rollout(1)
    tail = slice(-NEW, None)
    every = jnp.ones(8, bool)
    got = given_responses.with_responses(
        other, every, rows.tokens[:, tail], rows.mask[:, tail], sampler_logp=rows.sampler_logp[:, tail],
        truncated=rows.truncated,
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, got, rows)
    none = given_responses.with_responses(rows, ~every, other.tokens[:, tail], other.mask[:, tail])
    jax.tree.map(np.testing.assert_array_equal, none, rows)


@pytest.mark.slow
def test_a_prefix_and_its_rest_joined_are_the_rollout():
    rows = _rollout()
    policy, params, config, tokenizer = nano()
    length = jnp.asarray([0, 1, 2, 3, 4, 0, 2, 1], jnp.int32)
    keep = given_responses.prefix(rows.mask, length)
    np.testing.assert_array_equal(keep.sum(1), jnp.minimum(length, rows.mask.sum(1)))
    prompts, valid = given_responses.left_padded(rows.tokens, (rows.segment_ids > 0) & (~rows.mask | keep))
    keys = sample_keys(jax.random.key(3), 0, jnp.arange(8), 1)
    rest = generate(
        policy, params, prompts, valid, keys, group_size=1, max_new_tokens=NEW, eos_ids=tokenizer.eos_ids
    )  # fmt: skip
    got, kept = given_responses.joined(rows, keep, rest, new_tokens=NEW)
    np.testing.assert_array_equal(kept.sum(1), keep.sum(1))
    # the log-probabilities that were recorded in two rollouts are those of one pass over the whole
    logp, _ = score_tokens(policy, params, got)
    close.assert_same_forward(jnp.where(got.mask, logp, 0.0), got.sampler_logp, config)
    # rows without a prefix are the continuation itself
    assert int(length[0]) == 0
    np.testing.assert_array_equal(got.tokens[0, -NEW:], rest.tokens[0, -NEW:])
    np.testing.assert_array_equal(got.tokens[:, :-NEW], rows.tokens[:, :-NEW])
    total = keep.sum(1) + rest.mask.sum(1)
    np.testing.assert_array_equal(got.mask.sum(1), jnp.minimum(total, NEW))
    np.testing.assert_array_equal(got.truncated, rest.truncated | (total > NEW))


@pytest.mark.slow
def test_demonstrations_are_right_and_scored_by_the_actor():
    settings = recipes.OnlineSettings(levels=(1,), train_problems=16, eval_problems=8, max_new_tokens=NEW, group_size=2)
    found = recipes.bench(settings)
    plain = recipes.rollout_of_model(found.model, group_size=2, max_new_tokens=NEW, temperature=1.0)
    rollout = recipes.demonstrating_rollout(settings, found, plain)
    ids = jnp.asarray([3, 5, 5, 0], jnp.int32)
    keys = sample_keys(jax.random.key(0), 0, ids, 2)
    rows = rollout(found.model.params, found.train.tokens[ids], found.train.valid[ids], keys, ids)
    rewards = found.score(jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers), rows)
    assert (rewards.value[1::2] == 1).all() and recipes.last_members(8, 2).tolist() == [False, True] * 4
    logp, _ = score_tokens(found.model.policy, found.model.params, rows)
    close.assert_same_forward(jnp.where(rows.mask, logp, 0.0), rows.sampler_logp, found.model.config)


def test_too_long_a_response_is_refused():
    tokenizer = nano()[3]
    tokens, valid = encode_responses(tokenizer, ["1+1=2#2", "#2"], width=8)
    assert valid.sum(1).tolist() == [8, 3] and tokens[1, 2] == tokenizer.eos_ids[0]
    with pytest.raises(UserError, match="response 0 has 8 tokens"):
        encode_responses(tokenizer, ["1+1=2#2"], width=4)
    assert encode_responses(tokenizer, ["1+1=2#2", "#2"])[1].sum(axis=1).tolist() == [8, 3]
    assert encode_responses(tokenizer, ["1+1=2#2", "#2"])[0].shape == (2, 8)
    rows = _rollout()
    with pytest.raises(ValueError, match="no prompt"):
        given_responses.with_responses(rows, jnp.ones(8, bool), rows.tokens, rows.mask)


def test_a_mixture_routes_given_tokens_by_itself():
    """What was recorded is of the response that they take the place of."""
    line, wide = jnp.zeros(2, jnp.int32), jnp.ones((2, 4), jnp.int32)
    rows = Trajectories(wide, wide, wide, wide > 0, jnp.zeros((2, 4)), line > 0, line, line)
    rows = rows._replace(extras={EXPERTS: jnp.full((2, 4, 3), 5, jnp.int8), "other": line})
    got = given_responses.with_responses(rows, jnp.array([False, True]), wide[:, 2:], wide[:, 2:] > 0)
    assert got.extras[EXPERTS][:, :, 0].tolist() == [[5, 5, 5, 5], [5, 5, -1, -1]]
    assert got.extras[EXPERTS].dtype == jnp.int8 and got.extras["other"] is line
    both, _ = given_responses.joined(rows, rows.mask & (jnp.arange(4) == 2)[None], rows, new_tokens=2)
    assert both.extras[EXPERTS][:, :, 2].tolist() == [[5, 5, -1, -1]] * 2
