"""The progress view: a live bar where a terminal shows it, plain lines where a file or a pipe keeps it."""

import io
import sys

from jaxrl_llm.run.records.progress import progress

FIGURES = {"reward": 0.25, "tokens/s": 58171.0}


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self):
        return True


def _shown(monkeypatch, stream, steps, total, **options):
    monkeypatch.setattr(sys, "stdout", stream)
    with progress(total, **options) as shown:
        for step in steps:
            shown.step(step, FIGURES)
    return stream.getvalue()


def test_plain_lines(monkeypatch):
    """The first step, every tenth and the last one; no control characters."""
    said = _shown(monkeypatch, io.StringIO(), range(1, 26), 25).splitlines()
    assert [line.split("  ")[0] for line in said] == [f"step {n}/25" for n in (1, 10, 20, 25)]
    assert all("reward 0.25  tokens/s 5.817e+04" in line and line.endswith(" s") for line in said)
    assert "\x1b" not in "".join(said)


def test_a_resumed_run_shows_its_first_step(monkeypatch):
    said = _shown(monkeypatch, io.StringIO(), range(8, 12), 11, start=7).splitlines()
    assert [line.split("  ")[0] for line in said] == [f"step {n}/11" for n in (8, 10, 11)]


def test_a_live_bar_in_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    said = _shown(monkeypatch, Terminal(), range(4, 6), 5, start=3)
    assert "\x1b[" in said and "5/5" in said and "reward 0.25" in said
    assert "step 5/5" not in said  # the bar takes the place of the lines


def test_other_hosts_are_silent(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.distributed.hosts.is_first", lambda: False)
    assert _shown(monkeypatch, io.StringIO(), range(1, 3), 2) == ""
