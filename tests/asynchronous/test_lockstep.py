"""Rollouts ahead of updates in one order of programs: the host loop without staleness, and the same weights always."""

import threading
import time

import jax
import numpy as np
import pytest

from jaxrl_llm.asynchronous import lockstep, threads
from jaxrl_llm.asynchronous.threads import STALENESS
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.train import host, skipped
from tests.asynchronous import programs


@pytest.fixture(scope="module")
def loop():
    return host.make_host_loop(programs.method(), programs.judge)


def watched(loop, events, read=None):
    """The loop, with what it does written down as it begins."""

    def told(name, work):
        def inner(*given):
            events.append(name)
            return work(*given)

        return inner

    score = loop.score if read is None else lambda rows: (read.append(rows), loop.score(rows))[1]
    return loop._replace(begin=told("roll", loop.begin), score=told("score", score), finish=told("update", loop.finish))


def test_without_staleness_it_is_the_host_loop_bit_for_bit(loop):
    params, history = programs.wanted(4)
    state, found = lockstep.run(loop, programs.start(), 4, staleness=0)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert [row.pop(STALENESS) for row in found] == [0.0] * 4 and found == history


def test_a_rollout_begins_before_older_ones_are_scored(loop):
    events = []
    _, found = lockstep.run(watched(loop, events), programs.start(), 4, staleness=1)
    assert events == [*["roll"] * 2, "score", "update", "roll", "score", "update", "roll", "score", "update",
                      "score", "update"]  # fmt: skip
    assert [row[STALENESS] for row in found] == [0.0, 1.0, 1.0, 1.0]


def test_it_samples_with_the_weights_of_so_many_updates_ago(loop):
    """Written out: every version of the weights is kept, and the rollout of a step takes the second last before it."""
    versions, drawn, own = [programs.start()], {}, programs.start().sampler
    for step in range(5):
        acting = versions[max(step - 2, 0)]._replace(step=jax.numpy.int32(step), sampler=own)
        drawn[step] = loop.begin(acting)
        state = jax.tree.map(jax.numpy.copy, versions[step])
        _, own = loop.draw(own, state.key, state.step)  # the prompts of this method are not chosen by rewards
        state, _ = loop.finish(state, drawn[step], loop.score(drawn[step].trajectories))
        versions.append(state)
    read = []
    state, found = lockstep.run(watched(loop, [], read), programs.start(), 5, staleness=2)
    for step, rows in enumerate(read):
        np.testing.assert_array_equal(rows.tokens, drawn[step].trajectories.tokens, err_msg=f"step {step}")
    jax.tree.map(np.testing.assert_array_equal, state.params, versions[-1].params)
    assert [row[STALENESS] for row in found] == [0.0, 1.0, 2.0, 2.0, 2.0]
    other, _ = lockstep.run(loop, programs.start(), 5, staleness=1)
    assert any((x != y).any() for x, y in zip(*(jax.tree.leaves(s.params) for s in (state, other)), strict=True))


def test_what_is_scored_is_on_every_device(loop):
    shown, read = lockstep.to_all(meshes.parse_mesh("data=2")), []
    state, _ = lockstep.run(watched(loop, [], read), programs.start(), 3, shown=shown)
    assert all(rows.tokens.sharding.is_fully_replicated and len(rows.tokens.devices()) == 2 for rows in read)
    assert int(state.step) == 3


def test_a_sampler_that_is_another_one_stops_the_run_before_the_next_update(loop):
    events = []
    with pytest.raises(UserError, match="off the trainer"):
        lockstep.run(watched(loop, events)._replace(most_gap=1e-30), programs.start(), 4)
    assert events.count("update") == 1


def test_updates_that_are_not_finite_end_the_run(loop):
    def broken(state, drawn, rewards):
        state, metrics = loop.finish(state, drawn, rewards)
        return state, metrics | {skipped.SKIPPED: 1.0}

    with pytest.raises(skipped.NotFinite):
        lockstep.run(loop._replace(finish=broken, most_skipped=2), programs.start(), 9)


@pytest.mark.parametrize("module", [lockstep, threads])
@pytest.mark.parametrize("staleness", [0, 2])
def test_asked_to_stop_it_ends_behind_the_update_under_way(loop, module, staleness):
    """What was made ahead is dropped; from the state that is left the rest is that of the host loop."""
    updates = []

    def finish(*given):
        updates.append(given)
        return loop.finish(*given)

    asking = loop._replace(finish=finish)
    state, found = module.run(asking, programs.start(), 5, staleness=staleness, stop=lambda: len(updates) >= 2)
    assert len(updates) == len(found) == int(state.step) == 2
    if staleness == 0:
        params, history = programs.wanted(4)
        state, rest = module.run(loop, state, 4, staleness=0)
        jax.tree.map(np.testing.assert_array_equal, state.params, params)
        assert [{k: v for k, v in row.items() if k != STALENESS} for row in found + rest] == history
    state, found = module.run(asking, programs.start(), 5, staleness=staleness, stop=lambda: True)
    assert len(updates) == 2 and found == [] and int(state.step) == 0


def test_a_score_that_hangs_does_not_keep_a_run_from_stopping(loop, monkeypatch):
    """Whoever asks waits a minute, and then ends it."""
    monkeypatch.setattr(threads, "STOP_S", 0.1, raising=False)
    hanging, over = threading.Event(), threading.Event()

    def score(rows):
        hanging.set()
        over.wait(300)
        return loop.score(rows)

    began = time.monotonic()
    state, found = threads.run(loop._replace(score=score), programs.start(), 3, stop=hanging.is_set)
    assert hanging.is_set() and time.monotonic() - began < 200 and found == [] and int(state.step) == 0
    over.set()


def test_nothing_is_left_to_do(loop):
    state, history = lockstep.run(loop, programs.start(), 0)
    assert int(state.step) == 0 and history == []
    with pytest.raises(ValueError, match="staleness=-1 must not be negative"):
        lockstep.run(loop, state, 2, staleness=-1)
