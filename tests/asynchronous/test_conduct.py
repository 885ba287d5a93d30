"""An asynchronous run in threads: the host loop bit for bit at staleness 0, whatever dies, hangs, raises or is slow."""

import sys
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.asynchronous import conductor, roles, threads
from jaxrl_llm.asynchronous.limits import Limit, Limits, Sizes, Stuck
from jaxrl_llm.asynchronous.ray_workers import RayWorkers
from jaxrl_llm.asynchronous.workers import Threads
from jaxrl_llm.distributed import weight_transfer
from jaxrl_llm.errors import UserError
from jaxrl_llm.train import checkpoint, host
from jaxrl_llm.types import Sampler
from tests import close
from tests.asynchronous import programs

STEPS = 4
SHORT = Limits(tries=2, roll=Limit(300.0, 300.0), score=Limit(0.5, 0.5), start_s=300.0, first_s=0.0)


@pytest.fixture(scope="module")
def want():
    """Parameters and metrics of the host loop."""
    return programs.wanted(STEPS)


def run(folder, crew=None, build=programs.program, steps=STEPS, limits=SHORT, **sizes):
    every = sizes.pop("checkpoint_every", 1)
    report = conductor.run(
        crew or Threads(), build, steps, folder=str(folder), sizes=Sizes(**{"staleness": 0} | sizes), limits=limits,
        checkpoint_every=every,
    )  # fmt: skip
    state = checkpoint.restore(checkpoint.latest(folder), programs.start())
    assert int(state.step) == steps and len(report.history) == steps
    assert report.rows == list(range(steps * sizes.get("parts", 1)))
    return state, report


def same(state, want):
    jax.tree.map(np.testing.assert_array_equal, state.params, want[0])


def without(row):
    return {k: v for k, v in row.items() if k not in (threads.STALENESS, "time/update_s")}


def kinds(report):
    return [event.kind for event in report.events]


def test_the_host_loop_bit_for_bit_and_resumed(tmp_path, want):
    state, report = run(tmp_path, steps=2)
    assert report.events == [] and [row[threads.STALENESS] for row in report.history] == [0.0, 0.0]
    assert sum(t.sent_bytes for t in report.transfers) >= 2 * sum(x.nbytes for x in jax.tree.leaves(state.params))
    report = conductor.run(Threads(), programs.program, STEPS, folder=str(tmp_path), sizes=Sizes(staleness=0))
    state = checkpoint.restore(checkpoint.latest(tmp_path), programs.start())
    same(state, want)
    assert [without(row) for row in report.history] == want[1][2:]


def test_a_folder_is_of_one_process(tmp_path):
    """Two that train into it would each take up the other's checkpoints, and end with exit code 0."""
    with checkpoint.locked(tmp_path), pytest.raises(UserError, match="in use by another process"):
        conductor.run(Threads(), programs.program, 1, folder=str(tmp_path), sizes=Sizes(staleness=0))
    assert not checkpoint.steps(tmp_path)


@pytest.mark.parametrize("every", [1, STEPS])
def test_asked_to_stop_it_keeps_the_update_under_way(every, tmp_path, want):
    """And goes on from there; nothing is done where nothing had begun."""
    crew = programs.make_faulty(Threads, {})()
    given = dict(folder=str(tmp_path), sizes=Sizes(staleness=0, units=1), limits=SHORT, checkpoint_every=every)
    report = conductor.run(crew, programs.program, STEPS, stop=lambda: crew.counts.get("learn", 0) == 2, **given)
    assert report.events == [] and report.rows == [0, 1] and report.lesson is None
    assert checkpoint.latest(tmp_path).name == "step_00000002" and crew.counts["learn"] == 2
    nothing = conductor.run(Threads(), programs.program, STEPS, stop=lambda: True, **given)
    assert nothing.history == nothing.rows == [] and checkpoint.steps(tmp_path)[-1] == 2
    rest = conductor.run(Threads(), programs.program, STEPS, **given)
    assert [without(row) for row in report.history + rest.history] == want[1]
    same(checkpoint.restore(checkpoint.latest(tmp_path), programs.start()), want)


