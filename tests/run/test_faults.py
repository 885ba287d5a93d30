"""Faults of a whole run: rewards and weights that are not finite, damaged records, every signal at every moment."""

import json
import os
import pathlib
import pty
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.jobs import grpo
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import flags, parts
from jaxrl_llm.run.records import record, view
from jaxrl_llm.train import checkpoint
from jaxrl_llm.verifiers.verdict import Verdict

SMALL = [
    "--model", "nano", "--data", "chain", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8",
    "--train-problems", "32", "--eval-problems", "4", "--eval-samples", "2", "--checkpoint-every", "1",
]  # fmt: skip


def infinite_for_nines(answer, response):
    """A verifier with a mistake."""
    return Verdict(float("inf") if answer["value"] == "9" else 1.0)


def rows(path):
    lines = [{"prompt": f"m10 {i}+{j}=>", "answer": str((i + j) % 10)} for i in range(10) for j in range(10)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_an_infinite_reward_names_its_verifier(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(parts.VERIFIERS, "exact", infinite_for_nines)
    words = [*SMALL, "--data", rows(tmp_path / "rows.jsonl"), "--verifier", "exact", "--steps", "20"]
    assert grpo.cli([*words, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "is inf, from " in error and "test_faults.infinite_for_nines" in error and "reward of row" in error


def infinite(answer, response):
    """Of ``--reward``."""
    return float("inf")


def test_an_infinite_reward_of_ones_own_is_named(tmp_path, capsys):
    words = [*SMALL, "--data", rows(tmp_path / "rows.jsonl"), "--reward", f"{__name__}:infinite", "--steps", "2"]
    assert grpo.cli([*words, "--out", str(tmp_path / "run")]) == 2
    assert f"is inf, from {__name__}.infinite: a reward is a finite number" in capsys.readouterr().err


def poisoned_model(folder, value):
    folder.mkdir()
    for source in weights.bundled("nano").iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    (file,) = folder.glob("*.safetensors")
    arrays = safetensors.numpy.load_file(file)
    name = sorted(arrays)[3]
    arrays[name] = np.array(arrays[name])
    arrays[name].reshape(-1)[7] = value
    safetensors.numpy.save_file(arrays, file)
    return str(folder)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_do_not_load(tmp_path, capsys, value):
    model = poisoned_model(tmp_path / "model", value)
    assert grpo.cli([*SMALL, "--model", model, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"{model}/model.safetensors: " in error and "infinite or not a number" in error
    assert not (tmp_path / "run").exists()


DAMAGES = {
    "no JSON": b'{"step": 1, "rew\x00\x00\x00',
    "no text": b"\xff\xfe\x00",
    "no object": b"[1, 2]",
    "no step": b'{"reward/mean": 0.5}',
    "text as step": b'{"step": "one"}',
    "nothing else": b'{"step": 1}',
    "deep": b"[" * 100_000,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    assert grpo.cli([*SMALL, "--steps", "3", "--out", str(run)]) == 0
    return run


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_is_left_out_and_named(tmp_path, capsys, finished, damage, place):
    lines = (finished / "metrics.jsonl").read_bytes().splitlines()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([*lines[:place], DAMAGES[damage], *lines[place:]]) + b"\n")
    record.rewind(path, 2)
    kept = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [row["step"] for row in kept if "reward/mean" in row] == [1, 2]
    assert f"{path}:{place + 1} " in capsys.readouterr().err or damage == "nothing else"


def test_resume_and_report_after_damage(tmp_path, capsys, finished):
    """Lines that are broken, and one that lacks everything but its step."""
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", str(finished), str(run)], check=True)
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    (run / "metrics.jsonl").write_bytes(b"\n".join([b"\xff", b'{"step": 1}', lines[1][:50], lines[2], b'"x"', b""]))
    (run / view.FILE).write_bytes(b"{}\n" + (run / view.FILE).read_bytes())
    assert grpo.cli(["--resume", str(run), "--steps", "4"]) == 0
    assert (run / "metrics.jsonl").read_text().count("\n") == 3
    assert json.loads((run / "results.json").read_text())["sampler_trainer_gap"]["max"] > 0
    assert "metrics.jsonl:1 " in capsys.readouterr().err


# they compile as this process does: what is tried is when a signal comes, not what is optimised
ENVIRONMENT = dict(os.environ, XLA_FLAGS="", JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1")


BEGUN = []


@pytest.fixture(autouse=True)
def _no_run_is_left():
    """None that a test began goes on when the test is over."""
    yield
    while BEGUN:
        if (process := BEGUN.pop()).poll() is None:
            process.kill()
            process.wait()


def begin(*words, **more):
    command = [sys.executable, "-m", "jaxrl_llm", *SMALL, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    BEGUN.append(subprocess.Popen(command, env=ENVIRONMENT, **(pipes | more)))
    return BEGUN[-1]


def wait_for(condition, process, seconds=300.0):
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_scheduler_stops_a_run_after_its_step(tmp_path):
    run = tmp_path / "run"
    process = begin("--steps", "5000", "--checkpoint-every", "5000", "--out", str(run))
    wait_for((run / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and f"--resume {run}" in out
    steps = [row["step"] for row in record.read_lines(run / "metrics.jsonl")]
    assert checkpoint.latest(run / "checkpoints").name == f"step_{steps[-1]:08d}"


def test_a_terminal_that_is_gone_saves_and_stops(tmp_path):
    """A real one: its other end is closed, writing to it fails from then on."""
    run = tmp_path / "run"
    ours, theirs = pty.openpty()
    process = begin(
        "--steps", "5000", "--checkpoint-every", "5000", "--out", str(run),
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)

    def ready():
        try:
            os.read(ours, 65536)  # a terminal that nobody reads fills up
        except BlockingIOError:
            pass
        return (run / "metrics.jsonl").exists()

    wait_for(ready, process)
    os.close(ours)  # the kernel sends SIGHUP
    assert process.wait(timeout=120) == 130
    steps = [row["step"] for row in record.read_lines(run / "metrics.jsonl")]
    assert checkpoint.latest(run / "checkpoints").name == f"step_{steps[-1]:08d}"


def test_a_reader_that_leaves_saves_and_stops(tmp_path):
    """``| head``, or a ``tee`` that is killed: the next line that is said would end the run."""
    run = tmp_path / "run"
    process = begin("--steps", "5000", "--checkpoint-every", "5000", "--out", str(run))
    while process.stdout.readline() and not (run / "metrics.jsonl").exists():
        pass
    process.stdout.close()
    assert process.wait(timeout=120) == 130
    steps = [row["step"] for row in record.read_lines(run / "metrics.jsonl")]
    assert steps and checkpoint.latest(run / "checkpoints").name == f"step_{steps[-1]:08d}"


@pytest.mark.parametrize(
    "words",
    [["jaxrl_llm", "commands"], ["jaxrl_llm", "--help"], ["jaxrl_llm.experiment", "compare", "--help"],
     ["experiments.policy_gradient.dr_grpo", "--help"]],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("unbuffered", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_left_before_is_no_traceback(words, unbuffered):
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, *unbuffered, "-m", *words]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(theirs)
    said = done.stderr.splitlines()
    assert done.returncode in (0, 130) and len(said) <= 1 and all(line.startswith("stopped") for line in said), said


@pytest.mark.slow
def test_nohup_is_respected(tmp_path):
    run = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does: the child inherits it
    process = begin("--steps", "2", "--out", str(run))
    signal.signal(signal.SIGHUP, before)
    wait_for((run / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("moment", ["imports", "before the first step"])
def test_a_signal_during_start_up_is_one_line(tmp_path, number, moment):
    run = tmp_path / "run"
    process = begin("--steps", "5000", "--out", str(run))
    if moment == "imports":
        maps = pathlib.Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "numpy" in maps.read_text(), process, 60)
    else:
        wait_for((run / "settings.json").exists, process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "stopped" in out and "Traceback" not in out, out
    if moment != "imports":
        assert f"--resume {run}" in out


def test_two_threads_that_read_flags_leave_the_terminal_to_the_program(monkeypatch, capsys):
    """Workers of one process parse at once: each put back what it had found, and errors were written nowhere after."""
    inside = threading.Event()

    def cli(kind, *, args, **more):
        inside.set()
        time.sleep(0.1)
        print(f"of {args[0]}", file=sys.stderr)
        if args[0] == "two":
            raise SystemExit(2)
        return kind(), []

    monkeypatch.setattr(flags.tyro, "cli", cli)
    before, errors = sys.stderr, []

    def second():
        inside.wait()
        time.sleep(0.05)
        print("skipping checkpoint", file=sys.stderr)  # of another thread, while the first parses
        try:
            flags.read(dict, ["two"], prog="x")
        except UserError as error:
            errors.append(str(error))

    thread = threading.Thread(target=second)
    thread.start()
    assert flags.read(dict, ["one"], prog="x", names=["a"]) == {}
    thread.join()
    assert sys.stderr is before
    assert capsys.readouterr().err == "skipping checkpoint\n"
    assert len(errors) == 1 and "one" not in errors[0]
