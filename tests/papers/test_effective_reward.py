"""Clip and Delta: bounded rewards of steps, by the paper's numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models import effective_reward, pav
from experiments.reward_models.parts import progress_verifier, step_labels
from experiments.reward_models.parts import steps as reader
from jaxrl_llm.advantages import process
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.train import online
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.types import Rewards
from tests import close

SCORES = jnp.array([[0.9, 0.7, 0.8, 0.6]])
STEPS = jnp.array([[True, True, True, False]])  # the fourth is the answer


def _returns(rewards):
    return np.cumsum(np.asarray(rewards)[:, ::-1], axis=1)[:, ::-1]


def test_worked_delta_and_clip():
    delta = process.delta_steps(SCORES, STEPS)
    close.assert_near(delta, [[0.2, -0.1, 0.8, 0.0]])
    close.assert_near(_returns(delta), [[0.9, 0.7, 0.8, 0.0]])
    # the second step is none: the first is followed by the third
    for missing in (0.7, np.nan):
        holed = process.delta_steps(jnp.array([[0.9, missing, 0.8]]), jnp.array([[True, False, True]]))
        close.assert_near(holed, [[0.1, 0.0, 0.8]])
    clipped = process.clipped_steps(SCORES, STEPS, bound=0.75)
    close.assert_near(clipped, [[0.0, -0.05, 0.0, 0.0]])
    close.assert_near(process.delta_steps(clipped, STEPS), [[0.05, -0.05, 0.0, 0.0]])


def test_a_repeated_right_step_pays_only_without_bounds():
    # a right step of score 1 is said once, then twice
    once, twice = (jnp.array([[1.0, 1.0, 0.0]]), jnp.array([[1.0, 1.0, 1.0]]))
    there, more = jnp.array([[True, True, False]]), jnp.ones((1, 3), bool)
    sums = [(f(twice, more).sum() - f(once, there).sum()).item() for f in
            (process.plain_steps, process.clipped_steps, process.delta_steps)]  # fmt: skip
    close.assert_near(sums, [1.0, 0.0, 0.0])


def test_returns_are_bounded_and_nothing_leaks_from_missing_steps():
    rng = np.random.default_rng(0)
    scores, valid = rng.random((20, 6)), np.arange(6)[None, :] < rng.integers(0, 7, (20, 1))
    given = jnp.asarray(np.where(valid, scores, np.nan), jnp.float32), jnp.asarray(valid)
    close.assert_near(_returns(process.delta_steps(*given)), np.where(valid, scores, 0))
    clipped = process.clipped_steps(*given, bound=0.5)
    assert float(clipped.max()) <= 0
    both = process.delta_steps(clipped, given[1])
    close.assert_near(_returns(both), np.where(valid, np.minimum(scores - 0.5, 0), 0))
    none = process.delta_steps(SCORES, jnp.zeros((1, 4), bool))
    assert not none.any()


def test_a_head_fits_labels_as_a_regression_in_numpy_does():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 3))
    labels = (features @ [1.0, -2.0, 0.5] + 3 * rng.normal(size=60) > 0.3).astype(float)
    weight = (rng.random(60) < 0.7).astype(float)
    found = progress_verifier.fit_head(*(jnp.asarray(x, jnp.float32) for x in (features, labels, weight)))
    wide, theta = np.c_[features, np.ones(60)], np.zeros(4)
    for _ in range(50):  # Newton's steps to the optimum
        chance = 1 / (1 + np.exp(-wide @ theta))
        hessian = (wide * (weight * chance * (1 - chance))[:, None]).T @ wide
        theta += np.linalg.solve(hessian, wide.T @ (weight * (labels - chance)))
    left = 0.02  # of coefficients of about 1, after 300 steps of Adam, which ends near the optimum and not on it
    np.testing.assert_allclose(np.r_[found.weight, found.bias], theta, rtol=0, atol=left)


def test_both_learned_models_are_kept_where_both_are_asked_for():
    base = effective_reward.EMBEDDED | effective_reward.SMOKE | {"orm": 0.2}
    for asked, kept in (
        ({"learned_from": 4}, {"step_model"}), ({"outcome_from": 4}, {"outcome_model"}),
        ({"learned_from": 4, "outcome_from": 4}, {"step_model", "outcome_model"}),
        ({"learned_from": 4, "outcome_from": 4, "kl_weight": 0.1}, {"step_model", "outcome_model", "reference"}),
    ):  # fmt: skip
        plan = effective_reward.build(dataclasses.replace(effective_reward.Settings(), **base | asked))
        params = jax.eval_shape(plan.init, jax.random.key(0))
        assert set(jax.eval_shape(plan.stages[1].extras, params, jax.random.key(1))) == kept


@pytest.mark.slow
def test_a_learned_step_model_tells_right_steps_of_new_samples_from_wrong_ones():
    settings = recipes.OnlineSettings(levels=(2,), train_problems=192, eval_problems=4, max_new_tokens=24)
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)
    fit = jax.jit(progress_verifier.make_step_model(settings, prompts=128, most=3))
    model = fit(found.model.params, jax.random.key(0))
    rows = progress_verifier.sampled_rows(found, settings, found.model.params, jax.random.key(9), prompts=192)
    steps, right = step_labels.label(stepped, rows)
    labels, valid = reader.per_step(right.astype(jnp.float32), steps, most=3)
    scores, _, there = progress_verifier.step_success(found, model, rows, steps, most=3)
    assert (valid == there).all()
    said, true = np.asarray(scores)[valid], np.asarray(labels)[valid] > 0.5
    pairs = said[true][:, None] > said[~true][None, :]
    assert true.any() and (~true).any() and pairs.mean() > 0.65  # the area under its curve; of chance 0.5


@pytest.mark.slow
def test_a_learned_outcome_model_tells_right_responses_of_new_samples_from_wrong_ones():
    settings = recipes.OnlineSettings(levels=(2,), train_problems=192, eval_problems=4, max_new_tokens=24)
    found = recipes.bench(settings)
    fit = jax.jit(progress_verifier.make_outcome_model(settings, prompts=128))
    model = fit(found.model.params, jax.random.key(0))
    rows = progress_verifier.sampled_rows(found, settings, found.model.params, jax.random.key(9), prompts=192)
    own = jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers)
    true = np.asarray(curricula.train_score(found)(own, rows).value > 0.5)
    said = np.asarray(progress_verifier.outcome_success(found, model, rows))
    pairs = said[true][:, None] > said[~true][None, :]
    assert true.any() and (~true).any() and pairs.mean() > 0.6  # the area under its curve; of chance 0.5


def test_the_learned_arms_differ_in_their_scores_alone():
    base = effective_reward.Settings()
    assert base.outcome_from == 0 and effective_reward.ARMS["learned_orm"]["outcome_from"] == 256
    assert base.learned_from == 0 and effective_reward.ARMS["learned"] == {"learned_from": 256}
    assert effective_reward.ARMS["learned_naive"]["shape"] is effective_reward.ARMS["naive"]["shape"]


@pytest.mark.parametrize("paper", [effective_reward, pav])
def test_a_kl_to_the_start_is_taken_off_what_the_steps_are_paid(paper):
    """Rows that the start finds one nat likelier than the sampler did: every token is paid the weight more."""
    settings = paper.Settings(**paper.EMBEDDED | paper.SMOKE | {"max_new_tokens": 10})
    free, bound = (paper.build(dataclasses.replace(settings, kl_weight=weight)) for weight in (0.0, 0.5))
    params, (mine, theirs) = free.init(jax.random.key(0)), (plan.stages[-1].method for plan in (free, bound))
    state, kept = (plan.stages[-1].extras(params, jax.random.key(1)) for plan in (free, bound))
    assert kept.keys() - state.keys() == {"reference"}
    rows = online.roll(
        theirs, params["model"], jax.random.key(2), jnp.zeros((), jnp.int32), jnp.arange(2, dtype=jnp.int32)
    )
    logp, _ = score_tokens(mine.policy, params["model"], rows)
    rows = rows._replace(sampler_logp=jnp.where(rows.mask, logp - 1.0, 0.0))
    rewards = Rewards(jnp.ones(rows.mask.shape[0]), jnp.ones(rows.mask.shape[0], bool))
    without, other = (m.estimate(params, kept, rows, rewards).extras["returns"] for m in (mine, theirs))
    left = np.asarray(rows.mask)[:, ::-1].cumsum(1)[:, ::-1]  # the last of lambda 1 are sums of what is still paid
    difference = np.where(rows.mask, np.asarray(other) - np.asarray(without), 0.0)
    close.assert_same_sums(
        difference, np.where(rows.mask, 0.5 * left, 0.0), close.forward_sums(recipes.bench(settings).model.config, 64)
    )
