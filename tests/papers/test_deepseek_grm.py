"""DeepSeek-GRM: what is correct, votes over samples and orders, and the judge of judgements."""

import dataclasses
import json
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import strings
from experiments.reward_models import deepseek_grm
from experiments.reward_models.parts import (
    attribute_rewards,
    judge_panels,
    judgements,
    report_judges,
    text_attributes,
    text_judges,
)  # fmt: skip
from experiments.reward_models.parts import judge_pairs as task
from jaxrl_llm.run import options
from tests import close
from tests.models_for_tests import byte_model


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


def test_arms_of_the_claim_train_for_as_long_before_the_meta_model():
    """A second round of rejection stands where RL does, so that RL is not better for its updates."""

    def updates(arm):
        plan = deepseek_grm.build(dataclasses.replace(deepseek_grm.Settings(), **deepseek_grm.ARMS[arm]))
        return [stage.steps for stage in plan.stages[:-1]]

    assert updates("rejected") == updates("panels_rejected") == updates("rl") == updates("panels") == [100, 150]
    assert updates("direct") == updates("no_principles") == [100, 150]
    assert updates("no_rejection") == [150] and updates("base") == updates("panels_base") == []


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


def test_without_shuffling_a_liking_for_a_place_is_in_every_vote(monkeypatch):
    """A judge that likes the first place: half of the votes are for either answer, or all for one."""

    def sample(world, params, shown, key, *, samples):
        return jnp.zeros((shown.shape[0] * samples, 1), jnp.int32)

    def read(task, said):
        first = jnp.tile(jnp.array([[8.0, 6.0]]), (said.shape[0], 1))
        return said, jnp.ones(said.shape[0], bool), first

    monkeypatch.setattr(strings, "sample", sample)
    monkeypatch.setattr(task, "read_report", read)
    monkeypatch.setattr(
        deepseek_grm.report_judges, "meta_logits", lambda task, meta, shown, said: jnp.zeros(said.shape[0])
    )
    given = task.SUMS, {"judge": None, "meta": None}, task.SUMS.draw_prompts(jax.random.key(0), 3), jax.random.key(1)
    for judged, sums in ((deepseek_grm.both_orders, [224, 224]), (deepseek_grm.one_order, [256, 192])):
        _, scores, _ = judged(*given)
        assert judgements.voted(scores).tolist() == [sums] * 3


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


def test_correctness_of_one_two_and_four_by_a_loop():
    """Of one the exact score, of several the best alone, and no score where there is no answer."""
    rng = np.random.default_rng(2)
    gold, scores = (rng.integers(0, 3, (400, 4)).astype(np.float32) for _ in range(2))
    counts, given = rng.choice([1, 2, 4], 400), rng.choice([1, 2, 4], 400)
    given = np.where(rng.random(400) < 0.8, counts, given)  # a report may score too few or too many
    for k in range(400):
        gold[k, counts[k] :], scores[k, given[k] :] = -1, -1
    right, apart = [], []
    for true, said, count, number in zip(gold, scores, counts, given, strict=True):
        best = {i for i in range(count) if true[i] == max(true[:count])}
        worse = [said[i] for i in range(count) if i not in best]
        right.append(number == count and (
            said[0] == true[0] if count == 1 else all(max(said[i] for i in best) > x for x in worse)
        ))  # fmt: skip
        apart.append(count == 1 or bool(worse))
    assert judgements.picks_best(jnp.asarray(scores), jnp.asarray(gold)).tolist() == right
    assert judgements.decided(jnp.asarray(gold)).tolist() == apart and 50 < sum(right) < 350


