"""DeepSeek-GRM: what is correct, votes over samples and orders, and the judge of judgements."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models import deepseek_grm
from experiments.reward_models.parts import judge_pairs as task
from experiments.reward_models.parts import judgements, report_judges
from tests import close


def test_worked_correctness():
    gold = jnp.array([[0.0, 1.0, 0.0]])
    assert judgements.picks_best(jnp.array([[6.0, 8.0, 8.0]]), gold).tolist() == [False]
    assert judgements.picks_best(jnp.array([[6.0, 8.0, 7.0]]), gold).tolist() == [True]
    assert judgements.picks_best(jnp.array([[1.0], [0.0]]), jnp.array([[1.0], [1.0]])).tolist() == [True, False]


def test_a_tie_prefers_no_place_and_teaches_nothing():
    """Of two that are best either may win; where all are alike every report is right, in any order of the answers."""
    gold, scores = jnp.array([[5.0, 5.0], [5.0, 5.0]]), jnp.array([[7.0, 3.0], [3.0, 7.0]])
    assert judgements.picks_best(scores, gold).tolist() == [True, True]
    prompts = task.draw_prompts(jax.random.key(0), 400)
    true = task.principled_scores(task.SUMS, prompts)
    for said in (true, true + jnp.array([[1.0, 0.0]])):
        both = judgements.picks_best(said, true), judgements.picks_best(said[:, ::-1], true[:, ::-1])
        assert (both[0] == both[1]).all()
    every = deepseek_grm.correct(task.SUMS, None, jnp.ones(400, bool), true, prompts)
    assert (every == 1.0).all(), "a perfect judge is never wrong"


def test_what_counts_depends_on_the_question():
    answers = [3, 2, 2, task.CLEAN, 3, 1, 0, task.FLAW]  # of [q, 2, 3, 0]: the second errs at steps 2 and 3
    reasoning, looks = jnp.array([[1 - 1, 3, 3, 0, *answers]]), jnp.array([[1, 2, 3, 0, *answers]])
    assert task.principle(reasoning).tolist() == [0] and task.principle(looks).tolist() == [1]
    assert task.principled_scores(task.SUMS, reasoning).tolist() == task.gold_scores(reasoning).tolist()
    assert task.principled_scores(task.SUMS, looks).tolist() == [[10.0, 10.0 - 2.0 - 5.0]]
    prompts, said = task.draw_principled(task.SUMS, jax.random.key(1), 300, error_rate=0.0, mistaken=0.0)
    tagged, scored, scores = task.read_report(task.SUMS, said)
    assert scored.all() and (scores == task.principled_scores(task.SUMS, prompts)).all()
    assert (said[:, 1] == task.STRICT + task.principle(prompts)).all()
    _, wrong = task.draw_principled(task.SUMS, jax.random.key(1), 300, error_rate=0.0, mistaken=1.0)
    assert (wrong[:, 1] != said[:, 1]).all()
    _, plain = task.draw_principled(task.SUMS, jax.random.key(1), 300, error_rate=0.0, mistaken=0.0, named=False)
    assert (task.read_report(task.SUMS, plain)[2] == scores).all() and (plain[:, 1] < task.STRICT).all()


def test_votes_of_one_to_thirty_two():
    """A judge right in two of three reports wins every vote of many; one that likes the first place gains nothing."""
    gold = jnp.array([[9.0, 5.0], [5.0, 9.0], [7.0, 7.0]])
    place = jnp.tile(jnp.array([[[8.0, 6.0], [6.0, 8.0]]]), (3, 16, 1))  # in the other order it likes the other one
    found = deepseek_grm.of_votes(place, gold)
    assert float(found["eval/vote_1"]) == 0.5 and float(found["eval/vote_32"]) == 0.0
    right = jnp.where(jnp.arange(32)[None, :, None] % 3 < 2, gold[:, None, :], gold[:, None, ::-1])
    found = deepseek_grm.of_votes(right, gold)
    assert set(found) == {f"eval/vote_{k}" for k in (1, 2, 4, 8, 16, 32)}
    assert [float(found[f"eval/vote_{k}"]) for k in (1, 4, 32)] == [1.0, 1.0, 1.0]


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
    close.assert_near(judgements.meta_loss(logits, right), [np.log(2), np.log1p(np.exp(3.0))], magnitude=0)
    slope = jax.grad(lambda x: jnp.sum(judgements.meta_loss(x, right)))(logits)
    close.assert_near(slope, [-0.5, 1 / (1 + np.exp(-3.0))])


@pytest.mark.slow
def test_rejection_keeps_right_reports_on_pairs_that_are_not_too_easy():
    params = {"judge": task.SUMS.world.policy.init(jax.random.key(0))}
    stage = report_judges.rejection_stage(task.SUMS, steps=1, prompts=16, samples=3)
    prompts, said, weight = stage.extras(params, jax.random.key(1))["rows"]
    _, scored, scores = task.read_report(task.SUMS, said)
    gold = task.gold_scores(prompts)
    right = scored & judgements.picks_best(scores, gold) & (gold[:, 0] != gold[:, 1])
    right = np.asarray(right).reshape(16, 3)
    expected = right & ~right.all(1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(weight).reshape(16, 3), expected)
    # by hand: a right report on a pair whose other sample is wrong counts, one of three right ones does not
    value, figures = stage.method.loss(params, {}, (prompts, said, jnp.zeros(48)))
    assert float(value) == 0.0 and float(figures["tokens/trained"]) == 0.0


def test_a_hint_names_the_best_and_changes_nothing_else():
    prompts = task.draw_prompts(jax.random.key(3), 300)
    best = jnp.argmax(task.principled_scores(task.SUMS, prompts), axis=1).astype(jnp.int32)
    told = task.hinted(prompts, best)
    changed = np.asarray(told != prompts)
    assert (changed.sum(1) == 1).all() and (changed.argmax(1) == 7 + 4 * np.asarray(best)).all()
    for read in (task.right_steps, task.flawed, task.principle, task.gold_scores):
        assert (read(told) == read(prompts)).all()
    # a judge of hints is right wherever there is one, and as careless as ever elsewhere
    shown, said = task.draw_principled(task.SUMS, jax.random.key(4), 2000, hints=0.5)
    there = np.asarray((shown >= task.HINTED).any(1))
    right = np.asarray(judgements.picks_best(task.read_report(task.SUMS, said)[2],
                                             task.principled_scores(task.SUMS, shown)))  # fmt: skip
    assert 0.4 < there.mean() < 0.6 and right[there].all() and right[~there].mean() < 0.9


@pytest.mark.slow
def test_pairs_without_a_right_sample_are_tried_again_with_a_hint():
    """A judge trained on hints is right on most hinted prompts; only pairs that failed get them, learnt without."""
    draw = partial(task.draw_principled, hints=0.5)
    params = jax.jit(report_judges.make_start(task.SUMS, steps=300, draw=draw))(jax.random.key(0))
    gold = partial(task.principled_scores, task.SUMS)
    sizes = {"steps": 1, "prompts": 256, "samples": 3, "gold": gold}
    plain = jax.jit(report_judges.rejection_stage(task.SUMS, **sizes).extras)(params, jax.random.key(1))["rows"]
    both = jax.jit(report_judges.rejection_stage(task.SUMS, hints=3, **sizes).extras)(params, jax.random.key(1))["rows"]
    assert all((x[: 256 * 3] == y).all() for x, y in zip(both, plain, strict=True))
    prompts, said, weight = (np.asarray(x[256 * 3 :]) for x in both)
    assert prompts.max() < task.HINTED, "the hint is in no prompt that is learnt"
    asked, first, _ = (np.asarray(x) for x in plain)
    scores = [np.asarray(task.read_report(task.SUMS, jnp.asarray(x))[2]) for x in (first, said)]
    true = np.asarray(gold(jnp.asarray(asked)))

    def right(found):  # independently: the better one alone has the higher score
        return np.sign(found[:, 0] - found[:, 1]) * np.sign(true[:, 0] - true[:, 1]) > 0

    failed = np.repeat(~right(scores[0]).reshape(256, 3).any(1), 3)
    np.testing.assert_array_equal(weight > 0, failed & right(scores[1]))
    apart = failed & (true[:, 0] != true[:, 1])
    again = task.SUMS.world, params["judge"], jnp.asarray(asked), jax.random.key(5)
    unhinted = right(np.asarray(task.read_report(task.SUMS, report_judges.strings.sample(*again))[2]))
    assert apart.sum() > 30 and weight[apart].mean() > unhinted[apart].mean() + 0.05, "a hint helps where nothing did"
