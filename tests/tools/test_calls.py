"""Calls in what models write: right, malformed and hostile; rendered by a template and answered."""

import functools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data import chat
from jaxrl_llm.errors import UserError
from jaxrl_llm.tools import calls
from jaxrl_llm.tools.schema import declared, tool

WEATHER = tool(
    "weather",
    "Tells the weather.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
)
NOW = tool("now", "Tells the time.")
TOOLS = (WEATHER, NOW)
BONN = '{"name": "weather", "arguments": {"city": "Bonn"}}'
# as those of Hermes and Qwen models do it
TEMPLATE = """{%- if tools %}<|im_start|>system
Functions inside <tools></tools>:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _said(*bodies, text=""):
    return text + "".join(f"<tool_call>\n{body}\n</tool_call>\n" for body in bodies)


def test_calls_are_read():
    reply = calls.parse(_said(BONN, '{"name": "now", "arguments": {}}', text="Let me look.\n"), TOOLS)
    assert reply.text == "Let me look."
    assert reply.calls == (calls.Call("weather", {"city": "Bonn"}), calls.Call("now", {}))
    assert calls.parse("Sunny.", TOOLS) == calls.Reply("Sunny.", ())
    assert calls.parse("", TOOLS) == calls.Reply("", ())
    # the end of a call inside a string ends nothing, nor do a thought's calls count
    inside = json.dumps({"name": "weather", "arguments": {"city": "</tool_call><tool_call>"}})
    assert calls.parse(_said(inside), TOOLS).calls[0] == calls.Call("weather", {"city": "</tool_call><tool_call>"})
    thought = f"<think>maybe {_said('{}')}</think>{_said(BONN)}"
    assert calls.parse(thought, TOOLS).calls == (calls.Call("weather", {"city": "Bonn"}),)
    assert calls.parse(f"Hm. <think>{_said(BONN)}", TOOLS) == calls.Reply("Hm.", ())
    assert calls.parse(f"<think>a</think>Hm. <think>{_said(BONN)}</think>So 5.", TOOLS) == calls.Reply("Hm. So 5.", ())
    assert calls.parse(f"<think>a</think>Hm. <think>{_said(BONN)}", TOOLS) == calls.Reply("Hm.", ())
    assert calls.parse("<think>a</think>" + "<think>" * 50_000, TOOLS) == calls.Reply("", ())
    # a key more is read over
    assert calls.parse(_said(BONN[:-1] + ', "id": 7}'), TOOLS).calls[0].problem == ""


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "the call is no JSON"),
        ("weather(Bonn)", "the call is no JSON: Expecting value"),
        ('{"name": "weather", "arguments": {"city": "Bonn"}', "the call is no JSON"),
        ("{'name': 'weather'}", "the call is no JSON"),
        (BONN + "}", "the call is not closed by </tool_call>"),
        ('["weather"]', "a call is an object with name and arguments"),
        ('{"arguments": {}}', "the call has no name"),
        ('{"name": 3, "arguments": {}}', "the call has no name"),
        ('{"name": "weather"}', "the call of weather has no arguments; write {} for none"),
        ('{"name": "weather", "arguments": "{}"}', "the call of weather has arguments that are no object"),
        ('{"name": "wether", "arguments": {}}', "there is no tool wether; there are weather, now"),
        ('{"name": "weather", "arguments": {}}', "arguments: city is missing"),
        ('{"name": "weather", "arguments": {"city": 3}}', "arguments.city: 3 is no string"),
        ('{"name": "weather", "arguments": {"city": "a", "on": 1}}', "arguments.on: unknown; there is city"),
        ('{"name": "now", "name": "weather", "arguments": {}}', "a key stands twice"),
        ('{"name": "now", "arguments": {"x": NaN}}', "NaN is no JSON"),
        ('{"name": "now", "arguments": {"x": 1e999}}', "too large a number"),
        (f'{{"name": "now", "arguments": {{"x": -{"9" * 300}}}}}', "too large a number"),
        ('{"name": "now", "arguments": {"x": ' + "9" * 5000 + "}}", "the call is no JSON"),
        ('{"name": "now", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}", "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "now\\ud800", "arguments": {}}', "surrogates not allowed"),
    ],
)
def test_malformed_calls_say_why(body, problem):
    # the next call is made all the same
    first, second = calls.parse(_said(body, BONN), TOOLS).calls
    assert problem in first.problem and len(first.problem) < 300
    assert second == calls.Call("weather", {"city": "Bonn"})


def test_calls_that_are_cut_or_strays():
    for text in ("<tool_call>", "<tool_call>\n{", f"<tool_call>{BONN}", f"<tool_call>{BONN}</tool"):
        (only,) = calls.parse("a" + text, TOOLS).calls
        assert "closed" in only.problem or "no JSON" in only.problem
    (stray,) = calls.parse(f"{BONN}</tool_call>", TOOLS).calls
    assert stray.problem == "</tool_call> closes no call"
    # one that was never closed does not swallow the next
    broken, fine = calls.parse(f'<tool_call>{{"name": "now" {_said(BONN)}', TOOLS).calls
    assert broken.problem and fine == calls.Call("weather", {"city": "Bonn"})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([calls.OPEN, calls.CLOSE, BONN, '{"', '"', "{", "}", "[", "\\", "x", "\n", "<think>",
                                 "</think>", "1e9", "\ud800"])).map("".join))  # fmt: skip
def test_nothing_raises(text):
    reply = calls.parse(text, TOOLS)
    assert all(c.problem or c.name in ("weather", "now") for c in reply.calls)


def test_long_text_takes_little_time():
    start = time.perf_counter()
    for text in ("<tool_call>" * 50_000, '<tool_call>{"a": "' * 30_000, "</tool_call>" * 50_000, _said(BONN) * 5_000):
        found = calls.parse(text, TOOLS).calls
        assert len(found) == 65 and found[64].problem == "there are more than 64 calls"
    assert time.perf_counter() - start < 10


def _box():
    def weather(city):
        if city == "Nowhere":
            raise ValueError("no such city")
        return {"city": city, "sky": "grau, 9°"} if city != "Crash" else 1 / 0

    return calls.of_functions([(WEATHER, weather), (NOW, lambda: "noon")])


def test_answers_are_messages_that_the_template_appends():
    messages = [{"role": "user", "content": "Weather in Bonn?"}]
    prompt = chat.render(TEMPLATE, messages, tools=[declared(t) for t in TOOLS], add_generation_prompt=True)
    assert json.dumps(declared(WEATHER)) in prompt and prompt.endswith("<|im_start|>assistant\n")
    response = _said(
        BONN, '{"name": "weather", "arguments": {}}', '{"name": "weather", "arguments": {"city": "Nowhere"}}'
    )
    turn = calls.take_turn(_box(), response)
    assert turn.valid and [a.error for a in turn.answers] == [False, True, True]
    assert [m["content"] for m in turn.messages] == [
        '{"city": "Bonn", "sky": "grau, 9°"}', "error: arguments: city is missing", "error: no such city",
    ]  # fmt: skip
    history = [*messages, {"role": "assistant", "content": response}]
    grown = chat.render(TEMPLATE, [*history, *turn.messages], add_generation_prompt=True)
    assert grown.startswith(chat.render(TEMPLATE, history))
    assert grown.count("<tool_response>") == 3 and grown.endswith("<|im_start|>assistant\n")


def test_arguments_that_a_function_does_not_take_are_refused():
    """An invalid answer would void the episode: a policy could so throw away its own bad ones."""
    said = _said('{"name": "two", "arguments": {"a": 1, "b": 2, "c": 3}}')
    made = calls.of_functions([(tool("two", ""), lambda a, b: a), (tool("max", ""), max)])
    assert calls.take_turn(made, said).answers == (
        calls.Answer("error: two: got an unexpected keyword argument 'c'", error=True, valid=True),
    )
    assert made.run("two", {"a": 1}) == calls.Answer("error: two: missing a required argument: 'b'", error=True)
    assert made.run("max", {"a": 1}).valid is False  # it does not tell what it takes


def test_a_wrapper_may_give_more_than_it_gets():
    """Else every call of it is refused: it lacks what no policy could give."""

    def within(function):
        return functools.wraps(function)(lambda **given: function("session", **given))

    def look(session, a, b=0):
        return f"{session} {a} {b}"

    made = calls.of_functions([(tool("look", ""), within(look)), (tool("kept", ""), functools.lru_cache(look))])
    assert made.run("look", {"a": 1}) == calls.Answer("session 1 0")
    assert made.run("look", {"a": 1, "c": 2}) == calls.Answer(
        "error: look: got an unexpected keyword argument 'c'", error=True
    )
    assert made.run("kept", {"a": 1}) == calls.Answer("error: kept: missing a required argument: 'session'", error=True)


def test_what_a_tool_breaks_is_invalid_and_not_wrong():
    turn = calls.take_turn(_box(), _said('{"name": "weather", "arguments": {"city": "Crash"}}'))
    assert not turn.valid and "ZeroDivisionError" in turn.answers[0].text
    assert calls.take_turn(_box(), "Sunny.") == calls.Turn(calls.Reply("Sunny.", ()), (), ())
    both = calls.joined([_box(), calls.of_functions([(tool("add", ""), lambda: 1)])])
    assert both.run("add", {}) == calls.Answer("1") and both.run("now", {}) == calls.Answer("noon")
    with pytest.raises(UserError, match="two tools have one name: weather, now, weather, now"):
        calls.joined([_box(), _box()])
    with pytest.raises(UserError, match="two tools have one name"):
        calls.of_functions([(NOW, str), (NOW, str)])


@pytest.mark.parametrize(
    ("response", "value", "reason"),
    [
        (_said('{"name": "now", "arguments": {}}', BONN), 1.0, "right"),
        (_said(BONN), 0.0, "the call of now is missing or another"),
        (_said(BONN, BONN, '{"name": "now", "arguments": {}}'), 0.0, "calls weather needlessly"),
        (_said(BONN, '{"name": "now", "arguments": {"x": true}}'), 0.0, "the call of now is missing or another"),
        (_said(BONN, "{"), 0.0, "call 2: the call is no JSON"),
        ("It is noon.", 0.0, "the call of weather is missing or another"),
    ],
)
def test_verdicts(response, value, reason):
    answer = {"tools": [declared(t) for t in TOOLS], "calls": [json.loads(BONN), {"name": "now"}]}
    found = calls.verify(answer, response)
    assert (found.value, found.valid) == (value, True) and found.reason.startswith(reason)


def test_no_call_may_be_the_right_one():
    answer = {"tools": [declared(NOW)], "calls": []}
    assert calls.verify(answer, "Hello.").value == 1.0
    assert calls.verify(answer, _said('{"name": "now", "arguments": {}}')).value == 0.0
