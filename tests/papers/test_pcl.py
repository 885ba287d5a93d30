"""Prompt curriculum: the value model's choice, its loss, and what it learns."""

import dataclasses
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.curriculum import pcl
from experiments.curriculum.parts import prompt_value
from jaxrl_llm.curriculum import subset
from jaxrl_llm.experiment import arms, recipes
from jaxrl_llm.types import Rewards, TrainState, Trajectories
from tests import close
from tests.close import doubles


def test_worked_choice_and_ratio():
    values = jnp.array([0.1, 0.45, 0.9, 0.6])
    assert prompt_value.nearest_prompts(values, target=0.5, count=2).tolist() == [1, 3]
    assert prompt_value.nearest_prompts(jnp.array([0.5, 0.5, 0.5]), target=0.5, count=2).tolist() == [0, 1]
    ratio = prompt_value.effective_ratio(jnp.array([0.5, 0.05]), 16)
    close.assert_printed(ratio, [0.99997, 0.55987], 5)
    # the ratio is the chance of a group with a gradient
    groups = jax.random.uniform(jax.random.key(0), (20000, 16)) < 0.05
    close.assert_share((groups.any(1) & ~groups.all(1)).mean(), float(ratio[1]), 20000)


def _of_head(features, tx, **options):
    """The sampler of a head on features, as the experiment makes it."""
    values, start = prompt_value.head_values(features), partial(prompt_value.started_head, features.shape[1])
    return prompt_value.make_value_sampler(values, start, features.shape[0], tx, **options)


def test_the_loss_and_its_gradient():
    rates, valid = jnp.array([0.25, 0.75, jnp.nan]), jnp.array([True, True, False])
    assert float(prompt_value.success_loss(jnp.array([0.5, 0.5, 0.9]), rates, valid)) == doubles(0.125)
    slope = jax.grad(prompt_value.success_loss)(jnp.array([0.25, 0.5, 0.9]), rates, valid)
    close.assert_near(slope, [0.0, -0.5, 0.0])


def test_updates_agree_with_a_loop():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(6, 3))
    sampler = _of_head(jnp.asarray(features, jnp.float32), optax.sgd(0.1))
    state, weight, bias = sampler.init(6), np.zeros(3), 0.0
    for _ in range(4):
        ids, rates, valid = rng.integers(0, 6, 3), rng.random(3), rng.random(3) < 0.7
        step_w, step_b = np.zeros(3), 0.0
        for k, p, used in zip(ids, rates, valid, strict=True):
            if used:
                v = 1 / (1 + np.exp(-(features[k] @ weight + bias)))
                slope = 2 * (v - p) * v * (1 - v)
                step_w, step_b = step_w + slope * features[k], step_b + slope
        weight, bias = weight - 0.1 * step_w, bias - 0.1 * step_b
        rates[~valid] = np.nan
        state = sampler.update(state, jnp.asarray(ids), jnp.asarray(rates, jnp.float32), jnp.asarray(valid))
    close.assert_near(state.params.weight, weight)
    close.assert_near(state.params.bias, bias)


def test_one_candidate_is_a_uniform_draw():
    sampler = _of_head(jnp.ones((8, 2)), optax.sgd(0.1), candidates=1)
    draw = jax.jit(lambda k: sampler.draw(sampler.init(8), k, 2)[0])
    ids = jax.vmap(draw)(jax.random.split(jax.random.key(0), 4000))
    close.assert_share(np.bincount(np.asarray(ids).ravel(), minlength=8) / 8000, 1 / 8, 8000)


def test_it_learns_to_draw_prompts_of_medium_success():
    success = jnp.repeat(jnp.array([0.0, 0.5, 1.0]), 20)
    features = prompt_value.standardised(jax.nn.one_hot(jnp.repeat(jnp.arange(3), 20), 3))
    sampler = _of_head(features, optax.adam(0.1), candidates=4)
    state = sampler.init(60)
    for k in range(60):
        ids, state = sampler.draw(state, jax.random.key(k), 4)
        state = sampler.update(state, ids, success[ids], jnp.ones(4, bool))
    ids, _ = sampler.draw(state, jax.random.key(99), 4)
    assert float(jnp.mean(success[ids] == 0.5)) >= 0.75


