import json
import math
import sqlite3
from typing import get_args

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.data import formats
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.errors import DataError, UserError
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import parts
from jaxrl_llm.run.parts import VERIFIERS
from tests.close import doubles


def _file(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _only(tmp_path, row, layout):
    (problem,), bad = formats.read_problems(_file(tmp_path, row), layout=layout)
    assert not bad
    return problem


def test_plain(tmp_path):
    rows = [{"prompt": "1+1=>", "answer": 2}, {"prompt": "é=>", "answer": "x", "level": 3}]
    (first, second), _ = formats.read_problems(_file(tmp_path, *rows))
    assert (first.prompt, first.answer, first.level) == ("1+1=>", {"value": 2}, 0)
    assert (second.answer, second.level, second.identity) == ({"value": "x"}, 3, "é=>")


def test_messages_stay_messages(tmp_path):
    chat = [{"role": "user", "content": "2+2?"}]
    problem = _only(tmp_path, {"prompt": chat, "answer": 4}, "plain")
    assert problem.prompt == chat and json.loads(problem.identity) == chat


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "reply": 1}, r"rows.jsonl:1: lacks answer; it has prompt, reply: rename columns, or"),
        ({}, r"rows.jsonl:1: lacks prompt, answer; it has nothing"),
        ({"prompt": "a", "answer": 1, "level": "hard"}, r"rows.jsonl:1: level 'hard' is not a whole number"),
        ({"prompt": ["a"], "answer": 1}, r"rows.jsonl:1: a prompt that is a list holds messages"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        formats.read_problems(_file(tmp_path, row))


def test_rows_that_do_not_fit_are_counted_up_to_a_limit(tmp_path):
    rows = [{"question": "a", "answer": "so #### 1"}, {"question": "b", "answer": "2"}, {"question": "c"}]
    path = _file(tmp_path, *rows)
    found, bad = formats.read_problems(path, layout="gsm8k", bad_rows=2)
    assert [p.answer["value"] for p in found] == ["1"]
    assert [(b.where.rpartition(":")[2], b.reason) for b in bad] == [
        ("2", "the answer has no ####"),
        ("3", "lacks answer; it has question: rename columns, or name their --format"),
    ]
    with pytest.raises(DataError, match=r"rows.jsonl:3: lacks answer.*\(2 unreadable rows, --bad-rows 1 allowed\)"):
        formats.read_problems(path, layout="gsm8k", bad_rows=1)


def test_nothing_usable_is_an_error_even_where_bad_rows_are_allowed(tmp_path):
    with pytest.raises(DataError, match="holds no usable rows; the first: .*rows.jsonl:1: lacks question, answer"):
        formats.read_problems(_file(tmp_path, {"a": 1}), layout="gsm8k", bad_rows=5)


# a reply that each format's verifier accepts, and one that it does not
REAL = {
    "plain": ({"prompt": "1+1=>", "answer": 2}, "2", "3"),
    "gsm8k": (
        {"question": "How much?", "answer": "It is 500*2=<<500*2=1000>>1,000.\n#### 1,000"},
        "So it is \\boxed{1,000}.",
        "\\boxed{100}",
    ),
    "math": (
        {"problem": "Halve it.", "solution": "Thus $\\boxed{\\frac{1}{2}}$.", "level": "Level 3", "type": "Algebra"},
        "\\boxed{1/2}",
        "\\boxed{2}",
    ),
    "aime": ({"problem": "Find it.", "answer": "073"}, "\\boxed{73}", "\\boxed{37}"),
    "countdown": (
        {"nums": [3, 5, 2], "target": 16},
        "<answer>(3 + 5) * 2</answer>",
        "<answer>(3 + 5) * 5</answer>",
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/x",
            "prompt": 'from typing import List\n\n\ndef twice(x: List[int]) -> List[int]:\n    """Each twice."""\n',
            "canonical_solution": "    return [2 * v for v in x]\n",
            "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n",
            "entry_point": "twice",
        },
        "    return [v + v for v in x]\n\n\nprint(twice([1]))",
        "    return x",
    ),
    "mbpp": (
        {
            "text": "Write a function to find the area of a square.",
            "code": "def area(a):\r\n  return a * a",
            "test_list": ["assert area(2) == 4", "assert math.isclose(area(0.5), 0.25)"],
            "test_setup_code": "",
            "challenge_test_list": ["assert area(0) == 0"],
        },
        "Here it is:\n```python\ndef area(side):\n    return side ** 2\n```",
        "```python\ndef area(side):\n    return 4 if side == 2 else 0.25\n```",
    ),
    "hotpotqa": (
        {"question": "Which is older?", "answer": "The Arno", "level": "easy", "context": {"title": []}},
        "<answer>Arno</answer>",
        "<answer>Tiber</answer>",
    ),
    "nq": (
        {"question": "Where was it?", "golden_answers": ["Rome", "Roma, Italy"]},
        "It was <answer>Rome.</answer>",
        "<answer>Paris</answer>",
    ),
    "spider": (
        {"db_id": "shop", "question": "What is dear?", "query": "SELECT name FROM item WHERE price > 1"},
        "```sql\nSELECT name FROM item WHERE price = 2;\n```",
        "SELECT name FROM item",
    ),
    "bird": (
        {"db_id": "shop", "question": "How many?", "SQL": "SELECT 2", "evidence": "count", "difficulty": "moderate"},
        "SELECT count(*) FROM item",
        "SELECT count(*) FROM item WHERE price > 1",
    ),
    "calls": (
        {
            "query": "Weather in Bonn?",
            "tools": json.dumps(
                [
                    {
                        "name": "weather",
                        "description": "Tells it.",
                        "parameters": {
                            "city": {"type": "str", "description": "Where."},
                            "day": {"type": "int", "default": 0},
                        },
                    }
                ]
            ),
            "answers": '[{"name": "weather", "arguments": {"city": "Bonn"}}]',
        },
        'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>',
    ),
}


