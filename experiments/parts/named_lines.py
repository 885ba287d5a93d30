"""Lines of a reply that begin with a name, as models of language are asked to end what they write.

What is read is what a model wrote, of any length: each pattern goes over it once.
"""

import re

# in front of a name: marks and blanks of its own line
FRONT = r"^(?:[^\w\n]|_)*+"
_FLAGS = re.MULTILINE | re.IGNORECASE


def without_marks(text: str) -> str:
    """A text without the blanks and the marks of emphasis at its end.

    >>> without_marks("PERFECT ** _")
    'PERFECT'
    """
    end = len(text)
    while end and (text[end - 1].isspace() or text[end - 1] in "*_"):
        end -= 1
    return text[:end]


def named_line(reply: str, name: str) -> str:
    """What stands behind ``NAME:`` in the last line of a reply that begins so, without marks of emphasis around it.

    Nothing without such a line.

    >>> named_line("RATING: **PERFECT**", "RATING")
    'PERFECT'
    >>> named_line("It is clear.\\n**RATING: PERFECT**", "RATING"), named_line("A good RATING: no", "RATING")
    ('PERFECT', '')
    """
    found = re.findall(rf"{FRONT}{name}[*_]*+\s*+:[*_ \t]*+(.*)$", reply, _FLAGS)
    return without_marks(found[-1]) if found else ""


def behind_name(reply: str, name: str) -> str:
    """All that stands behind the first ``NAME:`` that begins a line; nothing without one.

    >>> behind_name("Sure.\\n**PROBLEM:** Ann has 3.\\nHow many?", "PROBLEM")
    'Ann has 3.\\nHow many?'
    """
    found = re.search(rf"{FRONT}{name}[*_]*+\s*+:[*_]*+(.*)", reply, _FLAGS | re.DOTALL)
    return found[1].strip() if found else ""
