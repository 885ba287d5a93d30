"""Calls of tools in the text of a response, as Hermes and Qwen models write them, and what is answered to them.

A call is ``<tool_call>`` ``{"name": "weather", "arguments": {"city": "Bonn"}}`` ``</tool_call>``; a response may hold
several, and text around them. What a model wrote raises nothing: a malformed call is a call with a ``problem``, in
words that can be shown to it. The declarations reach the model by its own chat template:
``chat.encode_chat(tokenizer, messages, tools=[declared(t) for t in tools], add_generation_prompt=True)``.
"""

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.tools import schema as schemas
from jaxrl_llm.tools.schema import Tool, shortened
from jaxrl_llm.verifiers.verdict import Verdict

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARK, SPACE = re.compile(f"{OPEN}|{CLOSE}"), re.compile(r"\s*")
MOST = 64  # calls that are read: the time to say what is wrong with one grows with the length of the text
MOST_DIGITS = 300  # of a whole number: a float holds it, which tools make of it
THOUGHT, SPOKEN = "<think>", "</think>"
_LATER = re.compile(rf"{THOUGHT}.*?(?:{SPOKEN}|\Z)", re.DOTALL)  # a thought behind the first
Message = dict[str, Any]


class Call(NamedTuple):
    """One call; ``problem`` says why it cannot be made, and is empty where it can."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""


class Reply(NamedTuple):
    """A response taken apart: what stands around the calls, thoughts left out, and the calls in their order."""

    text: str
    calls: tuple[Call, ...]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _number(text: str) -> float:
    if (value := float(text)) in (float("inf"), float("-inf")):
        raise ValueError(f"{shortened(text)} is too large a number")
    return value


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"{shortened(text)} is too large a number")
    return int(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_once, parse_float=_number, parse_int=_whole, parse_constant=_no_number
)  # fmt: skip


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at a place of a text, and where it ends.

    Raises:
      ValueError: for what is no JSON, is nested deeper than any tool needs, or cannot be written as UTF-8.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if schemas.deep(value):
        raise ValueError("nested too deeply")
    json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair cannot be sent to anyone
    return value, end


def _spoken(response: str) -> str:
    """What follows the thoughts: a call that is only thought of is not made."""
    before, end, after = response.partition(SPOKEN)
    return _LATER.sub("", after) if end else before.partition(THOUGHT)[0]


def _call(value: Any, tools: Mapping[str, Tool]) -> Call:
    """A call of decoded JSON."""
    if not isinstance(value, dict):
        return Call("", {}, f"a call is an object with name and arguments, not {shortened(value)}")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str):
        return Call("", {}, "the call has no name")
    if not isinstance(arguments, dict):
        said = "has no arguments; write {} for none" if arguments is None else "has arguments that are no object"
        return Call(name, {}, f"the call of {shortened(name)} {said}")
    if name not in tools:
        return Call(name, arguments, f"there is no tool {shortened(name)}; there are {', '.join(tools) or 'none'}")
    return Call(name, arguments, schemas.problem(arguments, tools[name].parameters))


def parse(response: str, tools: Sequence[Tool]) -> Reply:
    """The calls of a response, checked against the tools' schemas; never raises on what a model wrote.

    Calls inside ``<think> ... </think>`` do not count. Keys beside ``name`` and ``arguments`` are read over.

    >>> weather = schemas.tool("weather", "", {"type": "object", "required": ["city"]})
    >>> said = 'Let me see. <tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    >>> parse(said, [weather]).calls[0].problem
    'arguments: city is missing'
    """
    known = {item.name: item for item in tools}
    text, outside, calls = _spoken(response), [], []
    marks = list(MARK.finditer(text))
    at = k = 0
    while k < len(marks):
        if len(calls) == MOST:
            return Reply("".join(outside).strip(), (*calls, Call("", {}, f"there are more than {MOST} calls")))
        mark, k = marks[k], k + 1
        outside.append(text[at : mark.start()])
        at = mark.end()
        if mark.group() == CLOSE:
            calls.append(Call("", {}, f"{CLOSE} closes no call"))
            continue
        try:
            value, end = _decoded(text, SPACE.match(text, at).end())
            wrong = ""
        except ValueError as error:
            value, end, wrong = None, at, f"the call is no JSON: {shortened(str(error), 160)}"
        while k < len(marks) and marks[k].start() < end:  # inside a string
            k += 1
        # goes on behind the call, or at the next one where this was never closed
        until = marks[k].start() if k < len(marks) else len(text)
        closed = k < len(marks) and marks[k].group() == CLOSE
        if not wrong and (not closed or text[end:until].strip()):
            wrong = f"the call is not closed by {CLOSE}"
        calls.append(Call("", {}, wrong) if wrong else _call(value, known))
        at, k = (marks[k].end(), k + 1) if closed else (until, k)
    return Reply("".join([*outside, text[at:]]).strip(), tuple(calls))


class Answer(NamedTuple):
    """What a tool said.

    ``error``: it refused the call, which is the policy's concern. ``valid=False``: it could not be asked, which says
    nothing about the policy.
    """

    text: str
    error: bool = False
    valid: bool = True


class Toolbox(NamedTuple):
    """Tools and the function that runs one of them by name; it may be called from several threads."""

    tools: tuple[Tool, ...]
    run: Callable[[str, dict[str, Any]], Answer]


def _unfit(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Why a function cannot be called with these arguments; empty where it can, or does not tell what it takes.

    A wrapper that takes whatever comes may give the function inside more than it gets, and nothing else.
    """
    try:
        inner = outer = inspect.signature(function)
        with contextlib.suppress(ValueError):  # a wrapper may be written in C, too
            outer = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # of a function written in C
        return ""
    try:
        outer.bind(**arguments)
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in outer.parameters.values()):
            inner.bind_partial(**arguments)
    except TypeError as error:
        return str(error)
    return ""


