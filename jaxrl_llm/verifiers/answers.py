"""Answers compared as text or number: exact match, the number after a marker, multiple choice."""

import re
import unicodedata
from fractions import Fraction
from typing import Any

from jaxrl_llm.data.boxed import last_boxed
from jaxrl_llm.verifiers.countdown import tagged
from jaxrl_llm.verifiers.numbers import is_number, last_number, shown
from jaxrl_llm.verifiers.verdict import Verdict

_WHOLE = re.compile(r"[0-9]{1,4}")
# what stands around a letter or a word to show it in another face
_FACE = re.compile(r"\\(?:boxed|text[a-z]*|math(?:rm|bf|it|sf)|mbox|operatorname)[ ]?\{([^{}]*)\}")
_AROUND = re.compile(r"(\*{1,3}|`{1,3}|\${1,2})([^*`$]+)\1\.?")  # bold, code or a formula as a whole
_LETTER = r"\(?([A-HJ]\b(?!['\w])|I(?=[).:]|[ \t]*$))"  # I is a word as well, unless it ends something
_OF_THEM = r"(?i:(?:the[ \t]+)?(?:choice|option)[ \t]+)?"
# in falling order of trust: "answer is B", "answer: (B)" or "#B"; "option B." at the end of a clause; "(B)"; any
# "option B"; the letter alone on its line; "B)" or "B."
_CHOICES = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        rf"(?:\b(?i:answer|choice|option)[ \t]*(?i:is[ \t]*:?|:)\s*{_OF_THEM}|#){_LETTER}",
        rf"\b(?i:choice|option)[ \t]+{_LETTER}(?=\)?(?:[.,;:!]|[ \t]*$))",
        r"\(([A-J])\)",
        rf"\b(?i:answer|choice|option)[ \t]+{_LETTER}",
        r"(?:^|(?<=\s))([A-J])(?=[.):]?(?:\s*$))",
        r"(?:^|(?<=\s))([A-J])(?=[.):])",
    )
)
_NAMED = re.compile(r"\(([A-Ja-j])\).*|([A-Ja-j])(?:[.):].*)?", re.DOTALL)  # of a reference
MAX_CHARACTERS = 20_000


def _offered(response: str, markers: tuple[str, ...]) -> tuple[str, bool]:
    """The offered answer, and whether a tag or a box says where it begins and ends."""
    response = response[-MAX_CHARACTERS:]
    inside = tagged(response)
    boxed = last_boxed(response if inside is None else inside)
    if boxed is not None or inside is not None:
        return (inside if boxed is None else boxed).strip(), True
    for marker in markers:
        if marker in response:
            return response.rsplit(marker, 1)[1].strip(), False
    return response.strip(), False


def final_part(response: str, *, wanted: str = "") -> str:
    r"""The offered answer: the last ``<answer>``, ``\boxed{}``, the text after ``####`` or ``#``, or all of it.

    Args:
      wanted: the right answer: where it holds a ``#`` itself, a single one marks nothing.

    >>> final_part(r"<answer>\boxed{Rome}</answer>"), final_part("It is #4"), final_part("C#", wanted="C#")
    ('Rome', '4', 'C#')
    """
    return _offered(response, ("####",) if "#" in wanted else ("####", "#"))[0]


def _normal(text: str) -> str:
    text = _FACE.sub(r"\1", text).strip()
    if around := _AROUND.fullmatch(text):
        text = around[2]
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".")


def _bare(text: str) -> str:
    """A text without the marks that make it bold, code or a formula, and without blanks behind a blank."""
    text = re.sub(r"\*+|`+|\\?\$", "", text)
    for _ in range(3):  # one face inside another
        text = _FACE.sub(r"\1", text)
    # the patterns of choices try every way to share a run of blanks among their parts
    return re.sub(r"[ \t]+", " ", text).strip()


def read_exact(answer: dict[str, Any], response: str) -> str | None:
    """What ``verify_exact`` compares: the final part up to case, spacing and Unicode form; None where it is empty.

    A reading says which responses give the same answer, right or wrong; of the reference answer it knows the kind.
    """
    return _normal(final_part(response, wanted=str(answer["value"]))) or None


def verify_exact(answer: dict[str, Any], response: str) -> Verdict:
    """1 when the final part equals ``answer["value"]`` up to case, spacing and Unicode form.

    >>> verify_exact({"value": "Red Cat"}, "red  cat").value
    1.0
    """
    given, wanted = read_exact(answer, response), _normal(str(answer["value"]))
    if given is None:
        return Verdict(0.0, True, "no answer given")
    return Verdict(1.0, True, "right") if given == wanted else Verdict(0.0, True, f"{given[:40]!r} is not {wanted!r}")


