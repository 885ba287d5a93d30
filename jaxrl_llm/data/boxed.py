r"""What ``\boxed{}`` holds: how solutions and responses mark a mathematical answer."""

import re

# a command is read before its brace, an escaped brace is a brace that is shown and neither opens nor closes
_MARK = re.compile(r"\\\\?(?:boxed|fbox)[ \t\n]*\{|\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"\\(?:boxed|fbox)[ \t]+([^\s${}\\]+)")


def last_boxed(text: str, *, bare: bool = False) -> str | None:
    r"""What the last box of a text holds, braces balanced; None where none is closed. Reads the text once.

    Args:
      bare: without a box in braces, take the word behind ``\boxed``, as a few solutions of MATH are written.

    >>> last_boxed(r"not \boxed{3} but \boxed{\frac{1}{2}} or \fbox{"), last_boxed(r"so \boxed 2.", bare=True)
    ('\\frac{1}{2}', '2')
    """
    opened: list[int | None] = []  # of every brace that is open, where the contents of a box begin
    last, end = -1, -1
    for mark in _MARK.finditer(text):
        if mark[0] == "{":
            opened.append(None)
        elif len(mark[0]) > 2:
            opened.append(mark.end())
        elif mark[0] == "}" and opened and (begin := opened.pop()) is not None and begin > last:
            last, end = begin, mark.start()
    if end >= 0:
        return text[last:end]
    words = _BARE.findall(text) if bare else []
    return words[-1].rstrip(".,;") if words else None
