"""Trap 24, donated buffers: only the compiled step donates; what is kept was copied before."""

import jax
import numpy as np

from jaxrl_llm.train import checkpoint, fused, host
from tests.traps.tables import online, params, same, start


def _deleted(tree):
    return {x.is_deleted() for x in jax.tree.leaves(tree)}


def test_the_compiled_step_donates_its_state_and_nothing_else():
    method = online()
    loop, state = host.make_host_loop(method), start(method)
    drawn = loop.begin(state)
    assert _deleted(state) == {False}  # a rollout donates nothing
    rewards = loop.score(drawn.trajectories)
    after, _ = loop.finish(state, drawn, rewards)
    assert True in _deleted(state.params)
    assert _deleted((after, drawn.trajectories, rewards)) == {False}
    assert _deleted((method.problems, params())) == {False}


def test_the_fused_run_donates_its_state():
    method = online()
    state = start(method)
    after, _ = fused.run(method, state, 2)
    assert True in _deleted(state.params) and _deleted(after) == {False}


def test_a_checkpoint_outlives_the_state_that_it_was_made_of(tmp_path):
    method = online()
    loop = host.make_host_loop(method)
    state, _ = host.run(loop, start(method), 1)
    want = jax.tree.map(np.array, state.params)
    checkpoint.save(tmp_path, state)
    host.run(loop, state, 3)  # consumes the state that was saved
    assert True in _deleted(state.params)
    same(want, checkpoint.restore(checkpoint.latest(tmp_path), start(method)).params)


def test_a_reference_is_a_copy_and_survives():
    method = online()
    reference = jax.tree.map(lambda x: x.copy(), params())
    state, _ = host.run(host.make_host_loop(method), start(method, reference=reference), 2)
    same(params(), state.extras["reference"])