def read_number(answer: dict[str, Any], response: str) -> Fraction | None:
    """What ``verify_number`` compares: the last number of the final part; None without one."""
    part, marked = _offered(response, ("####", "#"))
    return last_number(part, alone=marked)


def verify_number(answer: dict[str, Any], response: str) -> Verdict:
    r"""1 when the last number of the final part equals the number in ``answer["value"]``.

    Inside a tag or a box an expression beyond one fraction or power is no number, see ``numbers.last_number``.

    >>> verify_number({"value": 10}, "3+5=8,8*4=32#10").value
    1.0
    >>> verify_number({"value": 18}, r"\boxed{\frac{1}{18}}").reason
    '0.05555555556 is not 18'
    """
    given, wanted = read_number(answer, response), last_number(str(answer["value"]))
    if wanted is None:
        return Verdict(0.0, False, f"reference answer {str(answer['value'])[:40]!r} holds no number")
    if given is None:
        return Verdict(0.0, True, "no number in the answer")
    return (
        Verdict(1.0, True, "right") if given == wanted else Verdict(0.0, True, f"{shown(given)} is not {shown(wanted)}")
    )


def read_choice(answer: dict[str, Any], response: str) -> str | None:
    """What ``verify_choice`` compares: the letter that is offered; None without one."""
    part = _bare(_offered(response, ("####",))[0])
    letters = [part.upper()] if re.fullmatch(r"[A-Ja-j]", part) else []
    for pattern in _CHOICES:
        letters = letters or pattern.findall(part)
    return letters[-1] if letters else None


def verify_choice(answer: dict[str, Any], response: str) -> Verdict:
    """1 when the letter A-J offered in the final part is ``answer["value"]``.

    A letter after "answer is" or "answer:" counts before "option B" at the end of a clause, that before one in
    parentheses, that before any other "option B", that before a letter alone or before a full stop; of equals the last
    counts. Bold, code and formulas are read as plain text. A final part that is one letter may be in lower case. The
    reference is a letter as well, or begins with one, as in ``(B) Paris`` and ``B. Paris``; else (a number, several
    letters) the verdict is invalid.

    >>> verify_choice({"value": "(B)"}, "A is wrong, so the answer is (B). I am sure.").value
    1.0
    >>> verify_choice({"value": 1}, "The answer is (B).").reason
    "reference answer '1' names no letter from A to J"
    """
    given, named = read_choice(answer, response), _NAMED.fullmatch(_bare(str(answer["value"])))
    if named is None:
        return Verdict(0.0, False, f"reference answer {str(answer['value'])[:40]!r} names no letter from A to J")
    wanted = (named[1] or named[2]).upper()
    if given is None:
        return Verdict(0.0, True, "no choice given")
    return Verdict(1.0, True, "right") if given == wanted else Verdict(0.0, True, f"{given} is not {wanted}")


def read_chain(answer: dict[str, Any], response: str) -> int | None:
    """What ``verify_chain`` compares: the whole number after the last ``#``; None without one."""
    _, marker, text = response.rpartition("#")
    return int(text) if marker and _WHOLE.fullmatch(text) else None


def verify_chain(answer: dict[str, Any], response: str) -> Verdict:
    """1 when the text after the last ``#`` is the whole number ``answer["value"]`` (at most four digits).

    The same rule as the jittable ``tokens.make_value_verifier``.

    >>> verify_chain({"value": 10}, "3+5=8,8*4=10#10").value
    1.0
    >>> verify_chain({"value": 10}, "10").reason
    'no # before the answer'
    """
    given, wanted = read_chain(answer, response), int(answer["value"])
    if given is None:
        _, marker, text = response.rpartition("#")
        said = f"{text[:20]!r} is not a whole number of at most 4 digits" if marker else "no # before the answer"
        return Verdict(0.0, True, said)
    return Verdict(1.0, True, "right") if given == wanted else Verdict(0.0, True, f"{given} is not {wanted}")


def _expects_number(answer: dict[str, Any]) -> bool:
    return is_number(str(answer["value"]).strip())


def read_any(answer: dict[str, Any], response: str) -> Fraction | str | None:
    """What ``verify_any`` compares: a number where the expected value is one, text elsewhere."""
    return (read_number if _expects_number(answer) else read_exact)(answer, response)


def verify_any(answer: dict[str, Any], response: str) -> Verdict:
    """Number comparison where the expected value is a number, text comparison elsewhere."""
    return (verify_number if _expects_number(answer) else verify_exact)(answer, response)
