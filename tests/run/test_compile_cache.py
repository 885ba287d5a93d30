"""The second start of a command loads what the first one compiled, and computes the same."""

import contextlib
import importlib
import json
import os
import pathlib
import stat
import subprocess
import sys
import time

import jax
import pytest

from jaxrl_llm.run import compile_cache

SMALL = [
    "--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "6", "--train-problems", "8",
    "--eval-problems", "4", "--eval-samples", "2",
]  # fmt: skip
# the gradient of the bundled model on one row
PROGRAM = """
import jax, jax.numpy as jnp
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import compile_cache
print(compile_cache.enable())
policy, params, config = weights.pretrained(weights.bundled("nano"))
ones = jnp.ones((1, 8), jnp.int32)
loss = lambda p: policy.unembed(p, policy.hidden(p, 3 * ones, jnp.arange(8)[None], ones)).sum()
norm = sum(float(jnp.vdot(x, x)) for x in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))
print(compile_cache.measured(), norm.hex())
"""


def _start(folder, *command):
    """A process as a user starts it: none of the settings of these tests."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env |= {"XDG_CACHE_HOME": str(folder), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _halve(place):
    """As a process leaves an entry that is killed while it writes."""
    for entry in place.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])


def test_the_second_start_loads_what_the_first_compiled(tmp_path):
    place, first, value = _start(tmp_path, "-c", PROGRAM)
    same, second, again = _start(tmp_path, "-c", PROGRAM)
    assert (same, again) == (place, value) and float(second) <= 0.4 * float(first)
    folder = pathlib.Path(place)
    assert folder.parent == tmp_path / "jaxrl_llm" / "compiled" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    _halve(folder)  # what cannot be read is compiled again
    _, third, again = _start(tmp_path, "-c", PROGRAM)
    assert again == value and float(third) > float(second)


@pytest.mark.slow
def test_the_second_start_of_the_main_job(tmp_path):
    """Compiles for at most 40 % of the time, and every figure of every step is the same to the last bit."""
    runs = []
    for name, more in (("first", []), ("second", []), ("third", ["--no-compile-cache"])):
        _start(tmp_path / "cache", "-m", "jaxrl_llm", *SMALL, "--out", str(tmp_path / name), *more)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        timed = ("time/", "roof/", "tokens/per_s")
        figures = [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]
        runs.append((json.loads((tmp_path / name / "results.json").read_text())["compile_seconds"], figures))
    (first, figures), (second, same), (third, again) = runs
    assert figures == same == again
    assert second <= 0.4 * first and second <= 0.4 * third, (first, second, third)


@pytest.mark.parametrize(("arguments", "wanted"), [([], True), (["--no-compile-cache"], False)])
@pytest.mark.parametrize(
    "command",
    [
        ["jaxrl_llm", "--steps", "1"],
        ["jaxrl_llm", "run", "dr_grpo", "--smoke", "--plan"],
        ["jaxrl_llm.experiment", "compare", "policy_gradient", "--smoke"],
        ["jaxrl_llm.experiment", "sweep", "experiments/policy_gradient/dr_grpo.py", "--smoke"],
    ],
    ids=lambda words: words[1],
)
def test_every_command_keeps_them_unless_told_not_to(command, arguments, wanted, monkeypatch):
    asked = []

    def enable(flag):
        asked.append(flag)
        raise KeyboardInterrupt  # before any work

    monkeypatch.setattr(compile_cache, "enable", enable)
    main = importlib.import_module(f"{command[0]}.__main__").main
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        main([*command[1:], *arguments])
    assert asked == [wanted]


def test_another_processor_version_or_flag_has_another_folder(monkeypatch):
    keys = {compile_cache.key(), compile_cache.key()}
    assert len(keys) == 1
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "processor", lambda: "x86_64 another avx512f")
        keys.add(compile_cache.key())
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "_version", lambda name: "0.99.0")
        keys.add(compile_cache.key())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX")
    keys.add(compile_cache.key())
    assert len(keys) == 4


@pytest.fixture
def config():
    """JAX's settings of the cache, given back afterwards."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs")
    kept = {name: getattr(jax.config, name) for name in names}
    yield jax.config
    for name, value in kept.items():
        jax.config.update(name, value)


