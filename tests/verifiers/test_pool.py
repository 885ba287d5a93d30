"""The pool survives everything that a verifier can do, and an infrastructure failure is never a zero."""

import threading
import time

import psutil
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.verifiers.countdown import verify as countdown
from jaxrl_llm.verifiers.pool import VerifierPool
from tests.close import doubles
from tests.verifiers import bad_verifiers, broken_module, killed_module
from tests.waits import soon


def _children():
    return {p.pid for p in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module")
def pool():
    before = _children()
    with VerifierPool(workers=2, timeout_s=1.0, memory_mb=512) as pool:
        yield pool
    left = {p for p in _children() - before if psutil.pid_exists(p)}
    assert not left


def _judge(pool, *responses, **settings):
    answers = [{"n": i} for i in range(len(responses))]
    return pool.judge(bad_verifiers.obey, answers, responses, **settings)


def test_order_of_many_items(pool):
    judged = _judge(pool, *["slow"] * 60)
    assert [v.value for v in judged.verdicts] == list(range(60))
    assert judged.metrics["verifier/invalid_fraction"] == 0.0


@pytest.mark.parametrize("response", ["hang", "sleep"])
def test_a_hang_is_killed_and_invalid(pool, response):
    start = time.monotonic()
    judged = _judge(pool, "fine", response, "fine")
    assert time.monotonic() - start < 8
    assert [v.valid for v in judged.verdicts] == [True, False, True]
    assert judged.verdicts[1] == (0.0, False, "timed out after 1.0 s")
    assert judged.metrics["verifier/killed"] == 1.0
    assert judged.metrics["verifier/invalid_fraction"] == doubles(1 / 3)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("memory", "out of memory"),
        ("exit", "ended with code 3"),
        ("abort", "ended with code -6"),
        ("raise", "KeyError: 'absent'"),
        ("deep", "RecursionError"),
    ],
)
def test_a_failure_is_invalid_and_the_pool_goes_on(pool, response, reason):
    judged = _judge(pool, response, "fine", response, "fine")
    assert [v.valid for v in judged.verdicts] == [False, True, False, True]
    assert reason in judged.verdicts[0].reason
    assert all(v.value == 0.0 for v in judged.verdicts if not v.valid)


@pytest.mark.parametrize("response", ["one big number", "more and more memory"])
def test_a_bomb_is_invalid_whichever_limit_it_meets_first(pool, response):
    verdict = _judge(pool, response).verdicts[0]
    assert not verdict.valid and verdict.value == 0.0


def _sleeping():
    """Processes with the command line of the child; one that has ended but for its entry has none."""
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1000"]]


def test_children_of_a_killed_verifier_are_killed(pool):
    assert not _judge(pool, "child").verdicts[0].valid
    assert soon(lambda: not _sleeping())


def test_output_of_a_verifier_disturbs_nothing(pool, capfd):
    assert _judge(pool, "print", "print").verdicts[1].value == 1.0
    assert capfd.readouterr() == ("", "")


def test_workers_import_no_jax(pool):
    assert _judge(pool, "jax?").verdicts[0].value == 0.0


def test_a_result_that_is_no_verdict_is_invalid(pool):
    verdict = pool.judge(bad_verifiers.not_a_verdict, [{}], ["x"]).verdicts[0]
    assert not verdict.valid and "ValueError" in verdict.reason


def test_deadline_is_a_metric_not_a_kill(pool):
    judged = _judge(pool, *["slow"] * 6, deadline_s=1e-6)
    assert all(v.valid for v in judged.verdicts)
    assert judged.metrics["verifier/late_fraction"] == 1.0
    assert _judge(pool, "fine", deadline_s=60.0).metrics["verifier/late_fraction"] == 0.0


def test_threads_share_a_pool(pool):
    results = {}

    def work(k):
        answers = [{"n": 100 * k + i} for i in range(20)]
        results[k] = [v.value for v in pool.judge(bad_verifiers.obey, answers, ["slow"] * 20).verdicts]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [100.0 * k + i for i in range(20)] for k in range(4)}


def test_switching_verifiers_and_an_empty_batch(pool):
    assert pool.judge(countdown, [{"numbers": [2, 3], "target": 6}], ["2*3"]).verdicts[0].value == 1.0
    assert _judge(pool, "fine").verdicts[0].value == 0.0
    assert pool.judge(countdown, [], []).verdicts == []


def test_an_idle_worker_that_died_is_replaced():
    with VerifierPool(workers=1) as pool:
        _judge(pool, "fine")
        alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        mine = [child for child in alive if "jaxrl_llm.verifiers.worker" in " ".join(child.cmdline())]
        assert mine
        for process in mine:
            process.kill()
        time.sleep(0.1)
        verdicts = [_judge(pool, "fine", "fine").verdicts[1].value for _ in range(2)]
    assert verdicts[-1] == 1.0


def test_closing_kills_the_workers_and_ends_a_waiting_thread():
    before = _children()
    pool = VerifierPool(workers=2, timeout_s=60.0)
    errors = []

    def wait():
        try:
            _judge(pool, "sleep", "sleep", "sleep")
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(2)]  # the items of the second are all pending
    for thread in threads:
        thread.start()
        time.sleep(0.5)
    pool.close()
    pool.close()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads) and not _children() - before
    with pytest.raises(RuntimeError, match="closed"):
        _judge(pool, "fine")
    assert len(errors) == 2 and all("closed" in error for error in errors)


def test_what_cannot_work_is_said_at_once(pool):
    with pytest.raises(ValueError, match="module-level function"):
        pool.judge(lambda answer, response: None, [{}], ["x"])
    with pytest.raises(ValueError, match="answers has 1 items and responses 2"):
        pool.judge(bad_verifiers.obey, [{}], ["x", "y"])
    with pytest.raises(UserError, match=r"does not load.*jaxrl_llm\[tasks\]"):
        pool.judge(broken_module.verify, [{}], ["x"])
    assert _judge(pool, "fine").verdicts[0].valid
    for name, value in (("workers", 0), ("timeout_s", 0.0), ("memory_mb", 1), ("start_timeout_s", -1.0)):
        with pytest.raises(ValueError, match=name):
            VerifierPool(**{name: value})


def test_a_worker_killed_while_it_loads_is_replaced_but_not_for_ever(tmp_path, monkeypatch):
    left = tmp_path / "left"
    monkeypatch.setenv("KILLS_LEFT", str(left))
    left.write_text("2")
    with VerifierPool(workers=1, memory_mb=512) as pool:
        assert pool.judge(killed_module.verify, [{}], [""]).verdicts[0].value == 1.0
    left.write_text("9")
    with VerifierPool(workers=1, memory_mb=512) as pool, pytest.raises(UserError, match="code -9 while loading"):
        pool.judge(killed_module.verify, [{}], [""])