def _databases(folder):
    (folder / "database" / "shop").mkdir(parents=True)
    connection = sqlite3.connect(folder / "database" / "shop" / "shop.sqlite")
    connection.execute("CREATE TABLE item (name TEXT, price INTEGER)")
    connection.execute("INSERT INTO item VALUES ('a', 1), ('b', 2)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("layout", sorted(set(formats.FORMATS) - {"prompts"}))  # whose rows have no right reply
def test_a_right_reply_is_right_and_a_wrong_one_wrong(tmp_path, layout):
    row, right, wrong = REAL[layout]
    _databases(tmp_path)
    problem = _only(tmp_path, row, layout)
    verify = VERIFIERS[formats.FORMATS[layout].verifier]
    assert verify(problem.answer, right).value == 1.0
    assert verify(problem.answer, wrong).value == 0.0


def test_worked_solutions_and_levels(tmp_path):
    gsm8k = _only(tmp_path, REAL["gsm8k"][0], "gsm8k")
    assert gsm8k.solution == "It is 500*2=1,000.\n\\boxed{1000}" and gsm8k.prompt == "How much?" + formats.BOXED
    math = _only(tmp_path, REAL["math"][0], "math")
    assert (math.level, math.answer["value"]) == (3, "\\frac{1}{2}")
    assert _only(tmp_path, REAL["countdown"][0], "countdown").identity == "[2, 3, 5] 16"


@pytest.mark.parametrize("solution", ["no box", "\\boxed{1"])
def test_math_without_a_final_answer(tmp_path, solution):
    with pytest.raises(DataError, match="rows.jsonl:1: the solution has "):
        formats.read_problems(_file(tmp_path, {"problem": "a", "solution": solution}), layout="math")


@pytest.mark.parametrize(
    "solution", ["so $\\boxed 2$", "so $\\fbox{2}$", "so $\\boxed {2}$", "\\boxed{1}, no \\boxed{2}"]
)
def test_boxes_of_math_as_its_rows_write_them(tmp_path, solution):
    row = {"problem": "a", "solution": solution, "level": "Level 1"}
    assert _only(tmp_path, row, "math").answer["value"] == "2"


@pytest.mark.parametrize(
    ("layout", "row", "message"),
    [
        ("plain", {"prompt": "a", "answer": " "}, "answer is empty; give a value or drop the row"),
        ("gsm8k", {"question": "a", "answer": "so\n#### "}, "what follows #### is empty"),
        ("math", {"problem": "a", "solution": "\\boxed{ }"}, "the box of the solution is empty"),
        ("hotpotqa", {"question": "a", "answer": ""}, "answer is empty"),
    ],
)
def test_an_empty_answer_is_an_error(tmp_path, layout, row, message):
    with pytest.raises(DataError, match=f"rows.jsonl:1: {message}"):
        formats.read_problems(_file(tmp_path, row), layout=layout)


@pytest.mark.parametrize("answer", [[], {"a": 1}, math.nan, math.inf, [1, 2], [["Rome"]]])
@pytest.mark.parametrize("layout", ["plain", "hotpotqa"])
def test_an_answer_that_nothing_can_be_compared_with_is_an_error(tmp_path, layout, answer):
    row = {"prompt": "a", "question": "a", "answer": answer}
    with pytest.raises(DataError) as error:
        formats.read_problems(_file(tmp_path, row), layout=layout)
    shown = str(json.loads(json.dumps(answer)))
    assert str(error.value).endswith(
        f"rows.jsonl:1: answer {shown!r} is no text, finite number, true or false, or list of texts; give one or drop "
        "the row (a reward of your own reads any column of --format prompts)"
    )


@pytest.mark.parametrize(("answer", "solution"), [(True, "True"), (2.5, "2.5"), (10**400, str(10**400)), ("x", "x")])
def test_answers_that_are_texts_or_numbers(tmp_path, answer, solution):
    problem = _only(tmp_path, {"prompt": "a", "answer": answer}, "plain")
    assert (problem.answer["value"], problem.solution) == (answer, solution)


def test_several_right_texts_are_compared_as_aliases(tmp_path):
    problem = _only(tmp_path, {"prompt": "a", "answer": ["Rome", "Roma"]}, "plain")
    assert problem.solution == "Rome" and VERIFIERS["f1"](problem.answer, "Roma").value == 1.0
    tokenizer = tokenizers.load(weights.bundled("nano"))
    parts.make_judge(tokenizer, [problem], VERIFIERS["f1"])
    for name in ("any", "exact", "number", "choice", "math"):
        with pytest.raises(UserError, match=r"compares one answer, and 1 rows have lists .*: give --verifier f1, or"):
            parts.make_judge(tokenizer, [problem], VERIFIERS[name])
    with pytest.raises(DataError, match="rows.jsonl:1: answer is empty"):
        formats.read_problems(_file(tmp_path, {"prompt": "a", "answer": ["Rome", " "]}))


@pytest.mark.parametrize(
    ("layout", "row", "message"),
    [
        ("nq", {"question": "a", "golden_answers": {"a": 1}}, r"golden_answers \(or answer\) \"{'a': 1}\" is no list"),
        ("nq", {"question": "a", "golden_answers": []}, r"golden_answers \(or answer\) holds no text; give one, a"),
        (
            "plain",
            {"prompt": [{"role": 5, "content": "a"}], "answer": 1},
            "the role 5 of a message of a prompt is no text; give user, assistant or system",
        ),
        (
            "humaneval",
            {"prompt": 5, "test": "def check(c): pass", "entry_point": "f"},
            "prompt, test and entry_point must be texts",
        ),
        (
            "humaneval",
            {"prompt": "a", "test": "def check(c): pass", "entry_point": "f", "canonical_solution": ["x"]},
            r"canonical_solution \"\['x'\]\" is no text; give one, or nothing",
        ),
        (
            "mbpp",
            {"text": "a", "code": "def f(): pass", "test_list": ["f()"], "test_setup_code": 5},
            "test_setup_code '5' is no text; give one, or nothing",
        ),
        ("spider", {"db_id": "a", "question": "a", "query": 5}, "the query '5' is no text of SQL; give one or"),
        ("bird", {"db_id": "a", "question": "a", "SQL": " "}, "the query ' ' is no text of SQL; give one or drop the"),
        (
            "gsm8k",
            {"question": "a", "answer": 5},
            r"does not fit the format \('int' object has no attribute 'rpartition'\): question is text, answer is a "
            "whole number; give the columns of its --format as it reads them, or drop the row",
        ),
        ("hotpotqa", {"question": ["a"], "answer": "b"}, r"does not fit .*: question is a list, answer is text; give"),
        ("aime", {"problem": "a", "answer": "1/2"}, "answer is '1/2', no whole number; give one or drop the row"),
        ("aime", {"problem": "a", "answer": [7]}, r"answer is \[7\], no whole number; give one or drop the row"),
        ("countdown", {"nums": ["a", 2], "target": 3}, "nums is 'a', no whole number; give one or drop the row"),
    ],
)
def test_a_column_of_the_wrong_kind_is_named(tmp_path, layout, row, message):
    with pytest.raises(DataError, match=f"rows.jsonl:1: {message}"):
        formats.read_problems(_file(tmp_path, row), layout=layout)


@pytest.mark.parametrize(
    ("layout", "row"),
    [
        ("nq", {"question": "a", "golden_answers": r'["Rome", "\ud800"]'}),
        ("calls", {"query": "a", "tools": r'[{"name": "go", "description": "\udc00"}]', "answers": "[]"}),
    ],
)
def test_half_of_a_character_in_a_list_that_is_text_is_named(tmp_path, layout, row):
    """Files of comma-separated values and columns have lists so; their texts are read once more."""
    with pytest.raises(DataError, match=r"rows.jsonl:1: .* is not UTF-8 \(.ud[8c]00 is half of a character\); write"):
        formats.read_problems(_file(tmp_path, row), layout=layout)


@pytest.mark.parametrize("nothing", [None, ""])
def test_columns_that_hold_nothing_are_as_absent(tmp_path, nothing):
    problem = _only(tmp_path, {"prompt": "a", "answer": "b", "solution": nothing, "level": nothing}, "plain")
    assert (problem.solution, problem.level) == ("b", 0)
    row = REAL["humaneval"][0] | {"canonical_solution": None}
    assert _only(tmp_path, row, "humaneval").solution == ""


def _csv(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    return str(path)


def test_lists_in_csv_files(tmp_path):
    (found,), _ = formats.read_problems(
        _csv(tmp_path, "text,code,test_list\nAdd,def f(x): return x,\"['assert f(1) == 1', 'assert f(2) == 2']\"\n"),
        layout="mbpp",
    )
    assert found.answer["checks"] == ["assert f(1) == 1", "assert f(2) == 2"]
    (one, other, plain), _ = formats.read_problems(
        _csv(tmp_path, 'question,golden_answers\na,"[\'Rome\', \'Roma\']"\nb,"[""Rome""]"\nc,Rome\n'), layout="nq"
    )
    assert [x.answer["value"] for x in (one, other, plain)] == [["Rome", "Roma"], ["Rome"], ["Rome"]]
    (found,), _ = formats.read_problems(_csv(tmp_path, 'nums,target\n"[3, 5, 2]",16\n'), layout="countdown")
    assert found.answer["numbers"] == [3, 5, 2]
    text = 'prompt,completions,scores\na,"[""b"", ""c""]","[1, 2]"\n'
    assert formats.read_pairs(_csv(tmp_path, text), layout="scores")[0] == [formats.Pair("a", "c", "b", 1.0)]


@pytest.mark.parametrize("text", ["['Rome' 'Roma']", "[Rome", "[f(1)]", "[" * 5000])
def test_texts_that_are_no_list(tmp_path, text):
    with pytest.raises(DataError, match=r"rows.csv:2: golden_answers \(or answer\) .\[.* is no list; write it as JSON"):
        formats.read_problems(_csv(tmp_path, f'question,golden_answers\na,"{text}"\n'), layout="nq")
    with pytest.raises(DataError, match="rows.csv:2: test_list '7' is no list"):
        formats.read_problems(_csv(tmp_path, "text,code,test_list\na,b,7\n"), layout="mbpp")


def test_a_parameter_that_is_called_optional_may_be_absent(tmp_path):
    parameters = {"q": {"type": "str"}, "page": {"type": "int, optional"}}
    row = {"query": "q", "tools": [{"name": "f", "parameters": parameters}], "answers": [
        {"name": "f", "arguments": {"q": "x"}}]}  # fmt: skip
    problem = _only(tmp_path, row, "calls")
    assert problem.answer["tools"][0]["function"]["parameters"]["required"] == ["q"]
    assert VERIFIERS["calls"](problem.answer, problem.solution).value == 1.0


def test_answers_in_words(tmp_path):
    problem = _only(tmp_path, REAL["hotpotqa"][0], "hotpotqa")
    assert problem.level == 1 and problem.prompt == "Which is older?" + formats.WORDS
    several = _only(tmp_path, {"question": "?", "answer": ["b d", "c"]}, "nq")
    assert several.answer["value"] == ["b d", "c"] and several.solution == "b d"
    assert _only(tmp_path, {"question": "?", "answer": "b d"}, "nq").answer["value"] == ["b d"]
    assert VERIFIERS["f1"](several.answer, "<answer>b</answer>").value == doubles(2 / 3)


@pytest.mark.parametrize("found", [[], [""], None, [3]])
def test_no_answer_in_words(tmp_path, found):
    with pytest.raises(DataError, match=r"rows.jsonl:1: golden_answers \(or answer\) holds no text"):
        formats.read_problems(_file(tmp_path, {"question": "?", "golden_answers": found}), layout="nq")


WEATHER = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip


def test_calls_of_tools(tmp_path):
    flat = _only(tmp_path, REAL["calls"][0], "calls")
    assert flat.answer["tools"][0]["function"]["parameters"]["required"] == ["city"]  # the other one has a default
    assert flat.prompt.startswith("You may call these tools:\n<tools>\n") and flat.prompt.endswith("Weather in Bonn?\n")
    assert VERIFIERS["calls"](flat.answer, flat.solution).value == 1.0
    talk = [{"role": "user", "content": "Hi"}]
    none = _only(tmp_path, {"prompt": talk, "tools": [WEATHER], "calls": []}, "calls")
    assert none.answer["tools"] == [WEATHER] and none.prompt[1:] == talk and none.prompt[0]["role"] == "system"
    assert VERIFIERS["calls"](none.answer, "Hello!").value == 1.0
    assert VERIFIERS["calls"](none.answer, flat.solution).reason == "calls weather needlessly"
    ruled = _only(tmp_path, {"prompt": [{"role": "system", "content": "Be brief."}, *talk], "tools": [WEATHER],
                             "calls": []}, "calls")  # fmt: skip
    assert ruled.prompt[0]["content"].startswith("Be brief.\n\nYou may call") and len(ruled.prompt) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": "[{"}, r"rows.jsonl:1: tools '\[\{' is no JSON \(Expecting .*\); write a list of objects"),
        ({"tools": [3]}, "rows.jsonl:1: tools is no list of objects"),
        ({"tools": [{"description": "?"}]}, r"rows.jsonl:1: tools\[0\] has no name"),
        (
            {"tools": [{"name": "weather", "parameters": [1]}]},
            r"rows.jsonl:1: tools\[0\] has parameters that are no obj",
        ),
        ({"answers": [{"name": "weather"}]}, r"rows.jsonl:1: answers\[0\] lacks arguments"),
        ({"answers": [{"name": "fly", "arguments": {}}]}, r"rows.jsonl:1: answers\[0\] calls 'fly', which is no tool"),
        ({"answers": None}, r"rows.jsonl:1: lacks query \(or prompt\), or answers \(or calls\)"),
    ],
)
def test_malformed_calls(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        formats.read_problems(_file(tmp_path, REAL["calls"][0] | changes), layout="calls")


def _parquet(tmp_path, rows):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def _declared(name, properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "?", "parameters": schema}}


def test_calls_of_parquet_files_are_those_that_were_written(tmp_path):
    """Arrow gives every object of a column the keys of all of them, with nulls."""
    rows = [
        {"query": "Bonn?", "tools": [_declared("weather", {"city": {"type": "string", "enum": ["Bonn", "Rome"]}})],
         "answers": [{"name": "weather", "arguments": {"city": "Bonn"}}]},
        {"query": "2+2?", "tools": [_declared("add", {"a": {"type": "integer"}, "b": {"type": "integer"}})],
         "answers": [{"name": "add", "arguments": {"a": 2, "b": 2}}]},
        {"query": "When?", "tools": [_declared("time", {"city": {"type": "string"}})],
         "answers": [{"name": "time", "arguments": {"city": "Oslo"}}]},
    ]  # fmt: skip
    found, _ = formats.read_problems(_parquet(tmp_path, rows), layout="calls")
    for problem, row in zip(found, rows, strict=True):
        assert problem.answer["calls"] == row["answers"] and problem.answer["tools"] == row["tools"]
        assert VERIFIERS["calls"](problem.answer, problem.solution) == (1.0, True, "right")
        assert "null" not in problem.prompt + problem.solution


def test_nulls_of_json_are_meant(tmp_path):
    tools = [_declared("find", {"text": {"type": "string"}, "after": {"type": ["string", "null"]}})]
    answers = [{"name": "find", "arguments": {"text": "a", "after": None}}]
    lines = _only(tmp_path, {"query": "?", "tools": tools, "answers": answers}, "calls")
    text = {"query": "?", "tools": json.dumps(tools), "answers": json.dumps(answers)}
    (columns,), _ = formats.read_problems(_parquet(tmp_path, [text]), layout="calls")
    assert lines.answer["calls"] == columns.answer["calls"] == answers


def _turns(*texts):
    return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]


def test_pairs(tmp_path):
    def only(row, layout):
        (pair,), _ = formats.read_pairs(_file(tmp_path, row), layout=layout)
        return pair

    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    assert only({"chosen": start + " d", "rejected": start + " e"}, "hh-rlhf") == (start, " d", " e", 0.0)
    chat = [[{"role": "user", "content": "p"}, {"role": "assistant", "content": x}] for x in "ab"]
    row = {"prompt": "p", "chosen": chat[0], "rejected": chat[1], "score_chosen": 8.5, "score_rejected": 7}
    assert only(row, "ultrafeedback") == ("p", "a", "b", 1.5)
    row = {"info": {"post": "long"}, "summaries": [{"text": "bad"}, {"text": "good"}], "choice": 1}
    assert only(row, "tldr") == ("long\n\nTL;DR:", " good", " bad", 0.0)
    with pytest.raises(DataError, match="the two dialogues part before their last turn"):
        only({"chosen": start + " d", "rejected": "\n\nHuman: z\n\nAssistant: d"}, "hh-rlhf")


@pytest.mark.parametrize("layout", ["plain", "ultrafeedback"])
def test_pairs_of_messages(tmp_path, layout):
    """With the messages before in a column of their own, in both answers, or in all three; a single one as text."""
    before, ends = _turns("a", "x", "b"), [_turns("", "y")[1:], _turns("", "z")[1:]]
    whole = {"chosen": before + ends[0], "rejected": before + ends[1]}
    rows = [{"prompt": before, "chosen": ends[0], "rejected": ends[1]}, whole, whole | {"prompt": before},
            whole | {"prompt": "a"}, {"prompt": before, "chosen": "y", "rejected": "z"}]  # fmt: skip
    for row in rows:
        assert formats.read_pairs(_file(tmp_path, row), layout=layout)[0] == [(before, "y", "z", 0.0)]
    row = {"chosen": _turns("a", "b"), "rejected": _turns("a", "c")}
    assert formats.read_pairs(_file(tmp_path, row), layout=layout)[0] == [(_turns("a"), "b", "c", 0.0)]
    assert formats.read_pairs(_file(tmp_path, row | {"prompt": "a"}), layout=layout)[0] == [("a", "b", "c", 0.0)]


def test_a_text_that_looks_like_messages_stays_text(tmp_path):
    calls = '[{"name": "f"}]'
    row = {"prompt": "a", "chosen": calls, "rejected": "b"}
    assert formats.read_pairs(_file(tmp_path, row), layout="plain")[0] == [("a", calls, "b", 0.0)]


def test_labels_and_rewards_of_messages(tmp_path):
    row = {"prompt": _turns("a"), "completion": _turns("", "b")[1:], "label": True}
    assert formats.read_judged(_file(tmp_path, row))[0] == [(_turns("a"), "b", True)]
    both = [(_turns("a"), "b", True), (_turns("a"), "c", False)]
    assert formats.paired(both) == [(_turns("a"), "b", "c", 0.0)]
    row = {"prompt": _turns("a"), "response": "b", "reward": 1}
    assert formats.read_rewarded(_file(tmp_path, row))[0] == [(_turns("a"), "b", 1.0)]


def test_conversations(tmp_path):
    said = _turns("a", "b", "c", "d")
    named = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in said]
    for row in ({"messages": said}, {"conversations": named}, {"conversations": said}):
        assert formats.read_conversations(_file(tmp_path, row))[0] == [said]
    for row, message in (
        ({"prompt": "a"}, "lacks messages .or conversations.; it has prompt"),
        ({"messages": _turns("a")}, "a conversation has no answer of the assistant behind what it answers"),
        ({"messages": _turns("", "a", "b", "c")[1:]}, "a conversation has no answer of the assistant behind what"),
        ({"messages": [{"role": "user"}]}, "a conversation that is a list holds messages with role and content"),
    ):
        with pytest.raises(DataError, match=f"rows.jsonl:1: {message}"):
            formats.read_conversations(_file(tmp_path, row))


