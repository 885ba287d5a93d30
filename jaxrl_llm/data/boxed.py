r"""What ``\boxed{}`` holds: how solutions and responses mark a mathematical answer."""

import re

# a command is read before its brace, an escaped brace is a brace that is shown and neither opens nor closes
_MARK = re.compile(r"\\\\?(?:boxed|fbox)[ \t\n]*\{|\\.|[{}]", re.DOTALL)
_BESIDE = re.compile(
    r"\\[()\[\]]|\\q?quad|\\(?:text|mbox)|[\s$*{}]"
)  # what shows a formula or a word, and says nothing
_AND = {",", ";", "and", "or", ",and", ",or"}
_BARE = re.compile(r"\\(?:boxed|fbox)[ \t]+([^\s${}\\]+)")


def last_boxed(text: str, *, bare: bool = False) -> str | None:
    r"""What the last box of a text holds, braces balanced; None where none is closed. Reads the text once.

    Args:
      bare: without a box in braces, take the word behind ``\boxed``, as a few solutions of MATH are written.

    >>> last_boxed(r"not \boxed{3} but \boxed{\frac{1}{2}} or \fbox{"), last_boxed(r"so \boxed 2.", bare=True)
    ('\\frac{1}{2}', '2')
    """
    if found := _closed(text):
        _, begin, end = found[-1]
        return text[begin:end]
    words = _BARE.findall(text) if bare else []
    return words[-1].rstrip(".,;") if words else None


def last_boxes(text: str) -> tuple[list[str], str]:
    r"""What the last box holds, behind those that are one answer with it, and the text that follows.

    Boxes are one answer where a comma, a semicolon, "and" or "or" stands between and nothing else.

    >>> last_boxes(r"not \boxed{7} but $\boxed{3}$ and $\boxed{5}$."), last_boxes(r"\boxed{3} wait \boxed{5}")
    ((['3', '5'], '$.'), (['5'], ''))
    """
    kept: list[tuple[int, int, int]] = []
    for box in reversed(_closed(text)):
        if kept and _BESIDE.sub("", text[box[2] + 1 : kept[-1][0]]) not in _AND:
            break
        kept.append(box)
    return [text[begin:end] for _, begin, end in reversed(kept)], text[kept[0][2] + 1 :] if kept else text


def _closed(text: str) -> list[tuple[int, int, int]]:
    """Where every box that is closed stands, and where its contents begin and end; in the order of their beginnings."""
    opened: list[tuple[int, int] | None] = []  # of every brace that is open, where it is that of a box
    found = []
    for mark in _MARK.finditer(text):
        if mark[0] == "{":
            opened.append(None)
        elif len(mark[0]) > 2:
            opened.append(mark.span())
        elif mark[0] == "}" and opened and (box := opened.pop()):
            found.append((*box, mark.start()))
    return sorted(found)
