"""A checkpoint is the whole run; damaged ones are skipped; a full disk loses nothing; kill -9 changes nothing."""

import atexit
import errno
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import tensorstore

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.io import weights
from jaxrl_llm.run.records import record
from jaxrl_llm.train import checkpoint
from jaxrl_llm.types import TrainState
from tests.models_for_tests import small_model


def _state(step=3, width=4):
    params = {"w": jnp.arange(width, dtype=jnp.float32), "layers": {"q": jnp.ones((2, 3, width))}}
    return TrainState(
        params=params,
        opt_state=optax.adam(1e-3).init(params),
        step=jnp.asarray(step, jnp.int32),
        key=jax.random.key(7),
        sampler=(jnp.asarray(5, jnp.int32), jnp.arange(6, dtype=jnp.int32)),
        extras={"ema": {"w": jnp.full((width,), 0.1)}},
    )


def _equal(a, b):
    np.testing.assert_array_equal(jax.random.key_data(a.key), jax.random.key_data(b.key))
    jax.tree.map(np.testing.assert_array_equal, a._replace(key=0), b._replace(key=0))


def test_roundtrip_is_exact_and_old_ones_go(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, _state(step), keep=2)
    assert checkpoint.steps(tmp_path) == [2, 3]
    blank = jax.tree.map(lambda x: x if checkpoint._is_key(x) else jnp.zeros_like(x), _state())
    _equal(checkpoint.restore(checkpoint.latest(tmp_path), blank), _state(3))


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "manifest"])
def test_damaged_checkpoint_is_skipped_with_a_message(tmp_path, capsys, harm):
    checkpoint.save(tmp_path, _state(1))
    checkpoint.save(tmp_path, _state(2))
    newest = tmp_path / "step_00000002"
    files = [p for p in (newest / "state").rglob("*") if p.is_file()]
    victim = newest / "manifest.json" if harm == "manifest" else max(files, key=lambda p: p.stat().st_size)
    if harm == "remove":
        victim.unlink()
    else:
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 0xFF
        victim.write_bytes(data if harm == "flip" else data[: len(data) // 2])
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000001"
    assert "step_00000002" in capsys.readouterr().err
    _equal(checkpoint.restore(checkpoint.latest(tmp_path), _state(0)), _state(1))


def test_what_lies_damaged_beyond_a_step_takes_no_place_from_what_is_written(tmp_path):
    """The run went on from before it: what it writes now is the newest that there is."""
    for step in (20, 30):
        checkpoint.save(tmp_path, _state(step))
        (tmp_path / f"step_{step:08d}" / "manifest.json").write_text("{")
    assert checkpoint.latest(tmp_path) is None
    for step in (10, 11, 12):
        checkpoint.save(tmp_path, _state(step))
        assert checkpoint.latest(tmp_path) == tmp_path / f"step_{step:08d}"
    assert checkpoint.steps(tmp_path) == [11, 12, 20, 30]


def test_a_step_that_is_written_again_is_never_gone(tmp_path, monkeypatch):
    """Killed as soon as anything is deleted."""

    def killed(*given, **named):
        raise KeyboardInterrupt

    checkpoint.save(tmp_path, _state(1))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, _state(1)._replace(key=jax.random.key(8)))
    assert checkpoint.steps(tmp_path) == [1] and checkpoint.latest(tmp_path) == tmp_path / "step_00000001"
    monkeypatch.undo()
    checkpoint.save(tmp_path, _state(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_half_written_checkpoint_is_not_seen(tmp_path):
    checkpoint.save(tmp_path, _state(1))
    (tmp_path / ".writing_00000002").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000001"


def test_full_disk_stops_with_the_remedy_and_keeps_the_rest(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, _state(1))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="disk is full.*older checkpoints are intact"):
        checkpoint.save(tmp_path, _state(2))
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000001"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs privileges")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk):
    """Checkpoint, trained model and metrics: each is one error that says how to go on, and nothing half-written."""
    _, params, config = small_model()
    with pytest.raises(UserError, match="disk is full.*older checkpoints are intact"):
        checkpoint.save(small_disk / "checkpoints", _state(1, width=10_000))
    assert checkpoint.latest(small_disk / "checkpoints") is None
    with pytest.raises(UserError, match="No space left on device; free space .*--resume"), record.resumable(small_disk):
        while True:
            record.append_line(small_disk / "metrics.jsonl", {"step": 1, "text": "x" * 5000})
    assert all(row["step"] == 1 for row in record.read_lines(small_disk / "metrics.jsonl"))
    with pytest.raises(UserError, match="No space left on device; free space .*--resume"), record.resumable(small_disk):
        weights.save(small_disk / "model", config, params)
    assert not list((small_disk / "model").glob("*.safetensors"))


