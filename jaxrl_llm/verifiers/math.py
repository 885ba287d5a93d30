"""Mathematical answers in LaTeX or plain form, compared by value with math-verify (extra ``tasks``).

Math-verify evaluates what it reads, and comparing symbolic expressions can run without end or eat all memory. So
responses are judged in a sealed process (``sandbox.pool.Sandbox.call``), which has math-verify loaded already and
executes no text: SymPy's parser reads formulas by ``formulas`` there. A response that exhausts its limits is wrong;
only where the reference does so, too, or the sandbox fails, is the verdict invalid.
"""

import functools
import importlib.util
import logging
import re
from fractions import Fraction
from typing import Any

from jaxrl_llm.data.boxed import last_boxed, last_boxes
from jaxrl_llm.errors import extra_module
from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.sandbox.records import Called, Limits
from jaxrl_llm.verifiers import formulas
from jaxrl_llm.verifiers.countdown import tagged
from jaxrl_llm.verifiers.numbers import last_number, one_line_fractions, whole_number
from jaxrl_llm.verifiers.verdict import Verdict

MAX_CHARACTERS = 20_000
# the wall clock only ends what gets no processor: a comparison never waits for anything else
LIMITS = Limits(cpu_s=2.0, wall_s=40.0, memory_mb=1024, output_bytes=1 << 16)
TIMEOUT_S = 200.0  # of an item in a pool: two calls and room; the limits above end them long before
# of the text of a formula: sizes of brackets, spaces, and words such as units
_LAYOUT = (
    re.compile(r"\\(?:left|right|big|Big|displaystyle)(?![a-zA-Z])"), re.compile(r"\\[,;:! ]|~|\s|\\?\$"),
    re.compile(r"(?<=.)\\(?:text|mathrm|mbox)\{[^{}]*\}$"),
)  # fmt: skip
# of numbers, what math-verify takes for sums or products: groups of digits with a thin space between, 3 1/2, 1.5e6
_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:\\[,:;]|[\u2009\u202f\u00a0])[0-9]{3})+(?![0-9])")
_MIXED = re.compile(r"(?<![\w.,/^\\])([0-9]{1,9}) ([0-9]{1,9})/([0-9]{1,9})(?!\.?[\w^/])")
# 2e-3 is as well e twice less 3: a whole number needs an exponent without a sign, or as Python writes that of 1e-05
_SHIFTED = re.compile(
    r"(?<![\w.])(?:([0-9]+)[eE]([0-9]{1,3}|[-+]0[0-9])|([0-9]*\.[0-9]+)[eE]([-+]?[0-9]{1,3}))(?!\.?\w)"
)
_SPACED = re.compile(r"-?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_USE = "the math verifier needs"


def prepare() -> None:
    """Starts the worker; a verifier pool calls it before the clock runs.

    Raises:
      UserError: when the extra is not installed.
    """
    _sandbox().run("")


@functools.cache
def _sandbox() -> Sandbox:
    if importlib.util.find_spec("math_verify") is None:
        extra_module("math_verify", _USE, "tasks")
    return Sandbox(workers=1, limits=LIMITS, modules=(__name__,))


def warm_up() -> None:
    """In the sandbox, before anything is given up: imports math-verify and lets it build its tables."""
    math_verify = extra_module("math_verify", _USE, "tasks")
    for name in ("math_verify", "math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns about every timeout that is off
    formulas.build_in_sympy()
    formulas.replace_in_sympy()
    compare("\\frac{1}{2}", "so it is $\\sqrt{0.25}$")
    math_verify.parser.parse_expr_cached.cache_clear()


@functools.lru_cache(maxsize=256)
def _gold(reference: str) -> list[Any]:
    """A reference as math-verify reads it: once for all responses of a group."""
    import math_verify

    return math_verify.parse(_delimited(_alone(reference)), parsing_timeout=0)


def _improper(found: re.Match) -> str:
    whole, above, below = map(int, found.groups())
    return f"{whole * below + above}/{below}"


def _shifted(found: re.Match) -> str:
    return f"{found[1] or found[3]}\\times 10^{{{int(found[2] or found[4])}}}"


def _in_digits(text: str) -> str:
    r"""A text whose numbers are written as math-verify reads them.

    >>> _in_digits(r"12\,345 or 3½, 1e-05"), _in_digits("2e-3")
    ('12345 or 7/2, 1\\times 10^{-5}', '2e-3')
    """
    text = _GROUPS.sub(lambda found: re.sub(r"[^0-9]", "", found[0]), one_line_fractions(text))
    return _SHIFTED.sub(_shifted, _MIXED.sub(_improper, text))


def _alone(text: str) -> str:
    r"""An answer that is marked as one, in digits, without the mark that ends a sentence.

    >>> _alone("x = 5."), _alone(r"5~\text{cm}"), _alone("1 000")
    ('x = 5', '5 \\text{cm}', '1000')
    """
    text = re.sub(r"(?<!\\)\\ |~", " ", _in_digits(text))
    text = re.sub(r"(?<![.\\\s])[.,;]\s*\Z", "", text)
    return text.replace(" ", "") if _SPACED.fullmatch(text.strip()) else text


def _delimited(text: str) -> str:
    """A text as a formula: without a delimiter math-verify finds plain numbers alone, and not all of these."""
    return text if re.search(r"(?<!\\)\$|\\[(\[]|\\boxed", text) else f"${text}$"


def _base(text: str) -> str | None:
    """The base of a number in digits, ``1234_5``: math-verify reads over it."""
    found = re.search(r"[0-9]_(?:([0-9])|\{([0-9]{1,2})\})\$?\Z", text.strip())
    return (found[1] or found[2]) if found else None


def _other_base(reference: str, response: str) -> bool:
    """Whether the answer names another base than the reference, where ten need not be named; one without is free."""
    boxed, inside = last_boxed(response), tagged(response)
    given = _base(next(text for text in (boxed, inside, response) if text is not None))
    return given is not None and given != (_base(reference) or "10")


def _final(response: str) -> str:
    """The last box alone, where there is one: math-verify trusts an earlier "final answer" more, and mixes boxes."""
    boxes, rest = last_boxes(response)
    if not boxes or not boxes[-1].strip():
        return _in_digits(response)
    formula = ", ".join(f"\\boxed{{{_alone(inside)}}}" for inside in boxes)
    return f"${formula}$%" if re.match(r"\s*\$\s*\\?%", rest) else formula


def compare(reference: str, response: str) -> list[Any]:
    """In the sandbox: ``[value, valid, reason]`` of a response."""
    import math_verify

    gold = _gold(reference)
    if not gold:
        return [0.0, False, f"reference answer {reference[:40]!r} does not parse"]
    try:
        given = math_verify.parse(_final(response), parsing_timeout=0)
        if not given and (inside := (tagged(response) or "").strip()):
            given = math_verify.parse(_delimited(_alone(inside)), parsing_timeout=0)
        if not given:
            return [0.0, True, "no mathematical answer found"]
        if _other_base(reference, response):
            return [0.0, True, f"the base of {response[-40:]} is not that of {reference[:40]}"]
        if math_verify.verify(gold, given, timeout_seconds=0):
            return [1.0, True, "right"]
        return [0.0, True, f"{str(given[0])[:40]} is not {reference[:40]}"]
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError) as error:
        return [0.0, True, f"not comparable: {type(error).__name__}"]


def read(answer: dict[str, Any], response: str) -> Fraction | str | None:
    r"""Which answer a response gives: its number where it is one, else its formula as text; None without one.

    That is the last box, tag, formula or number. No formula is evaluated for it, as ``verify`` does: responses whose
    expressions are equal and not written alike count as different ones.

    >>> [str(read({}, text)) for text in (r"\boxed{\frac12}", "so it is $x = 0.5$.", r"\boxed{\left( 1, \,2 \right)}")]
    ['1/2', '1/2', '(1,2)']
    """
    response = response[-MAX_CHARACTERS:]
    inside = tagged(response)
    given = last_boxed(response if inside is None else inside)
    if given is None:
        text = response if inside is None else inside
        between = re.split(r"(?<!\\)\$+", re.sub(r"\\[()\[\]]", "$", text))[1:-1:2]
        if not between and inside is None:
            return last_number(text)
        given = between[-1] if between else text
    if (number := whole_number(given.rpartition("=")[2])) is not None:
        return number
    for word in _LAYOUT:
        given = word.sub("", given)
    return given.replace("dfrac", "frac").replace("tfrac", "frac").rstrip(".") or None


class _NotAsked(RuntimeError):
    """The sandbox had no answer: another time it may have one, so this is not kept."""


@functools.lru_cache(maxsize=4096)
def _with_itself(reference: str) -> Called:
    called = _sandbox().call(f"{__name__}:compare", reference, reference)
    if called.status in ("wall", "broken"):
        raise _NotAsked(called.reason)
    return called


def verify(answer: dict[str, Any], response: str) -> Verdict:
    """1 when the last mathematical answer of the response equals ``answer["value"]``, 0 elsewhere.

    That is the last ``\\boxed{}``, with those that a comma, "and" or "or" joins to it; without a box what math-verify
    finds, which trusts "the final answer is" most.

    A reference that does not parse, or cannot be compared with itself, is an invalid verdict: the data are wrong, not
    the model. So is a machine without time for it. What a response exhausts by itself earns 0.

    >>> verify({"value": "\\\\frac{1}{2}"}, "So it is $0.5$.").value
    1.0
    """
    reference = str(answer["value"])
    called = _sandbox().call(f"{__name__}:compare", reference, response[-MAX_CHARACTERS:])
    if called.status == "ok":
        return Verdict(*called.value)
    if called.status in ("wall", "broken"):
        return Verdict(0.0, False, called.reason)
    try:
        same = _with_itself(reference)
    except _NotAsked as error:
        return Verdict(0.0, False, str(error))
    if same.status != "ok":
        return Verdict(0.0, False, f"reference answer {reference[:40]!r}: {same.reason}")
    return Verdict(0.0, True, f"the answer: {called.reason.splitlines()[-1]}")
