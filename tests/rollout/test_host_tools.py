"""Questions with tools in Python: what tools answer, what ends an episode, what is invalid."""

import json
import sqlite3

import numpy as np
import pytest

from jaxrl_llm.data import databases
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import DataError, UserError
from jaxrl_llm.rollout.host_worlds import Said
from jaxrl_llm.sandbox.records import Ran
from jaxrl_llm.tools import boxes
from jaxrl_llm.tools.calls import of_functions
from jaxrl_llm.tools.schema import tool
from jaxrl_llm.verifiers.verdict import Verdict
from jaxrl_llm.worlds import host_tools

TEXTS = ["Bonn lies on the Rhine.", "Ulm lies on the Danube.", "The Rhine flows into the North Sea."]


def by_words(query, count):
    fits = sorted(range(len(TEXTS)), key=lambda k: -len(set(query.split()) & set(TEXTS[k].split())))
    return [k for k in fits if set(query.split()) & set(TEXTS[k].split())][:count]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def verify(answer, text):
    return Verdict(float(answer in text), True, "")


def begin(box):
    world = host_tools.tool_world(box, verify)
    return world, world.reset(np.zeros((2,), np.uint32), "Rhine")


def test_calls_are_answered_and_the_rest_is_the_answer():
    world, start = begin(boxes.search_box(TEXTS, by_words, count=2))
    heard = world.step(start, "Let me see. " + call("search", query="Bonn lies"))
    shown = "<tool_response>\n[1] Bonn lies on the Rhine.\n[2] Ulm lies on the Danube.\n</tool_response>"
    assert heard == Said(heard.state, shown, 0.0, False)
    assert world.identity(heard.state) != world.identity(start)
    again = world.step(start, call("search", query="Bonn lies"))
    assert world.identity(again.state) == world.identity(heard.state)  # said otherwise, heard the same
    assert "nothing was found" in world.step(start, call("search", query="Pisa")).text
    assert "query is missing" in world.step(start, call("search")).text
    over = world.step(heard.state, "the Rhine")
    assert over.done and over.valid and over.reward == 1.0
    assert world.step(heard.state, "the Elbe").reward == 0.0


def test_a_tool_that_cannot_be_asked_and_a_verdict_that_says_nothing_are_invalid():
    def broken():
        raise ConnectionError("gone")

    world, start = begin(of_functions([(tool("clock", ""), broken)]))
    heard = world.step(start, call("clock"))
    assert not heard.valid and not heard.done and "gone" in heard.reason
    silent = host_tools.tool_world(of_functions([]), lambda answer, text: Verdict(0.0, False, "no judge"))
    heard = silent.step(host_tools.Place("x"), "x")
    assert not heard.valid and heard.reason == "no judge"


def machine(program):
    """In the place of the sandbox."""
    if program == "broken":
        return Ran("broken", None, "", "no worker", 0.0)
    return Ran("error", 1, "", "Traceback\nNameError", 0.1) if program == "x" else Ran("ok", 0, "4\n", "", 0.1)


def test_programs():
    world, start = begin(boxes.python_box(machine))
    assert world.step(start, call("python", code="print(2 + 2)")).text == "<tool_response>\n4\n\n</tool_response>"
    assert "NameError" in world.step(start, call("python", code="x")).text
    assert not world.step(start, call("python", code="broken")).valid


def test_a_database_is_read_and_nothing_else(tmp_path):
    path = tmp_path / "towns.sqlite"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE town (name TEXT, river TEXT)")
        made.executemany("INSERT INTO town VALUES (?, ?)", [("Bonn", "Rhine"), ("Ulm", "Danube")])
    made.close()
    box = boxes.database_box(path)
    assert box.run("query", {"sql": "SELECT name FROM town WHERE river = 'Rhine'"}).text == '["Bonn"]'
    assert box.run("query", {"sql": "SELECT name FROM town WHERE 0"}).text == "no rows"
    for wrong in ("DROP TABLE town", "SELECT nothing FROM town", "SELECT 1; SELECT 2"):
        refused = box.run("query", {"sql": wrong})
        assert refused.error and refused.valid, wrong
    assert box.run("tables", {}).text.startswith("CREATE TABLE town")
    databases.schema.cache_clear()
    path.write_text("no database, but some text that is as long as one")
    with pytest.raises(UserError, match="towns.sqlite cannot be read .*; give an SQLite file"):
        boxes.database_box(tmp_path / "towns.sqlite")


def test_the_calculator():
    box = boxes.calculator_box()
    assert box.run("calculate", {"expression": "-7 // 2 + 0.5 * 3"}).text == "-2.5"
    for wrong in (
        "2 ** 10000",
        "1 / 0",
        "__import__('os')",
        "9" * 5000,
        "(" * 300,
        "x",
        "",
        "1 if 1 else 2",
        "2 ** 0.5",
    ):
        refused = box.run("calculate", {"expression": wrong})
        assert refused.error and refused.valid, wrong
    assert box.run("calculate", {"expression": "10 ** 30"}).text == "1" + "0" * 30


def test_prompts_show_the_tools():
    box = boxes.search_box(TEXTS, by_words)
    problem = Problem("own", "Where?", "", {}, 0, "Where?")
    assert (
        host_tools.asked(problem, box).prompt.endswith("Where?") and '"search"' in host_tools.asked(problem, box).prompt
    )
    messages = host_tools.asked(problem._replace(prompt=[{"role": "user", "content": "Where?"}]), box).prompt
    assert [m["role"] for m in messages] == ["system", "user"] and '"search"' in messages[0]["content"]


def test_corpora(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"contents": "a"}\n{"title": "b", "text": "c"}\n')
    assert boxes.documents(path) == ["a", "b\nc"]
    path.write_text('{"contents": "a"}\n{"title": "b"}\n')
    with pytest.raises(DataError, match=r"corpus.jsonl:2: needs contents, or title and text"):
        boxes.documents(path)
    with pytest.raises(UserError, match="cannot be read"):
        boxes.documents(tmp_path / "none.jsonl")


def test_search_by_bm25s():
    pytest.importorskip("bm25s")
    find = boxes.bm25(TEXTS)
    assert find("Danube", 2) == [1] and find("", 2) == [] and find("Pisa", 2) == []
