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


@pytest.mark.parametrize("make", [q.rcc8, q.allen])
def test_puzzles(make):
    rng, calculus = np.random.default_rng(0), make()
    for paths, length in ((1, 2), (2, 2), (3, 2), (2, 6), (3, 6)):
        for _ in range(4):
            edges, answer = q.draw_puzzle(rng, make, length=length, paths=paths)
            assert edges.shape == (paths, length)
            sets = [q.closures(calculus, [int(x) for x in path])[-1] for path in edges]
            met = np.bitwise_and.reduce(sets)
            assert met == 1 << answer and (paths == 1 or all(s != met for s in sets))
            assert q.solved(make, edges.tolist()) == answer
    with pytest.raises(ValueError, match="no puzzle"):
        q.draw_puzzle(rng, make, length=2, paths=3, tries=0)
    assert q.solved(make, [[0]]) == 0 and q.solved(make, [[0], [1]]) == -1


@pytest.mark.parametrize("make", [q.rcc8, q.allen])
def test_chains_mean_what_their_edges_do(make):
    rng, calculus = np.random.default_rng(1), make()
    for _ in range(30):
        path = [int(x) for x in rng.integers(0, len(calculus.names), 2)]
        grown = q.expanded(rng, make, path, 6)
        assert len(grown) == 6
        assert q.closures(calculus, grown)[-1] == q.closures(calculus, path)[-1]
        assert q.expanded(rng, make, path, 2) == path
