"""A run on streamed rows that is stopped goes on with the next row, bit for bit."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.data.stream import make_stream
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.train import offline, streamed
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.packing import packed_rows
from tests import close
from tests.models_for_tests import dense_rows, small_model

TOKENS = np.random.default_rng(0).integers(0, 24, (10, 6)).astype(np.int32)


def _make(row):
    return {"tokens": TOKENS[row], "row": np.int32(row)}


@functools.cache
def _shared(tx):
    policy, _, _ = small_model()

    def loss(params, extras, batch):
        segments, positions = dense_rows(4, 6)
        logits = policy.unembed(params, policy.hidden(params, batch["tokens"], positions, segments))
        rows = jnp.sum(jnp.exp2(batch["row"].astype(jnp.float32)))
        return -jnp.mean(logprobs.token_logprobs(logits, batch["tokens"])), {"rows": rows}

    table = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *map(_make, range(4)))
    return Offline(lambda extras: table, make_uniform(), 4, loss, tx)


def _method(tx):
    return _shared(tx), jax.tree.map(jnp.array, small_model()[1])  # the state is donated


_step = functools.cache(streamed.make_step)  # compiled once


ADAM, PLAIN = optax.adam(1e-2), optax.sgd(0.1)


def _run(steps, mesh=None, *, state=None, place=None, tx=ADAM):
    """``steps`` further updates: the state, the rows of each and the place behind them."""
    method, params = _method(tx)
    state = offline.init_state(method, params, jax.random.key(0)) if state is None else state
    stream = make_stream(range(10), _make, batch=4)
    if place is not None:
        stream.set_state(place)
    state, found = streamed.run(_step(method), state, stream, steps=steps, mesh=mesh)
    return state, [float(one["rows"]) for one in found], stream.get_state()


def test_stopped_and_resumed_is_undisturbed():
    whole, rows, _ = _run(5)
    part, begun, place = _run(3)
    again, rest, _ = _run(2, state=part, place=json.loads(json.dumps(place)))
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    assert begun + rest == rows and len(set(rows)) == 5 and int(again.step) == 5


def test_asked_to_stop_it_reads_no_further():
    """The updates of a stretch that are not made, and their rows, come when the run goes on."""
    method, params = _method(ADAM)
    stream, begun = make_stream(range(10), _make, batch=4), []

    def counted(state, batch):
        begun.append(batch)
        return _step(method)(state, batch)

    state = offline.init_state(method, params, jax.random.key(0))
    state, found = streamed.run(counted, state, stream, steps=5, stop=lambda: len(begun) == 2)
    whole, rows, _ = _run(5)
    again, rest, _ = _run(3, state=state, place=stream.get_state())
    assert len(found) == 2 and [float(one["rows"]) for one in found] + rest == rows
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


def test_updates_do_not_begin_far_ahead_of_those_that_are_done(monkeypatch):
    """A device would work them off long after the run was asked to stop."""
    method, params = _method(ADAM)
    events, ready = [], jax.block_until_ready

    def begun(state, batch):
        events.append("begun")
        return _step(method)(state, batch)

    def waited(tree):
        events.extend(f"done {one['rows']}" for one in tree)
        return ready(tree)

    monkeypatch.setattr(streamed.jax, "block_until_ready", waited)
    state = offline.init_state(method, params, jax.random.key(0))
    _, found = streamed.run(begun, state, make_stream(range(10), _make, batch=4), steps=4)
    done = [f"done {one['rows']}" for one in found]
    assert events == ["begun", "begun", done[0], "begun", done[1], "begun", done[2]]


@pytest.mark.slow
def test_rows_of_a_mesh():
    whole, rows, _ = _run(3, tx=PLAIN)
    divided, same, _ = _run(3, meshes.parse_mesh("data=2,fsdp=2"), tx=PLAIN)
    assert same == rows
    sums, start = close.gradient_sums(small_model()[2], 4, 6), small_model()[1]
    close.assert_same_descent(divided.params, whole.params, 0.1, 3, sums, gradient=1.0)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), whole.params, start)
    assert max(jax.tree.leaves(moved)) > 10 * 3 * 0.1 * close.bound(sums, 1.0), "by more than it may differ"


def test_processes_that_would_hold_the_same_rows_are_refused(monkeypatch):
    """Each reads rows of its own: copies of the model would train on others, and say nothing."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="data=1, fsdp=1, expert=1 do not divide rows over 2 processes"):
        streamed.placed({"row": np.arange(4)}, meshes.parse_mesh("tensor=8"))


def test_a_table_without_rows_to_pack_trains():
    """The planner of packed rows finds nothing to arrange, and the steps are the same."""
    method, params = _method(ADAM)
    ran = [
        offline.make_run(method, 2, planner=planner)(offline.init_state(method, params, jax.random.key(0)))[1]["rows"]
        for planner, params in ((None, params), (packed_rows, _method(ADAM)[1]))
    ]
    np.testing.assert_array_equal(*ran)
