"""Checkpoints of the whole ``TrainState`` with orbax: written aside, checksummed, then renamed into place.

A folder ``step_00000012`` therefore is either complete or damaged later; ``latest`` verifies the checksums and skips
what does not hold, with a message.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed import hosts
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import TrainState

_MANIFEST = "manifest.json"
PATIENCE_S = 120.0  # what gives up before it has waited so long was misled by the clock
_OVERHEAD_BYTES = 128 * 1024  # metadata and manifest beside the arrays


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(state: TrainState) -> dict[str, Any]:
    """Typed keys as their data; orbax stores arrays."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state._asdict())


def _checksums(folder: pathlib.Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != _MANIFEST)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _require_space(folder: pathlib.Path, tree: Any) -> None:
    """Raises OSError before writing begins where the arrays cannot fit."""
    needed = sum(x.nbytes for x in jax.tree.leaves(tree)) + _OVERHEAD_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free")


def _of_the_disk(error: OSError | ValueError) -> OSError | None:
    """What the file system said; the array store, whose errors are ValueErrors, has its number in their text."""
    if isinstance(error, OSError):
        return error
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return None if code is None else OSError(int(code[1]), os.strerror(int(code[1])))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without orbax's own report of an error that is raised and reported once anyway."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _sync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_in_time(scratch: pathlib.Path, tree: Any, note: dict[str, Any]) -> None:
    """``_write``, once more where orbax gave up early: it reads its patience off a clock that may be set meanwhile.

    Several processes cannot go back alone: there such an error is one, and the run is to be resumed.
    """
    began = time.monotonic()
    try:
        _write(scratch, tree, note)
    except TimeoutError:
        if jax.process_count() > 1 or time.monotonic() - began > PATIENCE_S:
            raise
        shutil.rmtree(scratch, ignore_errors=True)
        _write(scratch, tree, note)


@jax.jit
def _finite_leaves(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else True, params)


def not_finite(params: Any) -> str:
    """The first weights with a value that is NaN or infinite, by their place in the tree; empty: there are none."""
    found = jax.tree_util.tree_leaves_with_path(_finite_leaves(params))
    return next(("/".join(map(_name, path)) for path, finite in found if not bool(finite)), "")


def check_finite(state: TrainState) -> None:
    """Raises UserError for parameters that no run can go on from: they would take the place of good ones."""
    if broken := not_finite(state.params):
        raise UserError(
            f"no checkpoint at step {int(state.step)}: {broken} of the parameters is not finite; lower the learning "
            "rate and begin anew, or --resume the run from its last checkpoint, which is intact"
        )


