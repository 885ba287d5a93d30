"""Soft judgements, normalisation over the batch, and a small generative judge distilled from a large one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models.parts import answer_judges, free_answers
from jaxrl_llm.advantages import group
from tests import close


def test_worked_soft_judgements():
    yes, no = jnp.array([0.7, 0.2, 0.3]), jnp.array([0.2, 0.7, 0.3])
    close.assert_near(answer_judges.soft_judgement(yes, no), [0.7, 0.3, 0.0])
    both = answer_judges.soft_judgement(yes, no, renormalise=True)
    close.assert_near(both, [7 / 9, 2 / 9, 0.0])


def test_worked_normalisation():
    found = group.batch_whitened(jnp.array([1.0, 0.0, 0.0, 0.0]), eps=0.0)
    close.assert_printed(found, [1.7321, -0.5774, -0.5774, -0.5774], 4)
    assert not group.batch_whitened(jnp.full(4, 0.3)).any()


def cases():
    """``(value, answered, answers, truth)`` of 1000 judgements."""
    pairs, truth = answer_judges.draw_judgements(jax.random.key(9), 1000, error_rate=0.0)
    answers = {"reference": pairs[:, 1], "modulus": pairs[:, 2], "value": pairs[:, 1] % pairs[:, 2]}
    return pairs[:, 0], jnp.ones(1000, bool), answers, np.asarray(truth)


def test_the_large_judge_errs_on_the_same_questions():
    value, answered, answers, truth = cases()
    assert free_answers.equivalent(value, answered, answers).tolist() == truth.tolist()
    large = np.asarray(answer_judges.large_judge(0.05)(value, answered, answers)) > 0.5
    close.assert_share((large == truth).mean(), 0.95, 1000)
    again = np.asarray(answer_judges.large_judge(0.05)(value, answered, answers)) > 0.5
    assert (large == again).all()


@pytest.mark.slow
def test_a_distilled_judge_sees_what_the_rule_misses():
    value, answered, answers, truth = cases()
    small = answer_judges.make_generative(2000, error_rate=0.05, worked=False, soft=True)
    net = small.fit(jax.random.key(1))
    said = np.asarray(small.judge(net, value, answered, answers))
    exact = np.asarray(free_answers.exact(value, answered, answers))
    assert ((said > 0.5) == truth).mean() > (exact == truth).mean() + 0.02
    assert 0 <= said.min() and said.max() <= 1 and len(np.unique(said.round(3))) > 10
    assert not small.judge(net, value, ~answered, answers).any()


def test_a_verdict_is_the_likeliest_word_however_sure_it_is(monkeypatch):
    """Of yes at .4, no at .3 and a third word at .3 the verdict is yes, though it is sure of less than a half."""
    yes, no = jnp.array([0.3, 0.4, 0.3, 0.6, 0.4]), jnp.array([0.4, 0.3, 0.3, 0.3, 0.3])
    monkeypatch.setattr(answer_judges, "verdicts", lambda *_, **__: (yes, no, None))
    value, answers = jnp.zeros(5, jnp.int32), {"reference": jnp.zeros(5, jnp.int32), "modulus": jnp.full(5, 11)}
    answered = jnp.array([True, True, True, True, False])
    given = None, value, answered, answers
    word = answer_judges.make_generative(8, error_rate=0.0, worked=False, soft=False)
    sure = answer_judges.make_generative(8, error_rate=0.0, worked=False, soft=True)
    assert word.judge(*given).tolist() == [0.0, 1.0, 0.0, 1.0, 0.0] and word.passes is None
    assert sure.passes(*given).tolist() == [False, True, False, True, False]
    close.assert_near(sure.judge(*given), np.float32([0.6, 0.4, 0.0, 0.6, 0.0]))


def test_pairs_are_of_all_qualities_and_logs_say_what_they_mean():
    pairs, truth = answer_judges.draw_judgements(jax.random.key(0), 4000, error_rate=0.0)
    found = np.asarray(pairs)
    assert (((found[:, 0] - found[:, 1]) % found[:, 2] == 0) == np.asarray(truth)).all()
    assert 0.5 < truth.mean() < 0.7 and (found[:, :2] < 2 * found[:, 2:]).all() and found.min() == 0
    same = (found[:, 0] == found[:, 1])[np.asarray(truth)]
    assert 0.35 < same.mean() < 0.65  # half of the right answers stand in the other form
    _, noisy = answer_judges.draw_judgements(jax.random.key(0), 4000, error_rate=0.1)
    answers = {"reference": pairs[:, 1], "modulus": pairs[:, 2], "value": pairs[:, 1] % pairs[:, 2]}
    large = answer_judges.large_judge(0.1)(pairs[:, 0], jnp.ones(4000, bool), answers)
    np.testing.assert_array_equal(noisy, large > 0.5)  # the log is that of the judge that is distilled, errors and all
    wrong = np.asarray(noisy) != np.asarray(truth)
    kinds, number = np.unique(found, axis=0, return_inverse=True)
    errs = np.bincount(number.ravel(), weights=wrong) / np.bincount(number.ravel())
    assert set(errs.tolist()) == {0.0, 1.0}  # on a question always or never
    close.assert_share(errs.mean(), 0.1, len(kinds))
    prompts, said = answer_judges.draw_log(jax.random.key(1), 500, error_rate=0.0, worked=True)
    forms = np.asarray(said)[:, :4]
    yes, no = (np.asarray(said)[:, 4] == word for word in (answer_judges.YES, answer_judges.NO))
    assert (forms[yes][:, :2] == forms[yes][:, 2:]).all() and (forms[no][:, :2] != forms[no][:, 2:]).any(1).all()
    assert 0.9 < (yes | no).mean() < 1 and prompts.shape == (500, 5)
    _, short = answer_judges.draw_log(jax.random.key(1), 500, error_rate=0.0, worked=False)
    assert (short[:, 0] == said[:, 4]).all()
