"""Chat templates of whoever made the model: rendered in jinja's sandbox, and within bounds of steps and sizes.

A template comes with a model from anywhere. Jinja keeps it from the machine; it does not keep it from running without
end or filling the memory, so loops and calls are counted, and what they make is measured, before it is made where that
would cost.
"""

import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.visitor
from jinja2 import nodes
from jinja2.filters import do_format, do_indent, do_round, make_attrgetter
from jinja2.utils import Namespace

MOST_STEPS = 200_000  # turns of loops and calls of one rendering
MOST_CHARACTERS = 10_000_000  # of any text, and items of any list
MOST_VALUES = 1_000_000  # that one value holds, each as often as it is held
MOST_NUMBER = 1_000_000  # that a function is told: a width, a count
MOST_BITS = 100_000  # of a whole number
MOST_INDENT = 100  # columns of a level of JSON
MOST_DIGITS = 300  # that a number is rounded to
MOST_SOURCE = 200_000  # characters of a template, which are seconds to compile
MOST_SECONDS = 20.0  # of processor time of one rendering, whatever was forgotten above
_WORK = 10**9  # product of the sizes of what a function is given
_CALL = 10  # steps that a call costs
_VALUES, _CHARACTERS = 20, 1000  # as many as are looked at, and as many as are made, for a step
_READ = 10_000  # characters that are looked at for a step
_BITS = 10**6  # product of the bits of two numbers, for a step
_APART = re.compile(r"%[^a-zA-Z%]*\*|:[^{}]*\{")  # a width that is given apart
# filters that multiply nothing: they may be given long texts together, and any number
_PLAIN = frozenset(
    "attr bool count d default e escape first float int items last length list map reject rejectattr safe select "
    "selectattr string".split()
)
_BY_ITEM = frozenset(
    "batch groupby join list map max min reject rejectattr select selectattr slice sort unique".split()
)
# the others ask for no more than the kind of a value
_READING_TESTS = "lower upper in eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >=".split()
# names that no template can write
_COUNTED, _BOUNDED = "counted by the renderer", "bounded by the renderer"
_READ_BY, _COPIED = "read by the renderer", "copied by the renderer"

_PASSED = jinja2.Environment | jinja2.runtime.Context | nodes.EvalContext  # to filters that ask for it


