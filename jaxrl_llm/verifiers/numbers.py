r"""The number that a text ends with, as models write it: ``1{,}000``, ``-\$5``, ``\frac{1}{2}``, ``1.5 \times 10^6``.

The time to read a text grows with its length alone, and nothing is computed that has many digits.
"""

import collections
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

MAX_DIGITS = 1000  # of a number that is read
_MAX_POWER = 4000  # digits of a power
_THIN, _CLOSED = "\u2009", "\u2063"  # a thin space, and where a formula ends behind a digit
_RAISED = {raised: f"^{digit}" for digit, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_VULGAR = {c: unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"}
_SMALL = re.compile(rf"(?<=[0-9]) ?([{''.join(_VULGAR)}])|([{''.join(_VULGAR)}])")
_LETTERS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u00a0": _THIN, "\u202f": _THIN, "~": " ", "\t": " ", "°": ""} | _RAISED
)
# a comma or a thin space counts only between groups of three digits; a point begins a number where no word ends
_PLAIN = (
    rf"(?:(?:[0-9]{{1,3}}(?:(?:,[0-9]{{3}})+|(?:{_THIN}[0-9]{{3}})+)(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"|(?<![\w.])\.[0-9]+)"
)
_SIGN = rf"(?:(?<![0-9{_CLOSED}])(?P<sign>[-+]))?"  # a minus behind a digit is an operator
_FRACTION = rf"(?:(?P<whole>[0-9]{{1,9}}) )?(?P<above>[0-9]{{1,9}}) ?/ ?(?P<below>{_PLAIN})"
_DIGITS = r"\{?(?P<%s>[-+]?[0-9]{1,3})(?![0-9])\}?"
_SCALED = (
    rf"(?P<base>{_PLAIN})(?:[eE](?P<shift>[-+]?[0-9]{{1,3}})(?!\w|\.[0-9])"
    rf"| ?(?:\\times|\\cdot|×|·|\*) ?10 ?\^ ?{_DIGITS % 'ten'}| ?\^ ?{_DIGITS % 'power'}| ?/ ?(?P<over>{_PLAIN}))?"
)
_NUMBER = re.compile(f"{_SIGN}(?:{_FRACTION}|{_SCALED})")
_OF_LATEX = re.compile(
    rf"(?P<before>(?<=[0-9]) ?)?\\[cdt]?frac ?(?:\{{ ?(-?{_PLAIN}) ?\}}|([0-9])) ?(?:\{{ ?({_PLAIN}) ?\}}|([0-9]))"
)
_WORDS = re.compile(
    r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|[mh]box|operatorname) ?\{([^{}]*)\}(?:\^(?:[0-9]|\{-?[0-9]+\}))?"
)
_GROUPS = re.compile(r"([^0-9]*)([0-9]{1,3}(?: [0-9]{3})+)((?:\.[0-9]+)?[^0-9]*)")
# what is left of an expression where every number is replaced by 0, and makes it no number: an operator between two, an
# index, one of two signs, an absolute value, a pair or a set, a factorial, a function, digits that go on for ever
_UNREAD = re.compile(
    r"0 ?(?:[-+*/_^×·÷]|\\times|\\cdot|\\div) ?0|\^|_ ?\{? ?0|(?:±|\\pm|\\mp) ?\{?0|\| ?0 ?(?:\\right)?\|"
    r"|[\[({] ?0 ?(?:, ?0 ?)+(?:\\right|\\)?[\])}]"
    r"|^[^a-zA-Z]*0 ?!|\\(?:[cdt]?frac|sqrt|pi|binom|log|ln|sin|cos|tan|infty|p?mod|bmod|lfloor|lceil|overline|bar|dot)"
    r"(?![a-z])"
)


def _words(found: re.Match) -> str:
    return f" {found[1]} " if any(x.isdigit() for x in found[1]) else ";"


def _one_line(found: re.Match) -> str:
    return f"{'' if found['before'] is None else ' '}{found[2] or found[3]}/{found[4] or found[5]} "


