"""Trap 35, evaluation variance and leakage: every score has n and an interval; held-out problems are never trained."""

import numpy as np
import pytest

from jaxrl_llm.data.problems import make_split
from jaxrl_llm.data.tasks import chain, countdown
from jaxrl_llm.metrics.intervals import mean_interval, wilson_interval
from jaxrl_llm.run.evaluate import summarize


def test_thirty_problems_at_one_half_have_an_interval_of_eighteen_points():
    for interval in (wilson_interval(15.0, 30), mean_interval([0.0, 1.0] * 15)):
        assert interval.n == 30 and interval.mean == 0.5
        assert 0.15 < interval.mean - interval.low < 0.20
    assert str(wilson_interval(15.0, 30)).endswith("(n=30)")


def test_the_unit_of_the_interval_is_the_problem_not_the_sample():
    value = np.repeat([[0.0], [1.0]], 8, axis=1)  # two problems, eight equal samples each
    at_1, at_8 = summarize(value, np.ones((2, 8), bool))
    assert at_1.n == at_8.n == 2 and (at_1.low, at_1.high) == (0.0, 1.0)  # two problems say next to nothing


def test_invalid_verdicts_are_left_out_of_the_estimate():
    value, valid = np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([[True, False], [False, False]])
    at_1, _ = summarize(value, valid)
    assert at_1.mean == 1.0 and at_1.n == 1
    with pytest.raises(ValueError, match="no sample has a valid verdict"):
        summarize(value, np.zeros((2, 2), bool))


@pytest.mark.parametrize("task", [countdown, chain])
def test_held_out_problems_are_never_trained_whatever_the_seed(task):
    held = {p.identity for p in make_split(task, split="heldout", n=60, seed=0)}
    for seed in (0, 1, 2):
        assert not held & {p.identity for p in make_split(task, split="train", n=300, seed=seed)}
