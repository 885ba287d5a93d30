"""Functions of packages, called in the sandbox: warm, sealed, one process a call."""

import os
import signal
import time

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.sandbox.records import Limits

LIMITS = Limits(cpu_s=1.0, wall_s=20.0, memory_mb=512, output_bytes=60_000)
MODULES = ("tests.sandbox.judges", "sympy")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    path = tmp_path_factory.mktemp("shown") / "data.txt"
    path.write_text("what is shown")
    return path


@pytest.fixture(scope="module", params=[(), ("namespaces",), ("landlock",), ("root",)], ids="-".join)
def sandbox(request, shown):
    # a folder of this user alone: whoever runs there must be this user
    without = (*request.param, "other_user")
    with Sandbox(workers=1, limits=LIMITS, modules=MODULES, readable=[str(shown.parent)], without=without) as pool:
        yield pool


def _call(pool, name, *given, **settings):
    return pool.call_fresh(f"tests.sandbox.judges:{name}", *given, **settings)


def test_a_function_sees_its_packages_and_what_is_shown(sandbox, shown):
    called = _call(sandbox, "tried", str(shown), os.getpid())
    assert called.status == "ok", called
    refused = [True, True, True, True] if sandbox.protection.files and sandbox.protection.calls else None
    assert called.value == {"ready": True, "shown": "what is shown", "refused": refused, "lazy": "module"}
    assert shown.read_text() == "what is shown"


def test_values_are_json(sandbox):
    assert _call(sandbox, "double", ["a", {"b": [1.5, None]}]).value == ["a", {"b": [1.5, None]}] * 2
    assert _call(sandbox, "double", "\ud800").value == "\ud800\ud800"


ENDS = {
    "cpu": ("spin", 30.0),
    "wall": ("wait",),
    "memory": ("hoard",),
    "raised": ("fail", "no key"),
    "output": ("talk",),
}


@pytest.mark.parametrize("status", ENDS)
def test_how_a_call_ends(sandbox, status):
    name, *given = ENDS[status]
    limits = LIMITS._replace(wall_s=0.5) if status == "wall" else LIMITS
    called = _call(sandbox, name, *given, limits=limits)
    assert (called.status, called.value) == (status, None) and called.reason
    assert status != "raised" or "no key" in called.reason
    assert _call(sandbox, "double", 2).value == 4


@pytest.mark.parametrize("name", ["leave", "nonsense"])
def test_an_end_without_a_value_is_none(sandbox, name):
    called = _call(sandbox, name)
    assert (called.status, called.value) == ("killed", None) and "without a value" in called.reason


def test_a_killed_worker_is_back_within_a_second(shown):
    """Its packages are imported already: one more worker waits."""
    with Sandbox(workers=1, limits=LIMITS, modules=MODULES) as pool:
        before = _call(pool, "pid")
        assert before.status == "ok"
        spare = pool._spare
        spare.hello()  # has come up
        (used,) = pool._workers - {spare}
        os.kill(used.process.pid, signal.SIGKILL)
        start = time.monotonic()
        assert _call(pool, "double", 3).value == 6
        assert time.monotonic() - start < 1.0
        assert spare in pool._workers and pool._spare not in (None, spare)


def test_functions_must_be_there(tmp_path):
    with Sandbox(workers=1, modules=MODULES) as pool, pytest.raises(ValueError, match="is of none of the modules"):
        pool.call_fresh("pathlib:Path")
    with pytest.raises(UserError, match="no_such_module"), Sandbox(workers=1, modules=("no_such_module",)) as pool:
        pool.run("1")
    with pytest.raises(ValueError, match="readable='here' must be"):
        Sandbox(workers=1, readable=["here"])
