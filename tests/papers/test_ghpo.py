"""GHPO: longer prefixes of the solution, stage after stage, until one response is right."""

import numpy as np
import pytest

from experiments.curriculum.parts import hints
from tests.papers import staged


def test_worked_prefixes():
    problem = staged.problem("p", "0123456789")
    assert [len(hints.make_prefix_hint(w)(problem)) for w in (0.25, 0.5, 0.75)] == [2, 5, 8]
    assert hints.make_prefix_hint(0.5)(staged.problem("p", "7*3=21,21+5=26")) == "7*3=21,"
    with pytest.raises(ValueError, match="share=1.5"):
        hints.make_prefix_hint(1.5)


def test_escalation_stops_with_the_first_right_response():
    outcomes = [[[0, 0, 0, 0]], [[0, 0, 1, 0]], [[1, 1, 1, 1]], [[1, 1, 1, 1]]]
    slots, _ = staged.scripted(outcomes, group_size=4)
    rows = staged.run(slots, 1, 4)
    assert slots["score"](None, rows).value.tolist() == [0.0, 0.0, 1.0, 0.0]  # the group at 0.25, not at 0.5
    assert hints.draws_of(rows).tolist() == [2] * 4


def test_solvable_prompts_stay_and_hopeless_ones_keep_the_last_group():
    outcomes = np.zeros((4, 2, 2), int)
    outcomes[0, 0] = [1, 0]
    slots, _ = staged.scripted(outcomes, group_size=2)
    rows = staged.run(slots, 2, 2)
    assert hints.stage_of(rows).tolist() == [0, 0, 3, 3]
    assert slots["score"](None, rows).value.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_agrees_with_a_loop():
    rng = np.random.default_rng(3)
    outcomes = (rng.random((4, 12, 3)) < 0.2).astype(int)
    slots, _ = staged.scripted(outcomes, group_size=3)
    rows = staged.run(slots, 12, 3)
    rewards, stages = [], []
    for problem in range(12):
        stage = 0
        while stage < 3 and not outcomes[stage, problem].any():
            stage += 1
        rewards += outcomes[stage, problem].tolist()
        stages += [stage] * 3
    assert slots["score"](None, rows).value.tolist() == [float(r) for r in rewards]
    assert hints.stage_of(rows).tolist() == stages
