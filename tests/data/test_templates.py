# ruff: noqa: E501 - templates on one line each
"""Templates of unknown authors: what they cannot do, in how little time, and that honest ones do not notice."""

import cProfile
import time

import pytest

from jaxrl_llm.data import chat, templates
from jaxrl_llm.errors import UserError
from jaxrl_llm.jobs.grpo import cli
from jaxrl_llm.models.io import weights

TALK = [{"role": "user", "content": "hi"}]
DOUBLED = "".join("{% set s = " + how + " %}" for how in ["s + s"] * 40)
LONG = "{% set s = 'x' * 9000000 %}"
MANY = "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{}{{% endfor %}}{{% endfor %}}"
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "deeper loops": "{% for i in range(999) %}{% for j in range(999) %}{% for k in range(999) %}x{% endfor %}{% endfor %}{% endfor %}",
    "a long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macros that call each other": "".join(
        f"{{% macro m{k}() %}}{('{{ m' + str(k - 1) + '() }}') * 10 if k else 'x'}{{% endmacro %}}" for k in range(12)
    )
    + "{{ m11() }}",
    "a loop that calls itself": "{% for i in [[1]] recursive %}{{ loop([i]) }}{% endfor %}",
    "a tower": "{{ 10 ** (10 ** 10) }}",
    "a tower of variables": "{% set n = 10 %}{{ n ** (n ** n) }}",
    "squares": "{% set ns = namespace(n=10) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "a long text": "{{ 'x' * 10 ** 10 }}",
    "a long list": "{{ [0] * 10 ** 10 }}",
    "doubled": "{% set s = 'xx' %}" + DOUBLED,
    "doubled lists": "{% set s = [1, 2] %}" + DOUBLED,
    "joined": "{% set s = 'xx' %}" + DOUBLED.replace("+", "~"),
    "set twice": "{% set s = 'xx' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 40,
    "set in a filter": "{% set s = 'xx' %}" + "{% set s | upper %}{{ s }}{{ s }}{% endset %}" * 40,
    "printed": "{% set s = 'x' * 9000000 %}{{ s }}{{ s }}",
    "centred": "{{ 'x' | center(10 ** 10) }}",
    "justified": "{{ 'x'.ljust(10 ** 10) }}",
    "zeros": "{{ 'x'.zfill(10 ** 10) }}",
    "formatted": "{{ '%10000000000d' % 1 }}",
    "formatted by star": "{{ '%*d' % (10 ** 10, 1) }}",
    "formatted by method": "{{ '{:>10000000000}'.format(1) }}",
    "formatted by argument": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "formatted by filter": "{{ '%*d' | format(10 ** 10, 1) }}",
    "replaced": "{% set s = 'x' * 900000 %}{{ s | replace('x', s) }}",
    "replaced by method": "{% set s = 'x' * 900000 %}{{ s.replace('x', s) }}",
    "joined widely": "{% set s = 'x' * 900000 %}{{ s | join(s) }}",
    "batched": "{{ [1] | batch(10 ** 10, 0) | list }}",
    "sliced": "{{ [1] | slice(10 ** 10) | list }}",
    "summed": "{{ ([[1] * 9000] * 900) | sum(start=[]) }}",
    "indented": "{{ ('x\n' * 9000) | indent(90000) }}",
    "JSON indented": "{{ messages | tojson(indent=900000) }}",
    "tabs": "{{ ('\t' * 9000).expandtabs(90000) }}",
    "translated": "{{ ('x' * 90000).translate({120: 'y' * 9000}) }}",
    "filled": "{{ '%(a)s' * 9000 % {'a': 'x' * 90000} }}",
    "lists of twice the same": "{% set n = namespace(s=[1]) %}" + "{% set n.s = [n.s, n.s] %}" * 26 + "{{ n.s }}",
    "the same as JSON": "{% set n = namespace(s=[1]) %}" + "{% set n.s = [n.s, n.s] %}" * 26 + "{{ n.s | tojson }}",
    "spaces of names": "{% set m = namespace(s=1) %}"
    + "{% set n = namespace(s=[m, m]) %}{% set m = namespace(s=[n, n]) %}" * 13
    + "{{ 'x' ~ m }}",
    "nested": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a text searched by its method": LONG + MANY.format("{{ s.count('ab') }}"),
    "a text searched by a test": LONG + MANY.format("{{ s is in(s) }}{{ s is upper }}"),
    "a text searched by an operator": LONG + MANY.format("{{ 'ab' in s }}"),
    "texts compared": LONG + "{% set t = s ~ '' %}" + MANY.format("{{ s == t }}"),
    "texts compared by a test": LONG + "{% set t = s ~ '' %}" + MANY.format("{{ s is eq t }}"),
    "a text copied": LONG + MANY.format("{% set t = s[1:] %}"),
    "lists compared": "{% set n = namespace(s=[1], t=[1]) %}"
    + "{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}" * 14
    + MANY.format("{{ n.s == n.t }}"),
    "numbers divided": "{% set n = 10 ** 20000 %}{% set m = 10 ** 10000 + 1 %}" + MANY.format("{{ (n // m) == n }}"),
    "rounded": "{{ 1 | round(1000000, 'ceil') }}",
    "words counted": "{% set s = 'x ' * 4999 %}" + MANY.format("{{ s | wordcount }}" * 20),
    "many questions a turn": MANY.format("{% if i == 1 %}{% endif %}" * 5000),
    "a long template": "{{ a }}" * 100_000,
    "two widths apart": "{{ '{:{}{}}'.format('x', 99999, 9999) }}",
    "a width as a text": "{{ '{:{}}'.format('x', '999999999') }}",
    "a width behind a name": "{{ '%(a)999999999d' % {'a': 1} }}",
    "a width by filter": "{{ '%999999999d' | format(1) }}",
    "many widths": "{{ '%999999d' * 1000 % ([1] * 1000) }}",
    "a list of letters": "{{ ('\U0001f600' * 9000000) | list }}",
    "letters one by one": "{{ ('\U0001f600' * 900000) | map('upper') | list }}",
    "today": "{{ strftime_now('%d %B') }}{{ 'x' * 10 ** 9 }}",
    "holds itself": "{% set n = namespace(s=1) %}{% set n.s = n %}{{ [n] }}",
    "no template": "{% for",
    "unknown filter": "{{ 1 | nothing }}",
    "nothing there": "{{ messages[5].content.x }}",
    "no number": "{{ 'a' | int + messages }}",
    "zero": "{{ 1 / 0 }}",
    "the class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the class by filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "the format of an attribute": "{{ '{0.__class__.__mro__}'.format(messages) }}{{ raise_exception('no class') }}",
    "an import": "{% import 'os' as os %}",
    "an include": "{% include '/etc/passwd' %}",
    "a change of the messages": "{{ messages.clear() }}",
    "colours of a terminal": "{{ raise_exception('\x1b[31m') }}",
    "a refusal": "{{ raise_exception('only one system message') }}",
}


