"""A run that learns nothing says so while it runs and in its report; what is the mean of nothing is left out."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.data import formats
from jaxrl_llm.errors import DataError
from jaxrl_llm.jobs import grpo
from jaxrl_llm.run import method, parts, settings
from jaxrl_llm.run.records import health
from jaxrl_llm.types import Rewards, Trajectories
from jaxrl_llm.verifiers.verdict import Verdict

SMALL = [
    "--model", "nano", "--data", "chain", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8",
    "--train-problems", "32", "--eval-problems", "4", "--eval-samples", "2",
]  # fmt: skip
FINE = {
    "group/degenerate_fraction": 0.5, "reward/mean": 0.4, "reward/valid_fraction": 1.0, "grad/norm": 0.3,
    "policy/entropy": 0.7, "length/truncated_fraction": 0.1, "update/skipped": 0.0,
}  # fmt: skip
EQUAL = {"group/degenerate_fraction": 1.0, "grad/norm": 0.0}
WRONG = {
    "every reward is 0: the model never answers in the form": EQUAL | {"reward/mean": 0.0},
    "are cut: raise --max-new-tokens": EQUAL | {"reward/mean": 0.0, "length/truncated_fraction": 0.9},
    "every reward is 1: the model solves all": EQUAL | {"reward/mean": 1.0},
    "all rewards of a group are equal (mean 0.5)": EQUAL | {"reward/mean": 0.5},
    "87% of the responses are cut": {"length/truncated_fraction": 0.87},
    "the gradient is exactly 0 though groups differ": {"grad/norm": 0.0},
    "the entropy is down to 0.001 nats": {"policy/entropy": 0.001},
    "only 20% of the rewards are valid": {"reward/valid_fraction": 0.2},
    "updates are not finite": {"update/skipped": 1.0, "grad/norm": float("nan"), "policy/entropy": float("nan")},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_cause_is_said_once_after_some_steps(words):
    watch, said = health.Health(patience=3), []
    for figures in [WRONG[words], WRONG[words], {}, *[WRONG[words]] * 9]:  # the third step was fine
        said.append(watch.see(FINE | figures))
    assert [k for k, lines in enumerate(said) if any(words in line for line in lines)] == [5]
    assert any(words in line for line in watch.summary())
    assert sum(map(len, said)) == (2 if "raise --max" in words else 1), said  # cut, and equal because of it


def test_a_run_that_learns_hears_nothing():
    watch = health.Health()
    assert not any(watch.see(FINE) for _ in range(50)) and watch.summary() == []
    assert health.judged([{"step": 1}, FINE | {"length/truncated_fraction": None}]).summary() == []


@pytest.mark.parametrize(("trained", "told"), [(0.0, 0), (1.0, 1)])
def test_a_batch_that_waits_for_more_groups_has_no_gradient_and_nothing_is_wrong(trained, told):
    """With ``--refill`` most steps may only collect."""
    figures, watch = FINE | {"grad/norm": 0.0, "refill/trained": trained}, health.Health()
    assert sum(len(watch.see(figures)) for _ in range(9)) == len(watch.summary()) == told


def test_one_response_a_prompt_is_no_group():
    """And where nothing ends a response, all are as long as they can be."""
    figures = FINE | {"group/degenerate_fraction": 1.0, "length/truncated_fraction": 1.0}
    silent = health.silent_of(group_size=1, limited=False)
    watch = health.Health(silent=silent)
    assert not any(watch.see(figures) for _ in range(9)) and health.judged([figures] * 9, silent).summary() == []
    assert len(health.judged([figures] * 9, health.silent_of(group_size=2)).summary()) == 2
    assert any("exactly 0" in line for _ in range(3) for line in watch.see(figures | {"grad/norm": 0.0}))


def rollout(mask, ids=(0, 0, 1, 1)):
    grid = jnp.asarray(mask, jnp.int32)
    line = jnp.zeros(4, jnp.int32)
    return Trajectories(grid, grid, grid, grid > 0, jnp.zeros(grid.shape), line > 0, jnp.asarray(ids), line)


def test_means_of_nothing_are_left_out():
    figures = {name: 0.0 for name in ("policy/entropy", "kl/sampler_max", "reward/mean", "length/right_tokens",
                                      "length/wrong_tokens", "grad/norm")}  # fmt: skip
    rows, mixed = rollout(np.ones((4, 3))), Rewards(jnp.array([0.0, 1, 0, 0]), jnp.ones(4, bool))
    assert health.without_empty(figures, rows, mixed, grpo.with_spread) == figures
    equal = Rewards(jnp.zeros(4), jnp.ones(4, bool))
    assert set(health.without_empty(figures, rows, equal, grpo.with_spread)) == {
        "reward/mean", "length/wrong_tokens", "grad/norm"
    }  # fmt: skip
    assert "policy/entropy" in health.without_empty(figures, rows, equal)  # all groups train: there are tokens
    cut = rows._replace(truncated=jnp.ones(4, bool))  # all out of tokens, which leave the loss
    keep = method.keep(dataclasses.replace(settings.Settings(), overlong="mask"), None)
    assert "policy/entropy" not in health.without_empty(figures, cut, mixed, keep)
    assert "policy/entropy" in health.without_empty(figures, rows, mixed, keep)
    invalid = Rewards(jnp.zeros(4), jnp.zeros(4, bool))
    assert set(health.without_empty(figures, rows, invalid)) == {"grad/norm"}


def nothing_right(answer, response):
    """Pays nobody."""
    return Verdict(0.0)


def rows(path):
    lines = [{"prompt": f"m10 {i}+{j}=>", "answer": str((i + j) % 10)} for i in range(10) for j in range(10)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_run_without_a_reward_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(parts.VERIFIERS, "exact", nothing_right)
    run = tmp_path / "run"
    words = [*SMALL, "--data", rows(tmp_path / "rows.jsonl"), "--verifier", "exact", "--steps", "6"]
    assert grpo.cli([*words, "--out", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.count("step 3: all groups equal for 3 steps: every reward is 0") == 1
    assert out.count("for 3 steps: every reward") == 1  # not again at every step
    assert "all groups equal in 6 of 6 steps: every reward is 0" in out and "gap: mean none, max none" in out
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        assert "policy/entropy" not in line and "kl/sampler_max" not in line and "length/right_tokens" not in line
        assert line["reward/mean"] == 0 and line["length/wrong_tokens"] > 0
    found = json.loads((run / "results.json").read_text())
    assert found["sampler_trainer_gap"] == {"mean": None, "max": None} and len(found["learned_nothing"]) >= 1


BAD = {
    "null prompt": ({"prompt": None, "answer": 1}, "prompt is null"),
    "null answer": ({"prompt": "a", "answer": None}, "answer is null"),
    "empty prompt": ({"prompt": " \n", "answer": 1}, "prompt is empty"),
    "number": ({"prompt": 7, "answer": 1}, "prompt 7 is neither text nor"),
    "object": ({"prompt": {"text": "a"}, "answer": 1}, "is neither text nor"),
    "null content": ({"prompt": [{"role": "user", "content": None}], "answer": 1}, "content of every message"),
    "no content": ({"prompt": [{"role": "user", "content": ""}], "answer": 1}, "not all of it empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_without_text_is_an_error_with_its_line(tmp_path, case):
    row, words = BAD[case]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"prompt": "a", "answer": 1}, row, {"prompt": "b", "answer": 0}])))
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{words}"):
        formats.read_problems(str(path))
    found, bad = formats.read_problems(str(path), bad_rows=1)
    assert [p.prompt for p in found] == ["a", "b"] and bad[0].where.endswith(":2")
    with pytest.raises(DataError, match="question is null"):
        path.write_text(json.dumps({"question": None, "answer": "#### 1"}))
        formats.read_problems(str(path), layout="gsm8k")


def weights_of(run):
    return safetensors.numpy.load_file(run / "model" / "model.safetensors")


def test_what_is_said_of_a_schedule_is_true_of_it():
    usual = dataclasses.replace(settings.Settings(), steps=200, schedule_steps=100)
    assert "comes down to 0 at step 100: what --steps 200 adds changes nothing" in settings.about_schedule(usual)
    constant = dataclasses.replace(usual, schedule="constant")
    rate = method.learning_rate(constant, 100)
    assert float(rate(50)) == float(rate(199)) > 0 and settings.about_schedule(constant) == ""
    assert settings.about_schedule(dataclasses.replace(usual, steps=100)) == ""
    filled = dataclasses.replace(usual, refill="drop", inner_epochs=2)
    assert settings.about_schedule(filled) == (
        "the learning rate of this run comes down to 0 over 200 updates, and --steps 200 make at most 400: with "
        "--refill drop a step whose batch is not full yet makes none"
    )


def test_more_steps_do_not_bend_the_learning_rate(tmp_path, capsys, monkeypatch):
    """Two steps of a schedule of four, resumed to four, are the four steps of a run in one piece."""
    short, long = tmp_path / "short", tmp_path / "long"
    times, sampled = [], grpo.evaluate.sampled

    def counted(*given, **named):
        times.append(1)
        return sampled(*given, **named)

    assert grpo.cli([*SMALL, "--steps", "4", "--out", str(long)]) == 0
    assert grpo.cli([*SMALL, "--steps", "2", "--schedule-steps", "4", "--out", str(short)]) == 0
    assert "the run stops at step 2 of the 4 of its learning rate's schedule" in capsys.readouterr().out
    monkeypatch.setattr(grpo.evaluate, "sampled", counted)
    assert grpo.cli(["--resume", str(short), "--steps", "4"]) == 0
    assert len(times) == 1  # at the end: what it was before is in its folder
    jax.tree.map(np.testing.assert_array_equal, weights_of(short), weights_of(long))
    assert grpo.cli(["--resume", str(long), "--steps", "5"]) == 0
    assert "comes down to 0 at step 4: what --steps 5 adds changes nothing" in capsys.readouterr().out
    assert settings.parse(["--resume", str(long), "--steps", "9"]).schedule_steps == 4
    assert grpo.cli(["--resume", str(long), "--schedule-steps", "9"]) == 2


def test_passes_over_the_prompts_are_steps(tmp_path, capsys):
    """And a resumed run may have more passes, or steps in their place, on the schedule that it began with."""
    run, words = tmp_path / "run", ["--train-problems", "6", "--prompts-per-step", "4"]
    assert grpo.cli([*SMALL, *words, "--epochs", "1", "--out", str(run)]) == 0
    assert "--epochs 1 of 6 rows, 4 a step: 2 steps" in capsys.readouterr().out
    kept = json.loads((run / "settings.json").read_text())
    assert (kept["steps"], kept["epochs"]) == (2, 1.0) and len((run / "metrics.jsonl").read_text().splitlines()) == 2
    more = settings.parse(["--resume", str(run), "--epochs", "2"])
    assert (more.epochs, more.schedule_steps) == (2.0, 2) and grpo.opened(more).settings.steps == 3
    other = settings.parse(["--resume", str(run), "--steps", "5"])
    assert (other.epochs, other.steps) == (0.0, 5) and grpo.opened(other).settings.steps == 5
    assert settings.parse(["--resume", str(run)]).epochs == 1.0
    for wrong, said in (
        (["--epochs", "1", "--steps", "3"], "--steps and --epochs both"),
        (["--epochs", "-1"], "--epochs"),
    ):
        assert grpo.cli(wrong) == 2 and said in capsys.readouterr().err


def test_rows_that_no_answer_can_meet_are_refused_before_there_is_a_folder(tmp_path, capsys):
    """Else the same command with another verifier would be told that the folder holds a run."""
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text("\n".join(json.dumps({"prompt": f"{k}+1=", "answer": [str(k + 1), "x"]}) for k in range(60)))
    assert grpo.cli(["--data", str(data), "--max-new-tokens", "4", "--out", str(run)]) == 2
    assert "verify_any compares one answer, and 60 rows have lists of right ones" in capsys.readouterr().err
    assert not run.exists()
