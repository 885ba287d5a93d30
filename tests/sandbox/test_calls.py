"""Functions of installed packages in the sandbox: they answer, they execute no text, they reach nothing."""

import os
import threading
import time

import pytest

from jaxrl_llm.sandbox import pool as pools
from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.sandbox.records import Limits

LIMITS = Limits(cpu_s=1.0, wall_s=20.0, memory_mb=512)
MODULES = ("json", "builtins", "time", "os", "numpy", "operator")
MEANS = [(), ("namespaces",), ("landlock",), ("seccomp",)]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, limits=LIMITS, modules=MODULES) as pool:
        yield pool


def test_values_errors_and_programs_take_turns(sandbox):
    assert sandbox.call("json:loads", "[1, 2.5, null]")[:2] == ("ok", [1, 2.5, None])
    raised = sandbox.call("json:loads", "[1")
    assert raised.status == "raised" and raised.reason.startswith("JSONDecodeError")
    assert sandbox.run("print(1)").stdout == "1\n"
    assert sandbox.call("builtins:len", "abc\ud800").value == 4
    assert sandbox.call("builtins:print", "to nobody").status == "ok"
    assert sandbox.call("builtins:exit").status == "raised"  # no exit there: -S
    assert sandbox.call("builtins:id", [0]).status == "ok"
    assert sandbox.call("builtins:iter", [0]).status == "raised"  # no plain value
    with pytest.raises(ValueError, match="none of the modules"):
        sandbox.call("sys:exit", 3)


def test_a_package_is_there_and_its_folder_is_named(sandbox):
    assert sandbox.call("builtins:__import__", "numpy.polynomial.legendre").status == "raised"  # a module is not plain
    assert any(folder.endswith("-packages") for folder in sandbox.protection.shown)
    assert "also read:" in sandbox.protection.statement()
    with Sandbox(workers=1) as plain:
        assert not plain.protection.shown
        assert plain.run("import numpy").status == "error"


def test_what_exhausts_its_limits_is_ended_and_the_next_is_back_within_a_second(sandbox):
    start = time.monotonic()
    assert sandbox.call("operator:pow", 7, 10**9).status == "cpu"
    assert time.monotonic() - start < 15
    assert sandbox.call("operator:mul", [0], 10**9).status == "memory"
    start = time.monotonic()
    assert sandbox.call("json:loads", "1").value == 1
    assert time.monotonic() - start < 1.0
    slept = sandbox.call("time:sleep", 60, limits=LIMITS._replace(wall_s=0.5))
    assert slept.status == "wall" and "0.5 s" in slept.reason
    assert sandbox.call("os:abort").status == "killed"
    assert sandbox.call("os:_exit", 0).status == "killed"
    assert sandbox.call("json:loads", "1").value == 1


def test_callers_of_many_threads_get_their_own_values(sandbox):
    values = {}

    def many(k):
        values[k] = [sandbox.call("operator:add", k, i).value for i in range(50)]

    threads = [threading.Thread(target=many, args=(1000 * k,)) for k in range(6)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    assert values == {1000 * k: [1000 * k + i for i in range(50)] for k in range(6)}


@pytest.mark.parametrize("without", MEANS, ids="+".join)
def test_text_is_not_executed_and_the_kernel_holds_what_executes_it_all_the_same(tmp_path, without):
    marker = tmp_path / "reached"
    os.chmod(tmp_path, 0o777)
    payloads = [
        f"__import__('os').system('touch {marker}')",
        f"open({str(marker)!r}, 'w').write('x')",
        f"__import__('subprocess').run(['touch', {str(marker)!r}])",
        "__import__('socket').socket()",
        f"__import__('os').kill({os.getpid()}, 15)",
        "open('/etc/passwd').read()",
    ]
    with Sandbox(workers=1, limits=LIMITS, modules=("builtins",), without=without) as sandbox:
        for text in payloads:
            refused = sandbox.call("builtins:eval", text)
            assert refused.status == "raised" and refused.reason == "Refused: text is not executed here", text
            compiled = sandbox.call("builtins:exec", text)
            assert compiled.reason == "Refused: text is not executed here", text
            # where nothing reads, only the kernel holds it
            held = sandbox.call_fresh("builtins:eval", text)
            assert held.status == "raised" or held.value not in (0, 1), (text, held)
            assert not marker.exists(), text


def test_a_fresh_call_leaves_nothing_and_knows_nothing(sandbox):
    """Each has a process of its own, with hash seed 0."""
    assert sandbox.call_fresh("builtins:exec", "import builtins; builtins.left = 1").status == "ok"
    assert sandbox.call_fresh("builtins:eval", "left").reason.splitlines()[-1].startswith("NameError")
    seen = {sandbox.call_fresh("builtins:hash", "text").value for _ in range(2)}
    assert len(seen) == 1


def test_one_process_answers_no_more_than_so_many_calls(sandbox, monkeypatch):
    """What text may have left behind in a library's caches does not last."""
    monkeypatch.setattr(pools, "_CALLS", 3)
    with Sandbox(workers=1, limits=LIMITS, modules=("threading",)) as few:
        names = [few.call("threading:_newname", "%s").value for _ in range(7)]
    assert names == ["1", "2", "3"] * 2 + ["1"]
