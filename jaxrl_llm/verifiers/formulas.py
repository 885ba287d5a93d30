"""Values of literals and formulas in text, read from their syntax: what ``eval`` would give, without executing any."""

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

MOST_BITS = 1 << 17  # of a whole number that a power or a shift gives
LARGEST = 10_000  # argument of a function of whole numbers, such as a factorial
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert,
}  # fmt: skip
_HOLDERS: dict[type, Callable[[list], Any]] = {ast.List: list, ast.Tuple: tuple, ast.Set: set}


def literal(text: str, *_: Any) -> Any:
    """The value of Python's literals and of arithmetic on numbers; the rest of the arguments is ignored.

    Raises:
      ValueError: for anything else, and for whole numbers of more than ``MOST_BITS`` bits.
      SyntaxError: for text that is no Python.

    >>> literal("['a', 'b']"), literal("(0x10 + 1) << 2")
    (['a', 'b'], 68)
    """
    return _value(ast.parse(text.strip(), mode="eval").body, _no_names)


def _no_names(node: ast.expr) -> Any:
    raise ValueError(f"a {type(node).__name__} is no literal")


def _value(node: ast.expr, other: Callable[[ast.expr], Any]) -> Any:
    """Args: ``other`` gives the value of nodes that are neither constants, arithmetic nor lists."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, other))
    if isinstance(node, ast.BinOp):
        return _binary(node.op, _value(node.left, other), _value(node.right, other))
    if type(node) in _HOLDERS:
        return _HOLDERS[type(node)]([_value(x, other) for x in node.elts])  # type: ignore[attr-defined]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_value(k, other): _value(v, other) for k, v in zip(node.keys, node.values, strict=True) if k}
    return other(node)


def _binary(kind: ast.operator, left: Any, right: Any) -> Any:
    if type(kind) in _BINARY:
        # a text or a list times a number can fill the memory
        if isinstance(kind, ast.Mult) and not all(hasattr(x, "__neg__") for x in (left, right)):
            raise ValueError("only numbers are multiplied")
        return _BINARY[type(kind)](left, right)
    if isinstance(kind, ast.Pow):
        _check_power(left, right)
        return left**right
    if isinstance(kind, ast.LShift | ast.RShift):
        if not (isinstance(left, int) and isinstance(right, int) and right <= MOST_BITS):
            raise ValueError("no shift of whole numbers of a size that can be")
        return left << right if isinstance(kind, ast.LShift) else left >> right
    raise ValueError(f"no arithmetic: {type(kind).__name__}")


def _whole(value: Any) -> int | None:
    """A whole number of Python's or SymPy's, or the larger part of a fraction; None for what is none of these."""
    if isinstance(value, int):
        return value
    if getattr(value, "is_Rational", False):
        return max(int(value.p), int(value.q), key=abs)
    return None


def _check_power(base: Any, exponent: Any) -> None:
    bottom, top = _whole(base), _whole(exponent)
    if top is None and getattr(exponent, "is_Pow", False) and exponent.is_number:  # one that waits to be computed
        above = [_whole(x) for x in exponent.args]
        if None in above:
            raise ValueError("a tower of powers")
        top = above[0] ** max(above[1], 0)  # checked when it was made
    if bottom is not None and top is not None and abs(bottom) > 1 and bottom.bit_length() * abs(top) > MOST_BITS:
        raise ValueError(f"a power of more than {MOST_BITS} bits")
    if isinstance(base, float) and top is not None and base and abs(top * math.log2(abs(base))) > 1100:
        raise ValueError("a power beyond what a float holds")


def make_expression(names: Mapping[str, Any], base: type, functions: tuple[Any, ...]) -> Callable[..., Any]:
    """``evaluate(code, global_dict, local_dict)`` in the place of ``eval`` in SymPy's parser.

    Args:
      names: what a name means that the local names do not define.
      base: class of all expressions: names may stand for its instances and subclasses, and subclasses are called.
      functions: what else may be called.
    """

    def known(name: str, local: Mapping[str, Any]) -> Any:
        value = local[name] if name in local else names.get(name)
        if isinstance(value, base | bool) or _callable(value):
            return value
        raise ValueError(f"{name} is no name of a formula")

    def _callable(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, base) or any(value is f for f in functions)

    def evaluate(code: Any, global_dict: Any = None, local_dict: Mapping[str, Any] | None = None) -> Any:
        local = {} if local_dict is None else local_dict
        tree = code if isinstance(code, ast.AST) else ast.parse(str(code).strip(), mode="eval")

        def other(node: ast.expr) -> Any:
            if isinstance(node, ast.Name):
                return known(node.id, local)
            if isinstance(node, ast.Call):
                return called(node)
            if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
                return _COMPARED[type(node.ops[0])](_value(node.left, other), _value(node.comparators[0], other))
            raise ValueError(f"a {type(node).__name__} is no part of a formula")

        def called(node: ast.Call) -> Any:
            function = _value(node.func, other)
            if not _callable(function):
                raise ValueError("only functions of formulas are called")
            if any(k.arg != "evaluate" or not isinstance(k.value, ast.Constant) for k in node.keywords):
                raise ValueError("a function of a formula takes no names")
            given = [_value(x, other) for x in node.args]
            _check_call(function.__name__, given)
            return function(*given, **{str(k.arg): k.value.value for k in node.keywords})  # type: ignore[attr-defined]

        return _value(tree.body, other)  # type: ignore[attr-defined]

    return evaluate


_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_NAMING = {"Symbol", "Function", "Integer", "Float", "Rational"}  # that take text
_FREE = {"Integer", "Float", "Rational", "Add", "Mul", "Abs", "Max", "Min", "Mod", "sqrt", "floor", "ceiling", "Tuple"}


def _check_call(name: str, given: list[Any]) -> None:
    if name not in _NAMING and any(isinstance(x, str | bytes) for x in given):
        raise ValueError(f"{name} of a text")
    if name == "Pow" and len(given) == 2:
        _check_power(*given)
    elif name not in _FREE | _NAMING and any(abs(_whole(x) or 0) > LARGEST for x in given):
        raise ValueError(f"{name} of a number beyond {LARGEST}")


_GENERATORS = 12  # of a polynomial whose arithmetic is built beforehand; more take longer than a verdict may


def build_in_sympy() -> None:
    """Builds what SymPy would write as text and execute while it simplifies, which a process that judges refuses.

    The arithmetic of monomials is such text, made of the number of generators and of nothing that a model wrote.
    SymPy keeps what is built; without it ``cancel`` and ``simplify`` fail, and with them right answers.
    """
    from sympy.polys.monomials import MonomialOps

    for count in range(1, _GENERATORS + 1):
        built = MonomialOps(count)
        for make in (built.mul, built.pow, built.mulpow, built.ldiv, built.div, built.lcm, built.gcd):
            make()


@functools.cache
def replace_in_sympy() -> None:
    """From here on SymPy's parser, in this process, reads the syntax of formulas and executes nothing."""
    import sympy
    from sympy.parsing import sympy_parser

    names = {name: getattr(sympy, name) for name in sympy.__all__}
    names |= {"max": sympy.Max, "min": sympy.Min, "abs": abs}
    functions = (sympy.sqrt, sympy.cbrt, sympy.root, sympy.real_root, abs)
    sympy_parser.eval = make_expression(names, sympy.Basic, functions)
    sympy_parser.compile = lambda tree, *_: tree  # a tree is what is read
    sympy_parser.exec = lambda _, space: space.update(names)  # it would import the names of SymPy
