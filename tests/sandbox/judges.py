"""Functions that ``Sandbox.call`` runs in tests."""

import os
import pathlib
import sys
import time

READY = []


def warm_up():
    READY.append(os.getpid())


def tried(path, host):
    """What a function of ours gets to see: that it was made ready before, what it may read, whom it may signal."""

    def refused(attempt):
        try:
            attempt()
        except OSError:
            return True
        return False

    return {
        "ready": len(READY) == 1 and READY[0] != os.getpid(),
        "shown": pathlib.Path(path).read_text(),
        "refused": [
            refused(lambda: pathlib.Path(path).write_text("x")),
            refused(lambda: pathlib.Path("/etc/passwd").read_text()),
            refused(lambda: os.kill(host, 0)),
            refused(os.fork),
        ],
        "lazy": type(__import__("sympy.physics.units").physics.units).__name__,
    }


def double(value):
    return value * 2


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return "done"


def wait():
    time.sleep(60)


def hoard():
    return len(bytearray(1 << 40))


def fail(text):
    raise KeyError(text)


def leave():
    os._exit(0)


def talk():
    sys.stdout.write("x" * (1 << 20))
    sys.stdout.flush()


def nonsense():
    for number in range(3, 64):
        try:
            os.write(number, b"[" * 50_000)
        except OSError:
            continue
    os._exit(0)


def pid():
    return os.getpid()
