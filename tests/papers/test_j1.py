"""J1: forced second thoughts, flips, and the trend of accuracy with thought."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models.parts import judge_pairs as task
from experiments.reward_models.parts import judgements, report_judges
from jaxrl_llm.advantages import group
from tests import close


def test_worked_advantages():
    found = group.reinforce_pp_advantages(jnp.array([1.0, 0.0, 1.0, 0.0]), eps=0.0)
    close.assert_near(found, [1, -1, 1, -1])


def test_flips_and_trend():
    found = judgements.flips(jnp.array([False, False, True, True]), jnp.array([True, False, True, False]))
    assert {k: float(v) for k, v in found.items()} == {"put_right": 0.25, "spoilt": 0.25}
    tokens = jnp.array([1.0, np.e, np.e**2])
    close.assert_near(judgements.log_slope(jnp.array([0.2, 0.3, 0.4]), tokens), 0.1)
    rng = np.random.default_rng(0)
    x, y = rng.uniform(1, 9, 5), rng.random(5)
    slope = np.polyfit(np.log(x), y, 1)[0]
    found = judgements.log_slope(jnp.asarray(y, jnp.float32), jnp.asarray(x, jnp.float32))
    close.assert_near(found, slope)
    assert float(judgements.log_slope(jnp.array([0.1, 0.9]), jnp.array([2.0, 2.0]))) == 0.0


@pytest.mark.slow
def test_every_round_puts_one_wait_in_place_of_the_end():
    params = task.SUMS.long.policy.init(jax.random.key(0))
    prompts = task.draw_prompts(jax.random.key(1), 6)
    for rounds in (0, 2):
        tokens, valid, spent, closed = jax.jit(
            lambda p, k, r=rounds: report_judges.thought_again(task.SUMS, params, p, k, rounds=r)
        )(prompts, jax.random.key(2))
        for row, there, count, shut, asked in zip(
            *map(np.asarray, (tokens, valid, spent, closed, prompts)), strict=True
        ):
            said = [int(t) for t in row[there]]
            assert said[:12] == asked.tolist()
            thoughts = said[12:]
            assert thoughts.count(task.CLOSE) == int(shut) and task.END not in thoughts
            assert (thoughts[-1:] == [task.CLOSE]) == shut and len(thoughts) == count + int(shut) <= 36


def _judge_of_three_rounds(closes=task.CLOSE):
    """``generate`` of a judge that goes by what it reads: six checks, twice WAIT, then ``closes``, 7 and 4."""

    def next_token(text):
        if task.CLOSE in text:
            return [task.ANSWER, task.SCORE + 7, task.ANSWER, task.SCORE + 4, task.END][
                len(text) - text.index(task.CLOSE) - 1
            ]
        last = max((k for k, t in enumerate(text) if t in (task.OPEN, task.WAIT)), default=-1)
        if last < 0:
            return task.OPEN
        if len(text) - last <= 6:
            return (task.OK, task.BAD)[(len(text) - last) % 2]
        return task.WAIT if text.count(task.WAIT) < 2 else closes

    def generate(policy, params, tokens, valid, keys, *, max_new_tokens, eos_ids, pad_id, **rest):
        n, width = tokens.shape
        whole = np.full((n, width + max_new_tokens), pad_id, np.int32)
        whole[:, :width] = tokens
        mask = np.zeros(whole.shape, bool)
        for i in range(n):
            text = [int(t) for t in np.asarray(tokens[i])[np.asarray(valid[i])]][12:]
            for k in range(width, width + max_new_tokens):
                text.append(next_token(text))
                whole[i, k], mask[i, k] = text[-1], True
                if text[-1] in eos_ids:
                    break
        segments = np.concatenate([np.asarray(valid), mask[:, width:]], axis=1).astype(np.int32)
        return SimpleNamespace(tokens=jnp.asarray(whole), mask=jnp.asarray(mask), segment_ids=jnp.asarray(segments))

    return generate


def test_no_forced_round_leaves_a_report_as_it_is(monkeypatch):
    """A judge of three rounds writes three; each forced one adds a whole round, up to five, and no other WAIT."""
    monkeypatch.setattr(report_judges, "generate", _judge_of_three_rounds())
    prompts = task.draw_prompts(jax.random.key(1), 2)
    a_round = [task.BAD, task.OK] * 3
    for rounds, whole in ((0, 3), (1, 4), (2, 5), (4, 5)):
        tokens, valid, spent, closed = report_judges.thought_again(
            task.SUMS, None, prompts, jax.random.key(2), rounds=rounds
        )
        said = [np.asarray(row)[np.asarray(there)].tolist()[12:] for row, there in zip(tokens, valid, strict=True)]
        assert said == [[task.OPEN, *a_round, *[task.WAIT, *a_round] * (whole - 1), task.CLOSE]] * 2
        assert spent.tolist() == [7 * whole] * 2 and closed.tolist() == [True, True]
        read, scores, _ = report_judges.forced_scores(task.SUMS, None, prompts, jax.random.key(2), rounds=rounds)
        assert read.tolist() == [True, True] and scores.tolist() == [[7.0, 4.0]] * 2


@pytest.mark.parametrize("ends", [task.END, task.OK])
def test_thoughts_that_are_not_closed_are_not_read(monkeypatch, ends):
    """An end in the midst of them, or none at all: no CLOSE and no WAIT is put where the judge wrote none."""
    monkeypatch.setattr(report_judges, "generate", _judge_of_three_rounds(closes=ends))
    prompts = task.draw_prompts(jax.random.key(1), 1)
    for rounds in (0, 2):
        tokens, valid, spent, closed = report_judges.thought_again(
            task.SUMS, None, prompts, jax.random.key(2), rounds=rounds
        )
        said = np.asarray(tokens)[0][np.asarray(valid)[0]].tolist()[12:]
        assert said.count(task.WAIT) == 2 and task.CLOSE not in said and closed.tolist() == [False]
        assert len(said) == spent.tolist()[0] == (21 if ends == task.END else 36)


@pytest.mark.slow
def test_no_round_is_an_ordinary_report():
    prompts, said = task.draw_reports(task.SUMS, jax.random.key(0), 4, error_rate=0.0)
    params = task.SUMS.long.policy.init(jax.random.key(0))
    read, scores, spent = report_judges.forced_scores(task.SUMS, params, prompts, jax.random.key(1), rounds=0)
    assert read.shape == (4,) and scores.shape == (4, 2) and (np.asarray(spent) <= 36).all()
    assert said.shape == (4, task.REPORT_TOKENS)


def test_long_reports_are_of_every_length_and_no_round_is_better():
    prompts, said = task.draw_reflections(task.SUMS, jax.random.key(3), 2000)
    waits = np.asarray((said == task.WAIT).sum(1))
    assert set(waits) == {0, 1, 2, 3, 4} and np.bincount(waits).min() > 300
    tagged, scored, scores = task.read_report(task.SUMS, said)
    assert tagged.all() and scored.all()
    assert said.shape[1] == task.LONG_REPORT >= 1 + 5 * 6 + 4 + 1 + 4 + 1, "the longest forced report was trained"
    right = np.asarray(judgements.three_way(scores, task.gold_scores(prompts)))
    by_rounds = [right[waits == k].mean() for k in range(5)]
    assert max(by_rounds) - min(by_rounds) < 0.12, "the last round errs as the first does"
