"""Qualitative calculi: Allen's interval algebra and RCC-8, composition of sets of relations, and puzzles of paths.

A set of base relations is a bit mask. A puzzle asks how the target stands to the source, given ``b`` disjoint paths of
``k`` edges; each path allows a set of relations, and only their intersection is a single one.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

ALLEN = ("b", "bi", "m", "mi", "o", "oi", "s", "si", "d", "di", "f", "fi", "e")
RCC8 = ("DC", "EC", "PO", "TPP", "NTPP", "TPPi", "NTPPi", "EQ")

# rows: R(x, y); columns: S(y, z) in the order of RCC8; an entry: the possible relations of x to z, "*" for all
_RCC8_TABLE = """
*|DC EC PO TPP NTPP|DC EC PO TPP NTPP|DC EC PO TPP NTPP|DC EC PO TPP NTPP|DC|DC|DC
DC EC PO TPPi NTPPi|DC EC PO TPP TPPi EQ|DC EC PO TPP NTPP|EC PO TPP NTPP|PO TPP NTPP|DC EC|DC|EC
DC EC PO TPPi NTPPi|DC EC PO TPPi NTPPi|*|PO TPP NTPP|PO TPP NTPP|DC EC PO TPPi NTPPi|DC EC PO TPPi NTPPi|PO
DC|DC EC|DC EC PO TPP NTPP|TPP NTPP|NTPP|DC EC PO TPP TPPi EQ|DC EC PO TPPi NTPPi|TPP
DC|DC|DC EC PO TPP NTPP|NTPP|NTPP|DC EC PO TPP NTPP|*|NTPP
DC EC PO TPPi NTPPi|EC PO TPPi NTPPi|PO TPPi NTPPi|PO TPP TPPi EQ|PO TPP NTPP|TPPi NTPPi|NTPPi|TPPi
DC EC PO TPPi NTPPi|PO TPPi NTPPi|PO TPPi NTPPi|PO TPPi NTPPi|PO TPP NTPP TPPi NTPPi EQ|NTPPi|NTPPi|NTPPi
DC|EC|PO|TPP|NTPP|TPPi|NTPPi|EQ
"""
_RCC8_CONVERSE = {"TPP": "TPPi", "NTPP": "NTPPi", "TPPi": "TPP", "NTPPi": "NTPP"}


class Calculus(NamedTuple):
    """Names of the base relations, ``table[r, s]`` the mask of compositions, ``converse[r]`` a base relation."""

    names: tuple[str, ...]
    table: np.ndarray
    converse: np.ndarray

    @property
    def everything(self) -> int:
        """The mask of all relations."""
        return 2 ** len(self.names) - 1


def interval_relation(x: tuple[int, int], y: tuple[int, int]) -> str:
    """Allen's relation of two intervals with integer ends."""
    if x == y:
        return "e"
    if x[1] < y[0] or y[1] < x[0]:
        return "b" if x[1] < y[0] else "bi"
    if x[1] == y[0] or y[1] == x[0]:
        return "m" if x[1] == y[0] else "mi"
    if x[0] == y[0]:
        return "s" if x[1] < y[1] else "si"
    if x[1] == y[1]:
        return "f" if x[0] > y[0] else "fi"
    if x[0] > y[0] and x[1] < y[1]:
        return "d"
    if x[0] < y[0] and x[1] > y[1]:
        return "di"
    return "o" if x[0] < y[0] else "oi"


@lru_cache(maxsize=1)
def allen() -> Calculus:
    """Allen's algebra, its table derived from all triples of intervals with ends in 0 .. 6 (six ends may differ)."""
    intervals = list(combinations(range(7), 2))
    number = {name: k for k, name in enumerate(ALLEN)}
    between = {(x, y): number[interval_relation(x, y)] for x in intervals for y in intervals}
    table, converse = np.zeros((13, 13), np.int64), np.zeros(13, np.int64)
    for x in intervals:
        for y in intervals:
            converse[between[x, y]] = between[y, x]
            for z in intervals:
                table[between[x, y], between[y, z]] |= 1 << between[x, z]
    return Calculus(ALLEN, table, converse)


@lru_cache(maxsize=1)
def rcc8() -> Calculus:
    """The region connection calculus with eight relations; table from Cohn et al., 1997."""
    number = {name: k for k, name in enumerate(RCC8)}
    table = np.zeros((8, 8), np.int64)
    for r, line in enumerate(_RCC8_TABLE.strip().splitlines()):
        for s, entry in enumerate(line.split("|")):
            names = RCC8 if entry == "*" else entry.split()
            table[r, s] = sum(1 << number[name] for name in names)
    converse = np.array([number[_RCC8_CONVERSE.get(name, name)] for name in RCC8])
    return Calculus(RCC8, table, converse)


