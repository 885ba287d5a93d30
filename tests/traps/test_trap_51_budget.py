"""Trap 51, a silent budget: running out, or losing an endpoint, stops or pauses the run, and no episode pays for it."""

import json

import numpy as np
import pytest

from experiments.agents import mua_rl
from experiments.agents.parts import desks, tau_bench_tools
from jaxrl_llm import experiment
from jaxrl_llm.errors import RunStopped
from jaxrl_llm.experiment import cli
from jaxrl_llm.tools import endpoints
from tests.endpoint_for_tests import serving
from tests.models_for_tests import byte_model
from tests.rollout.test_host_desk import START

SIZES = ["--max-turns", "2", "--action-tokens", "4", "--observation-tokens", "8", "--max-new-tokens", "24",
         "--slots", "4", "--eval-problems", "1", "--eval-samples", "4"]  # fmt: skip


def user(request):
    """What it says depends on the sample, as a model's words do."""
    return "Hello" if len(request["messages"]) == 2 else f"{request['seed'] % 97}?"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Two updates of MUA-RL with a byte model, a desk of one tool, and users behind a real server."""
    few = [(tool, run) for tool, run in tau_bench_tools.RETAIL if tool.name == "calculate"]
    monkeypatch.setitem(desks.DESK_TOOLS, "retail", few)
    (tmp_path / "model").mkdir()
    byte_model(tmp_path / "model", "qwen2", max_positions=1400)
    desk = tmp_path / "desk"
    (desk / "data").mkdir(parents=True)
    for name, rows in START.items():
        (desk / "data" / f"{name}.json").write_text(json.dumps(rows))
    (desk / "wiki.md").write_text("Be kind.")
    for split, said in (("train", "How are you?"), ("test", "Who are you?")):
        (desk / f"tasks_{split}.py").write_text(f"TASKS = [Task(instruction={said!r}, actions=[])]")
    monkeypatch.setattr(endpoints, "FIRST_PAUSE_S", 0.05)
    monkeypatch.chdir(tmp_path)  # replies are kept below the working folder
    mine = ["--model", str(tmp_path / "model"), "--data", f"retail:{desk}", "--user-model", "someone"]
    return ["--smoke", "--seeds", "1", "--arm", "mua_rl", *mine, *SIZES]


def run(command, address, out, *more):
    found = cli.run(mua_rl, [*command, "--user", address, "--out", str(out), *more]).arms["mua_rl"]
    assert found.metrics["world/failed_fraction"] == [0.0]
    return found


def same(one, other):
    for name in one.metrics:
        if not name.startswith(("world/", "time/")):
            np.testing.assert_array_equal(one.metrics[name], other.metrics[name], err_msg=name)


def test_a_spent_budget_stops_the_run_with_a_line_and_keeps_it(command, tmp_path, monkeypatch, capfd):
    with serving(monkeypatch, reply=user) as server:
        given = [*command, "--user", server.address, "--out", str(tmp_path / "cut"), "--endpoint-requests", "14"]
        with pytest.raises(SystemExit) as end:
            experiment.main(mua_rl.__name__, given)
        assert end.value.code == 2 and len(server.seen) == 14
        assert {r["temperature"] for r in server.seen} == {1.0}  # tau-bench's users
        talks = {r["seed"] for r in server.seen if len(r["messages"]) > 2}
        assert len(talks) > 4, "every talk is a sample of its own"
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error: ")]
    assert "is spent: 14 requests" in line and "raise --endpoint-requests 14 and run again" in line
    assert "cut/seeds/mua_rl/seed_0 is kept at step 1, the same command goes on there" in line
    assert (tmp_path / "cut" / "seeds" / "mua_rl" / "seed_0" / "checkpoints" / "stage_0" / "step_00000001").is_dir()


def forgotten(folder):
    """Removes the replies that are kept under the user's name and address."""
    (kept,) = (folder / "runs" / "users").glob("someone-*.jsonl")
    kept.unlink()


@pytest.mark.slow
def test_more_budget_goes_on_to_the_same_end(command, tmp_path, monkeypatch):
    with serving(monkeypatch, reply=user) as server:
        whole = run(command, server.address, tmp_path / "whole")
        asked = len(server.seen)
        forgotten(tmp_path)
        most, slots = asked - 6, 4
        with pytest.raises(RunStopped, match="is kept at step "):
            run(command, server.address, tmp_path / "cut", "--endpoint-requests", str(most))
        same(run(command, server.address, tmp_path / "cut", "--endpoint-requests", str(asked)), whole)
        assert len(server.seen) <= 2 * asked + slots, "nothing is asked twice but what was under way"


@pytest.mark.slow
def test_a_lost_endpoint_pauses_the_run(command, tmp_path, monkeypatch, capfd):
    with serving(monkeypatch, reply=user) as server:
        whole = run(command, server.address, tmp_path / "whole")
        asked = len(server.seen)
        forgotten(tmp_path)
        server.plan = [200] * (asked // 2) + [503] * 40  # more than the client tries by itself
        capfd.readouterr()
        same(run(command, server.address, tmp_path / "paused"), whole)
        told = capfd.readouterr().err
        assert told.count("is lost") == 1 and told.count("answers again") == 1
