"""Signals of the tests of runs."""

import signal

import pytest


@pytest.fixture(autouse=True)
def _signals_as_from_a_terminal():
    """SIGHUP is not ignored, although nohup may have started the tests; afterwards it is as it was."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