def test_explored_prompts_are_random_and_arguments_are_checked():
    features = jnp.eye(6)
    sampler = _of_head(features, optax.sgd(0.1), explore=0.5)
    ids, _ = sampler.draw(sampler.init(6), jax.random.key(0), 4)
    assert len(set(ids.tolist())) == 4
    with pytest.raises(ValueError, match="candidates=0"):
        _of_head(features, optax.sgd(0.1), candidates=0)
    with pytest.raises(ValueError, match="6 rows"):
        sampler.init(5)


def test_on_rows_maps_there_and_back():
    inner = _of_head(jnp.eye(3), optax.sgd(0.1))
    outer = subset.on_rows(inner, np.array([7, 2, 5]))
    ids, state = outer.draw(outer.init(9), jax.random.key(0), 3)
    assert set(ids.tolist()) == {2, 5, 7}
    rates, valid = jnp.array([0.1, 0.9, 0.4]), jnp.ones(3, bool)
    moved = outer.update(state, jnp.array([5, 7, 2]), rates, valid)
    same = inner.update(inner.init(3), jnp.array([2, 0, 1]), rates, valid)
    close.assert_near(moved.params.weight, same.params.weight, magnitude=0)
    with pytest.raises(ValueError, match="2 different"):
        subset.on_rows(inner, np.array([1, 1, 2]))


def test_rank_correlation_and_groups_that_are_taken_after_their_rollout():
    rng = np.random.default_rng(3)
    for _ in range(5):
        x, y = rng.integers(0, 5, 12), rng.integers(0, 4, 12)
        ranks = [np.array([(v < a).sum() + ((v == a).sum() + 1) / 2 for a in v]) for v in (x, y)]
        found = pcl.spearman(*(jnp.asarray(v, jnp.float32) for v in (x, y)))
        close.assert_near(found, np.corrcoef(*ranks)[0, 1])
    assert float(pcl.spearman(jnp.full((4,), 0.5), jnp.arange(4.0))) == 0.0  # the head as it begins
    settings = pcl.Settings(prompts_per_step=2, group_size=4, candidates=3, take=pcl.nearest_groups)
    right = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], np.float32)
    rewards = Rewards(jnp.asarray(right.reshape(-1)), jnp.ones((24,), bool))
    for take, groups in ((pcl.nearest_groups, [1, 3]), (pcl.first_mixed, [1, 3])):
        kept = pcl.taken(dataclasses.replace(settings, take=take))(None, rewards)
        assert np.flatnonzero(np.asarray(kept).reshape(6, 4).all(1)).tolist() == groups
        assert int(kept.sum()) == 8


def test_a_value_model_of_the_policys_size_reads_prompts_and_trains_whole():
    """V is 1/2 at first, then the head at each last token, without padding; body and head learn."""
    found = recipes.bench(recipes.OnlineSettings(levels=(1, 2), train_problems=12, eval_problems=4, max_new_tokens=8))
    policy, params, table = found.model.policy, found.model.params, found.train
    values = prompt_value.model_values(policy, table.tokens, table.valid)
    start = prompt_value.started_model(params, found.model.config.hidden_size)
    ids, rates = jnp.array([3, 7, 1], jnp.int32), jnp.array([0.0, 1.0, 1.0])
    np.testing.assert_array_equal(values(start, ids), jnp.full(3, 0.5))
    weight = np.random.default_rng(0).normal(size=found.model.config.hidden_size)
    drawn = start | {"head": jax.tree.map(lambda x: jnp.asarray(np.resize(weight, x.shape), x.dtype), start["head"])}
    got = values(drawn, ids)
    for k, row in enumerate(ids.tolist()):  # each prompt by itself, without padding
        tokens = np.asarray(table.tokens[row])[np.asarray(table.valid[row])][None]
        where, ones = np.arange(tokens.shape[1])[None], np.ones(tokens.shape, np.int32)
        hidden = np.asarray(policy.hidden(params, *(jnp.asarray(x) for x in (tokens, where, ones))), np.float64)[0, -1]
        head = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(drawn["head"])]
        bias, own = sorted(head, key=len)
        want = 1 / (1 + np.exp(-(hidden @ own + bias[0])))
        config = found.model.config
        close.assert_same_forward(got[k : k + 1], np.asarray([want]), config, columns=tokens.shape[1])
    sampler = prompt_value.make_value_sampler(values, lambda: start, 12, optax.adam(1e-3))
    state, valid = sampler.init(12), jnp.ones(3, bool)
    losses = []
    for _ in range(8):
        losses.append(float(prompt_value.success_loss(values(state.params, ids), rates, valid)))
        state = sampler.update(state, ids, rates, valid)
    assert losses[0] == doubles(0.75) and losses[-1] < losses[0]
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state.params["model"], params)
    assert max(jax.tree.leaves(moved)) > 0
    chosen, _ = sampler.draw(state, jax.random.key(0), 3)
    aside = np.abs(np.asarray(values(state.params, jnp.arange(12, dtype=jnp.int32))) - 0.5)
    assert sorted(aside[np.asarray(chosen)]) == sorted(aside)[:3]  # 4 x 3 candidates: all twelve
    with pytest.raises(ValueError, match="12 rows"):
        sampler.init(5)


