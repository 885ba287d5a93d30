"""Two processes with two devices each are one machine of four: same run, same checkpoints, resumed after a kill."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.distributed import hosts
from jaxrl_llm.errors import UserError
from jaxrl_llm.jobs.grpo import cli
from jaxrl_llm.run.settings import Settings, run_folder
from jaxrl_llm.train import checkpoint
from tests import close
from tests.models_for_tests import byte_model, nano, small_config

JOB = [
    "--data", "chain", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8",
    "--train-problems", "32", "--eval-problems", "8", "--eval-samples", "2", "--checkpoint-every", "1",
]  # fmt: skip


def _start(arguments, devices, out, module="jaxrl_llm"):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "COLUMNS": "200",
    }
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], env=environment, stdout=out, stderr=subprocess.STDOUT
    )


def _pair(arguments, folder, **module):
    """Both processes of a job, and their logs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [(folder / f"log{k}_{port}").open("w+") for k in range(2)]
    return [_start([*arguments, "--hosts", f"127.0.0.1:{port},2,{k}"], 2, logs[k], **module) for k in range(2)], logs


def _finish(processes, logs):
    for process, log in zip(processes, logs, strict=True):
        code = process.wait(300)
        log.seek(0)
        assert code == 0, log.read()


def _model(run):
    return safetensors.numpy.load_file(run / "model" / "model.safetensors")


