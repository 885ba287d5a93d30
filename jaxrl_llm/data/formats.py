"""The columns of published data sets as problems and as preference pairs.

A format turns the columns of one row into a problem; it names the verifier that its answers want. Nothing is
downloaded: the rows come from ``data.sources``.
"""

import ast
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from math import isfinite
from typing import Any, NamedTuple

from jaxrl_llm.data import databases
from jaxrl_llm.data.agent_formats import KINDS
from jaxrl_llm.data.boxed import last_boxed
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.sources import Malformed, Row, columnar, half, mixture, proportioned, read, sift
from jaxrl_llm.errors import DataError

BOXED = "\nReason step by step, and put the final answer within \\boxed{}."


class Format(NamedTuple):
    """``columns`` a row must have, how they become a problem, and the verifier of its answers; "": it has none.

    ``make`` finds two more columns: ``folder``, where the source lies, and ``columnar``, see ``sources.columnar``.
    """

    columns: tuple[str, ...]
    make: Callable[[dict[str, Any]], Problem]
    verifier: str


class Pair(NamedTuple):
    """Two answers to one prompt, of which the first was preferred; ``margin`` in the units of the source, or 0."""

    prompt: str | list[dict[str, str]]  # text, or the messages before the answers
    chosen: str
    rejected: str
    margin: float


def _problem(prompt: str | list[dict], value: Any, *, level: int = 0, solution: str = "", **more: Any) -> Problem:
    identity = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return Problem("rows", prompt, solution, {"value": value} | more, level, identity)


def _no_blank(value: Any, name: str) -> Any:
    """A value that is no blank text: against nothing, nothing would be right."""
    if isinstance(value, str) and not value.strip():
        raise ValueError(f"{name} is empty; give a value or drop the row")
    return value


def _answer(value: Any, name: str = "answer") -> Any:
    """An answer with which a response can be compared: text, a finite number, true or false, or texts that are right.

    >>> _answer("Rome"), _answer(2.5), _answer(["Rome", "Roma"])
    ('Rome', 2.5, ['Rome', 'Roma'])
    """
    if isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        return [_no_blank(x, name) for x in value]
    number = isinstance(value, int) or (isinstance(value, float | Decimal) and isfinite(value))
    if not isinstance(value, str) and not number:
        raise ValueError(
            f"{name} {str(value)[:40]!r} is no text, finite number, true or false, or list of texts; give one or drop "
            "the row (a reward of your own reads any column of --format prompts)"
        )
    return _no_blank(value, name)


