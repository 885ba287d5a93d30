"""CoLA: codes are learned once, RL moves nothing but the policy over them, and an even policy is even."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient import cola
from experiments.policy_gradient.parts import latent_code_tasks, latent_codes
from jaxrl_llm.experiment import recipes
from jaxrl_llm.train import fused
from jaxrl_llm.train.plan import start
from tests import close

BASE = dataclasses.replace(cola.Settings(), **cola.EMBEDDED | cola.SMOKE | {"learn_steps": 30, "learning_rate": 0.1})


def test_even_codes_bound_the_usage_term():
    """64 codes: 0.001 (-log 64) = -0.004159, the least there is."""
    close.assert_printed(0.001 * float(latent_codes.code_usage(jnp.zeros((1, 1, 64)))[0, 0]), -0.004159, 6)


@pytest.mark.slow
def test_a_reward_moves_the_choice_of_codes_alone():
    plan = cola.build(BASE)
    params = plan.init(jax.random.key(0))
    assert plan.init(jax.random.key(1))["codes"] is params["codes"], "learned once"
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
    assert token.init(jax.random.key(0)) is recipes.bench(BASE).model.params and token.stages
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
