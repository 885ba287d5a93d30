"""Rows on storage units and weights that workers take in turn: the host loop bit for bit, whatever is lost or slow."""

import threading
import time
from functools import partial

import jax
import numpy as np
import pytest

from jaxrl_llm.asynchronous import conductor, roles, threads
from jaxrl_llm.asynchronous.limits import Limit, Sizes
from jaxrl_llm.asynchronous.workers import Reply, Threads
from jaxrl_llm.types import Rewards
from tests.asynchronous import programs
from tests.asynchronous.test_conduct import SHORT, STEPS, kinds, run, same, without

PATIENT = SHORT._replace(score=SHORT.roll, tries=3)


@pytest.fixture(scope="module")
def want():
    """Parameters and metrics of the host loop."""
    return programs.wanted(STEPS)


def arrays(value):
    """Bytes of the arrays in what a worker answers."""
    return sum(x.nbytes for x in jax.tree.leaves(value) if isinstance(x, np.ndarray))


class Heard(Threads):
    """What comes back to the conductor: bytes by kind of the answer."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def wait(self, timeout_s):
        replies = super().wait(timeout_s)
        for reply in replies:
            kind = type(reply.value).__name__
            self.bytes.setdefault(kind, []).append(arrays(reply.value))
        return replies


@pytest.mark.parametrize("units", [1, 2])
def test_with_storage_units_it_is_the_host_loop_and_no_row_passes_through_the_conductor(units, tmp_path, want):
    crew = Heard()
    state, report = run(tmp_path, crew, limits=PATIENT, units=units)
    same(state, want)
    assert [without(row) for row in report.history] == want[1] and report.events == []
    assert len(crew.bytes["Rolled"]) == STEPS and sum(crew.bytes["Rolled"]) == 0
    assert len(crew.bytes["Cell"]) == STEPS and "Rewards" not in crew.bytes
    assert sum(report.loads["score"].values()) == sum(row["tokens/generated"] for row in want[1])


def test_without_units_rows_pass_through_the_conductor(tmp_path, want):
    """What the test above would not see if nothing was ever counted."""
    crew = Heard()
    state, _ = run(tmp_path, crew)
    same(state, want)
    assert min(crew.bytes["Rolled"]) > 0 and min(crew.bytes["Rewards"]) > 0


class Dying(programs.make_faulty(Threads, {})):
    """Storage units of which the one that is asked for the ``number``-th ``work`` is dead from then on."""

    def __init__(self, work, number, faults=()):
        super().__init__()
        self.when, self.asked, self.dead, self.faults = (work, number), 0, set(), dict(faults)

    def aside(self, name, function, timeout_s):
        found = Threads.aside(self, name, function, timeout_s)
        return partial(self._watched, name, function.__name__, found)

    def _watched(self, name, what, found, *arguments):
        if what == self.when[0]:
            self.asked += 1
            if self.asked == self.when[1]:
                self.dead.add(name)
        if name in self.dead:
            raise ConnectionError(f"{name} is gone")
        return found(*arguments)

    def call(self, name, function, *arguments):
        if name in self.dead:
            self._tickets += 1
            self._replies.put((name, Reply(self._tickets, error=RuntimeError("the unit died"), dead=True)))
            return self._tickets
        number = self.counts[function.__name__] = self.counts.get(function.__name__, 0) + 1
        wrapper = self.faults.get((function.__name__, number))
        return Threads.call(self, name, partial(wrapper, function) if wrapper else function, *arguments)


LOST = {  # of a step: rows written, read to be judged, rewards written, both read to be learned from
    "when a roller writes": ("put_value", 3),
    "when a judge reads": ("get_value", 4),
    "when a judge writes": ("put_value", 4),
    "when the learner reads rows": ("get_value", 5),
    "when the learner reads rewards": ("get_value", 6),
}


@pytest.mark.parametrize("when", LOST)
def test_a_unit_that_dies_changes_nothing(when, tmp_path, want):
    crew = Dying(*LOST[when])
    state, report = run(tmp_path, crew, limits=PATIENT, units=2, rollers=1)
    same(state, want)
    assert [without(row) for row in report.history] == want[1]
    assert kinds(report) == ["missing", "lost"] and "store-" in report.events[0].cause, report.events
    assert len(crew.dead) == 1


def test_rows_that_trained_and_were_lost_are_made_again_for_a_learner_that_comes_back_from_before_them(tmp_path, want):
    """The only unit dies in step 1, the learner before update 2, and no checkpoint covers step 0."""
    crew = Dying("get_value", 4, {("learn", 3): programs.left_before})
    state, report = run(tmp_path, crew, limits=PATIENT, units=1, rollers=1, checkpoint_every=STEPS)
    same(state, want)
    assert kinds(report) == ["missing", "lost", "lost", "resumed"], report.events


@pytest.mark.parametrize("every", [1, STEPS])
def test_rows_that_are_lost_while_the_learner_updates_by_them_are_not_waited_for(every, tmp_path):
    """Of the second step: they are being made again when its update is done, or are to be, on a unit that still starts.

    With a checkpoint of that update they are forgotten; without one the weights are too new for them.
    """
    gone, noticed, learned = (threading.Event() for _ in range(3))

    def update(function, learner, *arguments):
        program = learner.program

        def finish(*given):  # it has read all rows
            crew.dead.add("store-0")
            gone.set()
            assert noticed.wait(60)
            return program.finish(*given)

        learner.program = program._replace(finish=finish)
        found = function(learner, *arguments)
        learner.program = program
        learned.set()
        return found

    def behind(function, *arguments):
        assert gone.wait(60)
        return function(*arguments)

    def late(function, *arguments):
        noticed.set()
        assert learned.wait(60)
        time.sleep(0.5)  # the conductor hears of the update first
        return function(*arguments)

    class Slow(Dying):
        def start(self, name, role, make):
            slow = role == "store" and name != "store-0" and every == STEPS
            super().start(name, role, partial(late, make) if slow else make)

    again = {("roll", 4): late} if every == 1 else {}
    crew = Slow("nothing", 0, {("learn", 2): update, ("roll", 3): behind} | again)
    sizes = dict(units=1, rollers=1, staleness=1, checkpoint_every=every)
    _, report = run(tmp_path, crew, limits=PATIENT, **sizes)
    assert kinds(report) == ["missing", "lost"], report.events
    rolled_again = 2 if every == 1 else 1  # the row of the third step, that of the second where it began
    assert crew.counts["roll"] == STEPS + rolled_again


def test_a_unit_that_goes_silent_when_it_is_told_to_drop_rows_is_replaced(tmp_path, want):
    """Nobody says that it is dead: its machine answers nothing any more, neither the conductor nor others."""

    class Silent(Threads):
        silent = False

        def aside(self, name, function, timeout_s):
            found = super().aside(name, function, timeout_s)

            def asked(*arguments):
                if name == "store-0" and self.silent:
                    raise TimeoutError("no answer in time")
                return found(*arguments)

            return asked

        def call(self, name, function, *arguments):
            self.silent = self.silent or function is roles.drop
            if name == "store-0" and self.silent:
                self._tickets += 1
                return self._tickets
            return super().call(name, function, *arguments)

    state, report = run(tmp_path, Silent(), limits=PATIENT._replace(start_s=10.0), units=1, rollers=1)
    same(state, want)
    assert kinds(report) == ["missing", "lost"], report.events
    assert report.events[1][1:] == ("lost", "store-0", "no answer to drop in 10 s")


def test_a_reward_that_never_came_is_invalid_with_units_too(tmp_path):
    faults = {("score", k): programs.raising for k in (2, 3)}
    _, report = run(tmp_path, programs.make_faulty(Threads, faults)(), units=2)
    assert kinds(report) == ["failed", "failed", "invalid"]
    assert [row["reward/valid_fraction"] for row in report.history] == [1.0, 0.0, 1.0, 1.0]


def test_cells_are_freed_when_a_checkpoint_covers_them(tmp_path):
    crew, most = Threads(), []

    def watched(rows):
        most.append(max(len(s) for n, s in crew._states.items() if n.startswith("store")))
        return programs.judge(rows)

    def build():
        return programs.program()._replace(score=watched)

    run(tmp_path, crew, build, steps=8, limits=PATIENT, units=1)
    assert max(most) <= 4  # of two steps


def test_a_late_worker_does_not_change_rows_that_were_judged(tmp_path, want):
    """The first roller brings other rows of the first step, when those of the second have been scored."""
    scored, written = threading.Event(), threading.Event()

    def late(function, roller, fetch, manifest, key, *arguments):
        assert scored.wait(60)
        found = function(roller, fetch, manifest, key._replace(data=key.data + np.uint32(1)), *arguments)
        written.set()
        return found

    def score(function, *arguments):
        found = function(*arguments)
        scored.set()
        return found

    def learn(function, *arguments):
        assert written.wait(60)
        return function(*arguments)

    limits = PATIENT._replace(roll=Limit(0.5, 99.0), first_s=0.0)
    crew = programs.make_faulty(Threads, {("roll", 1): late, ("score", 1): score, ("learn", 1): learn})()
    state, report = run(tmp_path, crew, limits=limits, units=1)
    same(state, want)
    assert [without(row) for row in report.history] == want[1]
    assert {"late", "repeated"} <= set(kinds(report)), report.events


# weights in turn


class InTurn(Threads):
    """Counts who fetches weights at the same time; a fetch behind the first takes until a row is done.

    Rows keep step with the learner: one of step b takes until update b - 2 is done.
    """

    def __init__(self, rows):
        super().__init__()
        self.rows, self.lock = rows, threading.Lock()
        self.fetching, self.most, self.fetched, self.alone = set(), 0, {}, 0
        self.done, self.learned, self.changed = {}, 0, threading.Condition()

    def beside(self, name, function, *arguments):
        if function is not roles.fetch_weights:
            return super().beside(name, function, *arguments)
        return super().beside(name, partial(self._slow, name, function), *arguments)

    def _slow(self, name, function, *arguments):
        with self.lock:
            self.fetching.add(name)
            self.most = max(self.most, len(self.fetching))
        with self.changed:
            before = dict(self.done)
            if self.fetched.get(name):  # someone finishes a row meanwhile: rollout has not stopped
                over = self.changed.wait_for(
                    lambda: sum(self.done.values()) == self.rows or self.done != before, timeout=60
                )
                self.alone += not over
        found = function(*arguments)
        with self.lock:
            self.fetching.discard(name)
            self.fetched.setdefault(name, []).append(arguments[-1].version)
        return found

    def call(self, name, function, *arguments):
        if function is roles.roll:
            function = partial(self._counted, name, function)
        if function is roles.learn:
            function = partial(self._learned, function)
        return super().call(name, function, *arguments)

    def _learned(self, function, *arguments):
        found = function(*arguments)
        with self.changed:
            self.learned += 1
            self.changed.notify_all()
        return found

    def _counted(self, name, function, *arguments):
        found, step = function(*arguments), arguments[4].step
        with self.changed:
            assert self.changed.wait_for(lambda: self.learned >= step - 2, timeout=60)
            self.done[name] = self.done.get(name, 0) + 1
            self.changed.notify_all()
        return found


def test_workers_take_new_weights_in_turn_and_rollout_goes_on_beside_every_fetch(tmp_path):
    """A fetch ends only when some row was done while it ran; with all of them at once nobody would do one."""
    crew = InTurn(12)
    _, report = run(tmp_path, crew, steps=12, staleness=6, swaps=1, rollers=2, limits=PATIENT)
    assert crew.most == 1 and crew.alone == 0 and report.events == []
    assert all(versions == sorted(set(versions)) and len(versions) > 1 for versions in crew.fetched.values())
    behind = [row[threads.STALENESS] for row in report.history]
    assert max(behind) <= 6 and len({t.version for t in report.transfers}) > 2
    fetched = sum(map(len, crew.fetched.values()))
    assert fetched - 2 <= len(report.transfers) <= fetched  # once each; the run may end before the last are heard of


@pytest.mark.parametrize("swaps", [1, 2])
def test_in_turn_without_staleness_it_is_the_host_loop(swaps, tmp_path, want):
    state, report = run(tmp_path, swaps=swaps, units=2, limits=PATIENT)
    same(state, want)
    assert [without(row) for row in report.history] == want[1]
    assert report.waits["rollout: nobody generates"] > 0


def test_weights_under_way_change_nothing_of_a_row_that_is_being_generated(tmp_path):
    """A worker with a row in hand fetches the next version; the row's tokens are of the version that it began with."""
    seen = []

    class Watched(InTurn):
        def _counted(self, name, function, roller, *arguments):
            version = arguments[1].version
            found = super()._counted(name, function, roller, *arguments)
            seen.append((version, found.version, found.oldest, set(np.unique(found.rows.extras[roles.VERSION]))))
            return found

    run(tmp_path, Watched(8), steps=8, staleness=6, swaps=1, rollers=1, limits=PATIENT)
    # the last step may be no more than six versions behind: two are seen at least, more where updates are quick
    assert len(seen) == 8 and len({version for version, *_ in seen}) > 1
    for asked, had, oldest, of_tokens in seen:
        assert had == oldest >= asked and of_tokens - {-1} == {had}