def _listed(value: Any, name: str, kind: type = str) -> list[Any]:
    """A column that holds a list, or its text, as CSV files have it: JSON, or as Python writes it.

    >>> _listed("['Rome', 'Roma']", "answers"), _listed("[3, 5]", "nums", int), _listed("", "tests")
    (['Rome', 'Roma'], [3, 5], [])
    """
    found = value
    if isinstance(value, str):
        try:
            found = _parsed(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(f"{name} {value[:40]!r} is no list; write it as JSON") from error
    found = [] if found is None else found
    if not isinstance(found, list | tuple):
        raise ValueError(f"{name} {str(value)[:40]!r} is no list; write it as JSON")
    if not all(isinstance(x, kind) for x in found):
        raise ValueError(f"{name} {str(value)[:40]!r} is no list of {kind.__name__}; write it as JSON")
    return _no_half(list(found), name)


def _parsed(text: str) -> list[Any]:
    if not text.strip():
        return []
    try:
        found = json.loads(text)
    except ValueError:
        if re.search(r"""['"]\s+['"]""", text):  # NumPy's way, which Python would read as one text
            raise
        found = ast.literal_eval(text.strip())
    if not isinstance(found, list | tuple):
        raise ValueError("no list")
    return list(found)


def _no_half(value: Any, name: str) -> Any:
    """What a text of JSON held, where no text in it has half of a character: a row's own texts have none."""
    if torn := half(value):
        raise ValueError(f"{name} is not UTF-8 ({torn} is half of a character); write the whole one or drop the row")
    return value


def _messages(value: list[Any], name: str) -> list[dict[str, Any]]:
    if not value or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        raise ValueError(f"a {name} that is a list holds messages with role and content")
    if wrong := [m["role"] for m in value if not (isinstance(m["role"], str) and m["role"].strip())]:
        raise ValueError(f"the role {wrong[0]!r} of a message of a {name} is no text; give user, assistant or system")
    if not all(isinstance(m["content"], str) for m in value) or not any(m["content"].strip() for m in value):
        raise ValueError(f"the content of every message of a {name} is text, and not all of it empty")
    return value


def _prompt(found: Any) -> str | list[dict[str, Any]]:
    if isinstance(found, list):
        return _messages(found, "prompt")
    if not isinstance(found, str):
        raise ValueError(f"prompt {found!r} is neither text nor a list of messages")
    return found


def prompts(columns: dict[str, Any]) -> Problem:
    """``prompt`` (text, or a list of messages) alone: a reward of one's own, or a reward model, judges responses.

    >>> prompts({"prompt": "Tell me a story.", "style": "brief"}).answer
    {'value': ''}
    """
    return _problem(_no_blank(_prompt(columns["prompt"]), "prompt"), "")


def plain(columns: dict[str, Any]) -> Problem:
    """``prompt`` (text, or a list of messages) and ``answer``; optional ``level`` and worked ``solution``.

    Raises:
      ValueError: for a prompt that is neither text nor messages, an answer to which no response can be compared, or a
        level that is no whole number.
    """
    prompt = _prompt(columns["prompt"])
    try:
        level = int(columns.get("level") or 0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"level {columns['level']!r} is not a whole number") from error
    answer, solution = _answer(columns["answer"]), columns.get("solution")
    said = answer[0] if isinstance(answer, list) else answer
    return _problem(prompt, answer, level=level, solution=str(said if solution in (None, "") else solution))


def gsm8k(columns: dict[str, Any]) -> Problem:
    """GSM8K: the number after ``####`` of the worked answer; it ends the solution in the way that the prompt asks for.

    >>> one = gsm8k({"question": "1,000+1?", "answer": "It is <<1000+1=1001>>1,001.\\n#### 1,001"})
    >>> one.answer["value"], one.solution
    ('1001', 'It is 1,001.\\n\\\\boxed{1001}')
    """
    reasoning, marker, final = columns["answer"].rpartition("####")
    if not marker:
        raise ValueError("the answer has no ####")
    value = _no_blank(final.strip().replace(",", ""), "what follows ####")
    steps = re.sub(r"<<[^<>]*>>", "", reasoning).strip()  # without the calculator's marks
    return _problem(columns["question"] + BOXED, value, solution=f"{steps}\n\\boxed{{{value}}}".strip())


def math(columns: dict[str, Any]) -> Problem:
    r"""MATH: what the last ``\boxed{}`` of the solution holds, or a word behind ``\boxed``; "Level 3" is ``level`` 3.

    >>> math({"problem": "?", "solution": r"so \boxed{\frac{1}{2}}", "level": "Level 3"}).answer["value"]
    '\\frac{1}{2}'
    """
    digits, value = re.search(r"\d+", str(columns.get("level", ""))), last_boxed(columns["solution"], bare=True)
    if value is None:
        raise ValueError("the solution has no \\boxed{} that is closed")
    return _problem(
        columns["problem"] + BOXED,
        _no_blank(value, "the box of the solution"),
        level=int(digits[0]) if digits else 0,
        solution=columns["solution"],
    )


def _whole(value: Any, name: str) -> int:
    """A whole number, or its text; a fraction is not cut off: it would be another answer.

    >>> _whole("073", "answer"), _whole(16.0, "target")
    (73, 16)
    """
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):  # of other texts, of what is neither, of nan and infinity
        found = None
    if found is None or not isinstance(value, str) and found != value:
        raise ValueError(f"{name} is {value!r:.60}, no whole number; give one or drop the row")
    return found


def _number(value: Any, name: str) -> float:
    """A number, or its text.

    >>> _number("0.5", "reward"), _number(2, "reward")
    (0.5, 2.0)
    """
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is {value!r:.60}, no number; give one or drop the row") from error


def aime(columns: dict[str, Any]) -> Problem:
    """AIME and its like: ``problem`` and a whole number as ``answer``.

    >>> aime({"problem": "?", "answer": "073"}).answer["value"]
    '73'
    """
    return _problem(columns["problem"] + BOXED, str(_whole(columns["answer"], "answer")))


def countdown(columns: dict[str, Any]) -> Problem:
    """Countdown in words: ``nums`` and ``target``; the answer is one expression inside ``<answer>`` tags.

    >>> countdown({"nums": [3, 5, 2], "target": 16}).answer["numbers"]
    [3, 5, 2]
    """
    numbers = [_whole(n, "nums") for n in _listed(columns["nums"], "nums", object)]
    target = _whole(columns["target"], "target")
    prompt = (
        f"Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
        "operations (+, -, *, /) and each number exactly once. Put the expression inside <answer> </answer> tags, for "
        "example <answer>(1 + 2) / 3</answer>."
    )
    problem = _problem(prompt, target, level=len(numbers), numbers=numbers, target=target)
    return problem._replace(identity=f"{sorted(numbers)} {target}")


