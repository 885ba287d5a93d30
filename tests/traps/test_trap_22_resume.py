"""Traps 22 and 23, resume: stop after any step, also on an epoch boundary, and the end is bitwise the same.

Six prompts, four a step: epochs end inside step 2 and exactly after step 3.
"""

import functools

import jax
import pytest

from jaxrl_llm.train import checkpoint, host
from tests.traps.tables import online, same, start

STEPS = 6


@functools.cache
def _method():
    return online()


@functools.cache
def _loop():
    return host.make_host_loop(_method())


@functools.cache
def _undisturbed():
    return host.run(_loop(), start(_method()), STEPS)


@pytest.mark.parametrize("stop", range(STEPS + 1))
def test_resuming_is_bitwise_the_undisturbed_run(stop, tmp_path):
    state, before = host.run(_loop(), start(_method()), stop)
    checkpoint.save(tmp_path, state)
    del state
    other = start(_method(), seed=99)  # everything must come from the checkpoint
    state = checkpoint.restore(checkpoint.latest(tmp_path), other)
    assert int(state.step) == stop
    state, after = host.run(_loop(), state, STEPS)
    want, history = _undisturbed()
    same(want, state)
    assert before + after == history


def test_each_epoch_draws_each_prompt_once_across_the_boundary():
    drawn = [i for step in host.iterations(_loop(), start(_method()), STEPS) for i in step.drawn.ids.tolist()]
    for epoch in range(4):
        assert sorted(drawn[6 * epoch : 6 * epoch + 6]) == list(range(6))


def test_a_checkpoint_holds_every_leaf_of_the_state(tmp_path):
    state, _ = host.run(_loop(), start(_method()), 1)
    kept = jax.tree.map(lambda x: x.copy(), state)
    checkpoint.save(tmp_path, state)
    same(kept, checkpoint.restore(checkpoint.latest(tmp_path), start(_method(), seed=5)))
