"""Trap 34, verifier timeouts: killed from outside, also when the pool is driven off the main thread."""

import threading

from jaxrl_llm.verifiers import math
from jaxrl_llm.verifiers.pool import VerifierPool
from tests.verifiers import bad_verifiers


def _off_the_main_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    assert results, "the thread did not end"
    return results[0]


def test_a_loop_that_no_signal_interrupts_is_killed_and_the_batch_goes_on():
    with VerifierPool(workers=2, timeout_s=1.0) as pool:
        judged = _off_the_main_thread(
            lambda: pool.judge(bad_verifiers.obey, [{"n": 1}] * 3, ["one big number", "fine", "fine"], deadline_s=0.5)
        )
    assert [v.valid for v in judged.verdicts] == [False, True, True]
    assert judged.metrics["verifier/late_fraction"] >= 1 / 3  # the deadline is a metric


def test_math_verify_works_off_the_main_thread():
    with VerifierPool(workers=1, timeout_s=5.0) as pool:
        judged = _off_the_main_thread(lambda: pool.judge(math.verify, [{"value": "1/2"}], ["it is $0.5$"]))
    assert judged.verdicts[0] == (1.0, True, "right")