BY_THE_CLOCK = ("words counted", "many questions a turn", "letters one by one")  # cheap steps that do much


@pytest.mark.parametrize("name", HOSTILE)
def test_one_clear_line_and_soon(name, monkeypatch):
    """Soon by what is called, which is the same on every machine; the seconds are there for a single call that hangs."""
    if name in BY_THE_CLOCK:
        monkeypatch.setattr(templates, "MOST_SECONDS", 0.5)
    start, profile = time.thread_time(), cProfile.Profile()
    with profile, pytest.raises(UserError, match="the chat template refuses the 1 messages: .") as found:
        chat.render(HOSTILE[name], TALK)
    calls = sum(x.callcount for x in profile.getstats())
    assert str(found.value).isprintable() and len(str(found.value)) < 400
    assert calls < 10_000_000 and time.thread_time() - start < 30


def test_one_list_that_is_too_long_by_itself():
    """Also where nothing else is left to be counted."""
    with pytest.raises(templates.TooMuch, match="1000000 values"):
        templates._measure([0] * (templates.MOST_VALUES + 1))
    assert templates._measure([0] * 10) == (11, 0)


def test_honest_templates_do_not_notice():
    messages = [{"role": "user", "content": "x" * 50_000}] * 100
    text = chat.render(
        "{% for m in messages %}<{{ loop.index }}/{{ loop.length }}>{{ m.content | trim }}{% endfor %}", messages
    )
    assert len(text) > 5_000_000 and text.startswith("<1/100>x")
    every = (
        "{%- set ns = namespace(n=0) -%}{% macro show(m) %}[{{ m.role ~ ':' ~ m['content'] }}]{% endmacro %}"
        "{%- for m in messages if m.role != 'system' -%}{% set ns.n = ns.n + 1 %}{{ show(m) }}{{ ',' if not loop.last }}"
        "{%- else -%}none{%- endfor -%}{% set tail %}({{ ns.n * 2 }}){% endset %}{{ tail | upper }}{{ '%03d' % 7 }}"
        "{% generation %}!{% endgeneration %}{{ {'a': [1, 'ä']} | tojson }}{{ '{:>4}'.format(5) }}"
    )
    want = '[user:hi],[user:hi](4)007!{"a": [1, "ä"]}   5'
    assert chat.render(every, TALK * 2) == want and chat.render(every, TALK * 2) == want  # steps are counted anew
    assert chat.render("{% for m in messages %}{% else %}none{% endfor %}{{ 'a' 'b' }}{{ undefined }}", TALK) == "ab"


