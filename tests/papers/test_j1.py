"""J1: forced second thoughts, flips, and the trend of accuracy with thought."""

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
        tokens, valid, spent = jax.jit(
            lambda p, k, r=rounds: report_judges.thought_again(task.SUMS, params, p, k, rounds=r)
        )(prompts, jax.random.key(2))
        for row, there, count in zip(np.asarray(tokens), np.asarray(valid), np.asarray(spent), strict=True):
            said = [int(t) for t in row[there]]
            assert said[:12] == [int(t) for t in prompts[list(np.asarray(tokens).tolist()).index(row.tolist())]]
            thoughts = said[12:]
            assert thoughts[-1] == task.CLOSE and thoughts.count(task.CLOSE) == 1 and task.END not in thoughts
            # the untrained judge may write WAIT by itself: at least the forced ones are there
            assert thoughts.count(task.WAIT) >= rounds and len(thoughts) == count + rounds + 1


@pytest.mark.slow
def test_no_round_is_an_ordinary_report():
    prompts, said = task.draw_reports(task.SUMS, jax.random.key(0), 4, error_rate=0.0)
    params = task.SUMS.long.policy.init(jax.random.key(0))
    read, scores, spent = report_judges.forced_scores(task.SUMS, params, prompts, jax.random.key(1), rounds=0)
    assert read.shape == (4,) and scores.shape == (4, 2) and (np.asarray(spent) <= 8).all()
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
