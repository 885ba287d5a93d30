"""Trap 49, problems that depend on the process: two processes, two hash seeds, the same problems."""

import json
import os
import subprocess
import sys

import pytest

# they changed with the hash seed, or draw from Python's or NumPy's own generator
CHANGING = ("isomorphic_strings", "ransom_note", "polynomial_multiplication", "knights_knaves", "chain_sum")
_DRAW = """
import json, sys
from jaxrl_llm.verifiers import gym
families = sys.argv[1].split() or gym.families()
drawn = {name: gym.problems(name, 3, 11, unsound=True) for name in families}
print(json.dumps({name: [p.prompts, p.solutions, p.answers] for name, p in drawn.items()}))
"""


def _drawn(hash_seed: str, families: str) -> dict:
    """The problems of families in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _DRAW, families], capture_output=True, text=True, timeout=900,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_two_processes_with_two_hash_seeds_draw_the_same_problems():
    one, other = (_drawn(seed, " ".join(CHANGING)) for seed in ("1", "2"))
    assert one == other and set(one) == set(CHANGING)


@pytest.mark.slow
def test_no_family_depends_on_the_process():
    one, other = (_drawn(seed, "") for seed in ("3", "random"))
    assert len(one) >= 100
    assert [name for name in one if one[name] != other[name]] == []
