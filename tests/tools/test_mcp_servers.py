"""MCP servers over pipes: their tools, deadlines, and what a dead one makes of an answer."""

import asyncio
import contextlib
import pathlib
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools import boxes, calls, mcp_servers

SERVER = [sys.executable, str(pathlib.Path(__file__).with_name("mcp_server_for_tests.py"))]


def _call(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_a_server_answers_refuses_and_dies(monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setenv("SECRET", "42")
    with mcp_servers.connect(SERVER, call_s=60.0, start_s=120.0, environment={"GIVEN": "yes"}) as box:
        names = ", ".join(item.name for item in box.tools)
        assert names == "add, refuse, sleep, die, environment"
        assert box.tools[0].description == "The sum of two numbers."
        response = _call("add", '{"a": 1, "b": 2}') + _call("add", '{"a": "x", "b": 2}') + _call("sub", "{}")
        turn = calls.take_turn(box, response)
        assert turn.valid and [a.error for a in turn.answers] == [False, True, True]
        assert [m["content"] for m in turn.messages] == [
            "3", "error: arguments.a: 'x' is no integer", f"error: there is no tool sub; there are {names}",
        ]  # fmt: skip
        refused = box.run("refuse", {})
        assert refused.error and refused.valid and "not today" in refused.text
        # only what is given is seen
        assert box.run("environment", {"name": "SECRET"}).text == "none"
        assert box.run("environment", {"name": "GIVEN"}).text == "yes"
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda k: box.run("add", {"a": k, "b": k}).text, range(8)))
        assert found == [str(2 * k) for k in range(8)]
        dead = calls.take_turn(box, _call("die", "{}"))
        assert not dead.valid and not dead.answers[0].error
        after = box.run("add", {"a": 1, "b": 2})
        assert not after.valid and "did not answer" in after.text
    gone = box.run("add", {"a": 1, "b": 2})
    assert not gone.valid


def test_a_late_answer_is_no_wrong_one():
    pytest.importorskip("mcp")
    with mcp_servers.connect(SERVER, call_s=0.5, start_s=120.0) as box:
        start = time.monotonic()
        late = box.run("sleep", {"seconds": 30.0})
        assert not late.valid and not late.error and "timed out" in late.text
        assert time.monotonic() - start < 25


def test_a_connection_that_stands_still_is_no_answer(monkeypatch):
    """The thread that keeps the deadlines hangs or has stopped: the one who asks does not wait for ever."""
    pytest.importorskip("mcp")
    monkeypatch.setattr(mcp_servers, "GRACE_S", 0.05)
    with contextlib.closing(asyncio.new_event_loop()) as still:
        said = mcp_servers._runner(None, still, 0.01)("add", {})
        assert not said.valid and said.text == "add did not answer: TimeoutError: "


def test_servers_that_do_not_start():
    pytest.importorskip("mcp")
    for command, seconds in ((["no-such-program-here"], 60.0), ([sys.executable, "-c", "print('hello')"], 60.0)):
        with pytest.raises(UserError, match="did not start"), mcp_servers.connect(command, start_s=seconds):
            pass
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(UserError, match="no handshake within 0.5 s"), mcp_servers.connect(silent, start_s=0.5):
        pass
    with pytest.raises(UserError, match="call_s=0.0"), mcp_servers.connect(SERVER, call_s=0.0):
        pass


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[mcp\]'"), mcp_servers.connect(SERVER):
        pass


def test_a_server_is_a_flag():
    pytest.importorskip("mcp")
    box = boxes.opened(f"calculator,mcp={shlex.join(SERVER)}")
    assert [tool.name for tool in box.tools] == ["calculate", "add", "refuse", "sleep", "die", "environment"]
    turn = calls.take_turn(box, _call("add", '{"a": 1, "b": 2}') + _call("calculate", '{"expression": "2*3"}'))
    assert [message["content"] for message in turn.messages] == ["3", "6"]


@pytest.mark.parametrize("command, said", [("", "is no tool"), ("'open", "No closing quotation"), ("gone-x", "gone-x")])
def test_a_wrong_command_is_one_line(command, said):
    pytest.importorskip("mcp")
    with pytest.raises(UserError, match="--tools") as wrong:
        boxes.opened(f"mcp={command}")
    assert said in str(wrong.value) and "\n" not in str(wrong.value)


STRAY = """
import json, sys
def say(line): sys.stdout.buffer.write(line + b"\\n"); sys.stdout.flush()
for line in sys.stdin:
    asked = json.loads(line)
    kind, answer = asked.get("method"), {}
    if kind == "initialize":
        answer = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "stray", "version": "1"}}
    elif kind == "tools/list":
        answer = {"tools": [{"name": "long", "inputSchema": {"type": "object"}}]}
    elif kind == "tools/call":
        say(b"\\xff is no UTF-8, and no answer")
        answer = {"content": [{"type": "text", "text": "x" * 300_000}]}
    if "id" in asked: say(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer}).encode())
"""


def test_stray_bytes_do_not_end_a_connection_and_long_answers_are_cut():
    pytest.importorskip("mcp")
    with mcp_servers.connect([sys.executable, "-c", STRAY], call_s=60.0, start_s=120.0) as box:
        for _ in range(2):
            assert box.run("long", {}) == calls.Answer("x" * 262_144)
