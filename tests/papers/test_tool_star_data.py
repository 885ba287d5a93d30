"""Tool-Star's data with tools and its aids at inference, on scripted writers and a real sandbox."""

import json

import numpy as np
import pytest

from experiments.agents.parts import tool_chains, tool_data, tool_runs
from experiments.agents.parts.tool_chains import Aids, Chain
from experiments.agents.parts.tool_data import Sampled, Sizes
from jaxrl_llm.data import formats
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.envs import tool_question
from jaxrl_llm.errors import UserError
from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.tools import boxes
from jaxrl_llm.tools.calls import Answer, Call, Toolbox
from tests.endpoint_for_tests import serving

BOX = boxes.calculator_box()
ASKED = [{"role": "user", "content": "?"}]
QUESTION = Problem("rows", "6 * 7?", "", {"value": "42"}, 2, "6 * 7?")


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted(*texts):
    """Says these texts in turn, and keeps what it was shown."""
    left, seen = list(texts), []

    def write(messages, draw=0):
        seen.append((list(messages), draw))
        return left.pop(0)

    write.seen = seen
    return write


@pytest.fixture(scope="module")
def python():
    with Sandbox(workers=1) as sandbox:
        yield boxes.python_box(sandbox.run)


def test_a_chain_is_played_until_nothing_is_called():
    write = scripted(f"Let me see. {call('calculate', expression='6*7')}",
                     "<answer>42</answer>")  # fmt: skip
    found = tool_chains.solve(write, BOX, ASKED, calls=3)
    assert found.ended and found.failed == 0 and found.answer == "<answer>42</answer>"
    assert [c.arguments for c in found.calls] == [{"expression": "6*7"}]
    assert [m["role"] for m in found.messages] == ["assistant", "user", "assistant"]
    assert found.messages[1]["content"] == "<tool_response>\n42\n</tool_response>"
    assert write.seen[1] == ([*ASKED, *found.messages[:2]], 0)


def test_the_response_after_the_last_call_is_the_answer():
    one = call("calculate", expression="1+1")
    found = tool_chains.solve(scripted(one, one), BOX, ASKED, calls=1)
    assert not found.ended and len(found.calls) == 1 and found.answer == one
    found = tool_chains.solve(scripted(one, "2"), BOX, ASKED, calls=1)
    assert found.ended and found.answer == "2"
    assert tool_chains.solve(scripted("4"), BOX, ASKED, calls=0).ended


def test_the_debugger_mends_one_program(python):
    """The first failing program is written anew and its result shown in its place; the second error is shown."""
    broken = call("python", code="print(6 * seven)")
    asked = []

    def debug(program, error):
        asked.append((program, error))
        return "print(6 * 7)"

    write = scripted(broken, broken, "42")
    found = tool_chains.solve(write, python, ASKED, calls=5, aids=Aids(debug=debug))
    assert len(asked) == 1 and asked[0][0] == "print(6 * seven)" and "NameError" in asked[0][1]
    assert found.messages[1]["content"] == "<tool_response>\n42\n\n</tool_response>"
    assert "NameError" in found.messages[3]["content"]
    assert (found.debugged, found.failed, found.back) == (1, 1, 0)


def test_a_debugger_that_fails_too_is_shown(python):
    found = tool_chains.solve(
        scripted(call("python", code="1/0"), "?"), python, ASKED, calls=5, aids=Aids(debug=lambda *_: "[][1]", backs=1)
    )
    assert "IndexError" in found.messages[1]["content"] and (found.debugged, found.failed, found.back) == (1, 1, 0)


def test_the_backtracer_drops_what_failed_and_draws_again():
    """Only what stands before the failed turn is seen again, under another draw; the next failure is shown."""
    bad, good = call("calculate", expression="six"), call("calculate", expression="6*7")
    write = scripted(good, bad, bad, "42")
    found = tool_chains.solve(write, BOX, ASKED, calls=5, aids=Aids(backs=1), draw=3000)
    assert [draw for _, draw in write.seen] == [3000, 3000, 3001, 3001]
    assert write.seen[1][0] == write.seen[2][0] == [*ASKED, *found.messages[:2]]
    assert (found.back, found.failed, len(found.calls), found.ended) == (1, 1, 2, True)
    assert tool_chains.solve(scripted(bad, "x"), BOX, ASKED, calls=5).failed == 1  # without aids


def test_the_refiner_shortens_a_long_chain_once():
    one, long = call("calculate", expression="1+1"), "so " * 50
    seen = []

    def refine(problem, chain):
        seen.append((problem, chain))
        return "It is 2."

    write = scripted(long + one, long + one, "2")
    found = tool_chains.solve(write, BOX, ASKED, calls=5, aids=Aids(refine=refine, longest=100))
    assert len(seen) == 1 and seen[0][0] == "?" and long in seen[0][1] and "<tool_response>" in seen[0][1]
    assert [m["content"] for m in write.seen[1][0]] == ["?", "It is 2.", tool_chains.GO_ON]
    assert found.refined == 1 and len(found.calls) == 2
    assert tool_chains.solve(scripted(one, "2"), BOX, ASKED, calls=5, aids=Aids(refine=refine)).refined == 0


