"""Trap 23, off by one on resume: stop before the first step, inside an epoch, on its boundary, after the last step.

Six prompts, four a step: epochs end inside step 2 and exactly after step 3.
"""

import functools

import pytest

from jaxrl_llm.train import checkpoint, host
from tests.traps.tables import online, same, start

STEPS = 4


@functools.cache
def _loop():
    method = online()
    return method, host.make_host_loop(method)


@functools.cache
def _undisturbed():
    method, loop = _loop()
    steps = []
    for step in host.iterations(loop, start(method), STEPS):
        steps.append(step.drawn.ids.tolist())
        state = step.state
    return state, steps


@pytest.mark.parametrize("stop", range(STEPS + 1))
def test_every_boundary_repeats_and_skips_nothing(stop, tmp_path):
    method, loop = _loop()
    state, _ = host.run(loop, start(method), stop)
    checkpoint.save(tmp_path, state)
    (tmp_path / ".writing_00000099").mkdir()  # what a kill in the middle of writing leaves behind
    state = checkpoint.restore(checkpoint.latest(tmp_path), start(method, seed=99))
    assert int(state.step) == stop
    want, drawn = _undisturbed()
    seen = []
    for step in host.iterations(loop, state, STEPS):
        seen.append(step.drawn.ids.tolist())
        state = step.state
    assert seen == drawn[stop:]
    same(want, state)


def test_each_epoch_draws_each_prompt_once():
    _, steps = _undisturbed()
    drawn = [i for step in steps for i in step]
    assert sorted(drawn[:6]) == sorted(drawn[6:12]) == list(range(6))
