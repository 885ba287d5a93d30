"""Questions with tools in Python: what tools answer, what ends an episode, what is invalid."""

import json
import sqlite3
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data import databases
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.envs import retry_question, tool_question
from jaxrl_llm.errors import DataError, UserError
from jaxrl_llm.rollout.host.env import TextStepResult
from jaxrl_llm.run import catalog
from jaxrl_llm.sandbox.records import Ran
from jaxrl_llm.tools import boxes
from jaxrl_llm.tools.calls import joined, of_functions
from jaxrl_llm.tools.schema import tool
from jaxrl_llm.types import Trajectories
from jaxrl_llm.verifiers.verdict import Verdict

TEXTS = ["Bonn lies on the Rhine.", "Ulm lies on the Danube.", "The Rhine flows into the North Sea."]


def by_words(query, count):
    fits = sorted(range(len(TEXTS)), key=lambda k: -len(set(query.split()) & set(TEXTS[k].split())))
    return [k for k in fits if set(query.split()) & set(TEXTS[k].split())][:count]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def verify(answer, text):
    return Verdict(float(answer in text), True, "")


def begin(box):
    world = tool_question.tool_env(box, verify)
    return world, world.reset(np.zeros((2,), np.uint32), "Rhine")


def test_calls_are_answered_and_the_rest_is_the_answer():
    world, start = begin(boxes.search_box(TEXTS, by_words, count=2))
    heard = world.step(start, "Let me see. " + call("search", query="Bonn lies"))
    shown = "<tool_response>\n[1] Bonn lies on the Rhine.\n[2] Ulm lies on the Danube.\n</tool_response>"
    assert heard == TextStepResult(heard.state, shown, 0.0, False, mark=tool_question.CALLED | tool_question.FIRST_TOOL)
    assert world.identity(heard.state) != world.identity(start)
    again = world.step(start, call("search", query="Bonn lies"))
    assert world.identity(again.state) == world.identity(heard.state)  # said otherwise, heard the same
    assert "nothing was found" in world.step(start, call("search", query="Pisa")).text
    assert "query is missing" in world.step(start, call("search")).text
    over = world.step(heard.state, "the Rhine")
    assert over.done and over.valid and over.reward == 1.0
    assert world.step(heard.state, "the Elbe").reward == 0.0


def test_after_the_last_call_comes_the_answer():
    box = boxes.search_box(TEXTS, by_words, count=2)
    world = tool_question.tool_env(box, verify, calls=1)
    heard = world.step(world.reset(np.zeros((2,), np.uint32), "Rhine"), call("search", query="Bonn lies"))
    assert not heard.done and world.step(heard.state, call("search", query="Rhine")).done
    assert tool_question.tool_env(box, verify, calls=0).step(tool_question.Place("Rhine"), "the Rhine").reward == 1.0
    with pytest.raises(ValueError, match="calls=-1 must not be negative"):
        tool_question.tool_env(box, verify, calls=-1)


def test_marks_say_what_was_done_with_the_tools():
    box = joined([boxes.calculator_box(), boxes.search_box(TEXTS, by_words)])
    world = tool_question.tool_env(box, verify)
    fine, wrong = call("calculate", expression="1 + 1"), call("calculate", expression="1 +")
    said = (fine, call("search", query="Ulm"), fine + wrong, "<tool_call>?</tool_call>", "2")
    marks = np.asarray([[world.step(tool_question.Place("2"), text).mark for text in said]], np.int32)
    failed, malformed, first = tool_question.FAILED, tool_question.MALFORMED, tool_question.FIRST_TOOL
    assert marks.tolist() == [[1 | first, 1 | 2 * first, 1 | failed | first, 1 | malformed, 0]]

    def rows(*turns):
        chosen = marks[:, list(turns)]
        taken = np.ones(chosen.shape, bool)
        zeros = np.zeros(chosen.shape, np.int32)
        turn = {"turn": zeros, "end": zeros, "identity": zeros, "reward": zeros.astype(np.float32), "taken": taken}
        whole = turn | {"mark": chosen, "done": np.ones(1, bool), "valid": np.ones(1, bool)}
        extras = {f"turns/{name}": jnp.asarray(x) for name, x in whole.items()}
        return Trajectories(*[jnp.zeros((1, 2), jnp.int32)] * 8, extras=extras)

    both, slip, broken = rows(0, 1, 4), rows(0, 2, 4), rows(3, 4)
    assert [int(tool_question.tools_of(x)[0]) for x in (both, slip, broken)] == [2, 1, 0]
    assert [int(tool_question.calls_of(x)[0]) for x in (both, slip, broken)] == [2, 2, 1]
    assert [bool(tool_question.failed(x)[0]) for x in (both, slip, broken)] == [False, True, True]
    assert [bool(tool_question.formed(x)[0]) for x in (both, slip, broken)] == [True, True, False]


def test_one_retrieval_before_the_answer():
    box, problem = boxes.search_box(TEXTS, by_words, count=1), Problem("own", "Where is Ulm lies", "", {}, 0, "")
    assert "[1] Ulm lies on the Danube." in tool_question.with_passages(problem, box).prompt
    assert tool_question.told_nothing(problem, box) is problem
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Bonn"}]
    for messages in (talk, talk[1:]):  # a conversation has one system message
        system, user = tool_question.asked(problem._replace(prompt=messages), box).prompt
        assert user == talk[1] and system["role"] == "system" and '"search"' in system["content"]
        assert system["content"].startswith("Be brief.\n\nYou may call") == (messages is talk)
    with pytest.raises(UserError, match="needs search=CORPUS.jsonl"):
        tool_question.with_passages(problem, boxes.calculator_box())