def test_a_tool_that_cannot_be_asked_says_nothing():
    away = Toolbox(BOX.tools, lambda name, arguments: Answer("away", valid=False))
    with pytest.raises(RuntimeError, match="away"):
        tool_chains.solve(scripted(call("calculate", expression="1")), away, ASKED, calls=2)


def test_hints_break_in_where_there_is_doubt():
    text = "First 40. Perhaps it is 41. Let me verify. <answer>42</answer>"
    assert {kind for _, kind in tool_data.places(text)} == {"doubt", "check", "end"}
    found = {tool_data.hinted(np.random.default_rng(k), text) for k in range(40)}
    assert found == {
        f"First 40.\n{tool_data.HINTS['doubt']}\n",
        f"First 40. Perhaps it is 41.\n{tool_data.HINTS['check']}\n",
        f"{text}\n{tool_data.HINTS['end']}\n",
    }
    assert tool_data.hinted(np.random.default_rng(0), "") == f"{tool_data.HINTS['end']}\n"


def test_a_hinted_chain_begins_with_the_beginning():
    write = scripted("and so " + call("calculate", expression="6*7"), "42")
    found = tool_data.continued(write, BOX, ASKED, "I think\nhint\n", calls=3, draw=0)
    assert found.messages[0]["content"].startswith("I think\nhint\nand so <tool_call>")
    assert "I think\nhint" in write.seen[0][0][0]["content"]


def chain(*calls, ended=True, said="42"):
    return Chain(({"role": "assistant", "content": said},), tuple(calls), ended=ended)


ONE, TWO = Call("calculate", {"a": 1, "b": 2}), Call("calculate", {"a": 2})


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (chain(ONE, TWO), ""),
        (chain(ONE, ended=False), "no answer"),
        (chain(), "calls nothing"),
        (chain(ONE, TWO, Call("calculate", {"a": 3})), "more than 2"),
        (chain(ONE, Call("calculate", {"b": 2, "a": 1})), "twice"),
        (chain(ONE, Call("x", {}, "there is no tool x")), "malformed"),
        (chain(ONE, said="<think> so"), "<think> is not closed"),
        (chain(ONE, said="so </think> 42"), ""),
        (chain(ONE, said="so </think></think> 42"), "<think>"),
        (chain(ONE, said="<answer>42"), "<answer> is not closed"),
    ],
)
def test_the_standard(found, why):
    said = tool_data.fault(found, most_calls=2)
    assert (why in said) if why else not said


def test_calls_are_written_in_one_way():
    text = 'a <tool_call>{"arguments": {"x": "é"}, "name": "f", "more": 1}</tool_call> b <tool_call>{</tool_call>'
    wanted = 'a <tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call> b <tool_call>{</tool_call>'
    assert tool_data.standard(f" {text}\n") == wanted


def test_difficulty_decides_what_becomes_of_a_question():
    short = tool_chains.solve(scripted(call("calculate", expression="6*7"), "42"), BOX, ASKED, calls=3)
    long = short._replace(calls=(ONE, TWO), messages=(*short.messages[:2], *short.messages))
    asked = tool_question.asked(QUESTION, BOX)
    kinds = {
        "easy": Sampled(QUESTION, ("42!",), (short,)),
        "direct": Sampled(QUESTION, ("42!",), ()),
        "tool": Sampled(QUESTION, (), (long, short)),
        "hard": Sampled(QUESTION, (), ()),
    }
    assert {name: found.kind for name, found in kinds.items()} == {name: name for name in kinds}
    rows = {name: tool_data.imitated_rows(found, BOX) for name, found in kinds.items()}
    assert rows["easy"][0] | {"kind": "direct"} == rows["direct"][0] and rows["hard"] == []
    assert rows["easy"][0]["prompt"] == [{"role": "user", "content": asked.prompt}]
    assert [r["solution"] for r in rows["tool"]] == [short.messages[0]["content"], "42"]  # the fewest calls
    assert rows["tool"][1]["prompt"] == [*rows["tool"][0]["prompt"], *short.messages[:2]]
    again = [tool_data.reinforced_rows(found) for found in kinds.values()]
    assert again == [[], [], [], [{"prompt": "6 * 7?", "answer": "42", "level": 2, "kind": "hard"}]]
    with pytest.raises(UserError, match="give --format plain"):
        tool_data.reinforced_rows(Sampled(QUESTION._replace(answer={"value": 1, "numbers": [1]}), (), ()))


