"""DeepSeek-GRM: what is correct, votes over samples and orders, and the judge of judgements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models.parts import judge_pairs as task
from experiments.reward_models.parts import report_judges
from jaxrl_llm.rewards import judgements


def test_worked_correctness():
    gold = jnp.array([[0.0, 1.0, 0.0]])
    assert judgements.picks_best(jnp.array([[6.0, 8.0, 8.0]]), gold).tolist() == [False]
    assert judgements.picks_best(jnp.array([[6.0, 8.0, 7.0]]), gold).tolist() == [True]
    assert judgements.picks_best(jnp.array([[1.0], [0.0]]), jnp.array([[1.0], [1.0]])).tolist() == [True, False]


def test_worked_votes():
    scores = jnp.array([[[7.0, 6.0], [5.0, 6.0], [8.0, 6.0]]])
    assert judgements.voted(scores).tolist() == [[20.0, 18.0]]
    assert judgements.voted(scores, jnp.array([[0.2, 0.9, 0.3]]), keep=2).tolist() == [[13.0, 12.0]]
    assert judgements.voted(scores, jnp.array([[0.2, 0.9, 0.3]]), keep=3).tolist() == [[20.0, 18.0]]
    with pytest.raises(ValueError, match="keep=4"):
        judgements.voted(scores, jnp.zeros((1, 3)), keep=4)


def test_a_shuffled_order_is_undone():
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
    order = jnp.asarray(np.stack([rng.permutation(4) for _ in range(6)]), jnp.int32)
    shown = jnp.take_along_axis(scores, order, axis=1)
    np.testing.assert_array_equal(judgements.restored(shown, order), scores)


def test_meta_loss():
    logits, right = jnp.array([0.0, 3.0]), jnp.array([True, False])
    np.testing.assert_allclose(judgements.meta_loss(logits, right), [np.log(2), np.log1p(np.exp(3.0))], rtol=1e-5)
    slope = jax.grad(lambda x: jnp.sum(judgements.meta_loss(x, right)))(logits)
    np.testing.assert_allclose(slope, [-0.5, 1 / (1 + np.exp(-3.0))], atol=1e-6)


@pytest.mark.slow
def test_rejection_keeps_right_reports_on_pairs_that_are_not_too_easy():
    params = {"judge": report_judges.WORLD.policy.init(jax.random.key(0))}
    stage = report_judges.rejection_stage(steps=1, prompts=16, samples=3)
    prompts, said, weight = stage.extras(params, jax.random.key(1))["rows"]
    _, scored, scores = task.read_report(said)
    right = np.asarray(scored & judgements.picks_best(scores, task.gold_scores(prompts))).reshape(16, 3)
    expected = right & ~right.all(1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(weight).reshape(16, 3), expected)
    # by hand: a right report on a pair whose other sample is wrong counts, one of three right ones does not
    value, figures = stage.method.loss(params, {}, (prompts, said, jnp.zeros(48)))
    assert float(value) == 0.0 and float(figures["tokens/trained"]) == 0.0
