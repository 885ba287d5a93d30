"""Blocks between fences of three backquotes: where models write programs and queries."""

import re
from typing import NamedTuple

PYTHON = "python|py"  # as tags name it
_FENCE = re.compile(r"([ \t]*)```+(.*)", re.DOTALL)
_ITEM = re.compile(r"(?:[-*+>]|[0-9]{1,3}[.)])[ \t]+$")


class Block(NamedTuple):
    """What stands behind an opening fence (``python title="a.py"``), and the text up to the closing one."""

    tag: str
    text: str


def _opened(line: str) -> tuple[int, str] | None:
    """Where a line outside of blocks opens one: by how much its fence is indented, and the tag."""
    if line.count("```") % 2 == 0:
        return None
    before, _, tag = line.rpartition("```")
    shown = before.rstrip("`").lstrip()
    return len(before) if not shown or _ITEM.fullmatch(shown) else 0, tag.strip()


def _closed(line: str, indented: int) -> tuple[str, str | None] | None:
    """Of a line that closes a block: what it still has of it, and the tag of the next block where it opens one."""
    fence = _FENCE.fullmatch(line)
    if fence and "`" not in fence[2]:
        if len(fence[1]) > indented + 3:  # of an example inside the block
            return None
        return "", fence[2].strip() if fence[2][:1].strip() else None  # a tag follows at once, else it is talk
    end = line.rstrip()
    return (end[:-3], None) if end.endswith("```") and line.count("```") % 2 else None


def _block(tag: str, indented: int, lines: list[str]) -> list[Block]:
    """The block of these lines without the indentation that they share with the fence; none where it is empty."""
    cut = min((len(x) - len(x.lstrip(" \t")) for x in lines if x.strip()), default=-1)
    return [Block(tag, "".join(f"{x[min(cut, indented) :]}\n" for x in lines))] if cut >= 0 else []


def blocks(text: str) -> list[Block]:
    r"""The blocks of a text in order; one that is never closed goes on to the end. Every line is read once.

    >>> blocks("Run:\n```bash\npip install x\n```\nthen\n```py\nf()")
    [Block(tag='bash', text='pip install x\n'), Block(tag='py', text='f()\n')]
    """
    found: list[Block] = []
    lines: list[str] = []
    tag, indented = None, 0
    for line in text.replace("\r\n", "\n").split("\n"):
        if tag is None:
            if opened := _opened(line):
                indented, tag = opened
        elif closed := _closed(line, indented):
            found += _block(tag, indented, [*lines, closed[0]] if closed[0] else lines)
            tag, lines = closed[1], []
        else:
            lines.append(line)
    return found if tag is None else found + _block(tag, indented, lines)


def written_in(language: str, found: list[Block]) -> list[str]:
    """The texts of the blocks in a language; without any those without a tag, else all.

    Args:
      language: a pattern that its tags begin with, whatever their case.

    >>> written_in(PYTHON, [Block("bash", "ls"), Block("Python3", "f()"), Block("", "2")])
    ['f()']
    """
    pattern = re.compile(rf"[{{.]*(?:{language})(?![a-z])", re.IGNORECASE)
    own = [block.text for block in found if pattern.match(block.tag)]
    return own or [block.text for block in found if not block.tag] or [block.text for block in found]
