"""Critique-GRPO: the shaped probability, which refinement is taken, and what trains where there is none."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from experiments.parts import start_rates
from experiments.policy_gradient import critique_grpo
from experiments.policy_gradient.parts import refinement
from jaxrl_llm.advantages import group, selection
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.experiment import Results
from jaxrl_llm.losses import mixed
from jaxrl_llm.losses.policy import reinforce_loss
from jaxrl_llm.types import Rewards
from tests import close
from tests.experiment import made

PROBLEM = Problem("chain", "m11 3+5*4=>", "3+5=8,8*4=10#10", {"value": 10}, 2, "x")


def test_shaped_probability_and_its_slope():
    """f(.01, .1, .9) = .0909, .5, .9; gradients .0826, .25, .09: largest at p = gamma."""
    logp, ones = jnp.log(jnp.array([[0.01, 0.1, 0.9]])), jnp.ones((1, 3))

    def surrogate(x):
        return -jnp.sum(mixed.shaped_probability_loss(x, logp, ones, ones > 0).loss)

    close.assert_printed(surrogate(logp), 0.0909 + 0.5 + 0.9, 4)
    close.assert_printed(jax.grad(surrogate)(logp), [[0.0826, 0.25, 0.09]], 4)


def test_the_first_right_refinement_or_the_best_is_taken():
    for scores, want in (([0.0, 1.0, 1.0], 1), ([0.0, 0.3, 0.1], 1), ([0.0, 0.0, 0.0], 0)):
        best = selection.best_members(jnp.array(scores), jnp.zeros(3, jnp.int32))
        assert best.tolist() == [k == want for k in range(3)]


def test_a_refinement_enters_the_groups_mean_and_only_its_own_tokens_are_shaped():
    rewards, ids = jnp.array([0.0, 0.0, 0.0, 1.0]), jnp.zeros(4, jnp.int32)
    advantages = group.per_token(group.dr_grpo_advantages(rewards, ids), jnp.ones((4, 1), bool))
    close.assert_near(advantages[:, 0], [-0.25, -0.25, -0.25, 0.75])
    logp, mask = jnp.log(jnp.array([[0.5], [0.2], [0.9], [0.1]])), jnp.ones((4, 1), bool)
    outside = jnp.array([False, False, False, True])

    def loss(x, outside):
        own, other = (f(x, logp, advantages, mask) for f in (mixed.ratio_loss, mixed.shaped_probability_loss))
        return jnp.sum(mixed.combined(own, other, outside).loss)

    gradient = jax.grad(loss)(logp, outside)
    close.assert_near(gradient[:, 0], [0.25, 0.25, 0.25, -0.75 * 0.25])
    # without a refinement: Dr. GRPO without a clip
    plain = jax.grad(lambda x: jnp.sum(reinforce_loss(x, advantages, mask).loss))(logp)
    close.assert_near(jax.grad(loss)(logp, outside & False), plain)


def test_critiques_say_more_and_more():
    said = [critic(PROBLEM, 1) for critic in (refinement.indicative, refinement.with_answer, refinement.located)]
    assert said == ["F", "F#10", "F1"]
    assert {critic(PROBLEM, None) for critic in (refinement.indicative, refinement.located)} == {"T"}
    assert refinement.wrong_step(PROBLEM.solution, "3+5=8,8*4=9#9") == 1


def test_what_the_start_did_not_solve_is_counted_by_itself():
    """Four problems with 0, 2, 3 and 16 of 16 samples of the start right, two responses to each now."""
    rates = jnp.repeat(jnp.array([0, 2, 3, 16]) / 16, 2)
    rewards = Rewards(jnp.array([1.0, 0, 0, 0, 1, 1, 1, 1]), jnp.array([True] * 8))
    assert float(start_rates.right_where_the_start_failed(rewards, rates)) == 0.25
    assert float(start_rates.right_where_the_start_failed(rewards, rates, most=0)) == 0.5
    assert float(start_rates.right_where_the_start_failed(rewards, rates + 1)) == 0.0


def test_the_claim_rests_on_what_was_unsolved():
    values = {"unsolved/accuracy": (0.2, 0.1, 0.15), "eval/accuracy": (0.4, 0.5, 0.4)}
    arms = {
        name: dataclasses.replace(made.arm([0.0, 0.0]), metrics={m: [x[k], x[k] + 0.001] for m, x in values.items()})
        for k, name in enumerate(("critique", "grpo", "indicative"))
    }
    found = critique_grpo.claim(Results(arms))
    assert found.primary.metric == "unsolved/accuracy" and len(found.secondary) == 2
    assert all(part.by == 0 for part in found.secondary)


@pytest.mark.slow
def test_the_measurement_knows_what_the_start_solves():
    """At the start itself no more than 2 in 16 are right there, and the figure is one of all arms."""
    settings = dataclasses.replace(critique_grpo.Settings(), **critique_grpo.EMBEDDED | critique_grpo.SMOKE)
    plans = [critique_grpo.build(dataclasses.replace(settings, **critique_grpo.ARMS[a])) for a in ("grpo", "critique")]
    assert plans[0].measure is plans[1].measure
    found = jax.jit(plans[0].measure)(plans[0].init(jax.random.key(0)), jax.random.key(0))
    assert 0 <= float(found["unsolved/accuracy"]) <= float(found["eval/pass@4"])
    assert float(found["unsolved/accuracy"]) < 0.5