def _lines(run):
    path = run / "metrics.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_two_hosts_are_one_machine_and_survive_a_kill(tmp_path):
    job = [*JOB, "--steps", "8"]
    with (tmp_path / "alone.log").open("w+") as log:
        alone = _start([*job, "--mesh", "data=4", "--out", str(tmp_path / "alone")], 4, log)
        _finish([alone], [log])
    together = tmp_path / "together"
    processes, logs = _pair([*job, "--out", str(together)], tmp_path)
    deadline = time.monotonic() + 240
    while len(_lines(together)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    time.sleep(0.2)
    processes[0].kill()  # as a launcher does when it sees the other die
    for process in processes:
        process.wait(30)
    assert 2 <= len(_lines(together)) < 8
    _finish(*_pair(["--resume", str(together)], tmp_path))
    _finish(*_pair([*job, "--out", str(tmp_path / "quiet")], tmp_path))
    mine, quiet = _model(together), _model(tmp_path / "quiet")
    for name, array in quiet.items():
        np.testing.assert_array_equal(mine[name], array, err_msg=f"the kill changed {name}")
    lines, alone = _lines(together), _lines(tmp_path / "alone")
    rows = [[r["tokens/generated"] for r in found] for found in (lines, alone)]
    assert rows[0] == rows[1] and len(rows[0]) == 8  # the same samples at every step, each written once
    # two hosts and one add up the same gradient; behind Adam no bound of a sum follows (``close.assert_same_descent``)
    _same_first_step(lines[0], alone[0], nano()[2])


@pytest.mark.slow
def test_rollouts_ahead_on_two_hosts(tmp_path):
    """The asynchronous loop: without staleness the host loop, with it the same at every start, killed or not."""
    job = [*JOB[:-1], "2", "--steps", "4"]
    late = ["--loop", "async", "--staleness", "1"]
    ways = {"host": [], "none": ["--loop", "async", "--staleness", "0"], "late": late, "killed": late}
    for name, more in ways.items():
        processes, logs = _pair([*job, *more, "--out", str(tmp_path / name)], tmp_path)
        if name == "killed":
            deadline = time.monotonic() + 240
            while len(_lines(tmp_path / name)) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            for process in processes:
                process.kill()
                process.wait(30)
            assert 2 <= len(_lines(tmp_path / name)) < 4
            processes, logs = _pair(["--resume", str(tmp_path / name)], tmp_path)
        _finish(processes, logs)
    models = {name: _model(tmp_path / name) for name in ways}
    for name, array in models["host"].items():
        np.testing.assert_array_equal(models["none"][name], array, err_msg=name)
        np.testing.assert_array_equal(models["killed"][name], models["late"][name], err_msg=name)
    assert any((models["late"][name] != array).any() for name, array in models["host"].items())
    for name, behind in {"none": [0, 0, 0, 0], "late": [0, 1, 0, 1], "killed": [0, 1, 0, 1]}.items():
        assert [line["sampler/staleness"] for line in _lines(tmp_path / name)] == behind  # empty behind a checkpoint


def _same_first_step(one, other, config):
    wanted = {name: other[name] for name in ("loss/total", "grad/norm", "policy/entropy", "reward/mean")}
    assert wanted["grad/norm"] > 0
    close.assert_same_figures(one, wanted, close.gradient_sums(config, 16, 32))


@pytest.mark.slow
def test_rollouts_in_another_layout_on_two_hosts(tmp_path):
    runs = [tmp_path / name for name in ("together", "alone")]
    job = [*JOB, "--steps", "1", "--mesh", "fsdp=4"]
    _finish(*_pair([*job, "--rollout-mesh", "tensor=2,data=2", "--out", str(runs[0])], tmp_path))
    assert cli([*job, "--out", str(runs[1])]) == 0
    (one,), (other,) = map(_lines, runs)
    assert one["tokens/generated"] == other["tokens/generated"] and one["reshard/sent_bytes"] > 0
    sums = close.forward_sums(nano()[2], 24) + 16 * 8
    close.assert_same_sums(one["loss/total"], other["loss/total"], sums, magnitude=1.0)  # a mean of ratios of 1


@pytest.mark.parametrize(
    "spec, words",
    [("nobody", "neither auto nor"), ("10.0.0.1,2,0", "neither auto nor"), ("10.0.0.1:80,2,2", "must be below")],
)
def test_a_wrong_spec_is_named(spec, words, capsys):
    with pytest.raises(UserError, match=words):
        hosts.connect(spec)
    assert cli([*JOB, "--steps", "1", "--hosts", spec]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "spec, remedy", [("auto", "drop --hosts where this is the only machine"), ("10.0.0.1:80,2,1", "start all of them")]
)
def test_a_job_that_is_not_found_says_what_to_do(spec, remedy, monkeypatch):
    def alone(**known):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", alone)
    with pytest.raises(UserError, match=rf"did not find each other \(coordinator.*\); .*{remedy}"):
        hosts.connect(spec)


def test_one_process_needs_no_others():
    hosts.connect("")
    hosts.barrier("nobody else")
    assert hosts.is_first() and hosts.anywhere(True) and not hosts.anywhere(False)
    tree = {"a": jax.numpy.arange(3), "b": np.ones(2)}
    assert all(isinstance(x, np.ndarray) for x in hosts.gathered(tree).values())
    assert hosts.split_work(5, lambda part: np.arange(5)[part]).tolist() == [0, 1, 2, 3, 4]


def _second_of_two(monkeypatch, *said):
    """This process is the second one; what the first one says, one text after another."""
    texts = iter(said)

    def gather(own):
        return np.stack([np.frombuffer(next(texts).encode().ljust(len(own), b"\0"), np.uint8), own])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", gather)


def test_a_folder_that_is_named_by_a_clock_is_named_by_that_of_the_first_host(monkeypatch):
    """Else each host would keep its parts of a checkpoint in a folder of its own."""
    _second_of_two(monkeypatch, "20260101-000000", "")
    assert run_folder(Settings()) == pathlib.Path("runs/20260101-000000")
    with pytest.raises(ValueError, match="text of 257 bytes"):
        hosts.of_first("a" * 257)


def test_a_run_folder_that_is_not_shared_is_named(tmp_path, monkeypatch):
    """Two processes would wait in the first checkpoint for parts that lie on another disk."""
    hosts.share(tmp_path / "absent")  # one process has nothing to share
    _second_of_two(monkeypatch, *["abc", ""] * 3)
    of_text = hosts.multihost_utils.process_allgather

    def gather(own):
        return np.stack([np.asarray(True), own]) if own.dtype == bool else of_text(own)

    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", gather)
    with pytest.raises(UserError, match=r"--out .*: processes \[1\] do not see what process 0 writes there; give a"):
        hosts.share(tmp_path, patience_s=0.0)
    (tmp_path / ".seen_abc").touch()  # by the first one
    with monkeypatch.context() as refused:
        refused.setattr(type(tmp_path), "exists", _refuse)
        with pytest.raises(UserError, match=r"processes \[1\] do not see"):  # it may not look: the first one is told
            hosts.share(tmp_path, patience_s=0.0)
    hosts.share(tmp_path, patience_s=0.0)


def _refuse(path, **how):
    raise PermissionError(13, "Permission denied", str(path))


def test_what_the_first_process_cannot_do_ends_the_others_as_well(monkeypatch):
    done = []
    with pytest.raises(OSError, match="full"):  # alone, and on the first of several, as it was raised
        hosts.by_first("report", lambda: (_ for _ in ()).throw(OSError(28, "full")))
    hosts.by_first("report", lambda: done.append("alone"))
    _second_of_two(monkeypatch, "", "runs/a is there already")
    hosts.by_first("run folder", lambda: done.append("by the second"))
    with pytest.raises(UserError, match="run folder: runs/a is there already"):
        hosts.by_first("run folder", lambda: done.append("by the second"))
    assert done == ["alone"]


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (OSError(28, "full"), "[Errno 28] full"),
        (UserError("runs/a is there already"), "runs/a is there already"),
        (KeyError("step"), "KeyError: 'step'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_the_others_hear_of_whatever_the_first_process_raises(error, heard, monkeypatch):
    """They wait for its word, and would wait for one that has ended."""
    said = []
    monkeypatch.setattr(hosts, "of_first", lambda text, most: said.append(text) or text)
    with pytest.raises(type(error)) as found:
        hosts.by_first("export", lambda: (_ for _ in ()).throw(error))
    assert found.value is error and said == [heard]


def test_a_folder_that_another_job_holds_is_refused_on_every_process(tmp_path, monkeypatch):
    with checkpoint.held(tmp_path / "a"), pytest.raises(UserError, match="a is in use by another process"):
        with checkpoint.held(tmp_path / "a"):
            pass
    with checkpoint.held(tmp_path / "a"):  # let go of
        pass
    _second_of_two(monkeypatch, "", "b is in use by another process")
    looked = []
    monkeypatch.setattr(hosts, "share", looked.append)
    with checkpoint.held(tmp_path / "b"):  # by the first
        assert looked == [tmp_path / "b"]
        assert not (tmp_path / "b").exists()
    with pytest.raises(UserError, match="run folder: b is in use"), checkpoint.held(tmp_path / "b"):
        pass


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_ends_both_processes(tmp_path):
    """The second one waited for the first, which had ended, until the job was given up."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "settings.json").write_text("{}")
    processes, logs = _pair([*JOB, "--steps", "1", "--out", str(out)], tmp_path)
    began = time.monotonic()
    assert [process.wait(200) for process in processes] == [2, 2] and time.monotonic() - began < 150
    for log in logs:
        log.seek(0)
        assert f"--out {out} already holds a run" in log.read()


PAPER = [
    "--format", "gsm8k", "--max-new-tokens", "8", "--prompts-per-step", "4", "--group-size", "2", "--steps", "3",
    "--eval-every", "3", "--eval-problems", "4", "--eval-samples", "2", "--seeds", "1", "--arm", "dr_grpo",
    "--checkpoint-every", "1",
]  # fmt: skip


@pytest.mark.slow
def test_a_paper_on_two_hosts_is_the_paper_on_one(tmp_path):
    """An experiment with a model and rows of files: the same exported model, one set of files."""
    byte_model(tmp_path, "qwen2", max_positions=300)
    rows = [{"question": f"{k} + 1?", "answer": f"#### {k + 1}"} for k in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    job = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.jsonl"), *PAPER]
    module = {"module": "experiments.policy_gradient.dr_grpo"}
    with (tmp_path / "alone.log").open("w+") as log:
        alone = _start([*job, "--mesh", "data=4", "--out", str(tmp_path / "alone")], 4, log, **module)
        _finish([alone], [log])
    _finish(*_pair([*job, "--out", str(tmp_path / "both")], tmp_path, **module))
    one, other = (tmp_path / out / "seeds" / "dr_grpo" / "seed_0" for out in ("alone", "both"))
    assert [line["step"] for line in _lines(other)] == [1, 2, 3]
    alone, both = _lines(one), _lines(other)
    wanted = {name: alone[0][name] for name in ("loss/total", "grad/norm", "policy/entropy", "reward/mean")}
    config = small_config("qwen2", vocab_size=262)  # that of ``byte_model``
    close.assert_same_figures(both[0], wanted, close.gradient_sums(config, 8, 300))
    mine, theirs = _model(one), _model(other)
    for name in mine:
        np.testing.assert_allclose(theirs[name], mine[name], rtol=0, atol=close.adam_reach(1e-6, 3), err_msg=name)
    assert (tmp_path / "both" / "results.json").is_file()


@pytest.mark.slow
def test_rows_of_ones_own_are_opened_behind_the_meeting_of_the_hosts(tmp_path):
    """Their model touches the devices, after which no process can join the others."""
    byte_model(tmp_path, "qwen2", max_positions=300)
    rows = [{"prompt": f"{k} + 1?", "chosen": f"{k + 1}", "rejected": "no"} for k in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.jsonl"), "--plan", "--arm", "dpo"]
    with (tmp_path / "log").open("w+") as log:
        alone = _start([*job, "--hosts", f"127.0.0.1:{port},1,0"], 2, log, module="experiments.preference.rpo")
        _finish([alone], [log])
        log.seek(0)
        assert "'mesh': 'data=2'" in log.read()