def test_a_folder_of_the_users_own_stays(config, tmp_path):
    config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert compile_cache.enable(folder=tmp_path / "other") == tmp_path / "own"
    assert not (tmp_path / "other").exists()
    assert compile_cache.enable(False) is None and not config.jax_enable_compilation_cache


def test_a_folder_that_others_may_write_is_not_trusted(config, tmp_path, capsys, monkeypatch):
    """Its entries are code that would be run."""
    config.update("jax_compilation_cache_dir", None)
    place = tmp_path / compile_cache.key()
    place.mkdir()
    place.chmod(0o777)
    assert compile_cache.enable(folder=tmp_path) is None
    told = capsys.readouterr().err
    assert told.startswith(f"note: compiled programs are not kept: {place}: others may write") and told.count("\n") == 1
    (tmp_path / "file").write_text("")
    assert compile_cache.enable(folder=tmp_path / "file" / "below") is None
    assert "XDG_CACHE_HOME" in capsys.readouterr().err
    assert config.jax_compilation_cache_dir is None


def test_a_user_without_a_home_keeps_nothing_and_is_told(config, capsys, monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compile_cache.pathlib.Path, "home", none)
    config.update("jax_compilation_cache_dir", None)
    assert compile_cache.enable() is None
    assert capsys.readouterr().err.startswith("note: compiled programs are not kept: ~/.cache: there is no home folder")


def test_the_oldest_entries_go_first(tmp_path):
    now = time.time()
    for k in range(6):
        entry = tmp_path / f"version{k % 2}" / f"{k}-cache"
        entry.parent.mkdir(exist_ok=True)
        entry.write_bytes(bytes(100))
        os.utime(entry, (now - 86_400 * (10 - k),) * 2)
    assert compile_cache.tidy(tmp_path, most_bytes=450, most_days=30.0) == 2
    assert sorted(p.name for p in tmp_path.glob("*/*")) == [f"{k}-cache" for k in range(2, 6)]
    assert compile_cache.tidy(tmp_path, most_bytes=450, most_days=6.5) == 2
    assert compile_cache.tidy(tmp_path, most_bytes=450, most_days=30.0) == 0


def _aged(path, days):
    os.utime(path, (time.time() - 86_400 * days,) * 2)


def test_a_folder_among_the_entries_is_one_of_them(config, tmp_path, capsys):
    """XLA keeps what it tried for its kernels in one, which is as old as the newest of it."""
    config.update("jax_compilation_cache_dir", None)
    place = tmp_path / compile_cache.key()
    place.mkdir(mode=0o700)
    for name, days in (("old", 61), ("used", 1)):
        (place / name / "deep").mkdir(parents=True)
        for k in range(2):
            (place / name / "deep" / str(k)).write_bytes(bytes(100))
            _aged(place / name / "deep" / str(k), 90 if k else days)
        _aged(place / name, 90)
    (place / "empty").mkdir()
    _aged(place / "empty", 61)
    assert compile_cache.tidy(tmp_path, most_bytes=400, most_days=95.0) == 0  # 400 bytes, and none unused for so long
    assert compile_cache.enable(folder=tmp_path) == place and capsys.readouterr().err == ""
    assert [path.name for path in place.iterdir()] == ["used"]
    assert compile_cache.tidy(tmp_path, most_bytes=199) == 1 and not list(place.iterdir())


def test_an_entry_that_cannot_be_removed_stays_alone(config, tmp_path, capsys, monkeypatch):
    """The others go, and the run keeps its programs."""
    config.update("jax_compilation_cache_dir", None)
    place = tmp_path / compile_cache.key()
    place.mkdir(mode=0o700)
    for k in range(3):
        (place / str(k)).write_bytes(bytes(100))
        _aged(place / str(k), 90 - k)
    unlink = compile_cache.pathlib.Path.unlink

    def refused(path, **named):
        if path.name == "0":
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **named)

    monkeypatch.setattr(compile_cache.pathlib.Path, "unlink", refused)
    assert compile_cache.enable(folder=tmp_path) == place
    assert config.jax_compilation_cache_dir == str(place)
    assert [path.name for path in place.iterdir()] == ["0"]
    assert capsys.readouterr().err == (
        f"note: {place / '0'} of the compiled programs cannot be removed: Operation not permitted; remove it by hand\n"
    )