def test_a_margin_needs_both_scores(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"} | more for more in (
        {"score_chosen": 3, "score_rejected": 1}, {"score_chosen": 3, "score_rejected": None}, {"score_chosen": 3},
        {"score_chosen": "", "score_rejected": "1"}, {"score_chosen": 0, "score_rejected": "1"})]  # fmt: skip
    found, _ = formats.read_pairs(_file(tmp_path, *rows), layout="ultrafeedback")
    assert [pair.margin for pair in found] == [2.0, 0.0, 0.0, 0.0, -1.0]


def test_a_reward_that_is_no_number_is_named(tmp_path):
    for reward, shown in (("good", "'good'"), ([1], r"\[1\]")):
        with pytest.raises(DataError, match=f"rows.jsonl:1: reward is {shown}, no number; give one or drop the row"):
            formats.read_rewarded(_file(tmp_path, {"prompt": "a", "response": "b", "reward": reward}))


NAN = float("nan")
TALK = "\n\nHuman: a\n\nAssistant:"
POST = {"info": {"post": "p"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 1}


@pytest.mark.parametrize(
    ("layout", "row", "message"),
    [
        ("plain", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": NAN}, "the margin is nan; give a finite"),
        ("plain", {"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ("scores", {"prompt": "a", "completions": ["b", "c", "d"], "scores": [NAN, 1, 3]}, "scores .* not all finite"),
        (
            "scores",
            {"prompt": "a", "completions": ["b", "c"], "scores": ["x", 1]},
            "one of the scores is 'x', no number",
        ),
        (
            "plain",
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"},
            "margin is 'x', no number; give one or",
        ),
        (
            "ultrafeedback",
            {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": "x"},
            "score_chosen is 'x', no",
        ),
        ("tldr", POST | {"choice": "x"}, "choice is 'x', no whole number; give one or drop the row"),
        ("tldr", POST | {"choice": -1}, "choice -1 of 2 summaries; give 0 or 1, of two"),
        ("tldr", POST | {"summaries": [{"text": "a"}] * 3}, "choice 1 of 3 summaries; give 0 or 1, of two"),
        ("scores", {"prompt": "a", "completions": ["b", "b"], "scores": [1, 3]}, "chosen and rejected are equal"),
        (
            "scores",
            {"prompt": ["a"], "completions": ["b", "c"], "scores": [1, 3]},
            "a prompt that is a list holds mess",
        ),
        ("ultrafeedback", {"prompt": "a", "chosen": _turns("a", ""), "rejected": _turns("a", "b")}, ".* not empty"),
        ("ultrafeedback", {"prompt": "a", "chosen": _turns("a", "b"), "rejected": _turns("a", "b")}, ".* are equal"),
        (
            "plain",
            {"prompt": "a", "chosen": _turns("a"), "rejected": _turns("a", "b")},
            "chosen does not end with a mes",
        ),
        (
            "plain",
            {"chosen": "b", "rejected": "c"},
            "lacks prompt; it has chosen, rejected: rename columns, or name th",
        ),
        ("plain", {"prompt": ["a"], "chosen": "b", "rejected": "c"}, "a prompt that is a list holds messages"),
        ("ultrafeedback", {"prompt": "a", "chosen": _turns("a", "b"), "rejected": _turns("c", "d")}, "the two"),
        ("hh-rlhf", {"chosen": f"{TALK} b\n\nHuman: thanks", "rejected": f"{TALK} c"}, "a dialogue goes on behind"),
        ("hh-rlhf", {"chosen": TALK, "rejected": f"{TALK} c"}, ".* not empty"),
        ("tldr", {"info": {"post": "p"}, "summaries": [{"text": "a"}, {"text": " a"}], "choice": 1}, ".* are equal"),
        (
            "tldr",
            {"info": {"post": None, "article": "p"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 1},
            "info has no post",
        ),
    ],
)
def test_pairs_that_say_nothing(tmp_path, layout, row, message):
    with pytest.raises(DataError, match=f"rows.jsonl:1: {message}"):
        formats.read_pairs(_file(tmp_path, row), layout=layout)


@pytest.mark.parametrize(
    ("layout", "row"),
    [
        ("aime", '{"problem": "?", "answer": Infinity}'),
        ("countdown", '{"nums": [1, 2], "target": -Infinity}'),
        ("aime", '{"problem": "?", "answer": 73.5}'),
        ("countdown", '{"nums": [3.7, 5], "target": 8}'),
        ("countdown", '{"nums": [3, 5], "target": 8.9}'),
        ("calls", json.dumps({"query": "?", "tools": "[" * 100_000, "answers": "[]"})),
    ],
)
def test_values_beyond_all_bounds_are_unreadable_rows(tmp_path, layout, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(DataError, match="rows.jsonl:1: "):
        formats.read_problems(str(path), layout=layout)


def test_labels_of_csv_files(tmp_path):
    wanted = [("a", "b", True), ("a", "c", False)]
    for good, bad in (("true", "false"), ("True", "FALSE"), ("1", "0")):
        found, _ = formats.read_judged(_csv(tmp_path, f"prompt,completion,label\na,b,{good}\na,c,{bad}\n"))
        assert found == wanted
    with pytest.raises(DataError, match="rows.csv:2: label is 'good'; give true or false"):
        formats.read_judged(_csv(tmp_path, "prompt,completion,label\na,b,good\n"))
    assert formats.paired([*wanted, ("a", "b", False)]) == [("a", "b", "c", 0.0)]


def test_questions_about_databases(tmp_path):
    _databases(tmp_path)
    (tmp_path / "train.json").write_text(json.dumps([REAL["spider"][0]]))
    (problem,), _ = formats.read_problems(str(tmp_path / "train.json"), layout="spider")
    assert problem.prompt == (
        "CREATE TABLE item (name TEXT, price INTEGER);\n\n-- Answer with one SQLite query: What is dear?\n"
    )
    assert problem.solution == REAL["spider"][0]["query"] and problem.answer["rule"] == "bag"
    problem = _only(tmp_path, REAL["bird"][0], "bird")
    assert problem.prompt.endswith("query: How many? count\n") and problem.level == 2
    assert problem.answer["rule"] == "set"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shops", r"rows.jsonl:1: there is no database 'shops'; put it at .*/database/shops/shops.sqlite"),
        ("../shop", "rows.jsonl:1: db_id '../shop' is no plain name"),
        ("broken", "rows.jsonl:1: broken.sqlite cannot be read"),
        ("empty", "rows.jsonl:1: empty.sqlite has no tables"),
    ],
)
def test_databases_that_are_not_there(tmp_path, name, message):
    _databases(tmp_path)
    for other, content in (("broken", b"no database" * 99), ("empty", b"")):
        (tmp_path / "database" / other).mkdir()
        (tmp_path / "database" / other / f"{other}.sqlite").write_bytes(content)
    path = _file(tmp_path, {"db_id": name, "question": "?", "query": "SELECT 1"})
    with pytest.raises(DataError, match=message):
        formats.read_problems(path, layout="spider")


def test_the_flags_name_every_format_and_verifier():
    assert set(get_args(parts.Format)) == set(formats.FORMATS)
    assert set(get_args(parts.VerifierName)) == {"", *parts.VERIFIERS}
    assert {name for name, f in formats.FORMATS.items() if f.verifier not in parts.VERIFIERS} == {"prompts"}


def test_the_bad_rows_of_a_mixture_are_counted_together(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\nno JSON\n')
    spec = f"{tmp_path}/a.jsonl@0.5,{tmp_path}/b.jsonl@0.5"
    found, bad = formats.read_problems(spec, bad_rows=2)
    assert len(found) == 2 and len(bad) == 2
    with pytest.raises(DataError, match="b.jsonl:2: not JSON .*2 unreadable rows of all sources, --bad-rows 1 allowed"):
        formats.read_problems(spec, bad_rows=1)