def _text_or_nothing(columns: dict[str, Any], name: str) -> str:
    found = columns.get(name) or ""
    if not isinstance(found, str):
        raise ValueError(f"{name} {str(found)[:40]!r} is no text; give one, or nothing")
    return found


def humaneval(columns: dict[str, Any]) -> Problem:
    """HumanEval: the head of a function is to be completed; ``check(candidate)`` of ``test`` judges it.

    >>> row = {"prompt": "def f(x):\\n", "test": "def check(c): assert c(1) == 2", "entry_point": "f"}
    >>> humaneval(row).answer["checks"]
    ['def check(c): assert c(1) == 2\\n\\ncheck(f)\\n']
    """
    start, entry = columns["prompt"], columns["entry_point"]
    if not all(isinstance(columns[name], str) for name in ("prompt", "test", "entry_point")):
        raise ValueError("prompt, test and entry_point must be texts")
    checks = [f"{columns['test']}\n\ncheck({entry})\n"]
    solution = _text_or_nothing(columns, "canonical_solution")
    return _problem(start, entry, solution=solution, checks=checks, entries=[entry], setup=start, start=start)


def mbpp(columns: dict[str, Any]) -> Problem:
    """MBPP: a sentence and asserts; also ``prompt``/``test_imports`` of its sanitized half.

    The tests of ``test_list`` are shown; those of ``challenge_test_list``, which few rows have, are not, and count too.

    >>> row = {"text": "Add one.", "code": "def f(x): return x + 1", "test_list": ["assert f(1) == 2"]}
    >>> mbpp(row).answer["entries"], mbpp(row).answer["checks"]
    (['f'], ['assert f(1) == 2'])
    """
    task = columns.get("text") or columns.get("prompt")
    shown, hidden = (_listed(columns.get(name), name) for name in ("test_list", "challenge_test_list"))
    if not task or not shown:
        raise ValueError("a row of MBPP needs text (or prompt) and tests")
    imports = _listed(columns.get("test_imports"), "test_imports")
    setup = _text_or_nothing(columns, "test_setup_code") or "\n".join(imports)
    defined = re.findall(r"^(?:def|class)\s+(\w+)", columns["code"], re.MULTILINE)
    entries = [name for name in dict.fromkeys(defined) if any(re.search(rf"\b{name}\b", t) for t in shown + hidden)]
    if not entries:
        raise ValueError("no test uses a function of the reference code")
    prompt = f"Write a Python program. {task}\nYour code must pass these tests:\n" + "\n".join(shown) + "\n"
    return _problem(prompt, entries[0], solution=columns["code"], checks=shown + hidden, entries=entries, setup=setup)


def _asked(columns: dict[str, Any], query: Any, rule: str, *, hint: str = "", level: int = 0) -> Problem:
    """A question about a database that lies beside the source; its ``CREATE`` statements are shown."""
    if not isinstance(query, str) or not query.strip():
        raise ValueError(f"the query {str(query)[:40]!r} is no text of SQL; give one or drop the row")
    path = databases.find(columns["folder"], columns["db_id"])
    question = " ".join(x for x in (columns["question"].strip(), hint.strip()) if x)
    prompt = f"{databases.schema(path)}\n\n-- Answer with one SQLite query: {question}\n"
    return _problem(prompt, query, level=level, solution=query, database=str(path), rule=rule)


def spider(columns: dict[str, Any]) -> Problem:
    """Spider: a question about ``database/DB_ID/DB_ID.sqlite`` beside the file; a query with the same rows is right."""
    return _asked(columns, columns["query"], "bag")


def bird(columns: dict[str, Any]) -> Problem:
    """BIRD: as Spider, with ``evidence`` as a hint, ``difficulty`` as level 1 to 3, and rows compared as sets."""
    levels = {"simple": 1, "moderate": 2, "challenging": 3}
    level = levels.get(columns.get("difficulty", ""), 0)
    return _asked(columns, columns["SQL"], "set", hint=columns.get("evidence") or "", level=level)


WORDS = "\nAnswer with a few words inside <answer> </answer> tags."


def hotpotqa(columns: dict[str, Any]) -> Problem:
    """HotpotQA and 2WikiMultihopQA without their passages: ``level`` easy, medium or hard is 1 to 3.

    >>> hotpotqa({"question": "Where?", "answer": "Rome", "level": "hard"}).level
    3
    """
    levels = {"easy": 1, "medium": 2, "hard": 3}
    answer = _answer(columns["answer"])
    return _problem(columns["question"] + WORDS, answer, level=levels.get(columns.get("level", ""), 0))


