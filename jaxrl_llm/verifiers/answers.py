"""Answers compared as text or number: exact match, the number after a marker, multiple choice."""

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from typing import Any

from jaxrl_llm.verifiers.countdown import tagged
from jaxrl_llm.verifiers.verdict import Verdict

# a comma counts only between groups of three digits; a minus after a digit is an operator
_NUMBER = re.compile(r"(?:(?<![0-9])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_WHOLE = re.compile(r"[0-9]{1,4}")
# in falling order of trust: "answer is B" or "answer: (B)", "(B)", "B)" or "B." or the letter alone on its line
_CHOICES = (
    re.compile(r"\b(?i:answer|choice|option)(?i:\s+is)?\s*:?\s*\(?([A-J])\b(?!['\w])"),
    re.compile(r"\(([A-J])\)"),
    re.compile(r"(?:^|(?<=\s))([A-J])(?=[.):]?(?:\s*$))", re.MULTILINE),
    re.compile(r"(?:^|(?<=\s))([A-J])(?=[.):])", re.MULTILINE),
)
MAX_CHARACTERS = 20_000


def final_part(response: str) -> str:
    """The offered answer: the last ``<answer>``, ``\\boxed{}``, the text after ``####`` or ``#``, or all of it."""
    response = response[-MAX_CHARACTERS:]
    inside = tagged(response)
    if inside is not None:
        return inside.strip()
    boxed = BOXED.findall(response)
    if boxed:
        return boxed[-1].strip()
    for marker in ("####", "#"):
        if marker in response:
            return response.rsplit(marker, 1)[1].strip()
    return response.strip()


def number(text: str) -> Decimal | None:
    """The last number of a text, thousands separators removed; None where there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".")


def verify_exact(answer: dict[str, Any], response: str) -> Verdict:
    """1 when the final part equals ``answer["value"]`` up to case, spacing and Unicode form.

    >>> verify_exact({"value": "Red Cat"}, "red  cat").value
    1.0
    """
    given, wanted = _normal(final_part(response)), _normal(str(answer["value"]))
    return Verdict(1.0, True, "right") if given == wanted else Verdict(0.0, True, f"{given[:40]!r} is not {wanted!r}")


def verify_number(answer: dict[str, Any], response: str) -> Verdict:
    """1 when the last number of the final part equals the number in ``answer["value"]``.

    >>> verify_number({"value": 10}, "3+5=8,8*4=32#10").value
    1.0
    """
    given, wanted = number(final_part(response)), number(str(answer["value"]))
    if given is None:
        return Verdict(0.0, True, "no number in the answer")
    return Verdict(1.0, True, "right") if given == wanted else Verdict(0.0, True, f"{given:.10} is not {wanted:.10}")


def verify_choice(answer: dict[str, Any], response: str) -> Verdict:
    """1 when the letter A-J offered in the final part is ``answer["value"]``.

    A letter after "answer", "choice" or "option" counts before one in parentheses, that before one alone or before a
    full stop; of equals the last counts. A final part that is one letter may be in lower case.

    >>> verify_choice({"value": "B"}, "A is wrong, so the answer is (B). I am sure.").value
    1.0
    """
    part = final_part(response)
    letters = [part.upper()] if re.fullmatch(r"[A-Ja-j]", part) else []
    for pattern in _CHOICES:
        letters = letters or pattern.findall(part)
    if not letters:
        return Verdict(0.0, True, "no choice given")
    given, wanted = letters[-1], str(answer["value"]).strip().upper()
    return Verdict(1.0, True, "right") if given == wanted else Verdict(0.0, True, f"{given} is not {wanted}")


def verify_chain(answer: dict[str, Any], response: str) -> Verdict:
    """1 when the text after the last ``#`` is the whole number ``answer["value"]`` (at most four digits).

    The same rule as the jittable ``tokens.make_value_verifier``.

    >>> verify_chain({"value": 10}, "3+5=8,8*4=10#10").value
    1.0
    >>> verify_chain({"value": 10}, "10").reason
    'no # before the answer'
    """
    _, marker, text = response.rpartition("#")
    if not marker:
        return Verdict(0.0, True, "no # before the answer")
    if _WHOLE.fullmatch(text) is None:
        return Verdict(0.0, True, f"{text[:20]!r} is not a whole number of at most 4 digits")
    given, wanted = int(text), int(answer["value"])
    return Verdict(1.0, True, "right") if given == wanted else Verdict(0.0, True, f"{given} is not {wanted}")


def verify_any(answer: dict[str, Any], response: str) -> Verdict:
    """Number comparison where the expected value is a number, text comparison elsewhere."""
    wanted = str(answer["value"]).strip()
    return (verify_number if _NUMBER.fullmatch(wanted) else verify_exact)(answer, response)