def members(mask: int) -> list[int]:
    """The base relations of a set."""
    return [k for k in range(mask.bit_length()) if mask >> k & 1]


def compose(calculus: Calculus, left: int, right: int) -> int:
    """Composition of two sets: the union over their members.

    >>> allen().names[3], compose(allen(), 1 << ALLEN.index("m"), 1 << ALLEN.index("m")) == 1 << ALLEN.index("b")
    ('mi', True)
    """
    out = 0
    for r in members(left):
        for s in members(right):
            out |= int(calculus.table[r, s])
    return out


def closures(calculus: Calculus, path: Sequence[int]) -> list[int]:
    """The sets of relations of the source to every node along a path of base relations."""
    sets = [1 << path[0]]
    for relation in path[1:]:
        sets.append(compose(calculus, sets[-1], 1 << relation))
    return sets


@lru_cache(maxsize=8)
def _chains(make: Callable[[], Calculus], length: int) -> dict[int, list[tuple[int, ...]]]:
    """All chains of so many edges whose closure is a single relation, by that relation."""
    calculus = make()
    found: dict[int, list[tuple[int, ...]]] = {}
    for path in product(range(len(calculus.names)), repeat=length):
        end = closures(calculus, path)[-1]
        if end & (end - 1) == 0:
            found.setdefault(end.bit_length() - 1, []).append(path)
    return found


def expanded(
    rng: np.random.Generator, make: Callable[[], Calculus], path: Sequence[int], length: int
) -> list[int] | None:
    """The path with edges replaced, one after another, by chains of two that mean exactly the same, up to ``length``.

    The closure does not change: a long path asks for what a short one does. None where no edge can be replaced.

    From "Benchmarking Systematic Relational Reasoning with Large Language and Reasoning Models" (STaR),
    arXiv:2503.23487, section 3, as in its published generator.
    """
    path, pairs, identity = list(path), _chains(make, 2), len(make().names) - 1
    telling = {edge: [chain for chain in chains if identity not in chain] for edge, chains in pairs.items()}
    while len(path) < length:
        # a chain with the identity says nothing new: it is taken where no edge has another
        use = telling if any(telling.get(edge) for edge in path) else pairs
        open_ = [k for k, edge in enumerate(path) if use.get(edge)]
        if not open_:
            return None
        k = open_[int(rng.integers(len(open_)))]
        chains = use[path[k]]
        path[k : k + 1] = chains[int(rng.integers(len(chains)))]
    return path


def draw_puzzle(
    rng: np.random.Generator, make: Callable[[], Calculus], *, length: int, paths: int, tries: int = 20_000
) -> tuple[np.ndarray, int]:
    """``(edges [paths, length], answer)``: the paths' sets meet in the answer alone, and no single path gives it.

    Short paths (two edges, or one where ``length`` is one) are drawn until their sets meet so, and then expanded edge
    by edge. With one path its set is the answer itself.

    Raises:
      ValueError: when none is found.
    """
    calculus = make()
    size, short = len(calculus.names), min(length, 2)
    for _ in range(tries):
        edges = rng.integers(0, size, (paths, short))
        ends = [closures(calculus, list(map(int, path)))[-1] for path in edges]
        met = ends[0]
        for end in ends[1:]:
            met &= end
        if not (met and met & (met - 1) == 0 and (paths == 1 or all(end != met for end in ends))):
            continue
        grown = [expanded(rng, make, [int(x) for x in path], length) for path in edges]
        whole = [path for path in grown if path is not None]
        # composing from the left is no more than an upper bound: a chain inside a path may allow more than its edge
        if len(whole) == paths and [closures(calculus, path)[-1] for path in whole] == ends:
            return np.asarray(whole), met.bit_length() - 1
    raise ValueError(f"no puzzle with {paths} paths of {length} edges in {tries} tries; fewer edges are easier")


def solved(make: Callable[[], Calculus], edges: Sequence[Sequence[int]]) -> int:
    """The solver: the one relation in all paths' sets, -1 where there is none or several."""
    calculus = make()
    met = calculus.everything
    for path in edges:
        met &= closures(calculus, path)[-1]
    return met.bit_length() - 1 if met and met & (met - 1) == 0 else -1
