"""Trap 26, divergence between hosts: nothing depends on Python's hash seed, and what steers a job is cross-checked.

Two interpreters with different hash seeds draw the same problems and order the parameters alike; two processes of one
job that decide differently stop with the names of those that differ instead of hanging.
"""

import os
import socket
import subprocess
import sys

PROGRAM = """
import jax, numpy as np
from jaxrl_llm.data.problems import make_split
from jaxrl_llm.data.tasks import chain, countdown
from jaxrl_llm.models import decoder
from tests.models_for_tests import small_config
for task in (chain, countdown):
    print([p.prompt for p in make_split(task, split="train", n=20, seed=1)])
shapes = jax.eval_shape(decoder.make_policy(small_config()).init, jax.random.key(0))
print([jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)])
"""


def test_the_hash_seed_changes_nothing():
    outputs = []
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        run = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
        outputs.append(run.stdout)
    assert outputs[0] == outputs[1] and len(outputs[0].splitlines()) == 3


JOB = """
import sys
from jaxrl_llm.distributed import hosts
hosts.connect(sys.argv[1])
index = int(sys.argv[1][-1])
hosts.agree("same", {"step": 3, "kept": [1, 2]})
print("agreed", flush=True)
try:
    hosts.agree("which prompts", {"step": 3, "kept": [1, 2 + index]})
except RuntimeError as error:
    print(error, flush=True)
"""


def test_hosts_that_decide_otherwise_are_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, f"127.0.0.1:{port},2,{k}"], env=env, stdout=subprocess.PIPE, text=True
        )
        for k in range(2)
    ]
    for job in jobs:
        said = job.communicate(timeout=120)[0]  # the transport prints, too, and in the middle of our lines
        assert job.returncode == 0 and said.count("agreed") == 1
        assert "which prompts: processes [1] decided otherwise than process 0" in said
