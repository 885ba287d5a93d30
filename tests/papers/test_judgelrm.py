"""JudgeLRM: its reward by the paper's numbers, and the pairs and reports of the embedded task."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reward_models.parts import judge_pairs as task
from experiments.reward_models.parts import judgements
from tests.close import doubles, singles

GOLD = jnp.array([[8.0, 5.0]])


def _reward(scores, tagged=True, scored=True, gold=GOLD, **options):
    structure = judgements.structure_rewards(jnp.array([tagged]), jnp.array([scored]))
    return float(judgements.judge_rewards(structure, jnp.array([scores], jnp.float32), gold, **options)[0])


def test_worked_rewards():
    cases = [((8, 5), 4.2), ((7, 5), 3.6), ((9, 2), 3.2), ((4, 6), -0.5)]
    for scores, expected in cases:
        assert _reward(scores) == singles(expected)
    assert _reward((11, 3), scored=False) == doubles(-2.5)
    assert _reward((8, 0), tagged=False, scored=False) == doubles(-3.0)
    assert _reward((8, 5), score_terms=False) == doubles(3.0)


def test_a_tie_counts_as_not_worse():
    tie = jnp.array([[5.0, 5.0]])
    assert _reward((4, 6), gold=tie) == doubles(-0.5)
    assert _reward((6, 4), gold=tie) == singles(1 + 2 + 0.6 + 0.2)


def _steps(prompt):
    question, answers = prompt[:4], (prompt[4:8], prompt[8:12])
    scores = []
    for answer in answers:
        before, first = question[0], None
        for k in range(3):
            if first is None and answer[k] != (before + question[k + 1]) % 4:
                first = k
            before = answer[k]
        scores.append(10 - (0 if first is None else 6 - 2 * first) - 3 * (answer[3] == task.FLAW))
    return scores


def test_gold_agrees_with_a_loop():
    prompts = task.draw_prompts(jax.random.key(0), 300)
    expected = [_steps([int(t) for t in row]) for row in prompts]
    np.testing.assert_array_equal(task.gold_scores(prompts), expected)
    swapped = task.gold_scores(task.swapped(prompts))
    np.testing.assert_array_equal(swapped[:, ::-1], expected)
    assert 0.3 < float(task.reasoned(prompts).mean()) < 0.8
    # an error is carried on: no later step of the same answer is wrong by itself
    assert int((~task.right_steps(prompts)).sum(2).max()) == 1


def test_reports_are_read_back():
    prompts, said = task.draw_reports(task.SUMS, jax.random.key(1), 200, error_rate=0.0)
    tagged, scored, scores = task.read_report(task.SUMS, said)
    assert tagged.all() and scored.all()
    np.testing.assert_array_equal(scores, task.gold_scores(prompts))
    _, bare = task.draw_reports(task.SUMS, jax.random.key(1), 200, error_rate=0.0, reasons=False)
    np.testing.assert_array_equal(task.read_report(task.SUMS, bare)[2], scores)
    _, often = task.draw_reflections(task.SUMS, jax.random.key(1), 200, error=0.0)
    assert task.read_report(task.SUMS, often)[1].all()
    assert 0.7 < float((often == task.WAIT).any(1).mean()) < 0.9


def test_broken_reports():
    def read(*tokens):
        row = jnp.array([[*tokens, *[task.END] * (12 - len(tokens))]], jnp.int32)
        tagged, scored, scores = task.read_report(task.SUMS, row)
        return bool(tagged[0]), bool(scored[0]), scores[0].tolist()

    s = task.SCORE
    good = (task.OPEN, task.OK, task.CLOSE, task.ANSWER, s + 8, task.ANSWER, s + 5)
    assert read(*good) == (True, True, [8.0, 5.0])
    assert read(*good[:5]) == (False, False, [0.0, 0.0])  # one answer
    assert read(task.CLOSE, task.OPEN, *good[3:]) == (False, False, [0.0, 0.0])  # out of order
    assert read(*good[:4], task.OK, *good[5:]) == (True, False, [0.0, 0.0])  # no number behind the first
    assert read(task.OPEN, *good) == (False, False, [0.0, 0.0])  # opened twice
    endless = jnp.array([[*good, *[task.OK] * 5]], jnp.int32)
    assert not bool(task.read_report(task.SUMS, endless)[0][0])
