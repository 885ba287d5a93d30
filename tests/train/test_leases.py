"""Leases: every row is done once, whatever holders do; a row that fails too often says why."""

import random

import pytest

from jaxrl_llm.asynchronous.leases import Exhausted, Lease, Leases
from jaxrl_llm.asynchronous.transfer_queue import Consumer, TransferQueue


def test_every_row_is_done_once_whoever_dies_or_is_late():
    """A small world with a clock: holders finish, finish late, or die; each row's first result is the only one."""
    for seed in range(30):
        chance, queue, leases = random.Random(seed), TransferQueue({"roll": Consumer(("order",))}), Leases(tries=1000)
        queue.write(range(12), order=range(12))
        working, results, now = {}, [], 0.0  # holder -> row
        for _ in range(2000):
            now += 1.0
            for lease in leases.lapse(now):
                if leases.fail(lease.item, "late"):
                    queue.give_back("roll", [lease.item[1]])
            holder = chance.choice("abc")
            if holder not in working:
                rows = [r for r in queue.take("roll", 1, timeout=0.0) if not leases.is_done(("roll", r))]
                if rows:
                    working[holder] = rows[0]
                    leases.grant(("roll", rows[0]), holder, until=now + chance.randint(1, 9))
            elif chance.random() < 0.3:
                row = working.pop(holder)
                if leases.done(("roll", row), holder):
                    results.append(row)
            elif chance.random() < 0.2:
                del working[holder]
                for lease in leases.drop(holder):
                    if leases.fail(lease.item, "died"):  # not where a late one has done it
                        queue.give_back("roll", [lease.item[1]])
        assert sorted(results) == list(range(12))


def test_rows_come_back_first_and_in_order():
    queue = TransferQueue({"roll": Consumer(("order",))})
    queue.write(range(4), order="abcd")
    assert queue.take("roll", 3) == [0, 1, 2]
    queue.give_back("roll", [1, 2])
    assert queue.take("roll", 3) == [1, 2, 3]


def test_a_late_holder_may_still_be_first():
    leases = Leases(tries=3)
    leases.grant(("score", 1), "slow", until=1.0)
    assert leases.lapse(1.0) == [Lease(("score", 1), "slow", 1.0)] and leases.lapse(5.0) == []
    leases.grant(("score", 1), "quick", until=9.0)
    assert leases.done(("score", 1), "slow") and leases.is_done(("score", 1)) and not leases.done(("score", 1), "quick")
    assert not leases.fail(("score", 1), "no matter") and leases.held() == []


def test_the_last_failure_names_all():
    leases = Leases(tries=2)
    assert leases.fail(("roll0", 4), "died")
    with pytest.raises(Exhausted, match="roll0 of row 4 failed 2 times: died; late"):
        leases.fail(("roll0", 4), "late")


def test_what_is_reopened_is_done_again_and_nobody_holds_it():
    leases = Leases(tries=2)
    leases.grant(("score", 1), "a", until=5.0)
    leases.grant(("score", 2), "a", until=5.0)
    assert leases.fail(("score", 1), "late") and leases.done(("score", 1), "b")
    leases.reopen(("score", 1))
    assert not leases.is_done(("score", 1)) and [lease.item for lease in leases.held()] == [("score", 2)]
    leases.grant(("score", 1), "b", until=9.0)
    assert leases.fail(("score", 1), "late") and leases.done(("score", 1), "b")  # the first try of its new life


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: Leases(tries=0), "tries=0 must be at least 1"),
        (lambda x: [x.grant(("a", 1), "b", until=1.0) for _ in range(2)], r"b holds \('a', 1\) already"),
        (lambda x: [x.done(("a", 1), "b"), x.grant(("a", 1), "c", until=1.0)], r"\('a', 1\) is done"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call(Leases(tries=1))