def nq(columns: dict[str, Any]) -> Problem:
    """Natural Questions, TriviaQA and their like: ``golden_answers`` or ``answer``, one text or a list of aliases.

    >>> nq({"question": "Where?", "golden_answers": ["Rome", "Roma"]}).answer["value"]
    ['Rome', 'Roma']
    """
    found = columns.get("golden_answers", columns.get("answer"))
    one = isinstance(found, str) and not found.lstrip().startswith("[")
    aliases = [found] if one else _listed(found, "golden_answers (or answer)", object)
    if not aliases or not all(isinstance(alias, str) and alias.strip() for alias in aliases):
        raise ValueError("golden_answers (or answer) holds no text; give one, a list of them, or drop the row")
    return _problem(columns["question"] + WORDS, aliases, solution=aliases[0])


def with_tools(text: str, declarations: Sequence[Mapping[str, Any]]) -> str:
    """Instructions with declarations of tools behind them, and how a call is written (as Hermes and Qwen models do)."""
    lines = "\n".join(json.dumps(x, ensure_ascii=False) for x in declarations)
    form = '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
    said = f"You may call these tools:\n<tools>\n{lines}\n</tools>\nWrite each call as\n{form}"
    return f"{text}\n\n{said}" if text else said


def _without_nulls(value: Any) -> Any:
    """A value whose objects, at any depth, have no key of null.

    >>> _without_nulls([{"city": "Bonn", "a": None, "more": {"b": None}}, None])
    [{'city': 'Bonn', 'more': {}}, None]
    """
    if isinstance(value, dict):
        return {key: _without_nulls(x) for key, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def _objects(value: Any, name: str, needs: Sequence[str], *, filled: bool) -> list[dict[str, Any]]:
    """A list of objects, or the JSON text of one.

    Args:
      filled: objects that are no text have a null where they have no such key, but others of the source have.
    """
    if isinstance(value, str):
        try:
            found = _no_half(json.loads(value), name)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} {value[:40]!r} is no JSON ({error}); write a list of objects") from error
    else:
        found = _without_nulls(value) if filled else value
    if not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
        raise ValueError(f"{name} is no list of objects")
    for k, x in enumerate(found):
        absent = [key for key in needs if key not in x]
        if absent:
            raise ValueError(f"{name}[{k}] lacks {', '.join(absent)}")
    return found


def _may_lack(parameter: dict[str, Any]) -> bool:
    """Whether a parameter of xLAM's may be left out: it has a default, or a type such as "int, optional"."""
    return "default" in parameter or re.search(r"\boptional\b", str(parameter.get("type")), re.IGNORECASE) is not None


def _declaration(tool: dict[str, Any], k: int) -> dict[str, Any]:
    """A declaration as templates take it; of xLAM's rows the parameters are the properties alone."""
    inner = tool.get("function", tool)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ValueError(f"tools[{k}] has no name")
    if not re.fullmatch(r"[\w.\-]{1,128}", inner["name"]):
        raise ValueError(f"tools[{k}] is named {inner['name']!r}; use letters, digits, _, . and -, at most 128")
    schema = inner.get("parameters") or {}
    if not isinstance(schema, dict):
        raise ValueError(f"tools[{k}] has parameters that are no object")
    if schema.get("type") != "object":
        required = [name for name, x in schema.items() if isinstance(x, dict) and not _may_lack(x)]
        schema = {"type": "object", "properties": schema, "required": required}
    named = {"name": inner["name"], "description": str(inner.get("description") or ""), "parameters": schema}
    return {"type": "function", "function": named}


