"""Literals and formulas are read as ``eval`` would give them, and nothing else is."""

import math

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy.parsing import sympy_parser

from jaxrl_llm.verifiers import formulas

BAD = [
    "__import__('os').system('true')", "open('x')", "(lambda: 1)()", "[x for x in (1, 2)]", "''.join(['a'])", "f'{1}'",
    "().__class__", "a", "print(1)", "exec('1')", "1 if 1 else 2", "x := 3", "'a' * 10**9", "9**9**9", "1 << 10**9",
    "[0] * 10**9", "10**10**10", "2.0**10**6", "{**{}}", "[*[1]]", "1 and 2",
]  # fmt: skip


PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.recursive(PLAIN, lambda x: st.lists(x) | st.tuples(x, x) | st.dictionaries(st.text(), x)))
@settings(max_examples=60, deadline=None)
def test_literals_are_what_eval_gives(value):
    assert formulas.literal(repr(value)) == eval(repr(value))


@pytest.mark.parametrize(
    "text", ["1 + 2 * 3", "(7 - 2) // 2 % 3", "2 ** 10 - 0x1f", "~5 | 3 & 6 ^ 1", "-1.5e3 / 4", "1 << 5 >> 2"]
)
def test_arithmetic_is_what_eval_gives(text):
    assert formulas.literal(text) == eval(text)


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_refused(text):
    with pytest.raises((ValueError, SyntaxError)):
        formulas.literal(text)


def _names():
    return {name: getattr(sympy, name) for name in sympy.__all__}


@pytest.fixture
def read(monkeypatch):
    """``parse_expr`` of SymPy as it is in the workers."""
    real = sympy_parser.parse_expr
    plain = {text: real(text, local_dict={}) for text in FORMULAS}
    lazy = {text: real(text, evaluate=False) for text in FORMULAS}
    evaluate = formulas.make_expression(_names(), sympy.Basic, (sympy.sqrt, sympy.cbrt, sympy.root))
    monkeypatch.setattr(sympy_parser, "eval", evaluate, raising=False)
    monkeypatch.setattr(sympy_parser, "compile", lambda tree, *_: tree, raising=False)
    monkeypatch.setattr(sympy_parser, "exec", lambda _, space: space.update(_names()), raising=False)
    return real, plain, lazy


FORMULAS = [
    "1 + 2*x - 3/4", "-5*X**9 - 2*X**6/3 + 4*X**3 + C", "exp(x)*cos(x) - sqrt(2)*pi/3", "6*(98 - 54) - 34 - 66",
    "x**2 > 3", "4! + 5", "log(x, 2) + sin(x)**2", "1.5e-3*y", "(x + y)**3", "E + I*oo", "f(x) + g(2)", "0.[3]",
    "Abs(-3) + floor(2.5)", "x == y", "cbrt(8) + root(16, 4)", "2**3**2",
]  # fmt: skip


def test_formulas_are_what_sympy_gives(read):
    parse, plain, lazy = read
    for text in FORMULAS:
        assert parse(text, local_dict={}) == plain[text], text
        assert parse(text, evaluate=False) == lazy[text], text


def test_formulas_execute_nothing_and_stay_small(read):
    parse = read[0]
    for text in (
        "__import__('os').system('true')", "x.__class__", "sin('__import__(\"os\")')", "lambdify(x, 'x')", "print(x)",
        "eval('1')", "sympify('1')", "(lambda y: y)(x)", "9**9**9", "factorial(10**7)", "10**10**10 - x", "open('x')",
        "[y for y in x]", "preview(x)", "Symbol.__init__", "100000!", "binomial(10**9, 10**8)", "gamma(10**7)",
        "Function('f').__class__", "Symbol(x, real=x)", "2**(2**40)",
    ):  # fmt: skip
        with pytest.raises((ValueError, SyntaxError, TypeError)):
            value = parse(text, local_dict={})
            assert not isinstance(value, sympy.Basic), (text, value)


def test_towers_that_wait_to_be_computed_are_refused(read):
    assert read[0]("2**(3**2)", evaluate=False) == read[2]["2**3**2"]
    for text in ("9**9**9", "9**9**9**9", "2**(2**40)", "x + 10**10**10"):
        with pytest.raises((ValueError, TypeError)):
            read[0](text, evaluate=False)


def test_in_place_of_eval_it_costs_no_more(read):
    assert float(read[0]("pi*2", local_dict={})) == 2 * math.pi
