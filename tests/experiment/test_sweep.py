"""A swept setting: every arm with every value, seeds of its own, judged by training alone."""

import json
import pathlib

import numpy as np
import pytest

from jaxrl_llm.experiment import __main__ as commands
from jaxrl_llm.experiment import results, sweep
from tests.experiment.made import results as made

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = "tests/experiment/tiny.py"


def test_every_arm_gets_every_value_and_nothing_is_measured(tmp_path, capsys, monkeypatch):
    words = ["--values", "0.02", "0.4", "--seeds", "2", "--arm", "method", "warm", "--out", str(tmp_path)]
    scores = sweep.sweep(TINY, words)
    assert {name: list(row) for name, row in scores.items()} == {n: ["0.02", "0.4"] for n in scores}
    assert list(scores) == ["method", "warm"]
    assert all(cell.n == 2 for row in scores.values() for cell in row.values())
    kept = [json.loads(path.read_text()) for path in (tmp_path / "arms").glob("*/*.json")]
    assert all(arm["metrics"].keys().isdisjoint({"eval/accuracy"}) for arm in kept)
    assert sorted((arm["settings"]["learning_rate"], *arm["seeds"]) for arm in kept) == [
        (rate, seed) for rate in (0.02, 0.4) for seed in (1000, 1001) for _ in range(2)
    ]
    found = json.loads((tmp_path / "results.json").read_text())
    assert (
        found["command"] == f"python -m jaxrl_llm.experiment sweep {TINY} --values 0.02 0.4 --seeds 2 --arm method warm"
    )
    out = capsys.readouterr().out
    assert "best over these arms; the file has 0.1; results in" in out and "| all arms |" in out
    means = [np.mean([row[v].mean for row in scores.values()]) for v in ("0.02", "0.4")]
    assert f"learning_rate {('0.02', '0.4')[int(np.argmax(means))]} is best" in out
    monkeypatch.chdir(tmp_path)
    sweep.sweep(str(ROOT / TINY), [*words, "--record"])
    assert "taken from" in capsys.readouterr().out and (tmp_path / "results/sweeps/tiny.json").is_file()


def test_the_second_half_counts():
    found = made(a=[0.0, 0.0])
    found.arms["a"].curves["reward/mean"] = {"step": [1, 2, 3], "values": [[9.0, 1.0, 3.0], [9.0, 0.0, np.nan]]}
    np.testing.assert_array_equal(sweep.second_half(found, "a", "reward/mean"), [2.0, 0.0])


def test_a_value_at_which_a_seed_diverged_is_not_the_best():
    """However good the reward was before: neither by what the seed had earned, nor by the seeds that are left."""
    found = made(**{"a@1": [0.0, 0.0], "a@0.1": [0.0, 0.0]})
    for name, rewards, loss in (("a@1", 0.9, np.nan), ("a@0.1", 0.5, 0.1)):
        found.arms[name].curves["reward/mean"] = {"step": [1, 2], "values": [[0.0, rewards], [0.0, rewards]]}
        found.arms[name].metrics["loss/total"] = [0.1, loss]
    np.testing.assert_array_equal(sweep.second_half(found, "a@1", "reward/mean"), [0.9, np.nan])
    scores = {"a": {v: results.interval(sweep.second_half(found, f"a@{v}", "reward/mean")) for v in ("1", "0.1")}}
    assert sweep.best_of(scores, 2) == "0.1"
    assert sweep.best_of({"a": {"1": scores["a"]["1"]}}, 2) == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep"], "usage: "),
        (["sweep", TINY], "--values needs at least two, all different"),
        (["sweep", TINY, "--values", "1", "1"], "--values needs at least two, all different"),
        (["sweep", TINY, "--values", "1", "x"], "--values 1 x: learning_rate is of type float"),
        (["sweep", TINY, "--field", "advantages", "--values", "1", "2"], "--field advantages: the settings that are"),
        (["sweep", TINY, "--field", "warm_steps", "--values", "1", "3"], "arm warm sets warm_steps itself; sweep the"),
        (["sweep", TINY, "--field", "eval_samples", "--values", "1", "3"], "--field eval_samples"),
        (["sweep", TINY, "--values", "1", "2", "--arm", "x"], "--arm x: the arms are baseline, method, warm"),
        (["sweep", TINY, "--values", "1", "2", "--record", "--smoke"], "--record keeps whole runs only: drop"),
        (["sweep", TINY, "--values", "1", "2", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["sweep", TINY, "--value", "1", "2"], "unknown argument '--value'; did you mean --values?"),
        (["sweep", "nowhere.py", "--values", "1", "2"], "nowhere.py is no Python file"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert commands.main(words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