def one_line_fractions(text: str) -> str:
    """A text whose fractions of one character are written out.

    >>> one_line_fractions("3½ or ¾")
    '3 1/2 or 3/4'
    """
    return _SMALL.sub(lambda found: f" {_VULGAR[found[1]]}" if found[1] else _VULGAR[found[2]], text)


def _plain(text: str) -> str:
    """A text without what LaTeX and typography put into and around numbers, and without units that are raised."""
    text = re.sub(r"\{,\}|,\\!", ",", one_line_fractions(text).translate(_LETTERS)).replace("\\!", "")
    text = re.sub(r"\\[,:;]", _THIN, text).replace("\\ ", " ")
    text = re.sub(r"\\?\$", "", re.sub(r"(?<=[0-9])\\?\$", _CLOSED, text))
    text = re.sub(r"\^(?:\{\\circ\}|\\circ(?![a-z]))", "", _WORDS.sub(_words, text))
    text = re.sub(r"(?<=[A-Za-z])\^(?:[0-9]+|\{-?[0-9]+\})", "", text)
    text = re.sub(" +", " ", _OF_LATEX.sub(_one_line, text))
    whole = _GROUPS.fullmatch(text)
    return f"{whole[1]}{whole[2].replace(' ', ',')}{whole[3]}" if whole else text


def _read(text: str) -> Fraction | None:
    return Fraction(text.replace(",", "").replace(_THIN, "")) if len(text) <= MAX_DIGITS else None


def _value(found: re.Match) -> Fraction | None:
    value, below = _read(found["base"] or found["above"]), _read(found["below"] or found["over"] or "1")
    power = int(found["power"] or 1)
    if value is None or not below or (power < 0 and not value):
        return None
    if len(found["base"] or "") * abs(power) > _MAX_POWER:
        return None
    value = int(found["whole"] or 0) + value**power / below * Fraction(10) ** int(found["shift"] or found["ten"] or 0)
    return -value if found["sign"] == "-" else value


def last_number(text: str, *, alone: bool = False) -> Fraction | None:
    r"""The last number of a text; None where there is none, or more digits than anyone writes.

    Args:
      alone: the text was marked as an answer: of an equation its last side counts, and an expression that goes beyond
        one fraction or power is no number.

    >>> last_number(r"-\$1,000.5"), last_number(r"x = \frac{1}{18}", alone=True), last_number("3+5", alone=True)
    (Fraction(-2001, 2), Fraction(1, 18), None)
    """
    text = _plain(text)
    if alone:
        sides = [side for side in re.split(r"=|≈|\\approx", text) if _NUMBER.search(side)]
        text = re.sub(r"(^|\() ?- (?=[0-9.])", r"\1-", sides[-1] if sides else "")
        if _UNREAD.search(_NUMBER.sub("0", text)):
            return None
    found = collections.deque(_NUMBER.finditer(text), maxlen=1)
    return _value(found[0]) if found else None


def whole_number(text: str) -> Fraction | None:
    r"""The number that a text is, as models write it, and None where it is more or less than one.

    >>> whole_number(r"\frac12"), whole_number("1/2"), whole_number("2x"), whole_number("x + 3")
    (Fraction(1, 2), Fraction(1, 2), None, None)
    """
    found = _NUMBER.fullmatch(_plain(text).replace(_CLOSED, "").strip(f" {_THIN}").removesuffix("."))
    return _value(found) if found else None


def is_number(text: str) -> bool:
    """Whether a text is one number and nothing else, in plain digits.

    >>> [is_number(text) for text in ("-1,000.5", "1e-05", "1/2", "2 cats", "")]
    [True, True, False, False, False]
    """
    return re.fullmatch(rf"[-+]?{_PLAIN}(?:[eE][-+]?[0-9]{{1,3}})?", text.replace("\u2212", "-")) is not None


def shown(value: Fraction) -> str:
    """A number for messages, ten digits at most.

    >>> shown(Fraction(10)), shown(Fraction(1, 3))
    ('10', '0.3333333333')
    """
    return f"{Decimal(value.numerator) / Decimal(value.denominator):.10}"