def calls(columns: dict[str, Any]) -> Problem:
    """Calls of tools: ``query`` (or ``prompt``), ``tools`` and ``answers`` (or ``calls``), lists or their JSON text.

    As xLAM's function-calling rows, or with OpenAI's declarations. Without a call in ``answers`` the right response
    makes none. Of objects that Parquet or Arrow hold a null is an absent key; a null that is meant is in JSON text.

    >>> row = {"query": "Bonn?", "tools": '[{"name": "weather", "parameters": {"city": {"type": "string"}}}]'}
    >>> calls(row | {"answers": '[{"name": "weather", "arguments": {"city": "Bonn"}}]'}).answer["calls"]
    [{'name': 'weather', 'arguments': {'city': 'Bonn'}}]
    """
    asked, wanted = (next((columns[x] for x in names if x in columns), None)
                     for names in (("query", "prompt"), ("answers", "calls")))  # fmt: skip
    if asked is None or wanted is None:
        raise ValueError("lacks query (or prompt), or answers (or calls)")
    filled = bool(columns.get("columnar"))
    tools = [_declaration(tool, k) for k, tool in enumerate(_objects(columns["tools"], "tools", (), filled=filled))]
    right = _objects(wanted, "answers", ("name", "arguments"), filled=filled)
    known = {t["function"]["name"] for t in tools}
    for k, call in enumerate(right):
        if call["name"] not in known or not isinstance(call["arguments"], dict):
            raise ValueError(f"answers[{k}] calls {call['name']!r}, which is no tool of the row, or without arguments")
    solution = "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in right)
    if isinstance(asked, list):
        head, rest = (asked[0], asked[1:]) if asked[0].get("role") == "system" else ({"content": ""}, asked)
        prompt: str | list[dict] = [{"role": "system", "content": with_tools(head["content"], tools)}, *rest]
    else:
        prompt = f"{with_tools('', tools)}\n\n{asked}\n"
    return _problem(prompt, "", level=len(right), solution=solution, tools=tools, calls=right)


FORMATS = {
    "plain": Format(("prompt", "answer"), plain, "any"),
    "prompts": Format(("prompt",), prompts, ""),
    "gsm8k": Format(("question", "answer"), gsm8k, "number"),
    "math": Format(("problem", "solution"), math, "math"),
    "aime": Format(("problem", "answer"), aime, "number"),
    "countdown": Format(("nums", "target"), countdown, "countdown"),
    "humaneval": Format(("prompt", "test", "entry_point"), humaneval, "code"),
    "mbpp": Format(("code", "test_list"), mbpp, "code"),
    "spider": Format(("db_id", "question", "query"), spider, "sql"),
    "bird": Format(("db_id", "question", "SQL"), bird, "sql"),
    "hotpotqa": Format(("question", "answer"), hotpotqa, "f1"),
    "nq": Format(("question",), nq, "f1"),
    "calls": Format(("tools",), calls, "calls"),
}


def _pair(prompt: str | list[dict[str, str]], chosen: str, rejected: str, margin: Any = 0.0) -> Pair:
    """A pair that says something.

    Raises:
      ValueError: for an empty text, two equal answers, or a margin that is no finite number.
    """
    texts = (chosen, rejected, *([] if isinstance(prompt, list) else [prompt]))
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("prompt, chosen and rejected must be texts that are not empty")
    if chosen == rejected:
        raise ValueError("chosen and rejected are equal: nothing is preferred")
    if not isfinite(distance := _number(margin, "margin")):
        raise ValueError(f"the margin is {margin}; give a finite number")
    return Pair(prompt, chosen, rejected, distance)


def hh_rlhf(columns: dict[str, Any]) -> Pair:
    r"""HH-RLHF: two whole dialogues that part at the last turn of the assistant.

    >>> hh_rlhf({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"})[1:3]
    (' b', ' c')
    """
    marker = "\n\nAssistant:"
    prompt, found, chosen = columns["chosen"].rpartition(marker)
    other, also, rejected = columns["rejected"].rpartition(marker)
    if not (found and also):
        raise ValueError("a dialogue has no turn of the assistant")
    if prompt != other:
        raise ValueError("the two dialogues part before their last turn")
    if any("\n\nHuman:" in text for text in (chosen, rejected)):
        raise ValueError("a dialogue goes on behind its last turn of the assistant; cut it there or drop the row")
    return _pair(prompt + marker, chosen, rejected)


_HH_TURN = re.compile(r"(?:\n\n|^\s*)(Human|Assistant):")


def hh_messages(prompt: str) -> list[dict[str, str]]:
    r"""The turns of a prompt of HH-RLHF, for a chat template; what stands in front of them is the system's message.

    >>> hh_messages("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:")[1:]
    [{'role': 'assistant', 'content': 'b'}, {'role': 'user', 'content': 'c'}]
    """
    before, *parts = _HH_TURN.split(prompt)
    roles = ("user" if said == "Human" else "assistant" for said in parts[::2])
    turns = [{"role": role, "content": text.strip()} for role, text in zip(roles, parts[1::2], strict=True)][:-1]
    return [{"role": "system", "content": before.strip()}, *turns] if before.strip() else turns