def test_a_fetch_that_is_cut_goes_on_where_it_stopped(tmp_path, want):
    programs.ASKED.clear()
    faulty = programs.make_faulty(Threads, {}, cut_at=(3,))
    state, report = run(tmp_path, faulty(), piece_bytes=512, rollers=1, swaps=1, limits=PATIENT)
    same(state, want)
    half, rest = report.transfers[:2]
    assert kinds(report) == ["cut"] and 0 < half.sent_bytes == rest.kept_bytes


@pytest.mark.parametrize("work", [roles.fetch_weights, roles.newest])
def test_a_worker_that_dies_while_it_fetches_or_packs_is_replaced(work, tmp_path, want):
    class Dies(Threads):
        count = 0

        def beside(self, name, function, *arguments):
            self.count += function is work
            wrapper = (
                programs.left_before if function is work and self.count == 3 else (lambda work, *given: work(*given))
            )
            return super().beside(name, partial(wrapper, function), *arguments)

    state, report = run(tmp_path, Dies(), swaps=1, rollers=1, limits=PATIENT)
    same(state, want)
    assert kinds(report) == ["lost"] and "SystemExit" in report.events[0].cause


def test_judges_get_equal_shares_of_tokens(tmp_path):
    """Rows of unequal length, two judges that are equally slow: neither has more than a row beyond the other."""
    slow = threading.Barrier(2, timeout=60)

    def judged(rows):
        slow.wait()  # both have one row each
        return Rewards(np.zeros(len(rows.tokens), np.float32), np.ones(len(rows.tokens), bool))

    def build():
        return programs.program()._replace(score=judged)

    _, report = run(tmp_path, Threads(), build, parts=2, judges=2, limits=PATIENT, units=1)
    loads = list(report.loads["score"].values())
    assert len(loads) == 2 and abs(loads[0] - loads[1]) <= 2 * programs.toy.RESPONSE_TOKENS


@pytest.mark.parametrize("name", ["units", "swaps"])
def test_mistakes(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name}=-1 must be at least 0"):
        conductor.run(Threads(), programs.program, 1, folder=str(tmp_path), sizes=Sizes(**{name: -1}))


@pytest.mark.parametrize("work", [roles.fetch_weights, roles.newest])
def test_weights_that_do_not_come_are_noticed(work, tmp_path, want):
    class Hangs(Threads):
        count = 0

        def beside(self, name, function, *arguments):
            self.count += function is work
            late = (lambda *given: time.sleep(600)) if function is work and self.count == 2 else function
            return super().beside(name, late, *arguments)

    short = {role: getattr(PATIENT, role)._replace(hang_s=5.0) for role in ("roll", "learn")}
    limits = PATIENT._replace(**short, first_s=300.0)
    state, report = run(tmp_path, Hangs(), swaps=1, rollers=1, limits=limits)
    same(state, want)
    assert kinds(report) == ["lost"] and "no weights of version" in report.events[0].cause
