"""ThinkPrune: the reward ends at the limit, and cut responses are pushed down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses import kl
from jaxrl_llm.losses.policy import reinforce_loss
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.plan import Referred
from tests import close


def test_worked_group():
    rewards = shaping.limited_rewards(jnp.array([True, True]), jnp.array([30.0, 60.0]), limit_tokens=50)
    assert rewards.tolist() == [1.0, 0.0]
    advantages = group.group_normalized_advantages(rewards, jnp.zeros(2, jnp.int32))
    close.assert_printed(advantages, [0.7071, -0.7071], 4)


def test_the_token_at_the_limit_is_read_and_the_next_one_is_not():
    lengths = jnp.array([50.0, 51.0])
    assert shaping.limited_rewards(jnp.array([True, True]), lengths, limit_tokens=50).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="limit_tokens=0"):
        shaping.limited_rewards(jnp.array([True]), jnp.array([1.0]), limit_tokens=0)


def test_agrees_with_a_loop_and_a_wide_limit_is_grpo():
    rng = np.random.default_rng(1)
    right, length, ids = rng.random(12) < 0.5, rng.integers(1, 60, 12), np.repeat(np.arange(3), 4)
    expected = [float(r and n <= 31) for r, n in zip(right, length, strict=True)]
    args = jnp.asarray(right), jnp.asarray(length, jnp.float32)
    assert shaping.limited_rewards(*args, limit_tokens=31).tolist() == expected
    wide = group.group_normalized_advantages(shaping.limited_rewards(*args, limit_tokens=60), jnp.asarray(ids))
    plain = group.group_normalized_advantages(jnp.asarray(right, jnp.float32), jnp.asarray(ids))
    np.testing.assert_array_equal(wide, plain)


def test_a_cut_response_is_pushed_down_where_masking_it_would_not():
    mask = jnp.ones((2, 4), bool)
    rewards = shaping.limited_rewards(jnp.array([True, True]), jnp.array([3.0, 9.0]), limit_tokens=4)
    advantages = group.per_token(group.group_normalized_advantages(rewards, jnp.zeros(2, jnp.int32)), mask)
    slope = jax.grad(lambda x: reduce.tokens(reinforce_loss(x, advantages, mask).loss, mask))(jnp.zeros((2, 4)))
    assert (slope[0] < 0).all() and (slope[1] > 0).all()


def test_at_scale_a_round_is_held_to_where_it_began():
    """With a weight the reference is scored and k3 to it is added to the loss; without one nothing is kept or added."""
    sizes = {"levels": (2, 3), "train_problems": 8, "eval_problems": 8, "max_new_tokens": 12, "group_size": 2}
    settings = recipes.OnlineSettings(**sizes)
    found = recipes.bench(settings)
    policy, params, ids = found.model.policy, found.model.params, jnp.arange(2, dtype=jnp.int32)
    plain, held = (curricula.make_single_turn_grpo(settings, found, kl_weight=weight) for weight in (0.0, 0.5))
    keys = sample_keys(jax.random.key(0), 0, ids, 2)
    rows = plain.rollout(params, found.train.tokens[ids], found.train.valid[ids], keys, ids)
    rewards = found.score(jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers), rows)
    began = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), params)
    batch = held.estimate(params, Referred(began)._asdict(), rows, rewards)
    mask, reference = np.asarray(batch.mask), score_tokens(policy, began, rows)[0]
    close.assert_near(np.asarray(batch.ref_logp)[mask], np.asarray(reference)[mask])
    assert not np.any(plain.estimate(params, {}, rows, rewards).ref_logp)
    apart = held.loss(params, batch)[0] - plain.loss(params, batch)[0]
    terms = np.asarray(kl.k3(score_tokens(policy, params, rows)[0], reference, batch.mask))[mask]
    assert terms.mean() > 1e-3
    close.assert_near(apart, 0.5 * terms.mean())
