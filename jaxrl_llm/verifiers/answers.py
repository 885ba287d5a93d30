"""Answers compared as text or number: exact match, the number after a marker, multiple choice."""

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from typing import Any

from jaxrl_llm.verifiers.verdict import Verdict

_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*)(?:\.[0-9]+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_CHOICE = re.compile(r"(?:answer\s*(?:is|:)?\s*)?\(?\b([A-J])\b\)?", re.IGNORECASE)
MAX_CHARACTERS = 20_000


def final_part(response: str) -> str:
    """The offered answer: the last ``<answer>``, ``\\boxed{}``, the text after ``####`` or ``#``, or all of it."""
    response = response[-MAX_CHARACTERS:]
    tags = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    if tags:
        return tags[-1].strip()
    boxed = _BOXED.findall(response)
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
    return Verdict(1.0, True, "right") if given == wanted else Verdict(0.0, True, f"{given} is not {wanted}")


def verify_choice(answer: dict[str, Any], response: str) -> Verdict:
    """1 when the last letter A-J offered in the final part is ``answer["value"]``.

    >>> verify_choice({"value": "B"}, "So the answer is (B).").value
    1.0
    """
    letters = _CHOICE.findall(final_part(response))
    if not letters:
        return Verdict(0.0, True, "no choice given")
    given, wanted = letters[-1].upper(), str(answer["value"]).strip().upper()
    return Verdict(1.0, True, "right") if given == wanted else Verdict(0.0, True, f"{given} is not {wanted}")


def verify_any(answer: dict[str, Any], response: str) -> Verdict:
    """Number comparison where the expected value is a number, text comparison elsewhere."""
    wanted = str(answer["value"]).strip()
    return (verify_number if _NUMBER.fullmatch(wanted) else verify_exact)(answer, response)
