"""What crosses between a program and its tests: exact plain data, and nothing else."""

import collections
import datetime
import decimal
import enum
import fractions
import json
import math

import pytest

from jaxrl_llm.sandbox import values


def _there_and_back(value):
    kept = []

    def keep(x):
        kept.append(x)
        return len(kept) - 1

    text = json.dumps(values.encode(value, keep))
    return values.decode(json.loads(text), lambda n: ("held", n)), kept


PLAIN = [
    None, True, False, 0, -1, 2**53, -(2**200), 0.1, -0.0, 1e308, math.inf, "", "ä\0\n", "\ud800", b"\0\xff", 1 + 2j,
    [], [1, [2, (3,)]], (), (1,), {1, 2}, frozenset({3}), {}, {1: "a", (2, 3): [4.5], None: True}, range(1, 9, 2),
    fractions.Fraction(1, 3), bytearray(b"x"), decimal.Decimal("1.50"), decimal.Decimal("-Infinity"),
    collections.deque([1, [2]], 5), collections.deque(), collections.Counter("aab"), collections.OrderedDict(b=1, a=2),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4, fold=1), datetime.date(1, 1, 1), datetime.time(23, 59),
    datetime.timedelta(-1, 5, 6), datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_as_they_are(value):
    back, kept = _there_and_back(value)
    assert back == value and type(back) is type(value) and not kept
    assert repr(back) == repr(value)  # also the sign of zero


def test_not_a_number_comes_back():
    assert math.isnan(_there_and_back(math.nan)[0])


class Liar(int):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __index__(self):
        return 7


class Colour(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Liar(5), 5),
        (Colour.RED, 3),
        (collections.defaultdict(list, a=1), {"a": 1}),
    ],
)
def test_subclasses_become_their_base(value, plain):
    back, kept = _there_and_back(value)
    assert type(back) is type(plain) and back == plain and not kept


def test_named_tuples_keep_their_names():
    back, kept = _there_and_back([collections.namedtuple("P", "x y")(1, (2,))])
    assert back == [(1, (2,))] and (back[0].x, back[0].y, repr(back[0])) == (1, (2,), "P(x=1, y=(2,))") and not kept


def test_views_of_dictionaries():
    given = {"a": 1, "b": [2]}
    keys, values_, items = _there_and_back([given.keys(), given.values(), given.items()])[0]
    assert keys == given.keys() == {"a", "b"} and items == given.items() and list(values_) == [1, [2]]
    assert keys != ["a", "b"] and values_ != [1, [2]]


def test_other_objects_are_numbers():
    thing = object()
    back, kept = _there_and_back([thing, len])
    assert back == [("held", 0), ("held", 1)] and kept == [thing, len]


NONSENSE = [
    [], {}, ["?"], ["l", ["?"]], ["i", "x"], ["f", "one"], ["d", [1]], ["d", [["l"], 1]], ["s", ["l"]], ["b", "0"],
    ["q", "0x1", "0x0"], ["h"], ["h", "x"],
    ["n", "P", ["x y", "__class__"], 1, 2], ["n", "P", ["a", "a"], 1, 2], ["n", "P"], ["e", "x"],
    ["K", ["l"]], ["I", 1],
    ["D", "one"], ["M", "now", 0], ["L", "x", 1, 1], ["C", [1]], ["r", 1, 2, 0], 1.5, [["l"]], {"value": 1},
]  # fmt: skip


@pytest.mark.parametrize("tree", NONSENSE, ids=repr)
def test_nonsense_is_refused(tree):
    with pytest.raises(values.Unreadable):
        values.decode(tree, lambda n: n)


def test_depth_is_bounded_on_both_sides():
    deep = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(RecursionError):
        values.encode(deep, id)
    tree = ["l"]
    for _ in range(100_000):
        tree = ["l", tree]
    with pytest.raises(values.Unreadable):
        values.decode(tree, id)