def ultrafeedback(columns: dict[str, Any]) -> Pair:
    """UltraFeedback, binarised: messages of both answers; with both scores their difference is the margin."""
    given = {name: columns.get(name) for name in ("score_chosen", "score_rejected")}
    both = [_number(value, name) for name, value in given.items() if value not in (None, "")]
    margin = both[0] - both[1] if len(both) == 2 else 0.0
    written = {n: x for n in ("chosen", "rejected") if isinstance(x := columns[n], str) and re.match(r"\s*\[\s*\{", x)}
    return plain_pair(columns | {"margin": margin} | {name: _listed(x, name, dict) for name, x in written.items()})


def _answered(value: Any, name: str) -> tuple[list[dict[str, Any]], Any]:
    """The messages before an answer, and the text of the answer; of a text none, and itself."""
    if not isinstance(value, list):
        return [], value
    last = value[-1] if value else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise ValueError(f"{name} does not end with a message of the assistant")
    return value[:-1], last.get("content")


def _prompt_of(prompt: Any, before: list[dict[str, Any]]) -> Any:
    """The prompt of answers that stand behind messages; of one message it is its own words, where it is text."""
    if isinstance(prompt, list):
        before = before if before[: len(prompt)] == prompt else [*prompt, *before]
    elif prompt and len(before) < 2:
        return prompt
    return _messages(before, "prompt") if before else prompt


def tldr(columns: dict[str, Any]) -> Pair:
    """TL;DR comparisons: a post, two summaries, and the index of the preferred one.

    >>> tldr({"info": {"post": "p"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 1})[1:3]
    (' b', ' a')
    """
    post, best = columns["info"]["post"], _whole(columns["choice"], "choice")
    if best not in (0, 1) or len(columns["summaries"]) != 2:
        raise ValueError(f"choice {best} of {len(columns['summaries'])} summaries; give 0 or 1, of two")
    if not isinstance(post, str) or not post.strip():  # of the comparisons of news, which have an article
        raise ValueError("info has no post; drop the row")
    texts = [f" {s['text'].strip()}" for s in columns["summaries"]]
    return _pair(f"{post}\n\nTL;DR:", texts[best], texts[1 - best])


def plain_pair(columns: dict[str, Any]) -> Pair:
    """``prompt``, ``chosen`` and ``rejected``, texts or messages; optional ``margin``.

    Answers that are messages may be whole conversations, which part at the last turn; ``prompt`` may then be missing.

    >>> plain_pair({"prompt": "a", "chosen": "b", "rejected": "c"}).margin
    0.0
    """
    (before, chosen), (other, rejected) = (_answered(columns[name], name) for name in ("chosen", "rejected"))
    if before != other:
        raise ValueError("the two dialogues part before their last turn")
    if not (prompt := columns.get("prompt")) and not before:
        raise ValueError(_lacks(["prompt"], columns))
    return _pair(_prompt_of(prompt, before), chosen, rejected, columns.get("margin") or 0.0)


_LABELS = {"true": True, "1": True, "false": False, "0": False}


def _completed(columns: dict[str, Any], name: str) -> tuple[Any, str]:
    """``prompt`` and the response of column ``name``, texts or messages.

    Raises:
      ValueError: where one of them is empty.
    """
    before, response = _answered(columns[name], name)
    prompt = _prompt_of(columns["prompt"], before)
    if not prompt or not isinstance(prompt, str | list) or not (isinstance(response, str) and response):
        raise ValueError(f"prompt and {name} must be texts that are not empty")
    return prompt, response


def unpaired(columns: dict[str, Any]) -> tuple[Any, str, bool]:
    """``prompt`` and ``completion``, texts or messages, and ``label``: whether it is desirable.

    >>> unpaired({"prompt": "a", "completion": "b", "label": 1})
    ('a', 'b', True)
    """
    (prompt, completion), label = _completed(columns, "completion"), columns["label"]
    named = _LABELS.get(label.strip().lower()) if isinstance(label, str) else label  # a CSV file holds texts
    if named not in (True, False, 0, 1):
        raise ValueError(f"label is {label!r}; give true or false")
    return prompt, completion, bool(named)


def rewarded(columns: dict[str, Any]) -> tuple[Any, str, float]:
    """``prompt`` and ``response``, texts or messages, and ``reward``, a number: what was logged of a model in use.

    >>> rewarded({"prompt": "a", "response": "b", "reward": "0.5"})
    ('a', 'b', 0.5)
    """
    (prompt, response), reward = _completed(columns, "response"), columns["reward"]
    if not isfinite(found := _number(reward, "reward")):
        raise ValueError(f"reward is {reward!r}; give a number")
    return prompt, response, found


