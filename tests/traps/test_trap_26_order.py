"""Trap 26, divergence between hosts, the part that one host can show: nothing depends on Python's hash seed.

Two interpreters with different hash seeds draw the same problems and order the parameters alike.
"""

import os
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
