"""Trap 22, resume: a checkpoint is the whole state, so stopping half way gives bitwise the undisturbed run."""

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.train import checkpoint, host
from tests.traps.tables import online, same, start


def test_two_k_steps_equal_k_a_stop_and_k(tmp_path):
    method = online()
    loop = host.make_host_loop(method)
    want, history = host.run(loop, start(method), 4)
    state, before = host.run(loop, start(method), 2)
    checkpoint.save(tmp_path, state)
    del state
    other = start(method, seed=99)  # everything must come from the checkpoint
    other = other._replace(params=jax.tree.map(lambda x: x + 1.0, other.params))
    state, after = host.run(loop, checkpoint.restore(checkpoint.latest(tmp_path), other), 4)
    same(want, state)
    assert before + after == history


def test_a_checkpoint_holds_every_leaf_of_the_state(tmp_path):
    method = online()
    loop = host.make_host_loop(method)
    reference = {"ema": np.float32(3.0) * np.ones(4, np.float32)}
    state, _ = host.run(loop, start(method, statistics=jax.tree.map(jax.numpy.asarray, reference)), 1)
    checkpoint.save(tmp_path, state)
    other = start(method, seed=5, statistics={"ema": jax.numpy.zeros(4)})
    same(state, checkpoint.restore(checkpoint.latest(tmp_path), other))
    with pytest.raises(UserError, match="statistics"):
        checkpoint.restore(checkpoint.latest(tmp_path), start(method))
