"""The table of rows: every task has every row once, in whole groups, whatever the threads do; failures wake all."""

import random
import threading

import pytest

from jaxrl_llm.asynchronous.transfer_queue import Consumer, TransferQueue

TASKS = {"score": Consumer(("text",)), "value": Consumer(("text",)), "train": Consumer(("text", "reward"), 4)}


def test_every_task_has_every_row_once_under_random_interleavings():
    for seed in range(20):
        chance, queue = random.Random(seed), TransferQueue(TASKS)
        cells = [(row, column) for row in range(16) for column in ("text", "reward")]
        chance.shuffle(cells)
        had, written = {name: [] for name in TASKS}, set()
        while cells or any(len(rows) < 16 for rows in had.values()):
            if cells and chance.random() < 0.5:
                row, column = cells.pop()
                queue.write([row], **{column: [row]})
                written.add((row, column))
            name = chance.choice(list(TASKS))
            rows = queue.take(name, 4, timeout=0.0)
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
    assert queue.read([2], "text") == [None]


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
        (lambda q: TransferQueue({"idle": Consumer(())}), "consumer 'idle' needs a column"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call(TransferQueue(TASKS))