def test_a_long_talk_with_tools_does_not_notice():
    """A thousand messages, ten tools; what many templates ask in every turn."""
    tools = [{"name": f"tool{k}", "parameters": {f"p{i}": {"type": "string"} for i in range(20)}} for k in range(10)]
    ask = (
        "{% for m in messages[::-1] %}{% if tools != none and tools is iterable and 'tool' in m.content %}"
        "{{ m.content.split('l')[-1].strip() }}{% endif %}{% if m.role == messages[0].role and m.role in ['user'] %}"
        "{{ m.content[:2] }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": f"a tool {k}"} for k in range(1000)]
    assert templates.render(ask, {"messages": messages, "tools": tools}).endswith("1a 0a ")


def test_macros_and_namespaces_take_long_texts_and_large_numbers():
    """Gemma's templates write every argument of a call by a macro; reasoning stands beside its answer."""
    long = [{"role": "user", "content": "x" * 60_000, "reasoning": "y" * 60_000}]
    ask = (
        "{% macro argument(x) %}{{ x }}{% endmacro %}{{ argument(12345678) }}{{ none | default(1700000000, true) }}"
        "{% macro turn(a, b) %}{{ a[:1] ~ b[:1] }}{% endmacro %}"
        "{% for m in messages %}{{ turn(m.content, m.reasoning) }}"
        "{% set ns = namespace(a=m.content, b=m.reasoning) %}{{ ns.b[0] }}{% endfor %}"
        "{{ '%5d|%-3s|%s**' % (7, 'a', 'b') }}{{ '{:>4}'.format(5) }}{{ '%.2f' | format(2) }}{{ 2.345 | round(1) }}"
    )
    assert templates.render(ask, {"messages": long}) == "123456781700000000xyy    7|a  |b**   52.002.3"


def test_a_date_of_the_day_is_refused_with_a_remedy():
    with pytest.raises(UserError, match="'strftime_now' is undefined; a date of the day .* write a fixed one"):
        chat.render("{{ strftime_now('%d') }}", TALK)
    assert chat.render("{% if strftime_now is defined %}now{% else %}2024{% endif %}", TALK) == "2024"


def test_nothing_takes_longer_than_its_seconds(monkeypatch):
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.0)
    with pytest.raises(UserError, match="it takes more than 0 seconds"):
        chat.render("{% for i in range(9) %}x{% endfor %}", TALK)


def test_steps_are_those_of_one_rendering(monkeypatch):
    monkeypatch.setattr(templates, "MOST_STEPS", 50)
    for _ in range(10):
        assert chat.render("{% for i in range(40) %}x{% endfor %}", TALK) == "x" * 40
    with pytest.raises(UserError, match="it takes more than 50 steps"):
        chat.render("{% for i in range(51) %}x{% endfor %}", TALK)


def test_a_model_with_such_a_template_is_refused_by_the_command(tmp_path, capsys):
    for path in weights.bundled("nano").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(HOSTILE["nested loops"])
    assert cli(["--model", str(tmp_path), "--chat", "--steps", "1", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "it takes more than 200000 steps" in said and said.strip().count("\n") == 0
