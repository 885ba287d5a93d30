"""Plain Python values as JSON and back: what a program hands to the tests is data, never its own objects.

A pickle runs code, and an object brings its own ``__eq__``. Here only exact numbers, texts, dates and containers of
them pass; subclasses become their base, everything else a reference that stands for an object of the other side.
"""

import collections
import datetime
import decimal
import fractions
import functools
from collections.abc import Callable
from typing import Any

DEEPEST = 100
_CONTAINERS = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_BACK = {"l": list, "t": tuple, "s": set, "z": frozenset}
_DICTS = {collections.Counter: "C", collections.OrderedDict: "O", dict: "d"}
_DICTS_BACK = {tag: base for base, tag in _DICTS.items()}
_VIEWS = {
    type(view): tag
    for kind in (dict, collections.OrderedDict)  # whose views have types of their own
    for view, tag in ((kind().keys(), "K"), (kind().values(), "V"), (kind().items(), "I"))
}


class Unreadable(ValueError):
    """What arrived is no encoded value."""


def encode(value: Any, keep: Callable[[Any], Any], depth: int = 0) -> Any:
    """A tree for ``json.dumps``.

    Args:
      keep: of an object that is no plain value, the reference (JSON) that stands for it.
    """
    if depth > DEEPEST:
        raise RecursionError("a value is nested too deeply")
    if value is None or value is True or value is False:
        return value
    for base, convert in _SCALARS:
        if isinstance(value, base):
            return convert(value)
    if isinstance(value, tuple) and (fields := _fields(value)):
        return ["n", type(value).__name__, fields, *(encode(x, keep, depth + 1) for x in tuple.__iter__(value))]
    for base, tag in _CONTAINERS.items():
        if isinstance(value, base):
            return [tag, *(encode(x, keep, depth + 1) for x in base.__iter__(value))]
    for base, tag in _DICTS.items():
        if isinstance(value, base):
            return [tag, *([encode(k, keep, depth + 1), encode(v, keep, depth + 1)] for k, v in dict.items(value))]
    if isinstance(value, collections.deque):
        return ["e", value.maxlen, *(encode(x, keep, depth + 1) for x in collections.deque.__iter__(value))]
    if type(value) in _VIEWS:
        return [_VIEWS[type(value)], *(encode(x, keep, depth + 1) for x in value)]
    return ["h", keep(value)]


def _fields(value: tuple) -> list[str]:
    """Names of a named tuple; of any other none."""
    names = getattr(type(value), "_fields", ())
    good = isinstance(names, tuple) and len(names) == tuple.__len__(value)
    return list(names) if good and all(type(x) is str and x.isidentifier() and x[0] != "_" for x in names) else []


@functools.lru_cache(maxsize=64)
def _named(name: str, fields: tuple[str, ...]) -> type:
    return collections.namedtuple(name, fields)


def _integer(value: int) -> Any:
    exact = int.__index__(value)
    return exact if -(2**53) < exact < 2**53 else ["i", hex(exact)]


_SCALARS = (
    (int, _integer),
    (float, lambda x: ["f", float.hex(x)]),
    (str, lambda x: str.__str__(x)),
    (bytes, lambda x: ["b", bytes.hex(x)]),
    (bytearray, lambda x: ["a", bytearray.hex(x)]),
    (complex, lambda x: ["c", float.hex(complex.__complex__(x).real), float.hex(complex.__complex__(x).imag)]),
    (range, lambda x: ["r", *(_integer(n) for n in (x.start, x.stop, x.step))]),
    (fractions.Fraction, lambda x: ["q", hex(int(x.numerator)), hex(int(x.denominator))]),
    (decimal.Decimal, lambda x: ["D", decimal.Decimal.__str__(x)]),
    (datetime.datetime, lambda x: ["M", datetime.datetime.isoformat(x), x.fold]),
    (datetime.date, lambda x: ["Y", datetime.date.isoformat(x)]),
    (datetime.time, lambda x: ["T", datetime.time.isoformat(x), x.fold]),
    (datetime.timedelta, lambda x: ["L", x.days, x.seconds, x.microseconds]),
)


def decode(tree: Any, held: Callable[[Any], Any]) -> Any:
    """The value of a tree that ``encode`` made, or anyone else.

    Args:
      held: of a reference (a number or a list) that stands for an object, what to use in its place.

    Raises:
      Unreadable: for any other tree.
    """
    try:
        return _decoded(tree, held)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
        raise Unreadable(f"not an encoded value: {type(error).__name__}") from error


def _decoded(tree: Any, held: Callable[[Any], Any]) -> Any:
    if tree is None or type(tree) in (bool, int, str):
        return tree
    tag, rest = tree[0], tree[1:]
    if tag in _BACK:
        return _BACK[tag](_decoded(x, held) for x in rest)
    if tag in _DICTS_BACK:
        return _DICTS_BACK[tag]({_decoded(k, held): _decoded(v, held) for k, v in rest})
    if tag == "n":
        # field names are checked by the maker of named tuples
        return _named(rest[0], tuple(rest[1]))(*(_decoded(x, held) for x in rest[2:]))
    if tag in ("e", "K", "V", "I"):
        return _of_items(tag, [_decoded(x, held) for x in rest[tag == "e" :]], rest)
    if tag == "r":
        return range(*(_decoded(x, held) for x in rest))
    if tag == "h":
        return held(rest[0] if isinstance(rest[0], list) else int(rest[0]))
    return _PLAIN[tag](*rest)


def _of_items(tag: str, items: list, rest: list) -> Any:
    if tag == "e":
        return collections.deque(items, rest[0])
    if tag == "K":
        return dict.fromkeys(items).keys()
    return dict(enumerate(items)).values() if tag == "V" else dict(items).items()


_PLAIN = {
    "i": lambda x: int(x, 16),
    "f": float.fromhex,
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
    "c": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
    "D": decimal.Decimal,
    "M": lambda text, fold: datetime.datetime.fromisoformat(text).replace(fold=fold),
    "Y": datetime.date.fromisoformat,
    "T": lambda text, fold: datetime.time.fromisoformat(text).replace(fold=fold),
    "L": lambda days, seconds, microseconds: datetime.timedelta(days, seconds, microseconds),
    "q": lambda top, bottom: fractions.Fraction(int(top, 16), int(bottom, 16)),
}