def scores(columns: dict[str, Any]) -> Pair:
    """``prompt``, ``completions`` (texts, or objects with ``response``) and their ``scores``: the best over the worst.

    As UltraFeedback before it was binarised; its objects may hold ``overall_score`` in place of the column.

    >>> scores({"prompt": "a", "completions": ["b", "c", "d"], "scores": [1, 3, 2]})[1:]
    ('c', 'b', 2.0)
    """
    given = _listed(columns["completions"], "completions", object)
    texts = [x["response"] if isinstance(x, dict) else x for x in given]
    found = columns.get("scores")
    listed = [x["overall_score"] for x in given] if found is None else _listed(found, "scores", object)
    values = [_number(x, "one of the scores") for x in listed]
    if len(texts) != len(values) or len(texts) < 2:
        raise ValueError(f"{len(texts)} completions with {len(values)} scores; give two at least, and a score for each")
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("prompt and completions must be texts that are not empty")
    if not all(map(isfinite, values)):
        raise ValueError(f"scores {values} are not all finite; give a number for each")
    best, worst = (values.index(pick(values)) for pick in (max, min))
    if values[best] == values[worst]:
        raise ValueError("all scores are equal: nothing is preferred")
    return _pair(_prompt_of(columns["prompt"], []), texts[best], texts[worst], values[best] - values[worst])


def conversation(columns: dict[str, Any]) -> list[dict[str, str]]:
    """``messages``: a conversation, all of whose answers are imitated; or ShareGPT's ``conversations``.

    >>> said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    >>> conversation({"conversations": said})[1]
    {'role': 'assistant', 'content': 'b'}
    """
    name = "conversations" if columns.get("messages") is None else "messages"
    if columns.get(name) is None:
        raise ValueError(f"lacks messages (or conversations); it has {', '.join(columns)}: rename columns")
    roles = {"human": "user", "gpt": "assistant"}
    found = [
        {"role": roles.get(m["from"], m["from"]), "content": m["value"]} if {"from", "value"} <= set(m) else m
        for m in _listed(columns[name], name, dict)
    ]
    said = _messages(found, "conversation")
    if said[0]["role"] == "assistant" or not any(m["role"] == "assistant" and m["content"].strip() for m in said):
        raise ValueError("a conversation has no answer of the assistant behind what it answers")
    return said


PAIR_FORMATS = {
    "plain": (("chosen", "rejected"), plain_pair),
    "hh-rlhf": (("chosen", "rejected"), hh_rlhf),
    "ultrafeedback": (("chosen", "rejected"), ultrafeedback),
    "tldr": (("info", "summaries", "choice"), tldr),
    "scores": (("prompt", "completions"), scores),
}


def _lacks(absent: Sequence[str], columns: Mapping[str, Any]) -> str:
    has = f"it has {', '.join(columns) or 'nothing'}"
    return f"lacks {', '.join(absent)}; {has}: rename columns, or name their --format"


def _made(row: Row, columns: tuple[str, ...], make: Callable[[dict[str, Any]], Any]) -> Any:
    absent = [c for c in columns if c not in row.columns]
    if absent:
        return Malformed(row.where, _lacks(absent, row.columns))
    if null := [c for c in columns if row.columns[c] is None]:
        return Malformed(row.where, f"{', '.join(null)} is null; give a value or drop the row")
    first = row.columns[columns[0]] if columns else None
    if isinstance(first, str) and not first.strip():
        return Malformed(row.where, f"{columns[0]} is empty; give text or drop the row")
    try:
        return make(row.columns)
    except (ValueError, RecursionError) as error:
        return Malformed(row.where, str(error) or type(error).__name__)
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # a column of another kind than it reads
        kinds = ", ".join(f"{name} is {_kind(row.columns[name])}" for name in columns or row.columns)
        reason = f"does not fit the format ({str(error) or type(error).__name__}): {kinds}"
        return Malformed(row.where, f"{reason}; give the columns of its --format as it reads them, or drop the row")


def _kind(value: Any) -> str:
    return KINDS.get(type(value), f"a {type(value).__name__}")


def _convert(
    spec: str, columns: tuple[str, ...], make: Callable[[dict[str, Any]], Any], bad_rows: int
) -> tuple[list[Any], list[Malformed]]:
    found, bad = read(spec, bad_rows=bad_rows)
    made = sift((_made(row, columns, make) for row in found), bad, bad_rows=bad_rows)
    if not made:
        raise DataError(f"{spec} holds no usable rows; the first: {bad[0].where}: {bad[0].reason}")
    return made, bad


