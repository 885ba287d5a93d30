"""Sequences of a group that begin alike as a tree, planned on the host: what they share is computed once.

Groups share a prompt, turns that are rows of their own the conversation so far, branches of a search all that lies
before they part. Whoever shares is found by comparing tokens and positions, so nothing has to say so.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxrl_llm.train import packing
from jaxrl_llm.train.packing import Layout, Links, Rows, Sequence

BLOCKS = (8, 64)  # columns of a block, at least and at most; a sequence wastes half of one in the mean
SIXTEENTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16)  # of the blocks of padded rows: what is compiled
MORE = 1 / 32  # so many more columns may blocks of twice the size have: half as many keys and values are gathered
LEAST = 0.9  # trees of more columns than this share of packed rows are not worth their blocks


class Tree(NamedTuple):
    """Blocks of columns, and where sequences lie in them."""

    sequences: list[Sequence]
    columns: list[np.ndarray]  # of each sequence, numbered from 0
    chains: list[tuple[int, ...]]  # of each block: those on the way to it and itself


class _Grower:
    """Grows one tree."""

    def __init__(self, keys: list[np.ndarray], block: int):
        self.keys, self.block = keys, block
        self.columns = [np.zeros(len(key), np.int64) for key in keys]
        self.chains: list[tuple[int, ...]] = []

    def blocks(self, columns: int) -> int:
        return -(-columns // self.block)

    def grow(self, ids: list[int], start: int, chain: tuple[int, ...]) -> None:
        """All of ``ids`` are placed before ``start``, and agree there."""
        longest = max(ids, key=lambda i: len(self.keys[i]))
        whole = self.keys[longest]
        agree = {i: _agreeing(self.keys[i], whole, start) for i in ids}
        parting = [agree[i] for i in ids if agree[i] < len(self.keys[i])]
        if not parting:  # all are beginnings of the longest
            self._place(ids, start, len(whole), chain)
            return
        part = min(parting)
        branches: dict[int, list[int]] = {}
        ended = [i for i in ids if len(self.keys[i]) <= part]
        for i in ids:
            if len(self.keys[i]) > part:
                branches.setdefault(int(self.keys[i][part]), []).append(i)
        end = self._cut(list(branches.values()), start, part)
        chain = self._place(ids, start, end, chain)
        late = [i for i in ended if len(self.keys[i]) > end]
        for k, branch in enumerate(branches.values()):
            self.grow(branch + (late if k == 0 else []), end, chain)

    def _cut(self, branches: list[list[int]], start: int, part: int) -> int:
        """Where branches begin: where they part, in a new block, or before, at the last whole block."""
        before = part - (part - start) % self.block

        def cost(end: int) -> int:
            rest = (max(len(self.keys[i]) for i in branch) - end for branch in branches)
            return self.blocks(end - start) + sum(map(self.blocks, rest))

        return part if cost(part) <= cost(before) else before

    def _place(self, ids: list[int], start: int, end: int, chain: tuple[int, ...]) -> tuple[int, ...]:
        """New blocks for columns ``start`` to ``end`` of ``ids``; the way to the last of them."""
        first = len(self.chains) * self.block
        for _ in range(self.blocks(end - start)):
            chain = (*chain, len(self.chains))
            self.chains.append(chain)
        for i in ids:
            here = self.columns[i][start:end]
            here[:] = first + np.arange(len(here))
        return chain


def _agreeing(one: np.ndarray, other: np.ndarray, start: int) -> int:
    """How far two sequences agree, which they do before ``start``."""
    least = min(len(one), len(other))
    unlike = np.flatnonzero(one[start:least] != other[start:least])
    return start + int(unlike[0]) if len(unlike) else least


def grown(rows: Rows, sequences: list[Sequence], block: int) -> Tree:
    """The tree of some sequences; of those without anything in common a forest.

    Raises:
      ValueError: for positions that do not rise along a sequence.
    """
    keys = []
    for one in sequences:
        positions = rows.positions[one.row, one.columns].astype(np.int64)
        if (np.diff(positions) <= 0).any():
            raise ValueError(f"positions of row {one.row} do not rise, which blocks need; give --layout packed")
        keys.append(positions << 32 | rows.tokens[one.row, one.columns].astype(np.int64))
    order = sorted(range(len(keys)), key=lambda i: keys[i].tolist())  # halves of a tree then share what they can
    grower = _Grower([keys[i] for i in order], block)
    grower.grow(list(range(len(keys))), 0, ())
    return Tree([sequences[i] for i in order], grower.columns, grower.chains)


class _Shelf:
    """The rows of one part: each takes trees until its blocks are used up."""

    def __init__(self, rows: int, limit: int):
        self.limit = limit
        self.held: list[list[Tree]] = [[] for _ in range(rows)]

    def used(self) -> list[int]:
        return [sum(len(tree.chains) for tree in row) for row in self.held]

    def add(self, tree: Tree, split: Callable[[list[Sequence]], Tree]) -> bool:
        """Takes a tree, whole or in halves, where it is least full; False leaves the shelf as it was."""
        before = [list(row) for row in self.held]
        left = [tree]
        while left:
            one, used = left.pop(), self.used()
            row = int(np.argmin(used))
            if used[row] + len(one.chains) <= self.limit:
                self.held[row].append(one)
            elif len(one.sequences) > 1:
                half = len(one.sequences) // 2
                left += [split(one.sequences[half:]), split(one.sequences[:half])]
            else:
                self.held = before
                return False
        return True


def block_of(width: int) -> int:
    """An eighth of a row, as a power of two within ``BLOCKS``.

    >>> [block_of(width) for width in (35, 300, 512, 4096)]
    [8, 32, 64, 64]
    """
    return min(max(1 << max(width // 8, 1).bit_length() - 1, BLOCKS[0]), BLOCKS[1])


def prefix_trees(rows: Rows, *, parts: int = 1, shards: int = 1, block: int = 0) -> Layout:
    """Trees of groups in blocks; packed rows where few tokens are shared, or positions do not rise.

    With one part the number of blocks of a row is one of ``SIXTEENTHS`` of those of padded rows. With
    several it is that of the padded rows of a part, and parts that stay empty cost nothing. So is the number of blocks
    that one sees one of a few.

    Args:
      parts: of the update; whole groups in each.
      shards: rows of the layout in each part, as many as the devices that rows divide over.
      block: columns of a block; 0: ``block_of`` the rows, or twice that where hardly more columns are wasted.
    """
    sizes = (block,) if block else (block_of(rows.tokens.shape[1]), 2 * block_of(rows.tokens.shape[1]))
    found = list(packing.sequences(rows))
    try:
        trees, block = _grown_of_a_size(rows, packing.by_group(found, rows.group_ids), sizes)
    except ValueError:
        return packing.packed_rows(rows, parts=parts, shards=shards)
    count, width = rows.tokens.shape
    alone = sum(len(one.columns) for one in found)
    if sum(len(tree.chains) for tree in trees) * block > LEAST * alone:
        return packing.packed_rows(rows, parts=parts, shards=shards)
    most = -(-count // (parts * shards)) * -(-width // block)
    for limit in _limits(trees, shards, most) if parts == 1 else (most,):
        shelves = _shelved(rows, trees, parts, shards, limit, block)
        if shelves is not None:
            return _laid(rows, shelves, (parts, shards, limit), block)
    return packing.packed_rows(rows, parts=parts, shards=shards)


def _grown_of_a_size(rows: Rows, groups: list[list[Sequence]], sizes: tuple[int, ...]) -> tuple[list[Tree], int]:
    """Trees in the largest blocks that waste hardly more than the smallest."""
    best, least = None, 0
    for size in sizes:
        trees = [grown(rows, group, size) for group in groups]
        columns = size * sum(len(tree.chains) for tree in trees)
        if best is None or columns <= (1 + MORE) * least:
            best = trees, size
            least = least or columns
    return best


def _limits(trees: list[Tree], shards: int, most: int) -> Iterator[int]:
    """Blocks of a row that may do, the fewest first."""
    total = sum(len(tree.chains) for tree in trees)
    longest = max((len(chain) for tree in trees for chain in tree.chains), default=0)
    for share in SIXTEENTHS:
        limit = -(most * -share // 16)
        if limit >= longest and limit * shards >= total:
            yield limit


def _shelved(rows: Rows, trees: list[Tree], parts: int, shards: int, limit: int, block: int) -> list[_Shelf] | None:
    """Trees by part and row, the largest first; None where they do not fit."""
    split = partial(grown, rows, block=block)
    shelves = [_Shelf(shards, limit)]
    for tree in trees:
        if not any(shelf.add(tree, split) for shelf in shelves):
            if len(shelves) == parts:
                return None
            shelves.append(_Shelf(shards, limit))
            if not shelves[-1].add(tree, split):
                return None
    return shelves


def _laid(rows: Rows, shelves: list[_Shelf], shape: tuple[int, int, int], block: int) -> Layout:
    """The layout of trees on their shelves."""
    parts, shards, count = shape
    width = rows.tokens.shape[1]
    source = np.full((parts, shards, count * block), -1, np.int32)
    most = max((len(c) for s in shelves for row in s.held for tree in row for c in tree.chains), default=1)
    pages = np.full((parts, shards, count, packing.row_count(most, -(-width // block))), -1, np.int32)
    links = Links(rows, source.shape)
    for part, shelf in enumerate(shelves):
        for row, trees in enumerate(shelf.held):
            begin = 0
            for tree in trees:
                for one, columns in zip(tree.sequences, tree.columns, strict=True):
                    there = begin * block + columns
                    source[part, row, there] = one.row * width + one.columns
                    links.add(part, row, one, there)
                for k, chain in enumerate(tree.chains):
                    pages[part, row, begin + k, : len(chain)] = begin + np.asarray(chain)
                begin += len(tree.chains)
    return Layout(source, (source >= 0).astype(np.int32), *links.made(), pages)