def test_ranks_are_of_the_value_model_that_drew():
    """V of the rows is that of the sampler's state before it learns, and no copy of it is carried beside the state."""
    settings = pcl.Settings(**pcl.EMBEDDED | pcl.SMOKE | {"prompts_per_step": 4, "group_size": 2})
    stage = pcl.build(settings).stages[0]
    assert stage.extras({}, jax.random.key(0)) == {}
    features = jnp.asarray([[-1.0], [0.0], [1.0], [2.0]])
    head = prompt_value.Head(jnp.ones((1,)), jnp.zeros(()))
    group_of = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 2)

    def rollout(params, tokens, valid, keys, ids):
        empty = jnp.zeros((8, 1), jnp.int32)
        return Trajectories(
            empty, empty, empty, empty > 0, empty.astype(jnp.float32), group_of > 9, group_of, ids[group_of]
        )

    slots = pcl.watched(settings, rollout, prompt_value.head_values(features))
    sampler = prompt_value.Trained(head, ())
    actor = slots["actor"](TrainState("policy", None, None, None, sampler, {}))
    assert actor[0] == "policy" and actor[1] is head
    rows = slots["rollout"](actor, None, None, None, jnp.arange(4, dtype=jnp.int32))
    rewards = Rewards(jnp.asarray([0.0, 0, 0, 1, 1, 1, 1, 0]), jnp.ones((8,), bool))
    extras = slots["row_extras"]({}, rows, rewards)
    close.assert_near(extras["value"], np.repeat(1 / (1 + np.exp([1.0, 0.0, -1.0, -2.0])), 2))
    found = slots["figures"](types.SimpleNamespace(extras=extras), {})["value/spearman"]
    close.assert_near(found, np.corrcoef([0, 1, 2, 3], [0, 1.5, 3, 1.5])[0, 1])


def test_the_bed_has_an_oracle_and_a_frozen_value_model_takes_random_prompts():
    """V at 1/2 puts all candidates alike, and of equals the first are taken: one candidate is the same."""
    assert pcl.BED.positive == "oracle" and pcl.BED.positive in pcl.ARMS
    base = pcl.Settings(**pcl.EMBEDDED)
    frozen = arms.resolve(pcl, base, ("frozen",))["frozen"]
    assert frozen.value_rate == 0.0 and frozen.candidates == 4
    head, table = prompt_value.started_head(3), jnp.asarray(np.random.default_rng(0).normal(size=(64, 3)), jnp.float32)
    values, key = prompt_value.head_values(table), jax.random.key(5)
    drawn = {}
    for candidates in (1, 4):
        sampler = prompt_value.make_value_sampler(values, lambda: head, 64, optax.sgd(0.0), candidates=candidates)
        drawn[candidates] = sampler.draw(sampler.init(64), key, 8)[0].tolist()
    assert drawn[1] == drawn[4]
