"""Which rows of a batch are computed together: sequences packed into fewer rows, planned on the host.

A batch stays as it is, ``[B, T]``, and so do losses, groups and denominators. Only the pass through the model reads the
tokens in another arrangement, a ``Layout``, and its log-probabilities go back to where the tokens stand. What no loss
asks for is left out: padding, whatever follows the last masked token, and rows without a masked token.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

LAYOUT = "layout"  # its name in the extras of a batch
EIGHTHS = (1, 2, 3, 4, 5, 6, 8)  # of the padded rows: the shapes that are compiled, and no others


class Layout(NamedTuple):
    """Where the tokens of ``[B, T]`` rows are computed; with ``P`` parts the first four have a leading axis ``P``."""

    source: Int[Array, "R C"]  # of each computed column: the token ``b T + t``; -1: nothing
    segments: Int[Array, "R C"]  # as ``Batch.segment_ids`` of the computed rows
    target: Int[Array, "R K"]  # columns whose log-probability is asked for; -1: none
    before: Int[Array, "R K"]  # the columns that those are predicted from
    place: Int[Array, "B T"]  # of each token: its number among all targets, ``(p R + r) K + k``; -1: not asked for
    pages: Int[Array, "R N M"] | None = None  # blocks of columns that each block sees; see ``Policy.hidden_pages``


class Rows(NamedTuple):
    """What is planned from, as NumPy arrays."""

    tokens: Int[np.ndarray, "B T"]
    segment_ids: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, "B T"]
    mask: np.ndarray  # [B, T], the tokens whose log-probability is asked for
    group_ids: Int[np.ndarray, " B"]  # rows of one group go into one part


class Sequence(NamedTuple):
    """One segment of a row up to its last masked token."""

    row: int
    columns: np.ndarray  # [L], of the row


Planner = Callable[..., Layout]  # (rows, parts=, shards=)


def rows_of(batch: Any, mask: Any = None) -> Rows:
    """What a planner needs of a batch or of trajectories that are NumPy arrays."""
    groups = getattr(batch, "group_ids", None)
    groups = np.arange(len(batch.tokens)) if groups is None else groups
    return Rows(batch.tokens, batch.segment_ids, batch.positions, batch.mask if mask is None else mask, groups)


def sequences(rows: Rows) -> Iterator[Sequence]:
    """The segments with a masked token, in the order of the rows."""
    for row in np.flatnonzero((rows.mask & (rows.segment_ids > 0)).any(axis=1)):
        segments = rows.segment_ids[row]
        asked = segments[rows.mask[row]]
        for segment in np.unique(asked[asked > 0]):
            columns = np.flatnonzero(segments == segment)
            yield Sequence(int(row), columns[: np.flatnonzero(rows.mask[row, columns])[-1] + 1])


def by_group(found: list[Sequence], group_ids: np.ndarray) -> list[list[Sequence]]:
    """Sequences by group, the group with most tokens first."""
    groups: dict[int, list[Sequence]] = {}
    for one in found:
        groups.setdefault(int(group_ids[one.row]), []).append(one)
    return sorted(groups.values(), key=lambda group: -sum(len(one.columns) for one in group))


def row_count(needed: int, rows: int, shards: int = 1) -> int:
    """The number of rows that is compiled: the least of ``EIGHTHS`` of all rows, rounded up to whole ``shards``.

    >>> [row_count(n, 32) for n in (1, 5, 21, 30)], row_count(5, 32, shards=8)
    ([4, 8, 24, 32], 8)
    """

    def up(count: int) -> int:
        return math.ceil(count / shards) * shards

    counts = (up(math.ceil(rows * k / 8)) for k in EIGHTHS)
    return min((count for count in counts if count >= needed), default=up(needed))


class _Bins:
    """Rows that fill up, first fit; at most ``limit`` of them."""

    def __init__(self, width: int, limit: int):
        self.width, self.limit = width, limit
        self.free: list[int] = []
        self.held: list[list[Sequence]] = []

    def add(self, group: list[Sequence]) -> bool:
        """Takes all of a group or nothing."""
        free, chosen = list(self.free), []
        for one in sorted(group, key=lambda one: -len(one.columns)):
            size = len(one.columns)
            index = next((k for k, room in enumerate(free) if room >= size), len(free))
            if index == len(free):
                if index == self.limit:
                    return False
                free.append(self.width)
            free[index] -= size
            chosen.append((index, one))
        self.free = free
        self.held += [[] for _ in range(len(free) - len(self.held))]
        for index, one in chosen:
            self.held[index].append(one)
        return True


def _in_bins(rows: Rows, parts: int, shards: int) -> tuple[list[list[list[Sequence]]], int]:
    """Sequences by part and row, and the rows of a part."""
    count, width = rows.tokens.shape
    found = list(sequences(rows))
    if parts == 1:
        bins = _Bins(width, count if count >= len(found) else len(found))
        bins.add(found)
        return [bins.held], row_count(len(bins.held), count, shards)
    height = count // parts
    members = np.unique(rows.group_ids, return_counts=True)[1]
    # parts that cut groups do so whatever lies in them: then every row is one
    groups = rows.group_ids if (height % members == 0).all() else np.arange(count)
    made = [_Bins(width, height)]
    for group in by_group(found, groups):
        # a part that has no room holds as many groups as an unpacked one: there are never more than ``parts``
        if not any(bins.add(group) for bins in made):
            made.append(_Bins(width, height))
            if len(made) > parts or not made[-1].add(group):  # rows of several segments may need more
                return _as_they_stand(found, parts, height), height
    return [bins.held for bins in made], height


def _as_they_stand(found: list[Sequence], parts: int, height: int) -> list[list[list[Sequence]]]:
    """Every sequence in a row, and a part, that is that of its own row."""
    held: list[list[list[Sequence]]] = [[[] for _ in range(height)] for _ in range(parts)]
    for one in found:
        held[one.row // height][one.row % height].append(one)
    return held


def packed_rows(rows: Rows, *, parts: int = 1, shards: int = 1) -> Layout:
    """Several sequences to a row, as wide as the batch, first fit, the longest first.

    With one part the number of rows is one of ``row_count``'s. With several, rows of a part are as many as without
    packing, and parts that stay empty cost nothing (``train.step.accumulate``): one program for all lengths.

    Args:
      parts: of the update; whole groups in each, where as many rows hold whole groups.
      shards: that rows divide over.
    """
    held, height = _in_bins(rows, parts, shards)
    width = rows.tokens.shape[1]
    source, segments = (np.full((parts, height, width), fill, np.int32) for fill in (-1, 0))
    links = Links(rows, (parts, height, width))
    for part, bins in enumerate(held):
        for row, inside in enumerate(bins):
            at = 0
            for number, one in enumerate(inside, 1):
                columns = np.arange(at, at + len(one.columns))
                source[part, row, columns] = one.row * width + one.columns
                segments[part, row, columns] = number
                links.add(part, row, one, columns)
                at += len(columns)
    return Layout(source, segments, *links.made())


class Links:
    """Which computed columns are targets, from which they are predicted, and the place of each token."""

    def __init__(self, rows: Rows, shape: tuple[int, int, int]):
        self.rows, self.shape = rows, shape
        lines = shape[0] * shape[1]
        self.number = np.full((lines, shape[2]), -1, np.int32)  # of each computed column among the targets of its row
        self.before = np.zeros((lines, shape[2]), np.int32)
        self.counts = np.zeros(lines, np.int64)
        self.asked: list[tuple[int, np.ndarray, int, np.ndarray]] = []

    def add(self, part: int, row: int, one: Sequence, columns: np.ndarray) -> None:
        """A sequence that lies in ``columns`` of a row; columns that are targets already are shared."""
        # as in ``logprobs``: what does not follow its own segment has no log-probability
        follows = np.concatenate([[False], one.columns[1:] == one.columns[:-1] + 1])
        wanted = np.flatnonzero(self.rows.mask[one.row, one.columns] & follows)
        line = part * self.shape[1] + row
        fresh = wanted[self.number[line, columns[wanted]] < 0]
        self.number[line, columns[fresh]] = self.counts[line] + np.arange(len(fresh))
        self.before[line, columns[fresh]] = columns[fresh - 1]
        self.counts[line] += len(fresh)
        self.asked.append((one.row, one.columns[wanted], line, columns[wanted]))

    def made(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``target``, ``before`` and ``place`` of a layout: half as many targets as columns, or as many."""
        parts, height, width = self.shape
        half = -(-width // 2)
        size = width if self.counts.max(initial=0) > half else half
        target, before = (np.full((parts * height, size), fill, np.int32) for fill in (-1, 0))
        lines, columns = np.nonzero(self.number >= 0)
        target[lines, self.number[lines, columns]] = columns
        before[lines, self.number[lines, columns]] = self.before[lines, columns]
        place = np.full(self.rows.tokens.shape, -1, np.int32)
        for row, at, line, where in self.asked:
            place[row, at] = line * size + self.number[line, where]
        return target.reshape(parts, height, size), before.reshape(parts, height, size), place


def only_part(layout: Layout) -> Layout:
    """The layout of a pass that is not cut into parts, without the axis of parts."""
    return layout._replace(**{k: x[0] for k, x in layout._asdict().items() if k != "place" and x is not None})


def share(layout: Layout, batch_columns: int) -> float:
    """The columns that a pass computes, of those of the padded rows; empty parts are not computed."""
    used = np.asarray(layout.source >= 0).reshape(len(layout.source), -1).any(axis=1).sum()
    return float(used * np.prod(layout.source.shape[1:]) / batch_columns)


def reads_layouts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks an ``estimate`` or a ``loss`` that looks at its rows through ``score`` alone, and so takes a layout."""
    function.reads_layouts = True  # one wrapped in another function is taken for one that does not
    return function


def takes(function: Callable[..., Any]) -> bool:
    """Whether ``reads_layouts`` marked it."""
    return getattr(function, "reads_layouts", False)


def is_laid(node: Any) -> bool:
    """Whether a node of a tree is rows with a place for a layout."""
    return "layout" in getattr(node, "_fields", ())  # JAX's arrays have a layout of their own from 0.12 on


def with_layouts(tree: Any, planner: Planner, *, parts: int = 1, shards: int = 1) -> list[list[Layout]]:
    """The layouts of all rows of a minibatch of NumPy arrays that have a place for one, in the order of the tree.

    Rows are cut into ``parts`` as they stand, and for each part there is a layout.
    """
    planned = []
    for node in (node for node in jax.tree.leaves(tree, is_leaf=is_laid) if is_laid(node)):
        ends = np.split(np.arange(len(node.tokens)), parts)
        cuts = [jax.tree.map(lambda x, at=at: x[at], node) for at in ends]
        planned.append([planner(rows_of(cut), shards=shards) for cut in cuts])
    return planned


def of_one_shape(steps: list[list[list[Layout]]]) -> list[Layout]:
    """What ``with_layouts`` gave for several minibatches, stacked: leaves ``[steps, parts R, ...]``.

    Parts lie one after another, as ``train.step.split_rows`` cuts them.
    """
    made = []
    for node in zip(*steps, strict=True):
        flat = [layout for parts in node for layout in parts]
        shape = {name: [max(sizes) for sizes in zip(*(getattr(x, name).shape[1:] for x in flat), strict=True)]
                 for name in FILLED if getattr(flat[0], name) is not None}  # fmt: skip
        stacked = [jax.tree.map(lambda *x: np.concatenate(x), *(_grown(x, shape) for x in parts)) for parts in node]
        made.append(jax.tree.map(lambda *x: np.stack(x), *stacked))
    return made


FILLED = {"source": -1, "segments": 0, "target": -1, "before": 0, "pages": -1}


def _grown(layout: Layout, shape: dict[str, list[int]]) -> Layout:
    """A layout of one part, brought to a larger shape, without the axis of parts."""

    def grown(name: str) -> np.ndarray:
        x = getattr(layout, name)[0]
        fill = [(0, size - had) for size, had in zip(shape[name], x.shape, strict=True)]
        return np.pad(x, fill, constant_values=FILLED[name])

    size = layout.target.shape[2]
    moved = layout.place // size * shape["target"][1] + layout.place % size
    place = np.where(layout.place < 0, -1, moved).astype(np.int32)
    return Layout(place=place, **{name: grown(name) for name in shape})


def put(tree: Any, layouts: list[Layout]) -> Any:
    """The tree with a layout in each place for one, in the order of the tree."""
    left = list(layouts)
    return jax.tree.map(lambda x: x._replace(layout=left.pop(0)) if is_laid(x) else x, tree, is_leaf=is_laid)
