"""The same run by Ray actors on a cluster of two nodes on this machine: healthy, and with one fault after the other.

Every actor is a process with a JAX of its own. At staleness 0 the parameters are those of the host loop, bit for bit,
whatever happens on the way.
"""

import os
import pathlib
from functools import partial

import jax
import numpy as np
import pytest

from jaxrl_llm.asynchronous import conductor, threads
from jaxrl_llm.asynchronous.limits import Limit, Limits, Sizes
from jaxrl_llm.asynchronous.ray_workers import RayWorkers
from jaxrl_llm.train import checkpoint, host
from tests.asynchronous import programs

pytestmark = pytest.mark.slow
STEPS = 4
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
WHERE = {"learn": {"resources": {"learner": 0.1}}, "roll": {"resources": {"roller": 0.1}}}
LIMITS = Limits(score=Limit(300.0, 300.0))  # nothing is ever late on a busy machine unless a test says so


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A learner's node and a rollout node; their processes compile as this one does."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'jaxrl_llm[distributed]'")
    from ray.cluster_utils import Cluster

    cache = jax.config.jax_compilation_cache_dir or str(tmp_path_factory.mktemp("compiled"))
    root = str(pathlib.Path(__file__).parents[2])
    ours = {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in ours}
    os.environ |= ours
    made = Cluster(initialize_head=True, head_node_args=NODE | {"resources": {"learner": 1}})
    try:
        made.add_node(**{k: v for k, v in NODE.items() if k != "include_dashboard"}, resources={"roller": 1})
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def want():
    """Parameters and metrics of the host loop."""
    state, history = host.run(host.make_host_loop(programs.method(), programs.judge), programs.start(), STEPS)
    return jax.tree.map(np.asarray, state.params), history


def run(folder, faults=None, *, steps=STEPS, limits=LIMITS, every=1, crew=None, **sizes):
    sizes = Sizes(**{"rollers": 1, "staleness": 0} | sizes)
    crew = crew or programs.make_faulty(RayWorkers, faults or {})(WHERE)
    report = conductor.run(
        crew, programs.program, steps, folder=str(folder), sizes=sizes, limits=limits, checkpoint_every=every
    )
    state = checkpoint.restore(checkpoint.latest(folder), programs.start())
    assert int(state.step) == steps and len(report.history) == steps and report.rows == list(range(steps))
    return state, report


def same(state, report, want):
    jax.tree.map(np.testing.assert_array_equal, state.params, want[0])
    ours = [{k: v for k, v in row.items() if k in want[1][0]} for row in report.history]
    assert ours == want[1]


def kinds(report):
    return [event.kind for event in report.events]


def test_healthy(cluster, tmp_path, want):
    state, report = run(tmp_path)
    same(state, report, want)
    assert report.events == [] and len({n["NodeID"] for n in _nodes() if n["Alive"]}) == 2
    total = sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert [t.version for t in report.transfers] == list(range(STEPS)) and report.transfers[0].sent_bytes == total
    assert all(t.seconds > 0 and t.sent_bytes + t.kept_bytes == total for t in report.transfers)


def test_rows_on_storage_units_and_weights_in_turn(cluster, tmp_path, want):
    state, report = run(tmp_path / "a", units=2, swaps=1)
    same(state, report, want)
    assert report.events == [] and {t.version for t in report.transfers} == set(range(STEPS))
    _, report = run(tmp_path / "b", units=2, swaps=1, rollers=2, staleness=2)
    assert report.events == [] and max(row[threads.STALENESS] for row in report.history) <= 2


def test_a_storage_unit_that_is_killed(cluster, tmp_path, want):
    """At its second call, which frees the rows of a step: it holds those of the next."""
    state, report = run(tmp_path, {("drop", 2): programs.killed_before}, units=1)
    same(state, report, want)
    assert kinds(report).count("lost") == 1 and set(kinds(report)) <= {"missing", "lost"}, report.events


def _nodes():
    import ray

    return ray.nodes()


ONCE = {
    "rollout worker killed": ({("roll", 2): programs.killed_before}, ["lost"]),
    "learner killed": ({("learn", 4): programs.killed_before}, ["lost", "resumed"]),
    "learner killed behind its checkpoint": ({("learn", 4): programs.killed_after}, ["lost"]),
    "an environment raises": ({("score", 3): programs.raising}, ["failed"]),
    "verifier hung": ({("score", 2): programs.hanging}, ["late", "lost"]),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_fault_changes_nothing(name, cluster, tmp_path, want):
    faults, events = ONCE[name]
    limits = LIMITS._replace(score=Limit(5.0, 5.0)) if name == "verifier hung" else LIMITS
    state, report = run(tmp_path, faults, limits=limits, every=2 if "learner" in name else 1)
    same(state, report, want)
    assert kinds(report) == events, report.events
    assert all(event.who and event.cause for event in report.events)


def test_a_sender_that_dies_in_the_middle_of_a_transfer(cluster, tmp_path, want):
    """The half that has arrived is kept; the learner that comes after sends the rest."""
    crew = programs.make_faulty(RayWorkers, {}, sender_dies=(3, str(tmp_path / "died")))(WHERE)
    state, report = run(tmp_path / "run", crew=crew, piece_bytes=512)
    same(state, report, want)
    total = sum(x.nbytes for x in jax.tree.leaves(state.params))
    half, rest = report.transfers[:2]
    assert sorted(kinds(report)) == ["cut", "lost"]
    assert 0 < half.sent_bytes == rest.kept_bytes and half.sent_bytes + rest.sent_bytes == total


def test_a_full_queue_holds_the_rollouts_back(cluster, tmp_path):
    faults = {("learn", 0): partial(programs.slowed, 0.5)}
    _, report = run(tmp_path, faults, staleness=2, capacity=1)
    assert report.events == [] and report.waits["roller: queue full"] > 0.5
    # one step at a time; where its rollout does not wait for weights that are being packed, it takes those before them
    behind = [row[threads.STALENESS] for row in report.history]
    assert behind[0] == 0.0 and max(behind) <= 1.0


def test_a_worker_ten_times_slower(cluster, tmp_path):
    """It does what it can; the other does the rest, within the staleness."""
    crew = programs.make_faulty(RayWorkers, {("roll", 0): partial(programs.slowed, 2.0)})(WHERE)
    _, report = run(tmp_path, crew=crew, steps=10, rollers=2, staleness=2)
    done = crew.work["roll"]
    slow, quick = done[crew.firsts["roll"]], sum(done.values()) - done[crew.firsts["roll"]]
    assert report.events == [] and quick > slow >= 1 and quick + slow == 10
    assert max(row[threads.STALENESS] for row in report.history) <= 2