def test_a_bad_day():
    box = boxes.search_box(TEXTS, by_words, count=2)

    def asked(**day):
        return tool_question.noisy(box, np.random.default_rng(0), **day).run("search", {"query": "Bonn lies"})

    whole = box.run("search", {"query": "Bonn lies"})
    assert asked() == whole and whole.text.count("[") == 2
    assert asked(astray=1.0).text == whole.text.partition("\n")[2]
    lost = asked(failing=1.0)
    assert lost.error and lost.valid and "could not be fetched" in lost.text
    world = tool_question.tool_env(box, verify, luck=lambda box, rng: tool_question.noisy(box, rng, failing=0.5))
    start, search = world.reset(np.asarray([3, 4], np.uint32), "Rhine"), call("search", query="Bonn lies")
    said = [world.step(start._replace(heard=("",) * k), search).text for k in range(16)]
    assert said == [world.step(start._replace(heard=("",) * k), search).text for k in range(16)]  # luck repeats
    assert 0 < sum("fetched" in text for text in said) < 16
    long = boxes.search_box(["word " * 100], lambda query, count: [0])
    short = tool_question.noisy(long, np.random.default_rng(0), beginnings=True).run("search", {"query": "x"})
    assert len(short.text) == tool_question.BEGINNING


def test_wrong_answers_are_asked_again():
    world = retry_question.retry_env(verify)
    wrong = world.step(world.reset(np.zeros((2,), np.uint32), "Rhine"), "<answer>Elbe </answer>")
    assert not wrong.done and wrong.text == retry_question.AGAIN and wrong.reward == 0.0
    again, right = world.step(wrong.state, "elbe"), world.step(wrong.state, "the Rhine")
    assert again.mark == wrong.mark != right.mark and right.done and right.reward == 1.0
    silent = retry_question.retry_env(lambda answer, text: Verdict(1.0, False, "no judge"))
    heard = silent.step(retry_question.Place("x"), "x")
    assert not heard.valid and not heard.done and heard.reason == "no judge"


def test_a_tool_that_cannot_be_asked_and_a_verdict_that_says_nothing_are_invalid():
    def broken():
        raise ConnectionError("gone")

    world, start = begin(of_functions([(tool("clock", ""), broken)]))
    heard = world.step(start, call("clock"))
    assert not heard.valid and not heard.done and "gone" in heard.reason
    silent = tool_question.tool_env(of_functions([]), lambda answer, text: Verdict(0.0, False, "no judge"))
    heard = silent.step(tool_question.Place("x"), "x")
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
        "1" + " " * 4000 + "+ 1",
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


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("2 ** 200", str(2**200)),
        ("10 ** 299", "1" + "0" * 299),
        ("2 ** -3 * 8", "1"),
        ("(-1) ** 999999999999", "-1"),
        ("0 ** 100000", "0"),
        ("123456789012345678.5 * 2", "246913578024691357"),
        ("0.1234567890123456789e19", "1234567890123456789"),
        ("1_000.5e-1 + .5 + 5.", "105.55"),
        ("0x10", "16"),
    ],
)
def test_the_calculator_is_exact(expression, found):
    assert boxes.calculate(expression) == found


@pytest.mark.parametrize("expression", ["10 ** 300", "3 ** 5000", "1e400", "1e-999999999", "1e999999999", "9" * 301])
def test_the_calculator_says_which_numbers_are_too_large(expression):
    with pytest.raises(ValueError, match="a number has more than 300 digits"):
        boxes.calculate(expression)


def test_what_is_no_arithmetic_warns_nobody(recwarn):
    with pytest.raises(ValueError, match="only numbers and"):
        boxes.calculate("1if 1else 2")
    assert not recwarn.list


def test_prompts_show_the_tools():
    box = boxes.search_box(TEXTS, by_words)
    problem = Problem("own", "Where?", "", {}, 0, "Where?")
    assert (
        tool_question.asked(problem, box).prompt.endswith("Where?")
        and '"search"' in tool_question.asked(problem, box).prompt
    )
    messages = tool_question.asked(problem._replace(prompt=[{"role": "user", "content": "Where?"}]), box).prompt
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


@pytest.mark.parametrize(
    ("layout", "answer", "said"),
    [("plain", ["Rome", "Roma"], r"verify_any compares one answer, and 57 rows have lists .* give --verifier f1"),
     ("prompts", "Rome", "--format prompts: the rows have no answers to judge by")],
)  # fmt: skip
def test_rows_that_no_answer_can_meet_are_refused(layout, answer, said, tmp_path):
    """Each episode was wrong, or invalid, and nobody was told."""
    rows = [{"prompt": f"Which city is number {k}?", "answer": answer} for k in range(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = types.SimpleNamespace(data=str(tmp_path / "rows.jsonl"), format=layout, verifier="", eval_problems=1)
    with pytest.raises(UserError, match=said):
        catalog.rows_of(settings)
    if layout == "plain":
        settings.verifier = "f1"
        assert catalog.rows_of(settings)[2]({"value": answer}, "Roma").value == 1.0
