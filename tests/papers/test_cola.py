"""CoLA: codes are learned once, RL moves nothing but the policy over them, and an even policy is even."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient import cola
from experiments.policy_gradient.parts import latent_code_search, latent_code_tasks, latent_codes
from jaxrl_llm.experiment import recipes
from jaxrl_llm.train import fused
from jaxrl_llm.train.plan import start
from tests import close

BASE = dataclasses.replace(cola.Settings(), **cola.EMBEDDED | cola.SMOKE | {"learn_steps": 30, "learning_rate": 0.1})


def test_even_codes_bound_the_usage_term():
    """64 codes: 0.001 (-log 64) = -0.004159, the least there is."""
    close.assert_printed(0.001 * float(latent_codes.code_usage(jnp.zeros((1, 1, 64)))[0, 0]), -0.004159, 6)


def test_every_seed_draws_and_learns_its_own_codes():
    plans = [cola.build(dataclasses.replace(BASE, learn_steps=2, **cola.ARMS[x])) for x in ("cola", "marginal")]
    assert plans[0].init is plans[1].init, "of one seed they are those of all arms with such codes"
    first, again, other = (plans[0].init(jax.random.key(seed)) for seed in (0, 0, 1))
    assert first["model"] is other["model"], "nothing copies the frozen model for a seed"
    jax.tree.map(np.testing.assert_array_equal, first["model"], recipes.bench(BASE).model.params)
    for part in ("inverse", "merge", "codes", "policy"):
        jax.tree.map(np.testing.assert_array_equal, first[part], again[part])
        gap = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), first[part], other[part])
        assert max(jax.tree.leaves(gap)) > 1e-3, part


def test_moments_are_kept_of_what_trains_alone():
    """The frozen language model beside it has neither a gradient nor moments."""
    kept = {}
    for name in ("token", "cola", "marginal", "learned_reward"):
        plan = cola.build(dataclasses.replace(BASE, learn_steps=2, **cola.ARMS[name]))
        params = jax.eval_shape(plan.init, jax.random.key(0))
        states = [jax.eval_shape(lambda p, s=stage: start(s, p, jax.random.key(0)), params) for stage in plan.stages]
        kept[name] = [set(state.opt_state[0].mu) for state in states]
    model = set(recipes.bench(BASE).model.params)
    assert kept == {
        "token": [model], "cola": [{"policy"}], "marginal": [{"policy"}],
        "learned_reward": [{"policy"}, {"reward"}, {"q"}],
    }  # fmt: skip


def test_measurements_draw_from_the_weights_themselves(monkeypatch):
    asked, rollout_of = [], recipes.rollout_of

    def seen(*arguments, **named):
        asked.append(named.get("measured", False))
        return rollout_of(*arguments, **named)

    monkeypatch.setattr(recipes, "rollout_of", seen)
    identity, how = recipes.bench_identity(BASE), cola.how_of(BASE)
    latent_code_tasks._measure.__wrapped__(identity, cola.SOURCES[1:], 1.0, 4, how)
    latent_code_search._by_sampling.__wrapped__(identity, how, 4, latent_code_search.verified)
    assert asked == [True, True]


@pytest.mark.slow
def test_a_reward_moves_the_choice_of_codes_alone():
    plan = cola.build(BASE)
    params = plan.init(jax.random.key(0))
    online = plan.stages[0].method._replace(score=lambda answers, rows: _first_token_reward(rows))
    state, metrics = fused.run(online, start(plan.stages[0]._replace(method=online), jax.tree.map(jnp.copy, params),
                                             jax.random.key(0)), 2)  # fmt: skip
    assert np.isfinite(metrics["loss/total"]).all()
    after = state.params
    for part in ("model", "inverse", "merge", "codes"):
        jax.tree.map(np.testing.assert_array_equal, after[part], params[part])
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), after["policy"], params["policy"])
    assert min(jax.tree.leaves(moved)) > 0


def _first_token_reward(rows):
    """Something that differs within a group."""
    value = jnp.arange(rows.tokens.shape[0]) % 2
    return recipes.Rewards(value.astype(jnp.float32), jnp.ones(value.shape, bool))


@pytest.mark.slow
def test_arms_differ_in_what_they_act_on():
    token, even = (cola.build(dataclasses.replace(BASE, **cola.ARMS[name])) for name in ("token", "random_codes"))
    jax.tree.map(np.testing.assert_array_equal, token.init(jax.random.key(0)), recipes.bench(BASE).model.params)
    assert token.stages
    params = even.init(jax.random.key(0))
    assert not even.stages and not any(np.asarray(x).any() for x in jax.tree.leaves(params["policy"]))
    form, where = latent_code_tasks.form_of(BASE, cola.how_of(BASE)), jnp.ones((1, 1), jnp.int32)
    hidden = jnp.ones((1, 1, params["codes"].shape[1]))
    states = form.states(params["policy"], hidden, 0 * where, where)
    close.assert_near(jax.nn.softmax(form.chances(params["policy"], states), axis=-1), 1 / 3)


def test_what_is_measured():
    """Likelihood of text that earns nothing, and the share of different responses."""
    none = latent_code_tasks.Codes(0)
    measure = latent_code_tasks.measure_of_codes(BASE, cola.SOURCES[1:], none)
    assert measure is latent_code_tasks.measure_of_codes(BASE, cola.SOURCES[1:], none), "one program"
    found = jax.jit(measure)(recipes.bench(BASE).model.params, jax.random.key(0))
    assert 0 < float(found["eval/distinct"]) <= 1 and -2 < float(found["eval/kept"]) < 0
