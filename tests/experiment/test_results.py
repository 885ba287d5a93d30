"""Records: a round trip, NaN as null, tables on literal numbers."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest

from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import Results, results
from tests import close
from tests.experiment.made import arm
from tests.experiment.made import results as made


def test_round_trip_through_a_file(tmp_path):
    first = arm([0.25, math.nan], curve={0: [0.0, math.nan], 4: [0.25, 1 / 3]})
    text = json.dumps({"arms": {"only": results.plain(dataclasses.asdict(first))}}, allow_nan=False)
    (tmp_path / "results.json").write_text(text)
    record, found = results.read(tmp_path / "results.json")
    assert record["arms"]["only"]["metrics"] == {"eval/accuracy": [0.25, None]}
    second = found.arms["only"]
    assert dataclasses.replace(second, metrics={}, curves={}) == dataclasses.replace(first, metrics={}, curves={})
    np.testing.assert_array_equal(found.values("only", "eval/accuracy"), [0.25, np.nan])
    steps, values = found.curve("only", "eval/accuracy")
    np.testing.assert_array_equal(steps, [0, 4])
    np.testing.assert_array_equal(values, [[0.0, 0.25], [np.nan, 0.333333]])
    np.testing.assert_array_equal(found.values("only", "eval/accuracy", step=4), [0.25, 0.333333])


def test_plain_is_json_with_six_digits():
    found = results.plain({
        1: math.pi * 1e5, "nan": math.nan, "inf": -math.inf, "small": 1.23456789e-12, "array": np.array([1.5, np.nan]),
        "int": np.int64(3), "tuple": (1, (2.5,)), "none": None, "yes": True, "text": "x",
        "function": group.group_normalized_advantages,
    })  # fmt: skip
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "1": 314159.0, "nan": None, "inf": None, "small": 1.23457e-12, "array": [1.5, None], "int": 3,
        "tuple": [1, [2.5]], "none": None, "yes": True, "text": "x",
        "function": "jaxrl_llm.advantages.group.group_normalized_advantages",
    }  # fmt: skip


def test_intervals_leave_undefined_seeds_out():
    # 0.1, 0.2, 0.3: sd 0.1, t(2) = 4.303, half width 0.248434
    found = results.interval([0.1, math.nan, 0.2, math.inf, 0.3])
    assert found.n == 3
    close.assert_printed(found[:3], (0.2, -0.048434, 0.448434), 6)
    assert results.interval([0.5])[3] == 1
    nothing = results.interval([math.nan])
    assert nothing.n == 0 and math.isnan(nothing.mean)


def test_table_on_literal_numbers():
    found = Results({"base": arm([0.1, 0.2, 0.3]), "one": arm([0.5]), "none": arm([math.nan, math.nan])})
    assert results.table(found, ("eval/accuracy", "eval/tokens")) == (
        "| arm | eval/accuracy | eval/tokens | rollouts | tokens | updates |\n"
        "|---|---|---|---|---|---|\n"
        "| base | 0.2 [-0.04843, 0.4484] (n=3) | undefined | 1,000 | 20,000 | 4 |\n"
        "| one | 0.5 (n=1) | undefined | 1,000 | 20,000 | 4 |\n"
        "| none | undefined | undefined | 1,000 | 20,000 | 4 |\n"
    )


def test_what_was_not_recorded_is_a_key_error():
    found = made(a=[1.0])
    for arm_name, metric in (("b", "eval/accuracy"), ("a", "eval/tokens")):
        with pytest.raises(KeyError):
            found.values(arm_name, metric)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("a.b.f", "c.d.f", True),
        ("a.b.f", "c.d.g", False),
        ("a.f(low=0.2, high=0.28)", "b.f(low=0.2, high=0.28)", True),
        ("a.f(low=0.2, high=0.28)", "a.f(low=0.5, high=0.28)", False),
        ("a.f(0.25)", "a.g(0.25)", False),
        ("a.f", "a.f(0.25)", False),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", False),
        ("folder/rows.jsonl", "folder/others.jsonl", False),
        (["a.f", 1], ["b.f", 1], True),
        ({"x": "a.f"}, {"x": "b.g"}, False),
        (0.5, 1.5, False),
    ],
)
def test_a_function_may_move_and_nothing_else(old, new, expected):
    assert results.same(old, new) == results.same(new, old) == expected


def test_a_bound_function_is_recorded_by_its_name_and_numbers():
    """The same in every process: no address, so that a record can be compared with its file."""
    bound = functools.partial(results.plain, 0.25, value=(1, None))
    assert results.plain(bound) == "jaxrl_llm.experiment.results.plain(0.25, value=[1, None])"