class TooMuch(jinja2.TemplateRuntimeError):
    """A template that takes more steps, or makes something larger, than any conversation needs."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks assistant text; here it is plain."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounds(jinja2.visitor.NodeTransformer):
    """Counts the turns of loops; measures texts that are put together."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED, node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(x, _BOUNDED, node) for x in node.nodes]
        return _filtered(node, _BOUNDED, node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, _BOUNDED, node)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """What is searched is read; what is compared with a constant ends with it."""
        self.generic_visit(node)
        sides = [node.expr, *(x.expr for x in node.ops)]
        constant = any(isinstance(x, nodes.Const) for x in sides)
        for operand in node.ops:
            if operand.op in ("in", "notin") or not constant:
                operand.expr = _filtered(operand.expr, _READ_BY, node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _COPIED, node) if isinstance(node.arg, nodes.Slice) else node

    def _visit_holder(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        # names that are assigned to together are no value
        return node if getattr(node, "ctx", "load") == "store" else _filtered(node, _BOUNDED, node)

    visit_List = visit_Tuple = visit_Dict = _visit_holder


def _filtered(inner: Any, name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(inner, name, [], [], None, None, lineno=node.lineno).set_environment(node.environment)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


_HOLDERS = (list, tuple, set, frozenset, dict)


def _measure(value: Any) -> tuple[int, int]:
    """How many values it holds and how many characters of text, each as often as it is held: as printing it takes."""
    return _measured_once(value, {})


def _measured_once(value: Any, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Measured, where nothing that is held twice is gone through twice."""
    # first: asked whether it is anything else, it looks that up in itself
    if isinstance(value, Namespace):
        inside = (object.__getattribute__(value, "_Namespace__attrs"),)  # as its own text shows them
    elif isinstance(value, (str, bytes)):  # a union would be made anew for every value
        return _within(1, len(value))
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise TooMuch(f"it makes a number of more than {MOST_BITS} bits")
    elif not isinstance(value, _HOLDERS):
        return 1, 0
    else:
        inside = value
    if id(value) not in known:
        known[id(value)] = None
        held, characters = 1, 0
        for part in (inside, value.values()) if isinstance(value, dict) else (inside,):
            _within(held + len(part), characters)
            kinds = set(map(type, part))
            if kinds == {str}:
                held, characters = held + len(part), characters + sum(map(len, part))
            elif kinds <= {int, float, bool}:
                held += len(part)
                for x in (min(part, default=0), max(part, default=0)):
                    _measured_once(x, known)
            else:
                for x in part:
                    below = _measured_once(x, known)
                    held, characters = held + below[0], characters + below[1]
        known[id(value)] = _within(held, characters)
    measured = known[id(value)]
    if measured is None:
        raise TooMuch("it makes something that holds itself")
    return measured


def _within(held: int, characters: int) -> tuple[int, int]:
    if characters > MOST_CHARACTERS or held > MOST_VALUES:
        raise TooMuch(f"it makes something longer than {MOST_CHARACTERS} characters or {MOST_VALUES} values")
    return held, characters


def _check(values: Iterable[Any], told: Iterable[Any]) -> None:
    """Before a function is called: with what it works, and which numbers it is told."""
    if math.prod(max(_size(x), 1) for x in values) > _WORK:
        raise TooMuch("it works with texts that are too long together")
    if any(isinstance(x, int | float) and abs(x) > MOST_NUMBER for x in told):
        raise TooMuch(f"it asks for a width or a count beyond {MOST_NUMBER}")


def _check_widths(pattern: str) -> None:
    """Before a pattern is filled: what its widths add up to."""
    widths = re.findall("[0-9]+", pattern)
    if _APART.search(pattern) or any(len(x) > 7 for x in widths) or sum(map(int, widths)) > MOST_CHARACTERS:
        raise TooMuch(f"it formats with widths beyond {MOST_CHARACTERS} together, or with a width that is given apart")


def _check_text(text: str, given: Iterable[Any]) -> None:
    """Before a text, or a pattern of one, is filled with values."""
    if max(len(text), 1) * max((sum(_measure(x)) for x in given), default=1) > _WORK:
        raise TooMuch("it works with texts that are too long together")


def _json(value: Any, indent: Any = None, ensure_ascii: bool = False, **named: Any) -> str:
    """Without the HTML escapes of jinja's own filter, which would change the text."""
    if _size(indent) > MOST_INDENT or isinstance(indent, int) and indent > MOST_INDENT:
        raise TooMuch(f"it indents by more than {MOST_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **named)


class _Budget(threading.local):
    left = MOST_STEPS
    until = math.inf  # the clock of this thread


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%", "/", "//"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.budget = _Budget()
        self.finalize = self._looked_at
        self.filters |= {"tojson": _json, "sum": self._sum, "indent": self._indent, "format": _format, "round": _round}
        self.filters = {name: self._measured(name, function) for name, function in self.filters.items()}
        self.filters |= {_COUNTED: self._counted, _BOUNDED: self._bounded}
        self.filters |= {_READ_BY: self._looked_at, _COPIED: self._copied}
        self.tests |= {name: self._reading(self.tests[name]) for name in _READING_TESTS}
        self.globals["raise_exception"] = _refuse
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def spend(self, steps: int) -> None:
        """Steps of the rendering of this thread."""
        self.budget.left -= steps
        if self.budget.left < 0:
            raise TooMuch(f"it takes more than {MOST_STEPS} steps")
        if time.thread_time() > self.budget.until:
            raise TooMuch(f"it takes more than {MOST_SECONDS:g} seconds")

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        budget, now = self.budget, time.thread_time
        for item in items:
            budget.left -= 1
            if budget.left < 0 or now() > budget.until:
                self.spend(0)
            yield item

    def _looked_at(self, value: Any) -> Any:
        """A value that is given or printed."""
        if type(value) is str and len(value) < _READ:  # most are
            return value
        held, characters = _measure(value)
        self.spend(held // _VALUES + characters // _READ)
        return value

    def _copied(self, value: Any) -> Any:
        """A part of a value: no more than the value, which was measured."""
        self.spend(_size(value) // (_CHARACTERS if isinstance(value, str | bytes) else _VALUES))
        return value

    def _bounded(self, value: Any) -> Any:
        """A value that was made."""
        if type(value) is str and len(value) < _CHARACTERS:
            return value
        held, characters = _measure(value)
        self.spend(held // _VALUES + characters // _CHARACTERS)
        return value

    def _measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is given and makes no more than is sensible."""

        @functools.wraps(function)  # keeps what jinja notes on the function
        def measured(*given: Any, **named: Any) -> Any:
            self.spend(1)
            values = [self._looked_at(x) for x in given if not isinstance(x, _PASSED)]
            if name in _BY_ITEM and values and _size(values[0]) > MOST_VALUES:
                raise TooMuch(f"it goes through more than {MOST_VALUES} values")
            if name not in _PLAIN:
                _check([*values, *named.values()], [*values[1:], *named.values()])
                if values and isinstance(values[0], str):
                    _check_text(values[0], [*values[1:], *named.values()])
            made = function(*given, **named)
            return self._counted(made) if isinstance(made, Iterator) else self._bounded(made)

        return measured

    def _reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A test that reads what it is given."""

        @functools.wraps(function)
        def reading(*given: Any) -> Any:
            for value in given:
                if not isinstance(value, _PASSED):
                    self._looked_at(value)
            return function(*given)

        return reading

    def _sum(self, items: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        """Jinja's, within bounds of each part of the sum."""
        read = make_attrgetter(self, attribute) if attribute is not None else lambda item: item
        for item in self._counted(items):
            start = self._added(start, read(item))
        return start

    def _added(self, left: Any, right: Any) -> Any:
        if _size(left) + _size(right) > MOST_CHARACTERS:
            raise TooMuch("+ makes something too large")
        return self._bounded(left + right)

    def _indent(self, text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> Any:
        added = width if isinstance(width, int) else _size(width)
        if (str(text).count("\n") + 1) * added > MOST_CHARACTERS:
            raise TooMuch("it indents by too much")
        return do_indent(text, width, first, blank)

    def call(__self, __context: Any, __obj: Any, *given: Any, **named: Any) -> Any:  # noqa: N805 - as jinja has it
        __self.spend(_CALL)
        owner, values = getattr(__obj, "__self__", None), [*given, *named.values()]
        for value in [owner, *values] if owner is not None or values else ():
            __self._looked_at(value)
        if isinstance(owner, str | bytes):  # macros, namespaces and dictionaries multiply nothing
            _check([owner, *values], values)
        if isinstance(owner, str):
            _check_text(owner, values)
            name = getattr(__obj, "__name__", "")
            if name == "translate" or name == "expandtabs" and len(owner) * max([8, *values]) > MOST_CHARACTERS:
                raise TooMuch(f"{name} makes something too large")
        return __self._bounded(super().call(__context, __obj, *given, **named))

    def wrap_str_format(self, value: Any) -> Any:
        wrapper = super().wrap_str_format(value)
        if wrapper is not None:
            _check_widths(value.__self__)
        return wrapper

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        large = False
        if operator == "+":
            large = _size(left) + _size(right) > MOST_CHARACTERS
        elif operator == "%":
            if isinstance(left, str):
                _check_widths(left)
                _check_text(left if isinstance(right, dict) else "", [right])
        elif isinstance(left, int) and isinstance(right, int):
            bits = (left.bit_length(), right.bit_length())
            large = {"*": sum(bits), "**": bits[0] * max(right, 0)}.get(operator, 0) > MOST_BITS
            self.spend(math.prod(bits) // _BITS)
        elif operator == "*":
            sizes = [max(_size(x), x if isinstance(x, int) else 0) for x in (left, right)]
            large = math.prod(sizes) > MOST_CHARACTERS
        if large:
            raise TooMuch(f"{operator} makes something too large")
        return self._bounded(super().call_binop(context, operator, left, right))


def _format(pattern: Any, *given: Any, **named: Any) -> str:
    _check_widths(str(pattern))
    return do_format(pattern, *given, **named)


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if isinstance(precision, int) and abs(precision) > MOST_DIGITS:
        raise TooMuch(f"it rounds to more than {MOST_DIGITS} digits")
    return do_round(value, precision, method)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[_Environment, jinja2.Template]:
    if len(source) > MOST_SOURCE:
        raise TooMuch(f"it is longer than {MOST_SOURCE} characters")
    environment = _Environment()
    return environment, environment.from_string(source)


def render(source: str, variables: dict[str, Any]) -> str:
    """The text that a template makes of variables.

    Raises:
      ValueError: in one line, for whatever is wrong with the template, or what it refuses itself.
    """
    try:
        environment, template = _compiled(source)
        environment.budget.left, environment.budget.until = MOST_STEPS, time.thread_time() + MOST_SECONDS
        parts, size = [], 0
        for part in template.generate(**variables):
            size += len(part)
            if size > MOST_CHARACTERS:
                raise TooMuch(f"it writes more than {MOST_CHARACTERS} characters")
            parts.append(part)
        return "".join(parts)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{error.message} (line {error.lineno} of the template)") from error
    except jinja2.UndefinedError as error:
        clock = "; a date of the day would make other tokens every day: write a fixed one into the template"
        raise ValueError(f"{error}{clock if 'strftime_now' in str(error) else ''}"[:300]) from error
    except RecursionError as error:
        raise ValueError("it calls itself without end, or is nested too deeply") from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError("".join(x if x.isprintable() else "?" for x in text)) from error
    except MemoryError as error:
        raise ValueError("it needs more memory than there is") from error