def test_reports_on_one_two_and_four_answers_are_read_as_they_were_written():
    prompts, said = task.draw_principled(judge_panels.PANELS, jax.random.key(1), 900, error_rate=0.0, mistaken=0.0)
    _, scored, scores = task.read_report(judge_panels.PANELS, said)
    gold = task.principled_scores(judge_panels.PANELS, prompts)
    assert scored.all() and (scores == gold).all() and judgements.picks_best(scores, gold).all()
    counts = np.asarray(judge_panels.present(prompts)).sum(axis=1)
    for count in (1, 2, 4):
        close.assert_share(np.mean(counts == count), 1 / 3, 900)
    single = np.asarray(gold)[counts == 1]
    assert set(np.unique(single[:, 0])) == {0.0, 1.0} and (single[:, 1:] == -1).all()
    # a report of one answer fewer is one that can be read, and wrong
    fewer = task.report(judge_panels.PANELS, [jnp.ones((1, 4, 3), bool)], jnp.array([[9, -1, -1, -1]]))
    assert task.read_report(judge_panels.PANELS, fewer)[2].tolist() == [[9.0, -1.0, -1.0, -1.0]]
    assert judgements.picks_best(jnp.array([[9.0, -1, -1, -1]]), jnp.array([[9.0, 3, -1, -1]])).tolist() == [False]
    # the answers stand by themselves: what counts in one does not hang on its neighbours
    panel = prompts[counts == 4][:1]
    alone = jnp.concatenate([panel[:, :8], jnp.full((1, 12), judge_panels.ABSENT, jnp.int32)], axis=1)
    whole = task.scores_of(judge_panels.PANELS, judge_panels.right_steps(panel), panel)
    own = task.scores_of(judge_panels.PANELS, judge_panels.right_steps(alone), alone)
    assert int(own[0, 0]) == int(whole[0, 0])


def test_any_order_of_a_panel_has_the_same_vote():
    """Answers are shown in an order of their own; the scores that come back are those of the order that was asked."""
    panels = judge_panels.PANELS
    prompts = judge_panels.draw_prompts(jax.random.key(5), 300)
    order = judge_panels.draw_order(jax.random.key(6), prompts)
    shown = judge_panels.reordered(prompts, order)
    assert (np.sort(np.asarray(order), axis=1) == np.arange(4)).all()
    assert (judge_panels.present(shown) == judge_panels.present(prompts)).all(), "empty places stay last"
    said = task.principled_scores(panels, shown)
    assert (judgements.restored(said, order) == task.principled_scores(panels, prompts)).all()
    assert (judge_panels.swapped(judge_panels.swapped(prompts)) == prompts).all()
    four = np.asarray(judge_panels.present(prompts)).all(axis=1)
    places = np.asarray(order)[four]
    assert {tuple(x) for x in places[:, :2].tolist()} == {(i, j) for i in range(4) for j in range(4) if i != j}


def test_votes_on_a_single_answer_are_those_of_the_majority():
    gold = jnp.array([[1.0, -1, -1, -1], [0.0, -1, -1, -1], [10.0, 3, -1, -1]])
    ones = jnp.where(jnp.arange(32)[None, :] % 4 < jnp.array([[3], [2], [0]]), 1.0, 0.0)  # 24, 16 and none of 32
    every = jnp.stack([ones, *[-jnp.ones_like(ones)] * 3], axis=2)
    every = every.at[2].set(jnp.array([8.0, 6.0, -1.0, -1.0]))
    found = {name: float(x) for name, x in deepseek_grm.of_votes(every, gold).items()}
    # three of four say what is true of the first; as many as not of the second, which is no vote; the pair is right
    close.assert_near(found["eval/vote_32"], 2 / 3)
    close.assert_near(found["eval/vote_2"], 2 / 3)
    close.assert_near(found["eval/vote_1"], 2 / 3)