def save(folder: str | pathlib.Path, state: TrainState, *, keep: int = 2, note: dict[str, Any] | None = None) -> None:
    """Writes ``folder/step_<step>`` and removes all but the newest ``keep`` up to there.

    What lies beyond was damaged when the run went on from before it, or it would have gone on there: it stays until
    its step is written again, and counts for nothing.

    Args:
      note: small JSON facts stored beside the arrays (data file hash, settings).

    Raises:
      UserError: when the disk is full or not writable, or the parameters are not finite; older checkpoints stay
        intact.
    """
    check_finite(state)
    folder = pathlib.Path(folder).absolute()
    hosts.agree("checkpoint", {"step": int(state.step), "note": note or {}})
    final = folder / f"step_{int(state.step):08d}"
    scratch = folder / f".writing_{int(state.step):08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if hosts.is_first():
            for left in folder.glob(".writing_*"):  # of a run that was killed while writing
                shutil.rmtree(left, ignore_errors=True)
        hosts.barrier("checkpoint begins")
        _write_in_time(scratch, _plain(state), {"step": int(state.step), "note": note or {}})
        hosts.by_first("checkpoint", lambda: _publish(scratch, final))
    except (OSError, ValueError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        disk = _of_the_disk(error)
        if disk is None:
            raise
        why = "the disk is full" if disk.errno in (errno.ENOSPC, errno.EDQUOT) else str(disk)
        raise UserError(
            f"checkpoint at step {int(state.step)} not written to {folder}: {why}; free space or fix the folder, "
            "then --resume the run (an experiment: give the same command): older checkpoints are intact"
        ) from error
    written = [step for step in steps(folder) if step <= int(state.step)]
    for old in written[:-keep] if hosts.is_first() else ():
        shutil.rmtree(folder / f"step_{old:08d}", ignore_errors=True)


def _publish(scratch: pathlib.Path, final: pathlib.Path) -> None:
    old = final.parent / f"{scratch.name}_old"
    if final.exists():  # moved, not deleted: of a large one a part is gone long before the new one is in place
        os.replace(final, old)
    os.replace(scratch, final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write(scratch: pathlib.Path, tree: Any, facts: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    _require_space(scratch.parent, tree)
    if jax.process_count() == 1:  # arrays of several hosts are written by all of them, each its part
        tree = jax.tree.map(np.asarray, tree)
    with _quiet(), ocp.StandardCheckpointer() as writer:
        writer.save(scratch / "state", tree)
    if hosts.is_first():
        manifest = scratch / _MANIFEST
        manifest.write_text(json.dumps(facts | {"sha256": _checksums(scratch)}))
        _sync(manifest)


def steps(folder: str | pathlib.Path) -> list[int]:
    """Steps of the finished checkpoints in ``folder``, ascending."""
    return sorted(int(p.name[5:]) for p in pathlib.Path(folder).glob("step_*") if p.name[5:].isdigit())


def note(path: str | pathlib.Path) -> dict[str, Any]:
    """The facts stored beside the arrays of an intact checkpoint."""
    return json.loads((pathlib.Path(path) / _MANIFEST).read_text())["note"]


def damage(path: pathlib.Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        wanted = manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable {_MANIFEST} ({error})"
    found = _checksums(path)
    for name, digest in wanted.items():
        if found.get(name) != digest:
            return f"{name} is {'missing' if name not in found else 'damaged'}"
    return None


def latest(folder: str | pathlib.Path) -> pathlib.Path | None:
    """The newest intact checkpoint; damaged ones are skipped with a message on standard error."""
    folder = pathlib.Path(folder)
    for step in reversed(steps(folder)):
        path = folder / f"step_{step:08d}"
        wrong = damage(path)
        if wrong is None:
            return path
        print(f"skipping checkpoint {path}: {wrong}", file=sys.stderr)
    return None


def shapes(state: TrainState) -> TrainState:
    """What ``restore`` needs of a state: shapes, dtypes and shardings, but for keys without the arrays themselves."""

    def shape(x: Any) -> Any:
        bare = isinstance(x, jax.Array) and not _is_key(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if bare else x

    return jax.tree.map(shape, state)


def restore(path: str | pathlib.Path, like: TrainState) -> TrainState:
    """Reads a checkpoint into the structure, shapes, dtypes and shardings of ``like``.

    Args:
      like: a state, or its ``shapes``, beside which there is room for what is read.

    Raises:
      UserError: naming the first leaf that the checkpoint holds in another shape or not at all.
    """
    import orbax.checkpoint as ocp

    path = pathlib.Path(path).absolute()
    target = _plain(like)
    with ocp.StandardCheckpointer() as reader:
        stored = reader.metadata(path / "state").item_metadata.tree
        _check_same(path, stored, target)
        plain = reader.restore(path / "state", target)

    def typed(new: Any, old: Any) -> Any:
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if _is_key(old) else new

    return TrainState(**jax.tree.map(typed, plain, like._asdict()))


def _check_same(path: pathlib.Path, stored: Any, target: Any) -> None:
    def flat(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))[0]
        return {"/".join(_name(k) for k in keys): tuple(leaf.shape) for keys, leaf in leaves}

    old, new = flat(stored), flat(target)
    for name in sorted(set(old) | set(new)):
        if old.get(name) != new.get(name):
            raise UserError(
                f"checkpoint {path} does not fit this run: {name} is {old.get(name, 'absent')} there and "
                f"{new.get(name, 'absent')} here; resume with the settings of the run that wrote it"
            )


def _name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Makes a folder and holds it for this process; the system lets go of it however the process ends.

    Raises:
      UserError: when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # file systems without locks answer otherwise; they go on unguarded
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                why = f"{folder} is in use by another process; wait for it or choose another --out"
                raise UserError(why) from error
        yield


@contextlib.contextmanager
def held(folder: pathlib.Path) -> Iterator[None]:
    """As ``locked``, by the first of several processes: where it is refused, all of them are.

    Raises:
      UserError: when another job holds it, or not all processes see the folder, on every process.
    """
    with contextlib.ExitStack() as stack:
        hosts.by_first("run folder", lambda: stack.enter_context(locked(folder)))
        hosts.share(folder)
        yield
