"""Composition tables by known facts and by the axioms of relation algebras; puzzles have one answer."""

import numpy as np
import pytest

from experiments.analysis.parts import qualitative_calculi as q


def _set(calculus, *names):
    return sum(1 << calculus.names.index(name) for name in names)


def _comp(calculus, left, right):
    return q.compose(calculus, _set(calculus, left), _set(calculus, right))


def test_allen_by_known_facts():
    a = q.allen()
    assert a.table.shape == (13, 13)
    assert sum(bin(int(x)).count("1") for x in a.table.ravel()) == 409
    assert sum(bin(int(x)).count("1") == 1 for x in a.table.ravel()) == 97
    assert _comp(a, "m", "m") == _set(a, "b")
    assert _comp(a, "o", "o") == _set(a, "b", "o", "m")
    assert _comp(a, "o", "d") == _set(a, "o", "s", "d")
    assert _comp(a, "b", "bi") == a.everything


def test_rcc8_by_known_facts():
    r = q.rcc8()
    assert _comp(r, "DC", "DC") == r.everything
    assert _comp(r, "TPP", "DC") == _set(r, "DC")
    for name in r.names:
        assert _comp(r, "EQ", name) == _comp(r, name, "EQ") == _set(r, name)


@pytest.mark.parametrize("calculus", [q.allen(), q.rcc8()], ids=["allen", "rcc8"])
def test_axioms(calculus):
    size = len(calculus.names)

    def turned(mask):
        return sum(1 << int(calculus.converse[k]) for k in q.members(mask))

    for r in range(size):
        assert calculus.converse[calculus.converse[r]] == r
        for s in range(size):
            composed = int(calculus.table[r, s])
            back = q.compose(calculus, turned(1 << s), turned(1 << r))
            assert turned(composed) == back, (calculus.names[r], calculus.names[s])
            for t in range(size):  # x r y s z and x t z: the triangle read from any corner
                assert bool(composed >> t & 1) == bool(q.compose(calculus, turned(1 << r), 1 << t) >> s & 1)


def test_puzzles():
    rng, calculus = np.random.default_rng(0), q.rcc8()
    for paths in (1, 2, 3):
        for _ in range(5):
            edges, answer = q.draw_puzzle(rng, calculus, length=2, paths=paths)
            sets = [q.closures(calculus, [int(x) for x in path])[-1] for path in edges]
            met = np.bitwise_and.reduce(sets)
            assert met == 1 << answer and (paths == 1 or all(s != met for s in sets))
    with pytest.raises(ValueError, match="no puzzle"):
        q.draw_puzzle(rng, calculus, length=9, paths=1, tries=1)
