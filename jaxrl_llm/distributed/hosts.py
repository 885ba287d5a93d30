"""Several hosts as one machine: every process runs the same program and holds its part of every array."""

import hashlib
import json
import pathlib
import secrets
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.errors import UserError

SEEN_S = 70.0  # file systems of a network show a new file after a minute at the latest


def connect(spec: str) -> None:
    """Joins the processes of a job; call it before anything else touches a device.

    Args:
      spec: ``auto`` where the platform knows (TPU pods, SLURM, Open MPI), or ``ADDRESS:PORT,COUNT,INDEX``; empty: one
        process.

    Raises:
      UserError: for a spec that does not parse, or a coordinator that does not answer.
    """
    if not spec:
        return
    known: dict[str, Any] = {}
    if spec != "auto":
        parts = spec.split(",")
        if len(parts) != 3 or ":" not in parts[0] or not all(p.isdigit() for p in parts[1:]):
            raise UserError(f"--hosts {spec} is neither auto nor ADDRESS:PORT,COUNT,INDEX, as in 10.0.0.2:8476,4,0")
        count, index = int(parts[1]), int(parts[2])
        if index >= count:
            raise UserError(f"--hosts {spec}: index {index} must be below the count of {count} processes")
        known = {"coordinator_address": parts[0], "num_processes": count, "process_id": index}
    try:
        jax.distributed.initialize(**known)
    except (ValueError, RuntimeError) as error:
        remedy = (
            "give --hosts ADDRESS:PORT,COUNT,INDEX, or drop --hosts where this is the only machine"
            if spec == "auto"
            else f"start all of them with ADDRESS:PORT of the first, which must be free there: {parts[0]}"
        )
        raise UserError(f"--hosts {spec}: the processes did not find each other ({error}); {remedy}") from error


def is_first() -> bool:
    """Whether this process writes what is written once: records, plots, messages."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints once, however many processes there are."""
    if is_first():
        print(text, flush=True)


def barrier(name: str) -> None:
    """Waits until every process is here; with one process it does nothing."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def by_first(name: str, work: Callable[[], Any]) -> None:
    """What one process does alone, as writing a file; the others wait until it is done, and fail where it fails.

    A process that waits for one that has ended would wait until the job is given up, minutes later.

    Raises:
      UserError: on the other processes, whatever ``work`` raised.
      Exception: on the first process, what ``work`` raised.
    """
    failed: Exception | None = None
    if is_first():
        try:
            work()
        except Exception as error:  # raised below, when the others know of it
            failed = error
    text = "" if failed is None else str(failed)
    if failed is not None and not (text and isinstance(failed, (UserError, OSError))):
        text = f"{type(failed).__name__}: {text}".removesuffix(": ")  # others are not written to be read alone
    said = of_first(text.encode()[:1024].decode(errors="ignore"), most=1024)
    if failed is not None:
        raise failed
    if said:
        raise UserError(f"{name}: {said}")


def share(folder: pathlib.Path, patience_s: float = SEEN_S) -> None:
    """Makes sure that every process sees the run folder of the first; with one process it does nothing.

    On disks of their own the parts of a checkpoint would never be one: the processes would wait for each other's.

    Args:
      patience_s: how long a process looks for what the first one has written there.

    Raises:
      UserError: naming the processes that do not see it, on all of them.
    """
    if jax.process_count() == 1:
        return
    mark = folder / f".seen_{of_first(secrets.token_hex(8))}"  # a new name: no cache knows it as absent
    by_first("run folder", mark.touch)
    deadline = time.monotonic() + patience_s
    while not (seen := _is_there(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = np.flatnonzero(~np.ravel(multihost_utils.process_allgather(np.asarray(seen)))).tolist()
    if is_first():
        mark.unlink(missing_ok=True)
    if blind:
        raise UserError(f"--out {folder}: processes {blind} do not see what process 0 writes there; give a folder on "
                        "storage that all machines share")  # fmt: skip


def _is_there(path: pathlib.Path) -> bool:
    """Whether this process sees a file; where it may not look (rights, a disk that is gone) it does not."""
    try:
        return path.exists()
    except OSError:  # raised here alone it would leave the others waiting
        return False


def agree(name: str, decision: Any) -> None:
    """Makes sure that every process decided the same; with one process it does nothing.

    Processes whose Python values differ run different programs, and a job of different programs hangs or trains on
    nonsense. Every process must call this at the same point.

    Args:
      decision: plain JSON values that steer the program: a step, a choice, a file's hash.

    Raises:
      RuntimeError: naming the processes that differ from the first, on all of them.
    """
    if jax.process_count() == 1:
        return
    text = json.dumps(decision, sort_keys=True)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest)
    others = [k for k, found in enumerate(digests) if (found != digests[0]).any()]
    if others:
        raise RuntimeError(
            f"{name}: processes {others} decided otherwise than process 0 (here: {text[:200]}); control must depend on "
            "replicated values alone, not on a host's clock, files, hash seed or random numbers"
        )


def of_first(text: str, most: int = 256) -> str:
    """What the first process says, on every process: for what a process knows of itself alone, its clock for example.

    Args:
      most: bytes that are sent, the same on every process.

    Raises:
      ValueError: for more bytes than that.
    """
    if jax.process_count() == 1:
        return text
    said = text.encode()
    if len(said) > most:
        raise ValueError(f"text of {len(said)} bytes is longer than the {most} that are sent")
    found = multihost_utils.process_allgather(np.frombuffer(said.ljust(most, b"\0"), np.uint8))
    return bytes(np.asarray(found[0], np.uint8)).rstrip(b"\0").decode()


def gathered(tree: Any) -> Any:
    """The whole of every array as NumPy, on every process; what has no copy here is fetched from the others."""

    def whole(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(x)
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(whole, tree)


def split_work(rows: int, judge: Callable[[slice], Any]) -> Any:
    """``judge`` on this process's share of ``rows``; the shares of all processes one after another, on every process.

    Args:
      judge: of a slice of the rows, a tree of NumPy arrays with that many rows.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return judge(slice(0, rows))
    share = -(-rows // count)
    mine = judge(slice(index * share, min(rows, (index + 1) * share)))
    # shares must be equal to be gathered: the last one is filled up and cut again
    filled = jax.tree.map(lambda x: np.pad(x, [(0, share - len(x))] + [(0, 0)] * (x.ndim - 1)), mine)
    parts = multihost_utils.process_allgather(filled, tiled=True)
    return jax.tree.map(lambda x: np.asarray(x)[:rows], parts)


def anywhere(flag: bool) -> bool:
    """Whether the flag is set in any process: what one was told (to stop), all do."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))
