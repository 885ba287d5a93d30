"""A verifier whose process is killed while it loads, as often as a file says."""

import os
import pathlib
import signal

from jaxrl_llm.verifiers.verdict import Verdict

if left := os.environ.get("KILLS_LEFT"):
    path = pathlib.Path(left)
    count = int(path.read_text())
    path.write_text(str(count - 1))
    if count > 0:
        os.kill(os.getpid(), signal.SIGKILL)


def verify(answer, response):
    """Always right."""
    return Verdict(1.0)
