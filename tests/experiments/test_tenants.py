"""A table of responses, rounds of answers and three roles on a mesh of two devices with an adapter, ended with -9."""

import json
import os
import signal
import subprocess
import sys

import pytest

DYING = """
import importlib, os, signal, sys
from jaxrl_llm.train import checkpoint
save, calls = checkpoint.save, []
def dying(*given, **named):
    calls.append(given)
    if len(calls) == 2: os.kill(os.getpid(), signal.SIGKILL)
    return save(*given, **named)
if {die}: checkpoint.save = dying
from jaxrl_llm.experiment import cli
sys.exit(cli.main(importlib.import_module("{module}").__name__, {words!r}))
"""
FLAGS = ["--smoke", "--seeds", "1", "--loop", "host", "--mesh", "data=2", "--lora", "4", "--checkpoint-every", "1"]
TENANTS = {"offline.oreo": "oreo", "self_play.mae": "mae"}


def start(module, arm, out, die=False):
    words = [*FLAGS, "--arm", arm, "--out", str(out)]
    code = DYING.format(die=die, module=f"experiments.{module}", words=words)
    more = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # most of the time is compilation of what runs twice
    }
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=900, env=os.environ | more
    )


@pytest.mark.slow
@pytest.mark.parametrize("module", TENANTS)
def test_killed_on_a_mesh_with_an_adapter_it_goes_on_bit_for_bit(module, tmp_path):
    arm = TENANTS[module]
    whole = start(module, arm, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr[-2000:]
    killed = start(module, arm, tmp_path / "cut", die=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    again = start(module, arm, tmp_path / "cut")
    assert again.returncode == 0 and "resuming" in again.stdout, again.stderr[-2000:]
    one, other = (json.loads((tmp_path / out / "results.json").read_text())["arms"] for out in ("whole", "cut"))
    assert one[arm]["curves"] == other[arm]["curves"] and one[arm]["metrics"] == other[arm]["metrics"]


@pytest.mark.slow
def test_rounds_are_measured_on_a_mesh_with_an_adapter(tmp_path):
    """Nothing is trained there: an adapter says nothing, so that figures are those without."""
    done = start("search.multi_round_thinking", "twice", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (arm,) = json.loads((tmp_path / "results.json").read_text())["arms"].values()
    assert "eval/accuracy" in arm["metrics"]
