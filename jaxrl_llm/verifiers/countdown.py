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
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
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
    if len(table) != 1:
        return _wrong(f"{len(table) - 1} values not used")
    return Verdict(1.0, True, "right") if value == target else _wrong(f"ends at {value}, not {target}")


def _evaluate(node: ast.AST, used: list[int]) -> Fraction | None:
    """Value of a tree of + - * / over whole numbers; None for anything else or a division by zero."""
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < 10**MAX_DIGITS:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left, used), _evaluate(node.right, used)
        return None if left is None or right is None else _apply(_OPERATORS[type(node.op)], left, right)
    return None


def _expression(numbers: list[int], target: int, text: str) -> Verdict:
    text = text.split("=")[0].strip()
    if not text or re.search(r"[^0-9+\-*/() ]", text):
        return _wrong("not an expression of whole numbers and + - * / ( )")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return _wrong(f"does not parse: {type(error).__name__}")
    used: list[int] = []
    value = _evaluate(tree.body, used)
    if value is None:
        return _wrong("not a sum of products of the numbers, or a division by zero")
    if Counter(used) != Counter(numbers):
        return _wrong(f"uses {sorted(used)}, not each of {sorted(numbers)} once")
    return Verdict(1.0, True, "right") if value == target else _wrong(f"is {value}, not {target}")


def verify(answer: dict[str, Any], response: str) -> Verdict:
    """Judges ``7*3=21,21+5=26``, ``7*3+5`` or ``<answer>7*3+5</answer>``.

    Args:
      answer: ``numbers`` (list) and ``target``.

    >>> verify({"numbers": [3, 5, 7], "target": 26}, "7*3=21,21+5=26").value
    1.0
    >>> verify({"numbers": [3, 5, 7], "target": 26}, "<answer>7*3</answer>").reason
    'uses [3, 7], not each of [3, 5, 7] once'
    """
    numbers, target = [int(n) for n in answer["numbers"]], int(answer["target"])
    tags = _TAG.findall(response)
    text = (tags[-1] if tags else response).strip()
    if len(text) > MAX_CHARACTERS:
        return _wrong(f"longer than {MAX_CHARACTERS} characters")
    if not tags and _STEP.match(text):
        return _steps(numbers, target, text)
    return _expression(numbers, target, text)