def test_a_learner_that_dies_in_a_run_that_stops_is_where_its_checkpoint_is(tmp_path, want):
    """The second update is lost with it, and made again by the next run."""
    crew = programs.make_faulty(Threads, {("learn", 3): programs.left_before})()
    given = dict(folder=str(tmp_path), sizes=Sizes(staleness=0), limits=SHORT, checkpoint_every=2)
    report = conductor.run(crew, programs.program, STEPS, stop=lambda: crew.counts.get("learn", 0) == 3, **given)
    assert kinds(report) == ["lost"] and len(report.history) == 2 and checkpoint.steps(tmp_path) == [2]
    rest = conductor.run(Threads(), programs.program, STEPS, **given)
    assert [without(row) for row in report.history + rest.history] == want[1]


FAULTS = {
    "roller killed": ({("roll", 2): programs.left_before}, ["lost"]),
    "roller killed behind its work": ({("roll", 3): programs.left_after}, ["lost"]),
    "learner killed before an update": ({("learn", 4): programs.left_before}, ["lost", "resumed"]),
    "learner killed behind an update": ({("learn", 4): programs.left_after}, ["lost"]),
    "verifier hung": ({("score", 2): programs.hanging}, ["late", "lost"]),
    "environment raises": ({("score", 3): programs.raising}, ["failed"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_nothing(name, tmp_path, want):
    faults, events = FAULTS[name]
    every = 2 if "learner" in name else 1
    state, report = run(tmp_path, programs.make_faulty(Threads, faults)(), checkpoint_every=every)
    same(state, want)
    assert [without(row) for row in report.history] == want[1]
    assert kinds(report) == events, report.events
    assert all(event.who and event.cause for event in report.events)


def test_a_transfer_cut_in_half_goes_on_where_it_stopped(tmp_path, want):
    programs.ASKED.clear()
    faulty = programs.make_faulty(Threads, {}, cut_at=(3,))
    state, report = run(tmp_path, faulty(), piece_bytes=512, rollers=1)
    same(state, want)
    total = sum(x.nbytes for x in jax.tree.leaves(state.params))
    half, rest = report.transfers[:2]
    assert kinds(report) == ["cut"] and "the line broke" in report.events[0].cause
    assert 0 < half.sent_bytes == rest.kept_bytes and half.sent_bytes + rest.sent_bytes == total


def test_a_verifier_that_always_hangs_leaves_invalid_rewards(tmp_path):
    faults = {("score", k): programs.hanging for k in (2, 3)}
    _, report = run(tmp_path, programs.make_faulty(Threads, faults)())
    assert kinds(report) == ["late", "lost", "late", "invalid", "lost"]
    assert [row["reward/valid_fraction"] for row in report.history] == [1.0, 0.0, 1.0, 1.0]
    assert "failed 2 times: no answer from score-" in report.events[3].cause


@pytest.mark.parametrize("capacity", [None, 1])
def test_a_slow_learner_holds_the_others_back(capacity, tmp_path):
    """The table is never fuller than allowed; without a capacity the staleness bounds it."""
    filled, updates = [], []

    class Watched(Threads):
        def call(self, name, function, *arguments):
            if function is roles.roll:
                filled.append(arguments[3].step - len(updates))
            if function is roles.learn:
                updates.append(arguments[0])
                function = partial(programs.slowed, 0.05, function)
            return super().call(name, function, *arguments)

    _, report = run(tmp_path, Watched(), staleness=2, capacity=capacity)
    behind = [row[threads.STALENESS] for row in report.history]
    assert max(filled) == (2 if capacity is None else 0) and behind[0] == 0
    # with room for one step a rollout that begins at once takes the weights before those that are being packed
    assert max(behind) == 2 if capacity is None else max(behind) <= 1
    assert report.waits["roller: queue full" if capacity else "roller: staleness"] > 0.05


def test_packing_weights_does_not_stop_training(tmp_path, monkeypatch):
    """Those of the first update are not ready before the second is done; no rollout takes older ones than allowed."""
    pack, done, waited, used = weight_transfer.pack, threading.Event(), [], []

    def slow(tree, version, **more):
        if version == 1:
            waited.append(done.wait(60.0))
        return pack(tree, version, **more)

    def build():
        made = programs.program()

        def finish(state, drawn, rewards):
            state, metrics = made.finish(state, drawn, rewards)
            if int(state.step) == 2:
                done.set()
            return state, metrics

        return made._replace(finish=finish)

    class Watched(Threads):
        def call(self, name, function, *arguments):
            if function is roles.roll:
                used.append((arguments[3].step, arguments[1].version))
            return super().call(name, function, *arguments)

    monkeypatch.setattr(weight_transfer, "pack", slow)
    _, report = run(tmp_path, Watched(), build, staleness=1)
    # the second update needs the rows of its step alone, which the first weights drew
    assert waited == [True] and report.events == []
    assert used[:2] == [(0, 0), (1, 0)] and all(0 <= step - version <= 1 for step, version in used)
    assert [row[threads.STALENESS] for row in report.history][:2] == [0.0, 1.0]


def test_weights_that_cannot_be_packed_end_the_run(tmp_path, monkeypatch):
    pack = weight_transfer.pack

    def broken(tree, version, **more):
        if version == 2:
            raise MemoryError("no room for the pieces")
        return pack(tree, version, **more)

    monkeypatch.setattr(weight_transfer, "pack", broken)
    with pytest.raises(Stuck, match="no room for the pieces"):
        run(tmp_path)


def test_a_slow_roller_leaves_rows_to_the_others(tmp_path, want):
    limits = SHORT._replace(roll=Limit(0.5, 99.0), first_s=99.0, tries=9)
    slow = programs.make_faulty(Threads, {("roll", 2): partial(programs.slowed, 60.0)})
    state, report = run(tmp_path, slow(), limits=limits)
    same(state, want)
    assert "late" in kinds(report) and report.seconds < 60.0


def test_an_error_does_not_wait_for_a_scorer_that_never_ends(monkeypatch):
    """It asks a dead endpoint again and again; the learner has an error of its own meanwhile."""
    monkeypatch.setattr(threads, "LEAVE_S", 0.5)
    asked, free = threading.Event(), threading.Event()

    def judge(rows):
        if asked.is_set():
            free.wait(60)
        asked.set()
        return programs.judge(rows)

    def figures(iteration):
        raise UserError("no room for the line of a step")

    began = time.monotonic()
    with pytest.raises(UserError, match="no room"):
        threads.run(host.make_host_loop(programs.method(), judge), programs.start(), 3, staleness=2, figures=figures)
    assert not free.is_set() and time.monotonic() - began < 55.0
    free.set()


@pytest.mark.parametrize("where", ["threads", "workers"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_curriculum_keeps_every_lesson(where, staleness, tmp_path):
    """It counts its draws and its lessons, and its two prompts are those numbers: what a rollout was drawn by."""
    sampler = Sampler(
        init=lambda problems: (jnp.int32(0), jnp.int32(0)),
        draw=lambda state, key, n: (jnp.stack(state), (state[0] + 1, state[1])),
        update=lambda state, ids, scores, valid: (state[0], state[1] + 1),
    )
    method, drawn = programs.method()._replace(sampler=sampler), {}

    def start():
        return programs.start()._replace(sampler=sampler.init(16))

    def judge(rows):
        draws, lessons = np.asarray(rows.problem_ids)[[0, 2]].tolist()
        drawn[draws] = lessons
        return programs.judge(rows)

    if where == "threads":
        state, history = threads.run(host.make_host_loop(method, judge), start(), 5, staleness=staleness)
        assert [step - drawn[step] for step in range(5)] == [row[threads.STALENESS] for row in history]
    else:
        build = partial(roles.make_program, method, start, judge)
        conductor.run(Threads(), build, 5, folder=str(tmp_path), sizes=Sizes(staleness=staleness))
        state = checkpoint.restore(checkpoint.latest(tmp_path), start())
    assert [int(x) for x in state.sampler] == [5, 5]
    assert sorted(drawn) == [0, 1, 2, 3, 4] and all(step - staleness <= drawn[step] <= step for step in drawn)


@pytest.mark.slow
def test_parts_of_responses_and_prompts_carry_the_versions_of_their_tokens(tmp_path, monkeypatch, want):
    seen = []
    learn = roles.learn

    def watched(learner, step, ids, rows, rewards, last):
        seen.append((step, rows))
        return learn(learner, step, ids, rows, rewards, last)

    monkeypatch.setattr(roles, "learn", watched)
    state, _ = run(tmp_path / "a", build=programs.in_parts, parts=2)
    for mine, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(want[0]), strict=True):
        close.assert_near(mine, theirs)  # the caches of later parts are computed anew
    seen.clear()
    _, report = run(tmp_path / "b", build=programs.in_parts, parts=2, staleness=3)
    for step, rows in seen:
        for row in rows:
            versions = row.extras[roles.VERSION]
            np.testing.assert_array_equal(versions >= 0, row.mask)
            drawn = np.where(row.mask, versions, step)
            assert drawn.min() >= step - 3 and (np.diff(versions[:, 5:], axis=1)[row.mask[:, 6:]] >= 0).all()
    assert report.history[-1][threads.STALENESS] <= 3


@pytest.mark.slow
def test_the_reference_is_scored_apart(tmp_path):
    """Against the same loop in one process, with the reference's figures from the same function."""
    state, report = run(tmp_path, build=programs.with_reference)
    made = programs.with_reference()
    loop = host.make_host_loop(made.online, programs.judge)
    theirs, history = made.start(), []
    while int(theirs.step) < STEPS:
        drawn = loop.begin(theirs)
        rows = drawn.trajectories
        rewards, logp = loop.score(rows), made.reference(rows)
        rows = rows._replace(extras={"ref_logp": logp})
        theirs, metrics = loop.finish(theirs, drawn._replace(trajectories=rows), rewards)
        history.append(float(metrics["kl/ref"]))
    jax.tree.map(np.testing.assert_array_equal, state.params, theirs.params)
    rounding = close.bound(4, 1.0)  # e^-d - 1 + d at a d next to 0
    assert [row["kl/ref"] for row in report.history] == history and history[0] <= rounding < history[-1]


def test_what_cannot_be_cured_ends_the_run_with_its_cause(tmp_path):
    always = {("roll", k): programs.raising for k in (1, 2)}
    with pytest.raises(Stuck, match="roll0 of row 0 failed 2 times: KeyError: 'the shop has no such item'"):
        run(tmp_path, programs.make_faulty(Threads, always)(), rollers=1)
    with pytest.raises(Stuck, match="learn-.*the shop has no such item"):
        run(tmp_path, programs.make_faulty(Threads, {("learn", 1): programs.raising})())
    dying = {("score", k): programs.left_before for k in range(1, 9)}
    limits = SHORT._replace(restarts=2, tries=9)
    with pytest.raises(Stuck, match=r"restarts=2 are used up; the last was score-\d+: SystemExit: killed"):
        run(tmp_path, programs.make_faulty(Threads, dying)(), limits=limits)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"rollers": 0}, "rollers=0 must be at least 1"),
        ({"staleness": -1}, "staleness=-1 must be at least 0"),
        ({"parts": 3}, "parts=3 does not divide the 2 prompts"),
        ({"parts": 2, "capacity": 1}, "capacity=1 is less than the parts=2"),
    ],
)
def test_mistakes(sizes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        run(tmp_path, **sizes)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"ray is not installed; pip install 'jaxrl_llm\[distributed\]'"):
        RayWorkers()
