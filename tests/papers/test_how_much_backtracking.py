"""How much backtracking: what its arms imitate, and that they differ in nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.analysis import how_much_backtracking
from experiments.analysis.parts import search_traces
from experiments.analysis.parts import search_traces_task as toy
from jaxrl_llm.experiment import arms

ARMS = how_much_backtracking.ARMS
WRITTEN = [arm for arm, changes in ARMS.items() if "teacher" not in changes and changes.get("back") != -1]


def _settings(arm, smoke=False):
    base = arms.preset(how_much_backtracking, smoke=smoke, model=how_much_backtracking.Settings().model)
    return arms.override(base, ARMS[arm], arm)


def _read(arm, count=24):
    own = _settings(arm)
    rows = search_traces.traces(own.task, (own.back,), own.swapped, puzzles=count)({}, jax.random.key(0))
    return own, *(np.asarray(x) for x in rows[:2])


@pytest.mark.parametrize("arm", WRITTEN)
def test_a_name_says_how_many_wrong_nodes_a_trace_holds(arm):
    own, prompts, responses = _read(arm)
    number = arm.rsplit("_", 1)[1]
    wanted = int(number) if number.isdigit() else 3
    assert (responses == toy.BACK).sum(1).tolist() == [wanted] * len(responses)
    solved = np.asarray(toy.right(jnp.asarray(prompts), jnp.asarray(responses)))
    assert solved.mean() < 0.4 if own.swapped == "traces" else solved.all()


def test_arms_of_a_task_imitate_the_same_puzzles():
    for game in ("sudoku", "countdown", "line"):
        asked = [_read(arm)[1] for arm in WRITTEN if arm.startswith(game)]
        assert len(asked) >= 3 and all((other == asked[0]).all() for other in asked)


def test_the_wrong_work_of_another_puzzle_stands_in_the_places_of_ones_own():
    _, _, own = _read("sudoku_3", 60)
    _, _, wrong = _read("sudoku_wrong", 60)
    np.testing.assert_array_equal(own == toy.BACK, wrong == toy.BACK)
    assert (own != wrong).any(axis=1).mean() > 0.5


def test_a_teacher_imitates_as_long_as_its_learners_and_at_their_rate(monkeypatch):
    """It had 600 steps at a third of the rate of their 2,000, on half of the puzzles: no stronger run than theirs."""
    given = {}
    monkeypatch.setattr(search_traces, "reward_stage", lambda *task, **numbers: "rewards")
    monkeypatch.setattr(search_traces, "distilled", lambda *task, **numbers: given.update(numbers))
    monkeypatch.setattr(search_traces, "distilled_stage", lambda made, **numbers: "imitation")
    own = _settings("sudoku_distilled")
    assert how_much_backtracking.build(own).stages == ("imitation", "rewards")
    assert given["teacher"][0] >= own.imitation_steps and given["teacher"][1] > own.steps
    assert (given["imitation_rate"], given["taught"]) == (own.imitation_rate, own.train_problems)


@pytest.mark.slow
def test_equal_updates_for_all_but_cold():
    """Stages of equal lengths, one of rewards alone where nothing is imitated; every task has a base that read it."""
    for arm in ARMS:
        small = dataclasses.replace(_settings(arm, smoke=True), steps=3, imitation_steps=2)  # few puzzles
        lengths = [stage.steps for stage in how_much_backtracking.build(small).stages]
        own = _settings(arm)
        assert lengths == ([3] if arm.endswith("cold") else [2, 3]), arm
        assert (own.read is search_traces.draw_first) == (own.task in toy.FIRST), arm
        assert (own.steps, own.imitation_steps, own.learning_rate) == (40, 2000, 1e-3), arm
    asked, said = search_traces.draw_first(jax.random.key(0), 600)
    assert set(np.asarray(asked)[:, 0].tolist()) == set(toy.FIRST), "the base has read all of its tasks"
    assert 0.4 < np.asarray(toy.right(asked, said)).mean() < 0.65, "half of what it read is that of another puzzle"
    assert not np.asarray(said == toy.BACK).any()


def test_a_record_measures_as_many_puzzles_as_the_standard_asks_for():
    small = dataclasses.replace(_settings("list_0", smoke=True), eval_problems=512, eval_samples=8)
    assert how_much_backtracking.build(small).measure.keywords == {"problems": 512, "samples": 8}