def _mixed(
    spec: str, read: Callable[[str], tuple[list[Any], list[Malformed]]], bad_rows: int
) -> tuple[list[Any], list[Malformed]]:
    """``read`` of a source, or of all sources of a mixture in their shares; ``bad_rows`` holds for all together."""
    parts = mixture(spec)
    if len(parts) == 1:
        return read(parts[0][0])
    found = [read(name) for name, _ in parts]
    bad = [x for _, of_one in found for x in of_one]
    if len(bad) > bad_rows:
        raise DataError(
            f"{bad[-1].where}: {bad[-1].reason} ({len(bad)} unreadable rows of all sources, "
            f"--bad-rows {bad_rows} allowed)"
        )
    return proportioned([rows for rows, _ in found], [weight for _, weight in parts]), bad


def read_problems(spec: str, *, layout: str = "plain", bad_rows: int = 0) -> tuple[list[Problem], list[Malformed]]:
    """The problems of a source, and the rows left out.

    Args:
      spec: see ``sources.rows``; or a mixture of several, see ``sources.mixture``.
      layout: a name in ``FORMATS``.
      bad_rows: how many rows may be unreadable; one more is an error.

    Raises:
      DataError: as ``sources.read``, or for a row that lacks a column or does not fit the format.
    """
    chosen = FORMATS[layout]

    def of_one(source: str) -> tuple[list[Problem], list[Malformed]]:
        folder = str(pathlib.Path(source).parent)

        def make(columns: dict[str, Any]) -> Problem:
            rest = {name: value for name, value in columns.items() if name not in chosen.columns}
            more = {"folder": folder, "columnar": columnar(source)}
            return chosen.make(columns | more)._replace(row=rest or None)

        return _convert(source, chosen.columns, make, bad_rows)

    return _mixed(spec, of_one, bad_rows)


def read_pairs(spec: str, *, layout: str, bad_rows: int = 0) -> tuple[list[Pair], list[Malformed]]:
    """The preference pairs of a source, and the rows left out; ``layout`` is a name in ``PAIR_FORMATS``.

    Of ``unpaired`` rows every desirable response to a prompt is paired with one that is not, as far as there are both.

    Raises:
      DataError: as ``read_problems``, or where no prompt has responses of both kinds.
    """
    if layout == "unpaired":
        judged, bad = read_judged(spec, bad_rows=bad_rows)
        if not (pairs := paired(judged)):
            raise DataError(f"{spec}: no prompt has a response with label true and one with label false")
        return pairs, bad
    return _mixed(spec, lambda source: _convert(source, *PAIR_FORMATS[layout], bad_rows), bad_rows)


def read_conversations(spec: str, *, bad_rows: int = 0) -> tuple[list[list[dict[str, str]]], list[Malformed]]:
    """Conversations, see ``conversation``, and the rows left out."""
    return _mixed(spec, lambda source: _convert(source, (), conversation, bad_rows), bad_rows)


def paired(judged: Sequence[tuple[Any, str, bool]]) -> list[Pair]:
    """Responses with a label as pairs: of a prompt the k-th good one over the k-th bad one, in turn.

    >>> [p[:3] for p in paired([("a", "b", True), ("a", "c", False), ("a", "d", True), ("e", "f", True)])]
    [('a', 'b', 'c'), ('a', 'd', 'c')]
    """
    by_prompt: dict[str, tuple[Any, list[str], list[str]]] = {}
    for prompt, response, label in judged:
        by_prompt.setdefault(str(prompt), (prompt, [], []))[1 if label else 2].append(response)
    found = []
    for prompt, good, bad in by_prompt.values():
        count = max(len(good), len(bad)) if good and bad else 0
        pairs = (Pair(prompt, good[k % len(good)], bad[k % len(bad)], 0.0) for k in range(count))
        found += [pair for pair in pairs if pair.chosen != pair.rejected]
    return found


def read_judged(spec: str, *, bad_rows: int = 0) -> tuple[list[tuple[Any, str, bool]], list[Malformed]]:
    """Responses with a label, see ``unpaired``, and the rows left out."""
    columns = ("prompt", "completion", "label")
    return _mixed(spec, lambda source: _convert(source, columns, unpaired, bad_rows), bad_rows)


def read_rewarded(spec: str, *, bad_rows: int = 0) -> tuple[list[tuple[Any, str, float]], list[Malformed]]:
    """Responses with their rewards, see ``rewarded``, and the rows left out."""
    columns = ("prompt", "response", "reward")
    return _mixed(spec, lambda source: _convert(source, columns, rewarded, bad_rows), bad_rows)
