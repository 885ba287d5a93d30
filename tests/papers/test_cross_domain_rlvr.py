"""Soft judgements, normalisation over the batch, and a small judge distilled from a large one."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models.parts import answer_judges, free_answers
from jaxrl_llm.advantages import group


def test_worked_soft_judgements():
    yes, no, judged = jnp.full(3, 0.7), jnp.full(3, 0.2), jnp.array([0, 1, 2])
    np.testing.assert_allclose(answer_judges.soft_judgement(yes, no, judged), [0.7, 0.8, 0.0], atol=1e-6)
    both = answer_judges.soft_judgement(yes, no, judged, renormalise=True)
    np.testing.assert_allclose(both, [0.7778, 0.7778, 0.0], atol=1e-4)


def test_worked_normalisation():
    found = group.batch_whitened(jnp.array([1.0, 0.0, 0.0, 0.0]), eps=0.0)
    np.testing.assert_allclose(found, [1.7321, -0.5774, -0.5774, -0.5774], atol=1e-4)
    assert not group.batch_whitened(jnp.full(4, 0.3)).any()


def _cases():
    pairs, truth = answer_judges.judged_pairs(np.random.default_rng(9), 3000, 0.0)
    answers = {
        "reference": jnp.asarray(pairs[:, 1], jnp.int32),
        "modulus": jnp.asarray(pairs[:, 2], jnp.int32),
        "value": jnp.asarray(pairs[:, 1] % pairs[:, 2], jnp.int32),
    }
    return jnp.asarray(pairs[:, 0], jnp.int32), jnp.ones(3000, bool), answers, truth


def test_judges_from_exact_to_distilled():
    value, answered, answers, truth = _cases()
    assert free_answers.equivalent(value, answered, answers).tolist() == truth.tolist()
    large = np.asarray(answer_judges.make_large_judge(0.05)(value, answered, answers)) > 0.5
    assert (large == truth).mean() == pytest.approx(0.95, abs=0.03)
    again = np.asarray(answer_judges.make_large_judge(0.05)(value, answered, answers)) > 0.5
    assert (large == again).all()  # the same question gets the same verdict
    small = answer_judges.make_small_judge(answer_judges.distilled(1500, 0.05), soft=False)(value, answered, answers)
    exact = np.asarray(free_answers.exact(value, answered, answers))
    assert ((np.asarray(small) > 0.5) == truth).mean() > (exact == truth).mean() + 0.05
    assert not answer_judges.make_small_judge(answer_judges.distilled(1500, 0.05), soft=True)(
        value, ~answered, answers
    ).any()


def test_pairs_are_of_all_qualities():
    pairs, truth = answer_judges.judged_pairs(np.random.default_rng(0), 4000, 0.0)
    assert 0.5 < truth.mean() < 0.7
    same = pairs[:, 0] == pairs[:, 1]
    assert 0.35 < same[truth].mean() < 0.65  # half of the right answers stand in the other form
    _, noisy = answer_judges.judged_pairs(np.random.default_rng(0), 4000, 0.1)
    assert (noisy != truth).mean() == pytest.approx(0.1, abs=0.02)