def test_panels_of_rows_of_ones_own_show_one_answer_or_both(tmp_path):
    """A preferred answer alone is worth 1, the other one 0; orders of both are undone."""
    byte_model(tmp_path, "qwen2", max_positions=400)
    lines = [{"prompt": f"Say {k}.", "chosen": f"It is {k}.", "rejected": f"No {k}!"} for k in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    of_rows = text_judges.Settings(data=str(tmp_path / "pairs.jsonl"), max_new_tokens=16)
    both = dataclasses.asdict(options.ModelSettings(model=str(tmp_path))) | dataclasses.asdict(of_rows)
    settings = types.SimpleNamespace(**both, learning_rate=1e-3)
    pairs = text_judges.open_task(settings).task
    panels = judge_panels.of_task(pairs)
    assert pairs.counts == (2,) and panels.counts == (1, 2)
    prompts = panels.draw_prompts(jax.random.key(0), 400)
    gold = np.asarray(panels.gold_scores(prompts))
    assert {tuple(x) for x in gold.tolist()} == {(10.0, 4.0), (4.0, 10.0), (1.0, -1.0), (0.0, -1.0)}
    close.assert_share(np.mean(gold[:, 1] < 0), 0.5, 400)
    shown, order = panels.shuffled(jax.random.key(1), prompts)
    assert (judgements.restored(panels.gold_scores(shown), order) == gold).all()
    assert 0 < int((np.asarray(order)[gold[:, 1] >= 0, 0] == 1).sum()) < 200 and (order[gold[:, 1] < 0, 0] == 0).all()
    tokenizer = text_judges.text_rows.opened(settings).model.tokenizer
    for row, true in zip(np.asarray(prompts[:40]), gold, strict=False):
        text = tokenizer.decode(row[row != strings.PAD].tolist())
        good, bad = text.find("It is"), text.find("No ")
        seen = {(True, True): (10.0, 4.0) if good < bad else (4.0, 10.0), (True, False): (1.0, -1.0),
                (False, True): (0.0, -1.0)}  # fmt: skip
        assert tuple(true) == seen[good >= 0, bad >= 0] and text.count("response:") == 1 + (true[1] >= 0)
    _, said = task.draw_principled(panels, jax.random.key(0), 100, error_rate=0.0, mistaken=0.0)
    _, scored, scores = task.read_report(panels, said)
    again = task.principled_scores(panels, panels.draw_prompts(jax.random.fold_in(jax.random.key(0), 0), 100))
    assert scored.all() and (scores == again).all()
    told = np.asarray(panels.hinted(prompts, jnp.zeros(400, jnp.int32)))
    hinted = np.array(["Better:" in tokenizer.decode(row[row != strings.PAD].tolist()) for row in told[:40]])
    assert (hinted == (gold[:40, 1] >= 0)).all()


def test_judges_of_rows_of_ones_own_read_the_last_token_not_the_padding(tmp_path):
    """Heads on texts of different lengths: what they say depends on the text, and not on the columns behind it."""
    byte_model(tmp_path, "qwen2", max_positions=400)
    lines = [{"prompt": f"Say {k}.", "chosen": f"It is {k}.", "rejected": f"No {k}!"} for k in range(12)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    of_rows = text_judges.Settings(data=str(tmp_path / "pairs.jsonl"), max_new_tokens=16, scorer_steps=1)
    both = dataclasses.asdict(options.ModelSettings(model=str(tmp_path))) | dataclasses.asdict(of_rows)
    settings = types.SimpleNamespace(**both, learning_rate=1e-3)
    rows = text_judges.text_rows.opened(settings)
    replies, pairs = text_attributes.replies(rows, settings), text_judges.open_task(settings).task
    table, end = rows.train, rows.model.tokenizer.eos_ids[0]
    reward = attribute_rewards.init_reward(replies, jax.random.key(0), outputs=3)
    meta = report_judges.init_meta(pairs, jax.random.key(0))
    meta["head"] = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), meta["head"])
    for read in (
        lambda said: attribute_rewards.scores(replies, reward, table.prompts, said),
        lambda said: report_judges.meta_logits(pairs, meta, table.prompts, said)[:, None],
    ):
        found = read(table.chosen)
        longer = read(jnp.pad(table.chosen, ((0, 0), (0, 5)), constant_values=end))
        close.assert_same_forward(longer, found, rows.model.config, columns=table.prompts.shape[1] + 21)
        assert (found != read(table.rejected)).all()
