"""Countdown: each number exactly once, right arithmetic, the target reached; steps or one expression."""

import ast
import re
from collections import Counter
from fractions import Fraction
from typing import Any

from jaxrl_llm.verifiers.verdict import Verdict

MAX_CHARACTERS = 200
MAX_DIGITS = 4
_STEP = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}})([+\-*/])([0-9]{{1,{MAX_DIGITS}}})=([0-9]{{1,{MAX_DIGITS}}})")
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def _apply(operator: str, a: Fraction, b: Fraction) -> Fraction | None:
    if operator == "/":
        return None if b == 0 else a / b
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def _wrong(reason: str) -> Verdict:
    return Verdict(0.0, True, reason)


def _steps(numbers: list[int], target: int, text: str) -> Verdict:
    table = [Fraction(n) for n in numbers]
    value = None
    for part in text.split(","):
        match = _STEP.fullmatch(part)
        if match is None:
            return _wrong(f"not a step: {part[:20]!r}")
        a, b, value = (Fraction(int(match[k])) for k in (1, 3, 4))
        for operand in (a, b):
            if operand not in table:
                return _wrong(f"{operand} is not on the table")
            table.remove(operand)
        if _apply(match[2], a, b) != value:
            return _wrong(f"wrong arithmetic: {part}")
        table.append(value)
    table.remove(value)
    if table:
        return _wrong(f"number {table[0]} not used")
    return Verdict(1.0, True, "right") if value == target else _wrong(f"ends at {value}, not {target}")


def _evaluate(node: ast.AST, used: list[int]) -> Fraction | str:
    """Value of a tree of + - * / over whole numbers, or what is wrong with it."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        if node.value >= 10**MAX_DIGITS:
            return f"a number of more than {MAX_DIGITS} digits"
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _evaluate(node.left, used)
        if isinstance(left, str):
            return left
        right = _evaluate(node.right, used)
        if isinstance(right, str):
            return right
        value = _apply(_OPERATORS[type(node.op)], left, right)
        return "division by zero" if value is None else value
    return "more than whole numbers and + - * / ( )"


def _expression(numbers: list[int], target: int, text: str) -> Verdict:
    text, *claimed = (part.strip() for part in text.split("="))
    if len(claimed) > 1 or (claimed and claimed[0] != str(target)):
        return _wrong(f"claims {'='.join(claimed)[:20]!r}, not {target}")
    if not text or re.search(r"[^0-9+\-*/() ]", text):
        return _wrong("not an expression of whole numbers and + - * / ( )")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return _wrong(f"does not parse: {type(error).__name__}")
    used: list[int] = []
    value = _evaluate(tree.body, used)
    if isinstance(value, str):
        return _wrong(value)
    missing, extra = Counter(numbers) - Counter(used), Counter(used) - Counter(numbers)
    if missing:
        return _wrong(f"number {min(missing)} not used")
    if extra:
        return _wrong(f"number {min(extra)} used too often or not given")
    return Verdict(1.0, True, "right") if value == target else _wrong(f"is {value}, not {target}")


def verify(answer: dict[str, Any], response: str) -> Verdict:
    """Judges ``7*3=21,21+5=26``, ``7*3+5`` or ``7*3+5=26``, plain or in the last ``<answer>`` tag, exactly.

    Args:
      answer: ``numbers`` (list) and ``target``.

    >>> verify({"numbers": [3, 5, 7], "target": 26}, "7*3=21,21+5=26").value
    1.0
    >>> verify({"numbers": [3, 5, 7], "target": 26}, "<answer>7*3</answer>").reason
    'number 5 not used'
    """
    numbers, target = [int(n) for n in answer["numbers"]], int(answer["target"])
    text = tagged(response)
    text = (response if text is None else text).strip()
    if len(text) > MAX_CHARACTERS:
        return _wrong(f"longer than {MAX_CHARACTERS} characters")
    return (_steps if _STEP.match(text) else _expression)(numbers, target, text)


def tagged(response: str) -> str | None:
    """The text of the last complete ``<answer>`` tag, found in linear time; None where there is none."""
    before, end, _ = response.rpartition("</answer>")
    _, start, text = before.rpartition("<answer>")
    return text if end and start else None