def test_a_question_is_sampled_in_three_ways():
    good = call("calculate", expression="6*7")
    write = scripted("I think 41.", good, "42", good, "43")
    sizes = Sizes(direct=1, prompted=1, hints=1)
    found = tool_data.sample(write, BOX, QUESTION, lambda text: "42" in text, np.random.default_rng(0), sizes)
    assert found.direct == () and len(found.chains) == 1 and found.faults == ("its answer is wrong",)
    assert found.kind == "tool"
    shown = [messages[0]["content"] for messages, _ in write.seen]
    assert shown[0] == "6 * 7?" and "<tools>" in shown[1] and "You began your answer" in shown[3]


ROWS = [{"question": f"{k} * 7?", "answer": str(7 * k)} for k in range(40)]


def replying(request):
    """Even questions are right at once, odd ones by a tool, every third of them never."""
    asked, last = request["messages"][0]["content"], request["messages"][-1]["content"]
    k = int(asked.split(" * 7?")[0].split()[-1])
    if "<tools>" not in asked:
        return f"<answer>{7 * k if k % 2 == 0 else 'unknown'}</answer>"
    if "<tool_response>" in last:
        return f"<answer>{'unknown' if k % 3 == 0 and k % 2 else last.split()[1]}</answer>"
    return call("calculate", expression=f"{k}*7")


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_rows_are_written_that_training_reads(source, monkeypatch, capsys):
    with serving(monkeypatch, reply=replying) as server:
        words = ["rows", "--data", str(source), "--tools", "calculator", "--writer", server.address]
        assert tool_runs.cli([*words, "--writer-model", "m", "--out", "made"]) == 0
    assert "written: made" in capsys.readouterr().out
    report = json.loads((source.parent / "made" / "report.json").read_text())
    assert report["kinds"].keys() == {"easy", "tool", "hard"} and report["left_out"] == 0
    imitated, bad = formats.read_problems("made/sft.jsonl")
    assert not bad and len(imitated) == report["sft"] == report["kinds"]["easy"] + 2 * report["kinds"]["tool"]
    hard, bad = formats.read_problems("made/rl.jsonl")
    assert not bad and len(hard) == report["rl"] == report["kinds"]["hard"]
    assert all(int(p.prompt.split()[0]) % 6 == 3 and p.prompt.endswith(formats.WORDS) for p in hard)


def test_held_out_questions_are_solved_with_and_without_aids(source, monkeypatch, capsys):
    """The writer misspells its first expression at draw 0 alone: going back mends it, seeing the error does not."""

    def reply(request):
        asked, last = request["messages"][0]["content"], request["messages"][-1]["content"]
        if "<tool_response>" in last:
            return f"<answer>{last.split()[1]}</answer>"
        k = asked.split(" * 7?")[0].split()[-1]
        return call("calculate", expression=f"{k}*7" if request["seed"] else "seven")

    with serving(monkeypatch, reply=reply) as server:
        words = ["solve", "--data", str(source), "--tools", "calculator", "--writer", server.address]
        assert tool_runs.cli([*words, "--writer-model", "m", "--out", "lines.jsonl", "--problems", "2"]) == 0
    shown = capsys.readouterr().out
    assert "plain/right    0\n" in shown and "aided/right    1\n" in shown and "aided/back     1\n" in shown
    lines = [json.loads(line) for line in (source.parent / "lines.jsonl").read_text().splitlines()]
    assert [line["aided"]["failed"] for line in lines] == [0] * len(lines) and len(lines) == 2


TOOLED = ["--data", "{rows}", "--tools", "calculator"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rows"], "--data names no questions"),
        (["rows", "--data", "{rows}"], "--tools names none"),
        (["rows", "--data", "{rows}", "--tools", "hammer"], "'hammer' is no tool"),
        (["rows", *TOOLED, "--writer", "x"], "--writer ADDRESS and --writer-model"),
        (["rows", *TOOLED], "--model nano has no chat template"),
        (["rows", *TOOLED, "--direct", "0", "--prompted", "0"], "--prompted 0 needs"),
        (["rows", *TOOLED, "--most-calls", "0"], "--most-calls 0 must be at least 1"),
        (["rows", *TOOLED, "--out", "{rows}/x"], "choose another --out"),
        (["rows", "--data", "missing.jsonl", "--tools", "calculator"], "missing.jsonl"),
        (["solve", *TOOLED, "--debugger", "x"], "--debugger ADDRESS and"),
        (["solve", *TOOLED, "--backs", "-1"], "--backs -1 must be at least 0"),
        (["solve", "--bakcs", "1"], "--backs"),
    ],
)
def test_mistakes_are_one_line(words, told, source, capsys):
    assert tool_runs.cli([word.format(rows=source) for word in words]) == 2
    said = capsys.readouterr().err
    assert told in said and said.startswith("error: ") and said.count("\n") == 1
