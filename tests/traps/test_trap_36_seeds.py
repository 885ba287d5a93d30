"""Trap 36, best of seeds: one seed has no interval, and comparisons are paired over all of them."""

import json
import math
import pathlib

import pytest

from jaxrl_llm.experiment.cli import Options
from jaxrl_llm.metrics.intervals import mean_interval, paired_difference, t_quantile
from tests import close
from tests.close import doubles


def test_one_seed_has_no_interval():
    interval = mean_interval([0.9])
    assert interval.n == 1 and math.isnan(interval.low) and math.isnan(interval.high)
    with pytest.raises(ValueError, match="two values"):
        t_quantile(0)


def test_three_seeds_use_students_t_and_say_how_many_they_are():
    interval = mean_interval([0.6, 0.7, 0.8])
    assert interval.n == 3
    close.assert_printed((interval.high - interval.mean) / (0.1 / math.sqrt(3)), 4.303, 3)


def test_arms_are_compared_on_the_same_seeds():
    assert paired_difference([0.5, 0.6, 0.9], [0.4, 0.5, 0.8]).low == doubles(0.1)
    with pytest.raises(ValueError, match="shape"):
        paired_difference([0.5, 0.6], [0.4])


RECORDS = sorted((pathlib.Path(__file__).parents[2] / "results").rglob("*.json"))


def test_every_committed_table_rests_on_three_seeds_at_least():
    tables = [json.loads(path.read_text()) for path in RECORDS]
    tables = [t for t in tables if isinstance(t, dict) and isinstance(t.get("arms"), dict) and "claim" in t]
    assert tables
    for table in tables:
        seeds = [list(arm["seeds"]) for arm in table["arms"].values()]
        most = max(seeds, key=len)  # arms of the primary part go on until it is decided; the others have the first
        assert min(map(len, seeds)) >= 3 and all(s == most[: len(s)] for s in seeds), table.get("experiment")
    assert Options().seeds >= 3