@pytest.mark.parametrize(("options", "said"), [("ro", "Read-only file system"), ("size=2m", "the disk is full")])
def test_what_the_array_store_meets_is_one_line(options, said, small_disk, monkeypatch):
    """The folder turns while arrays are written: their library says so in a ValueError, by the number in its text."""
    subprocess.run(["mount", "-o", "remount,size=2m", str(small_disk)], check=True)
    checkpoint.save(small_disk, _state(1))

    def turned(scratch, *_):
        subprocess.run(["mount", "-o", f"remount,{options}", str(small_disk)], check=True)
        store = tensorstore.KvStore.open({"driver": "file", "path": f"{small_disk}/"}).result()
        while True:
            store.write(f"{len(list(small_disk.iterdir()))}", bytes(300_000)).result()

    monkeypatch.setattr(checkpoint, "_write", turned)
    with pytest.raises(UserError, match=f"not written to .*{said}; .*--resume the run .*: older checkpoints are"):
        checkpoint.save(small_disk, _state(2))
    assert checkpoint.latest(small_disk) == small_disk / "step_00000001"


def test_another_shape_names_the_leaf(tmp_path):
    checkpoint.save(tmp_path, _state())
    with pytest.raises(UserError, match="does not fit this run"):
        checkpoint.restore(checkpoint.latest(tmp_path), _state(width=5))


JOB = [
    "--model", "nano", "--data", "chain", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8",
    "--train-problems", "32", "--eval-problems", "4", "--eval-samples", "2", "--checkpoint-every", "2",
]  # fmt: skip


@functools.cache
def _cache():
    """A folder that goes with this process."""
    folder = tempfile.TemporaryDirectory(prefix="jaxrl_llm_runs_")
    atexit.register(folder.cleanup)
    return folder.name


def _environment():
    # what the first run compiles, the others load: it does not enter the results, and little is optimised in any
    compiler = {
        "JAX_COMPILATION_CACHE_DIR": _cache(),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return dict(os.environ, XLA_FLAGS="", JAX_PLATFORMS="cpu") | compiler


def _run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_llm", *arguments], env=_environment(), capture_output=True, text=True, timeout=400
    )


def _kill_after(run: pathlib.Path, seconds: float, *arguments):
    """Starts the job and kills it without warning ``seconds`` after its first metric line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_llm", *arguments],
        env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    before = (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > before:
            break
        time.sleep(0.02)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()


def _kill_and_resume(tmp_path, kills):
    steps = str(6 + 2 * kills)
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    done = _run(*JOB, "--steps", steps, "--out", str(calm))
    assert done.returncode == 0, done.stderr
    rng = random.Random(0)
    _kill_after(rough, rng.uniform(0, 0.3), *JOB, "--steps", steps, "--out", str(rough))
    for _ in range(kills - 1):
        _kill_after(rough, rng.uniform(0, 0.3), "--resume", str(rough))
    done = _run("--resume", str(rough))
    assert done.returncode == 0, done.stderr
    a, b = (safetensors.numpy.load_file(run / "model" / "model.safetensors") for run in (calm, rough))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    rows = [json.loads(line) for line in (rough / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, int(steps) + 1))


@pytest.mark.slow
def test_kill_9_and_resume_is_bitwise(tmp_path):
    """Traps 22 and 23."""
    _kill_and_resume(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kill_9_at_twenty_moments(tmp_path):
    _kill_and_resume(tmp_path, 20)


@pytest.mark.slow
def test_ctrl_c_leaves_a_resumable_run(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_llm", *JOB, "--steps", "2000", "--out", str(run)],
        env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"--resume {run}" in out
    assert checkpoint.latest(run / "checkpoints") is not None


def test_a_clock_that_jumps_while_a_checkpoint_is_written_costs_nothing(tmp_path, monkeypatch):
    writes, write = [], checkpoint._write

    def misled(*given):
        writes.append(given)
        if len(writes) == 1:
            raise TimeoutError("ChainedFuture completed 1/2 futures but timed out after 34646400.06 seconds.")
        write(*given)

    monkeypatch.setattr(checkpoint, "_write", misled)
    checkpoint.save(tmp_path, _state(3))
    assert len(writes) == 2 and [p.name for p in sorted(tmp_path.iterdir())] == ["step_00000003"]


def test_a_disk_that_hangs_is_not_the_clock(tmp_path, monkeypatch):
    def hangs(*given):
        raise TimeoutError("timed out")

    monkeypatch.setattr(checkpoint, "PATIENCE_S", 0.0)
    monkeypatch.setattr(checkpoint, "_write", hangs)
    with pytest.raises((UserError, TimeoutError), match="timed out"):
        checkpoint.save(tmp_path, _state(3))
