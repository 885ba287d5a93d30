"""Command lines from dataclasses: every mistake is one clear line that names the nearest flag."""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import math
import sys
import textwrap
import threading
import tokenize
import typing
from collections.abc import Container, Iterable, Sequence
from typing import Annotated, Any

import tyro

from jaxrl_llm.errors import UserError


def spell(name: str) -> str:
    """The flag of a field: ``group_size`` is ``--group-size``.

    >>> spell("group_size")
    '--group-size'
    """
    return f"--{name.replace('_', '-')}"


def check_amount(name: str, value: float | int) -> None:
    """Raises UserError for the value of a field that is negative, infinite or no number."""
    if value < 0:
        raise UserError(f"{spell(name)} {value} must not be negative")
    if not math.isfinite(value):
        raise UserError(f"{spell(name)} {value} must be finite")


def check_length(named: Container[str]) -> None:
    """Raises UserError where the length of a run is given twice, in steps and in passes over its rows."""
    if "steps" in named and "epochs" in named:
        raise UserError("--steps and --epochs both say how long to train; give one of them")


def check_default(settings: Any, names: Iterable[str], why: str) -> None:
    """Raises UserError for a field that has another value than its default, with ``why`` nothing reads it."""
    usual = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in names:
        if (value := getattr(settings, name)) != usual[name]:
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            given = spell(name) if value is True else f"{spell(name)} {shown}"
            raise UserError(f"{given} {why}, or drop {spell(name)}")


def check_seed(seed: int) -> None:
    """Raises UserError for a seed that JAX would not tell from another one."""
    if seed < 0:
        raise UserError(f"--seed {seed} must be at least 0")
    if seed >= 2**32:
        raise UserError(f"--seed {seed} must be below 2**32")


@functools.cache
def _own_comments(kind: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # a class that was made, not written
        return {}
    lines, found = source.splitlines(), {}
    words = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {word.start[0]: word.string.lstrip("# ") for word in words if word.type == tokenize.COMMENT}
    for node in (node for part in ast.parse(source).body if isinstance(part, ast.ClassDef) for node in part.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above, first = [], node.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                above.insert(0, comments[first])
                first -= 1
            beside = [
                text for at, text in comments.items()
                if node.lineno <= at <= (node.end_lineno or 0) and not text.startswith("fmt:")
            ]  # fmt: skip
            found[node.target.id] = " ".join(beside or above)
    return found


def explained(kind: type, field: dataclasses.Field) -> Any:
    """The type of a field of ``kind``, with the comment beside or above it as the help of its flag.

    tyro reads comments where a class is written; classes that are made of fields of others have lost them. A class that
    gives a field another default and no comment leaves it that of the class before.
    """
    comment = next(filter(None, (_own_comments(part).get(field.name) for part in kind.__mro__)), "")
    return Annotated[field.type, tyro.conf.arg(help=comment)] if comment else field.type


def listed(kind: Any, prog: str) -> str:
    """The flags of the dataclass ``kind`` as ``--help`` lists them."""
    return tyro.extras.get_parser(kind, prog=prog).format_help()


_PARSING = threading.Lock()  # workers of one process parse at once, and each would put the other's page back


class _Heard(io.StringIO):
    """What this thread writes; what others write goes where it went."""

    def __init__(self, before: Any):
        super().__init__()
        self.before, self.thread = before, threading.get_ident()

    def write(self, text: str) -> int:
        return super().write(text) if threading.get_ident() == self.thread else self.before.write(text)


def _flagged(kind: Any) -> list[str]:
    """The fields that a flag gives: not those that a command takes by their place."""
    fields = dataclasses.fields(kind)
    return [f.name for f in fields if tyro.conf.Positional not in getattr(f.type, "__metadata__", ())]


def several(kind: Any) -> set[str]:
    """The fields of a dataclass that take any number of values."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name for field in fields if typing.get_origin(field.type) is tuple}


def joined(arguments: Sequence[str], many: Iterable[str]) -> list[str]:
    """The words of a command line, where a flag of several values that is given again adds to the ones before.

    Args:
      many: names of the fields that have several values.

    >>> joined(["--stop", "a", "--steps", "3", "--stop=b", "c"], ["stop"])
    ['--stop', 'a', 'b', 'c', '--steps', '3']
    """
    known = {spell(name): [spell(name)] for name in many}
    names = [word.partition("=")[0].replace("_", "-") for word in arguments]
    again = {name for name in known if names.count(name) > 1}
    found: list[list[str]] = [[]]
    for name, word in zip(names, arguments, strict=True):
        if name in again:
            _, given, value = word.partition("=")
            known[name] += [value] if given else []
            found.append(known[name])
        elif word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return [word for part in {id(part): part for part in found}.values() for word in part]


def named(arguments: Sequence[str]) -> dict[str, str]:
    """The fields that a command line names as flags, each with the word behind it.

    >>> named(["--model", "nano", "--no-remat", "--steps=3"])
    {'model': 'nano', 'remat': '--steps=3', 'steps': '3'}
    """
    found = {}
    for k, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.lstrip("-").removeprefix("no-").replace("-", "_")
            found[name] = value if equals else "".join(arguments[k + 1 : k + 2])
    return found


def read(kind: Any, arguments: Sequence[str], *, prog: str, default: Any = None, names: Iterable[str] = ()) -> Any:
    """An object of the dataclass ``kind`` from the words of a command line; ``--help`` prints and exits with 0.

    Args:
      default: the object whose values stand where no flag is given; None: the defaults of ``kind``.
      names: fields to suggest for an unknown flag; none given: those of ``kind``.

    Raises:
      UserError: for an unknown flag, a missing or a malformed value.
    """
    given = {} if default is None else {"default": default}
    arguments = joined(arguments, several(kind))
    try:
        with _PARSING, contextlib.redirect_stderr(_Heard(sys.stderr)) as said:
            found, unknown = tyro.cli(kind, args=arguments, prog=prog, return_unknown_args=True, **given)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        lines = [line.strip("│|╭╮╰╯+ ") for line in said.getvalue().splitlines()]
        lines = [line for line in lines if line.strip("─-")]  # a title, the message, help
        message = itertools.takewhile(lambda line: "helptext" not in line, lines[1:])
        raise UserError(f"{' '.join(message)}; see --help") from stop
    if unknown:
        known = [spell(name) for name in (list(names) or _flagged(kind))]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
        raise UserError(f"unknown argument {unknown[0]!r}; " + (f"did you mean {near[0]}?" if near else "see --help"))
    return found