def of_functions(pairs: Sequence[tuple[Tool, Callable[..., Any]]]) -> Toolbox:
    """Python functions of keyword arguments; text is answered as it is, all else as JSON.

    A ``ValueError`` is a refusal that the policy reads, and so are arguments that the function does not take;
    ``RunStopped`` ends the run; another exception makes the answer invalid.

    Raises:
      UserError: for two tools of one name.
    """
    found = {item.name: function for item, function in pairs}
    if len(found) < len(pairs):
        raise UserError(f"two tools have one name: {', '.join(item.name for item, _ in pairs)}")

    def run(name: str, arguments: dict[str, Any]) -> Answer:
        if wrong := _unfit(found[name], arguments):
            return Answer(f"error: {name}: {wrong}", error=True)
        try:
            value = found[name](**arguments)
            return Answer(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        except RunStopped:  # a ValueError as well
            raise
        except ValueError as error:
            return Answer(f"error: {error}", error=True)
        except Exception as error:  # a tool is foreign code
            return Answer(f"{name} failed: {type(error).__name__}: {error}", valid=False)

    return Toolbox(tuple(item for item, _ in pairs), run)


def joined(boxes: Sequence[Toolbox]) -> Toolbox:
    """The tools of several boxes as one.

    Raises:
      UserError: for two tools of one name.
    """
    owner = {item.name: box for box in boxes for item in box.tools}
    tools = tuple(item for box in boxes for item in box.tools)
    if len(owner) < len(tools):
        raise UserError(f"two tools have one name: {', '.join(item.name for item in tools)}")
    return Toolbox(tools, lambda name, arguments: owner[name].run(name, arguments))


class Turn(NamedTuple):
    """What follows a response: messages to append by ``chat.encode_turns``; none when it called nothing."""

    reply: Reply
    answers: tuple[Answer, ...]  # one for each call
    messages: tuple[Message, ...]

    @property
    def valid(self) -> bool:
        """Whether every tool could be asked."""
        return all(answer.valid for answer in self.answers)


def take_turn(box: Toolbox, response: str) -> Turn:
    """Makes the calls of a response, one after the other; a malformed one is answered by its problem and not made."""
    reply = parse(response, box.tools)
    answers = tuple(
        Answer(f"error: {c.problem}", error=True) if c.problem else box.run(c.name, c.arguments) for c in reply.calls
    )
    pairs = zip(reply.calls, answers, strict=True)
    messages = tuple({"role": "tool", "name": c.name, "content": a.text} for c, a in pairs)
    return Turn(reply, answers, messages)


def verify(answer: Mapping[str, Any], response: str) -> Verdict:
    """1 where a response makes exactly the calls of ``answer["calls"]``, in any order, and 0 else.

    ``answer`` holds ``tools``, declarations as templates take them, and ``calls``, objects with name and arguments; no
    calls: the right response calls nothing. A malformed call is 0 with its problem as the reason.

    Raises:
      UserError: when ``answer`` itself is malformed.
    """
    reply = parse(response, [schemas.from_declaration(d) for d in answer["tools"]])
    for k, call in enumerate(reply.calls, start=1):
        if call.problem:
            return Verdict(0.0, True, f"call {k}: {call.problem}")
    left = [{"name": c.name, "arguments": c.arguments} for c in reply.calls]
    for wanted in answer["calls"]:
        match = {"name": wanted["name"], "arguments": wanted.get("arguments", {})}
        k = next((k for k, found in enumerate(left) if schemas.same(found, match)), None)
        if k is None:
            return Verdict(0.0, True, f"the call of {wanted['name']} is missing or another")
        del left[k]
    return Verdict(0.0, True, f"calls {left[0]['name']} needlessly") if left else Verdict(1.0, True, "right")
