"""Weights sent from one job to another in named pieces with checksums: what has arrived is not sent again.

The sender cuts every array into the shards of its devices and these into pieces. The receiver asks for pieces by name,
in any order, from whoever has that version; a transfer cut in half goes on where it stopped, and a piece that did not
change between two versions (a frozen part, an embedding) is not sent at all.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Box = tuple[tuple[int, int], ...]  # begin and end of each axis


class Piece(NamedTuple):
    """A box of one leaf."""

    name: str
    leaf: int
    box: Box
    nbytes: int
    digest: str


class Manifest(NamedTuple):
    """All that a receiver needs to know before the first byte."""

    version: int
    skeleton: Any  # the tree with the numbers of its leaves
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    pieces: tuple[Piece, ...]


class Transfer(NamedTuple):
    """What one call of ``receive`` moved."""

    version: int
    sent_bytes: int
    kept_bytes: int  # that were there already
    seconds: float


class Cut(RuntimeError):
    """A transfer that ended too early; what arrived is kept."""

    def __init__(self, message: str, transfer: Transfer):
        super().__init__(message, transfer)
        self.message, self.transfer = message, transfer

    def __str__(self) -> str:
        return self.message


Fetch = Callable[[int, Sequence[str]], dict[str, np.ndarray]]  # (version, names) -> bytes of each


def _digest(data: np.ndarray) -> str:
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def _shards(leaf: Any) -> Iterator[tuple[Box, np.ndarray]]:
    """Every part of an array that this process has, once."""
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
        yield tuple((0, n) for n in leaf.shape), leaf
        return
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            box = tuple(s.indices(n)[:2] for s, n in zip(shard.index, leaf.shape, strict=True))
            yield box, np.asarray(shard.data)


def _slabs(box: Box, array: np.ndarray, piece_bytes: int) -> Iterator[tuple[Box, np.ndarray]]:
    """A part cut along its first axis."""
    if not box or array.nbytes <= piece_bytes or array.size == 0:
        yield box, array
        return
    rows = max(1, piece_bytes // (array.nbytes // len(array)))
    for k in range(0, len(array), rows):
        slab = array[k : k + rows]
        yield ((box[0][0] + k, box[0][0] + k + len(slab)), *box[1:]), slab


Packed = tuple[Manifest, dict[str, np.ndarray]]  # and the bytes of every piece


def _all(tree: Any) -> Any:
    return tree


def pack(
    tree: Any, version: int, *, piece_bytes: int = 2**22, before: Packed | None = None,
    changed: Callable[[Any], Any] = _all,
) -> Packed:  # fmt: skip
    """A copy on the host, shard by shard; no array is collected whole.

    Args:
      piece_bytes: the most that a piece holds, if not a single row of its shard is longer.
      before: an earlier version of the same tree, in the same pieces.
      changed: of the tree, the part that differs from ``before``; the rest is not read again.
    """
    named = jax.tree_util.tree_flatten_with_path(tree)[0]
    structure = jax.tree.structure(tree)
    numbers = jax.tree.unflatten(structure, range(len(named)))
    new = set(jax.tree.leaves(numbers if before is None else changed(numbers)))
    pieces = [] if before is None else [piece for piece in before[0].pieces if piece.leaf not in new]
    contents = {piece.name: before[1][piece.name] for piece in pieces}
    for number in sorted(new):
        path, leaf = named[number]
        for part, array in _shards(leaf):
            for box, slab in _slabs(part, array, piece_bytes):
                name = f"{jax.tree_util.keystr(path)}{[list(ends) for ends in box]}"
                data = np.frombuffer(np.ascontiguousarray(slab).tobytes(), np.uint8)
                pieces.append(Piece(name, number, box, data.nbytes, _digest(data)))
                contents[name] = data
    leaves = [leaf for _, leaf in named]
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    pieces.sort(key=lambda piece: piece.leaf)  # as they are without ``before``: equal weights, an equal fingerprint
    return Manifest(version, numbers, shapes, tuple(str(leaf.dtype) for leaf in leaves), tuple(pieces)), contents


def fingerprint(manifest: Manifest) -> str:
    """Equal for equal weights in an equal layout, whatever their version."""
    joined = "".join(f"{piece.name}{piece.digest}" for piece in manifest.pieces)
    return hashlib.blake2b(joined.encode(), digest_size=16).hexdigest()


_Made = dict[int, tuple[tuple[str, ...], Any]]  # of leaves, by number: digests of the pieces, and what was made of them


class Arrival:
    """The receiving end: host memory for the leaves, and which pieces of them are there."""

    def __init__(self) -> None:
        self._shapes: Any = None
        self._leaves: list[np.ndarray] = []
        self._have: dict[str, str] = {}  # name -> digest of what lies in its box
        self._pieces: dict[str, Piece] = {}
        self._skeleton: Any = None
        self._made: _Made = {}  # by ``tree``
        self._copied: _Made = {}  # by ``host_tree``

    def aim(self, manifest: Manifest) -> list[Piece]:
        """What is missing for a version; pieces that are there and the same are kept."""
        if (manifest.shapes, manifest.dtypes) != self._shapes:
            self._shapes = manifest.shapes, manifest.dtypes
            # pages are only committed where something is written: a process pays for the pieces that it needs
            kinds = zip(manifest.shapes, manifest.dtypes, strict=True)
            self._leaves = [np.empty(shape, jax.numpy.dtype(dtype)) for shape, dtype in kinds]
            self._have, self._made, self._copied = {}, {}, {}
        self._skeleton = manifest.skeleton
        self._pieces = {p.name: p for p in manifest.pieces}
        # pieces of another cut share memory with these, which will be written
        self._have = {name: digest for name, digest in self._have.items() if name in self._pieces}
        return self.missing()

    def missing(self) -> list[Piece]:
        """Pieces of the version aimed at that are not there."""
        return [p for p in self._pieces.values() if self._have.get(p.name) != p.digest]

    def accept(self, name: str, data: np.ndarray) -> None:
        """Puts a piece into its place.

        Raises:
          ValueError: for a piece that is not part of the version, or whose bytes are not those promised.
        """
        piece = self._pieces.get(name)
        if piece is None:
            raise ValueError(f"piece {name} is not part of this version")
        if data.nbytes != piece.nbytes or _digest(data) != piece.digest:
            raise ValueError(f"piece {name} arrived damaged ({data.nbytes} of {piece.nbytes} bytes); fetch it again")
        leaf, where = self._leaves[piece.leaf], tuple(slice(a, b) for a, b in piece.box)
        self._have.pop(name, None)
        leaf[where] = np.frombuffer(data.tobytes(), leaf.dtype).reshape([b - a for a, b in piece.box])
        self._have[name] = piece.digest

    def _check(self) -> None:
        missing = self.missing()
        if missing:
            raise ValueError(f"{len(missing)} of {len(self._pieces)} pieces are missing, {missing[0].name} first")

    def host_tree(self) -> Any:
        """A copy of the weights in host memory, for devices that take it later, while the next version arrives.

        Raises:
          ValueError: naming what is missing.
        """
        self._check()
        return self._mapped(self._copied, lambda number: self._leaves[number].copy())

    def _mapped(self, before: _Made, make: Callable[[int], Any]) -> Any:
        """``make`` of every leaf; of those that were the same twice, what it made then, which is kept."""
        now: dict[int, list[str]] = {}
        for piece in self._pieces.values():
            now.setdefault(piece.leaf, []).append(piece.digest)

        def of(number: int) -> Any:
            digests = tuple(now[number])
            known, made = before.get(number, ((), None))
            if known == digests and made is not None:
                return made
            fresh = make(number)
            before[number] = digests, fresh if known == digests else None
            return fresh

        return jax.tree.map(of, self._skeleton)

    def tree(self, shardings: Any = None) -> Any:
        """The weights as arrays on devices, once nothing is missing.

        Args:
          shardings: a tree of ``Sharding``; each device gets its part. Default: the default device.

        Raises:
          ValueError: naming what is missing.
        """
        self._check()

        def whole(number: int) -> jax.Array:
            return jax.numpy.array(self._leaves[number], copy=True)  # the buffer is written again by the next version

        def placed(number: int, sharding: jax.sharding.Sharding) -> jax.Array:
            leaf = self._leaves[number]
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index].copy())

        if shardings is None:
            return self._mapped(self._made, whole)
        return jax.tree.map(placed, self._skeleton, shardings)


def receive(arrival: Arrival, manifest: Manifest, fetch: Fetch, *, batch_bytes: int = 2**24) -> Transfer:
    """Fetches what is missing of a version, several pieces at a time.

    Raises:
      Cut: when ``fetch`` fails or brings damaged bytes; call again, with the same or another source, to go on.
    """
    started, sent = time.monotonic(), 0
    missing = arrival.aim(manifest)
    wanted = sum(piece.nbytes for piece in missing)
    total = sum(piece.nbytes for piece in arrival._pieces.values())

    def moved() -> Transfer:
        return Transfer(manifest.version, sent, total - wanted, time.monotonic() - started)

    for batch in _batches(missing, batch_bytes):
        try:
            found = fetch(manifest.version, [piece.name for piece in batch])
            for piece in batch:
                arrival.accept(piece.name, found[piece.name])
                sent += piece.nbytes
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            text = f"weights of version {manifest.version} cut after {sent} of {wanted} bytes ({cause})"
            raise Cut(text, moved()) from error
    return moved()


def _batches(pieces: Sequence[Piece], batch_bytes: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        if batch and sum(p.nbytes for p in batch) + piece.nbytes > batch_bytes:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch
