"""The table of rows: every task has every row once, in whole groups, whatever the threads do; failures wake all.

Values lie on storage units, of which the control plane knows nothing; its consumers get equal shares of the tokens.
"""

import random
import threading

import pytest

from jaxrl_llm.asynchronous.transfer_queue import Consumer, ControlPlane, StorageUnit, TransferQueue

TASKS = {"score": Consumer(("text",)), "value": Consumer(("text",)), "train": Consumer(("text", "reward"), 4)}


@pytest.mark.parametrize("units", [1, 3])
def test_every_task_has_every_row_once_under_random_interleavings(units):
    for seed in range(20):
        chance, queue = random.Random(seed), TransferQueue(TASKS, units=units)
        cells = [(row, column) for row in range(16) for column in ("text", "reward")]
        chance.shuffle(cells)
        had, written = {name: [] for name in TASKS}, set()
        while cells or any(len(rows) < 16 for rows in had.values()):
            if cells and chance.random() < 0.5:
                row, column = cells.pop()
                queue.write([row], **{column: [row]})
                written.add((row, column))
            name = chance.choice(list(TASKS))
            rows = queue.take(name, 4, timeout=0.0, by=chance.choice([None, "a", "b"]))
            assert all(queue.read(rows, column) == rows for column in TASKS[name].columns)
            assert all((row, column) in written for row in rows for column in TASKS[name].columns)
            assert name != "train" or len({row // 4 for row in rows}) <= 1  # a group comes whole
            had[name] += rows
        assert all(sorted(rows) == list(range(16)) for rows in had.values())


def test_rows_come_in_the_order_of_becoming_ready():
    queue = TransferQueue(TASKS)
    queue.write([5, 2], text=["e", "b"])
    queue.write([9], text=["i"])
    assert queue.take("score", 2) == [5, 2] and queue.take("score", 1) == [9] and queue.take("value", 3) == [5, 2, 9]
    assert queue.read([2, 9], "text") == ["b", "i"]
    queue.forget([2])
    with pytest.raises(KeyError):
        queue.read([2], "text")


def test_threads_share_the_rows_of_a_task():
    queue, found, lock = TransferQueue(TASKS), [], threading.Lock()

    def work():
        while rows := queue.take("score", 2):
            with lock:
                found.extend(rows)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for row in range(0, 200, 2):
        queue.write([row, row + 1], text=["", ""])
    while len(found) < 200:
        pass
    queue.close()
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(found) == list(range(200)) and not any(thread.is_alive() for thread in threads)


def test_rows_go_around_the_units_with_all_their_columns():
    queue = TransferQueue(TASKS, units=3)
    queue.write(range(8), text=list("abcdefgh"))
    queue.write([4], reward=[1.0])
    assert [len(unit) for unit in queue.units] == [3, 4, 2] and queue.units[1].get(4, "reward") == 1.0
    queue.forget([1, 4, 5])
    assert [len(unit) for unit in queue.units] == [3, 1, 1] and queue.read([7, 0], "text") == ["h", "a"]


def test_a_unit_that_is_busy_holds_up_neither_the_others_nor_the_control_plane():
    queue = TransferQueue(TASKS, units=2)
    queue.write([0, 1], text=["a", "b"])
    entered, leave = threading.Event(), threading.Event()

    def busy():
        with queue.units[0]._lock:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=busy)
    thread.start()
    assert entered.wait(60)
    queue.write([3], text=["d"])
    assert queue.take("score", 3, timeout=0.0) == [0, 1, 3] and queue.read([1, 3], "text") == ["b", "d"]
    leave.set()
    thread.join()
    assert queue.read([0], "text") == ["a"]


def test_the_control_plane_never_sees_a_value():
    """It is told rows and columns alone, and what it does follows from them."""
    control, unit = ControlPlane(TASKS), StorageUnit()
    unit.put(0, "text", object())
    assert control.take("score", 1, timeout=0.0) == []
    control.written([0], "text")
    assert control.take("score", 1, timeout=0.0) == [0] == control.take("value", 1, timeout=0.0)
    assert not {"put", "get", "read", "write"} & set(dir(control))


def served(control, weights, quick):
    """When the last row is done by two workers who ask as soon as they are free, one ``quick`` times as fast."""
    free, had = {"slow": 0.0, "quick": 0.0}, {"slow": 0.0, "quick": 0.0}
    for _ in weights:
        who = min(free, key=free.get)
        (row,) = control.take("score", 1, timeout=0.0, by=who)
        had[who] += weights[row]
        free[who] += weights[row] / (quick if who == "quick" else 1.0)
    return max(free.values()), had


def test_consumers_get_equal_shares_of_the_tokens():
    for seed in range(50):
        chance, control = random.Random(seed), ControlPlane({"score": Consumer(("text",))})
        weights = [chance.randint(1, 100) for _ in range(24)]
        control.weigh(range(24), weights)
        control.written(range(24), "text")
        for turn in range(24):
            assert control.take("score", 1, timeout=0.0, by="ab"[turn % 2])
        loads = control.loads("score")
        assert sum(loads.values()) == sum(weights) and abs(loads["a"] - loads["b"]) <= max(weights)


def test_whoever_is_free_takes_the_next_row():
    """A worker three times as fast does more, and both end nearly together, whatever the rows weigh."""
    for seed in range(50):
        chance, control = random.Random(seed), ControlPlane({"score": Consumer(("text",))})
        weights = [chance.randint(1, 100) for _ in range(40)]
        control.weigh(range(40), weights)
        control.written(range(40), "text")
        ended, had = served(control, weights, 3.0)
        assert had["quick"] > had["slow"] and ended <= sum(weights) / 4 + max(weights)


def test_rows_of_an_earlier_batch_go_first_all_the_same():
    control = ControlPlane({"score": Consumer(("text",), batch_size=2)})
    control.weigh(range(4), [1, 2, 50, 60])
    control.written([3, 2, 1, 0], "text")
    assert [control.take("score", 1, by="a")[0] for _ in range(4)] == [1, 0, 3, 2]


def test_whoever_comes_in_the_place_of_another_goes_on_with_its_share():
    control = ControlPlane({"score": Consumer(("text",))})
    control.weigh(range(6), [8, 7, 3, 1, 4, 2])
    control.written(range(6), "text")
    assert [control.take("score", 1, by=who)[0] for who in "ab"] == [0, 1]
    control.leave("a")
    assert control.take("score", 1, by="c") == [3]  # with 8 before: the lightest
    control.give_back("score", [3], by="c")
    assert control.loads("score") == {"b": 7.0, "c": 8.0} and control.take("score", 1, by="d") == [4]


def test_what_is_lost_is_written_and_had_again():
    queue = TransferQueue(TASKS, units=2)
    queue.write(range(4), text=list("abcd"), reward=[0.0] * 4)
    assert queue.take("score", 3) == [0, 1, 2] and queue.take("train", 4, timeout=0.0) == [0, 1, 2, 3]
    queue.lose([1, 3], ["text", "reward"])
    assert queue.take("score", 1, timeout=0.0) == queue.take("train", 4, timeout=0.0) == []
    queue.write([1, 3], text=["B", "D"])
    assert queue.take("score", 2, timeout=0.0) == [1, 3] and queue.take("train", 4, timeout=0.0) == []
    queue.write([3, 1], reward=[1.0, 1.0])
    assert queue.take("train", 4, timeout=0.0) == [0, 1, 2, 3] and queue.read([0, 1], "text") == ["a", "B"]


def test_a_failure_elsewhere_is_raised_to_whoever_waits():
    queue = TransferQueue(TASKS)
    threading.Timer(0.05, lambda: queue.close(RuntimeError("the sampler broke"))).start()
    with pytest.raises(RuntimeError, match="the sampler broke"):
        queue.take("score", 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: q.write([0], answer=["x"]), "column 'answer' is read by no task; the columns are text, reward"),
        (lambda q: q.write([0], text=[]), "column 'text' has 0 values for 1 rows"),
        (lambda q: [q.write([0], text=["x"]) for _ in range(2)], "row 0 has its 'text' already"),
        (lambda q: q.take("judge", 1), "task 'judge' is unknown; the tasks are score, value, train"),
        (lambda q: q.take("train", 3), "count=3 must be a multiple of group_size=4"),
        (lambda q: TransferQueue(TASKS, units=0), "units=0 must be at least 1"),
        (lambda q: TransferQueue({"idle": Consumer(())}), "consumer 'idle' needs a column"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call(TransferQueue(TASKS))
