"""A signal ends a process in bounded time, wherever the exception that it raises is lost."""

import signal
import subprocess
import sys
import time

import pytest

from jaxrl_llm.run import stop
from tests.run import test_faults

BEGIN = """
import gc, hashlib, os, signal, sys, threading, time, weakref
from jaxrl_llm.run import stop

SIGNAL, sent = int(sys.argv[1]), []

def send(*args):
    if not sent:
        sent.append(1)
        os.kill(os.getpid(), SIGNAL)

def later(seconds, count=1):
    for _ in range(count):
        time.sleep(seconds)
        os.kill(os.getpid(), SIGNAL)

class Last:
    def __del__(self):
        send()
"""
BLOCK = """
try:
    with {block}:
        {body}
except KeyboardInterrupt:
    print("stopped", file=sys.stderr)
    sys.exit(130)
"""
WAIT = "[time.sleep(0.01) for _ in range(3000)]"
DROPPED = {
    "collector": f"gc.callbacks.append(send); gc.collect(); {WAIT}",
    "weak reference": f"thing = Last(); kept = weakref.ref(thing, send); del thing; {WAIT}",
    "finaliser": f"Last(); {WAIT}",
    "another exception": "[(_ for _ in ()).throw(ValueError('hash')) for _ in [0] if not _caught()]",
}
CAUGHT = """
def _caught():
    try:
        send()
        time.sleep(30)
    except KeyboardInterrupt:
        pass
"""
COMPILING = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # half an hour in which no Python runs


def ends(program, number):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + CAUGHT + program, str(int(number))], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 130 and "stopped" in done.stderr and "Traceback" not in done.stderr, done
    return time.monotonic() - began


@pytest.mark.parametrize("place", DROPPED)
def test_an_interruption_that_is_dropped_comes_again(place):
    assert ends(BLOCK.format(block="stop.interruptible()", body=DROPPED[place]), signal.SIGTERM) < 20


@pytest.mark.parametrize("block, count", [("stop.interruptible('stopped')", 1), ("stop.Stop().listening()", 2)])
def test_what_does_not_come_back_to_python_is_ended(block, count):
    """A compilation, or a step that waits for a device that is gone: no handler runs."""
    body = f"threading.Thread(target=later, args=(0.2, {count}), daemon=True).start(); {COMPILING}"
    assert ends("stop.GRACE_S = 1.0\n" + BLOCK.format(block=block, body=body), signal.SIGINT) < 20


def test_one_signal_lets_a_loop_end_its_step():
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    loop = stop.Stop()
    with loop.listening():
        signal.raise_signal(signal.SIGTERM)
        assert loop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.set_wakeup_fd(-1) == -1


def test_other_exceptions_stay_what_they_are():
    with pytest.raises(ValueError, match="mine"), stop.interruptible():
        raise ValueError("mine")


COLLECTED = """
import gc, os, pathlib, signal, sys
from jaxrl_llm.__main__ import main

sent = []

def collected(phase, info):
    if not sent and pathlib.Path(sys.argv[-1], "settings.json").exists():
        sent.append(1)
        os.kill(os.getpid(), signal.SIGINT)

gc.callbacks.append(collected)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_whose_interruption_falls_into_the_collector_stops(tmp_path):
    """As one does in many that come while a program is traced: JAX has a callback there."""
    words = [*test_faults.SMALL, "--steps", "5000", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", COLLECTED, *words]
    done = subprocess.run(command, env=test_faults.ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130 and f"--resume {tmp_path / 'run'}" in done.stdout, done
    assert "Traceback" not in done.stderr and not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_experiment_that_is_interrupted_says_how_it_goes_on(tmp_path, number):
    command = [sys.executable, "-m", "experiments.policy_gradient.dr_grpo", "--smoke", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, env=test_faults.ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    test_faults.wait_for((tmp_path / "out").exists, process)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130 and error.endswith("stopped; the same command goes on\n"), error
