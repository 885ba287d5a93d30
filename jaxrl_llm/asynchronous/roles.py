"""The work of every role of an asynchronous run, as functions of the role's own state; no queue, no network.

A process builds its ``Program`` itself, on the devices that it sees; between processes go NumPy arrays, and weights in
pieces (``weight_transfer``). Rows go to whoever asked for the work, or to a storage unit, which others then read: who
asked hears where they lie. Whoever calls these functions decides where they run: ``threads`` in one process,
``asynchronous.ray_workers`` in many.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.asynchronous.transfer_queue import StorageUnit
from jaxrl_llm.distributed import weight_transfer
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train import checkpoint, online
from jaxrl_llm.train.host import make_host_loop
from jaxrl_llm.train.online import Drawn, Online
from jaxrl_llm.train.step import trained_part, with_trained
from jaxrl_llm.types import Rewards, TrainState, Trajectories, declared

VERSION = "version"  # in the extras of trajectories: the weights that drew each token, -1 where none did


class Scored(NamedTuple):
    """Extras of trajectories that a reference scorer has seen: its log-probabilities ``[B, T]``."""

    ref_logp: Any


class Program(NamedTuple):
    """What a run computes, of ``make_program``; every process makes its own by calling the same function."""

    online: Online
    start: Callable[[], TrainState]  # the state before the first update; only the learner calls it
    draw: Callable[..., Any]  # (curriculum, key, step) -> (prompts, curriculum)
    rolls: tuple[Callable[..., Trajectories], ...]  # (params, key, step, prompts, rows of before) -> rows
    score: Callable[[Trajectories], Rewards]
    finish: Callable[..., Any]
    reference: Callable[[Trajectories], Any] | None


def make_program(
    method: Online, start: Callable[[], TrainState], score: Callable[[Trajectories], Rewards] | None = None, *,
    reference: Callable[[Trajectories], Any] | None = None, go_on: Sequence[Callable[..., Trajectories]] = (),
    place: Callable[[TrainState], TrainState] | None = None,
) -> Program:  # fmt: skip
    """Compiles lazily, what the role of a process needs.

    Args:
      score: verifiers or environments on the host; default: the jittable scorer of ``method``.
      reference: log-probabilities ``[B, T]`` for ``Scored``, see ``given_reference``.
      go_on: later parts of a rollout whose first is that of ``method``: ``(params, rows, keys) -> rows``.
      place: as in ``train.host.make_host_loop``.
    """
    loop = make_host_loop(method, score, place=place)

    def first(params: Any, key: Any, step: Any, ids: Any, rows: None) -> Trajectories:
        return online.roll(method, params, key, step, ids)

    def later(part: Callable[..., Trajectories], params: Any, key: Any, step: Any, ids: Any, rows: Any) -> Trajectories:
        return part(params, rows, sample_keys(key, step, ids, method.group_size))

    rolls = tuple(jit_sampling(roll) for roll in (first, *(partial(later, part) for part in go_on)))
    draw = jax.jit(partial(online.draw, method))
    return Program(method, start, draw, rolls, loop.score, loop.finish, reference)


Build = Callable[[], Program]


class Order(NamedTuple):
    """A part of a step's prompts to be rolled out."""

    step: int
    part: int
    ids: np.ndarray


class RunKey(NamedTuple):
    """A typed key as data."""

    data: np.ndarray
    kind: str


class Cell(NamedTuple):
    """A cell of a storage unit, and how others reach it."""

    unit: str
    get: Callable[[int, str], Any]
    put: Callable[[int, str, Any], None]
    row: int
    column: str


class Referred(NamedTuple):
    """Rows, and what the reference says of them; either may lie on a storage unit."""

    rows: Any
    logp: Any


class Missing(RuntimeError):
    """A storage unit does not answer, or has lost what it had."""


class Rolled(NamedTuple):
    """One part of a rollout, with the version that drew it and what its weights cost to fetch."""

    rows: Trajectories | Cell
    version: int
    transfer: weight_transfer.Transfer | None
    count: int  # responses
    tokens: int  # drawn so far, those of earlier parts too
    oldest: int  # version that drew one of them


class Lesson(NamedTuple):
    """The rows of an update, and what they earned."""

    trajectories: Trajectories
    rewards: Rewards


class Published(NamedTuple):
    """Where the learner stands: its step, the curriculum, and the newest step on disk."""

    step: int
    sampler: Any
    key: RunKey
    manifest: weight_transfer.Manifest  # the newest weights to fetch, perhaps of an earlier step, see ``newest``
    saved: int
    metrics: dict[str, float]  # of the newest update; empty before the first
    lesson: Lesson | None = None  # of the last update of all, to be read


class Gone(RuntimeError):
    """The pieces of that version are not kept any more."""


def given_reference(policy: Any, params: Any, rows: Trajectories, *, temperature: float = 1.0) -> tuple[Any, Any]:
    """The ``score`` of ``make_estimate`` where the reference scorer is a process of its own."""
    logp = declared(Scored, rows.extras).ref_logp
    return logp, jnp.zeros_like(logp)


def on_host(tree: Any) -> Any:
    """Arrays as NumPy, to be sent."""
    return jax.tree.map(np.asarray, tree)


def key_data(key: Any) -> RunKey:
    """A typed key to be sent."""
    return RunKey(np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key)))


def key_of(sent: RunKey) -> Any:
    """The typed key that was sent."""
    return jax.random.wrap_key_data(jnp.asarray(sent.data), impl=sent.kind)


def joined(parts: Sequence[Trajectories]) -> Trajectories:
    """The parts of a step side by side, groups numbered on."""
    if len(parts) == 1:
        return parts[0]
    numbered, first = [], 0
    for part in parts:
        ids = np.asarray(part.group_ids)
        numbered.append(part._replace(group_ids=ids + np.int32(first)))
        first += int(ids.max()) + 1
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *numbered)


def put_value(unit: StorageUnit, row: int, column: str, value: Any) -> None:
    """Fills a cell of a storage unit."""
    unit.put(row, column, value)


def get_value(unit: StorageUnit, row: int, column: str) -> Any:
    """What lies in a cell of a storage unit."""
    return unit.get(row, column)


def drop(unit: StorageUnit, rows: Sequence[int]) -> None:
    """Frees the cells of rows that nobody reads any more."""
    unit.drop(rows)


def kept(value: Any, cell: Cell | None) -> Any:
    """A value, put where it belongs: then only the cell comes back.

    Raises:
      Missing: where the storage unit does not take it.
    """
    if cell is None:
        return value
    try:
        cell.put(cell.row, cell.column, value)
    except Exception as error:
        raise Missing(f"{cell.unit} did not take {cell.column} of row {cell.row}: {type(error).__name__}") from error
    return cell


def read(value: Any) -> Any:
    """A value, wherever it lies.

    Raises:
      Missing: where the storage unit does not answer.
    """
    if isinstance(value, Referred):
        rows = read(value.rows)
        return rows._replace(extras=rows.extras | Scored(read(value.logp))._asdict())
    if not isinstance(value, Cell):
        return value
    try:
        return value.get(value.row, value.column)
    except Exception as error:
        raise Missing(f"{value.unit} has no {value.column} of row {value.row}: {type(error).__name__}") from error


def draw(program: Program, sampler: Any, key: RunKey, step: int) -> tuple[np.ndarray, Any]:
    """The prompts of a step and the curriculum after the draw, for whoever hands out the orders."""
    return on_host(program.draw(sampler, key_of(key), jnp.asarray(step, jnp.int32)))


class Standby(NamedTuple):
    """Weights in host memory that a worker has fetched and not taken yet."""

    version: int
    fingerprint: str
    params: Any


class Roller:
    """A rollout worker: its compiled parts, and the weights that it has."""

    def __init__(self, build: Build, batch_bytes: int):
        self.program, self.batch_bytes = build(), batch_bytes
        self.arrival, self.params = weight_transfer.Arrival(), None
        self.version, self.fingerprint = -1, ""
        self.lock = threading.Lock()  # of the arrival
        self.standby: deque[Standby] = deque(maxlen=1)  # the newest alone
        self.placed: list[tuple[np.ndarray, jax.Array]] = []  # of the standby whose weights these are


def ready(state: Any) -> None:
    """Answers once a role has built its program."""


def fetch_weights(
    roller: Roller, fetch: weight_transfer.Fetch, manifest: weight_transfer.Manifest
) -> weight_transfer.Transfer:
    """Brings weights into the worker's host memory, while it generates with those that it has; ``roll`` takes them.

    From "AsyncFlow", arXiv:2507.01663, section 4 (delayed parameter update).

    Raises:
      weight_transfer.Cut: when the weights did not arrive whole; what arrived is kept for the next call.
    """
    with roller.lock:
        transfer = weight_transfer.receive(roller.arrival, manifest, fetch, batch_bytes=roller.batch_bytes)
        fingerprint = weight_transfer.fingerprint(manifest)
        roller.standby.append(Standby(manifest.version, fingerprint, roller.arrival.host_tree()))
    return transfer


def roll(
    roller: Roller, fetch: weight_transfer.Fetch, manifest: weight_transfer.Manifest, key: RunKey, order: Order,
    rows: Trajectories | Cell | None, part: int, cell: Cell | None = None,
) -> Rolled:  # fmt: skip
    """The next tokens of an order with weights at least as new as ``manifest``.

    Args:
      cell: of the rows that come out; None: they are in what comes back.

    Raises:
      weight_transfer.Cut: when the weights did not arrive whole; what arrived is kept for the next call.
      Missing: when a storage unit does not answer.
    """
    rows, transfer = read(rows), None
    if roller.standby:
        standby = roller.standby.pop()
        roller.params = _placed(roller, standby.params)
        roller.version, roller.fingerprint = standby.version, standby.fingerprint
    # a learner that came back from its checkpoint is behind what this worker has
    if manifest.version >= roller.version or roller.version > order.step:
        if weight_transfer.fingerprint(manifest) != roller.fingerprint:
            with roller.lock:
                transfer = weight_transfer.receive(roller.arrival, manifest, fetch, batch_bytes=roller.batch_bytes)
                roller.params = roller.arrival.tree()
            roller.fingerprint = weight_transfer.fingerprint(manifest)
        roller.version = manifest.version
    before, seen = (None, 0) if rows is None else (rows._replace(extras=_but_version(rows)), rows.tokens.shape[1])
    ids, step = jnp.asarray(order.ids), jnp.asarray(order.step, jnp.int32)
    found = on_host(roller.program.rolls[part](roller.params, key_of(key), step, ids, before))
    versions = np.where(found.mask, np.int32(roller.version), np.int32(-1))
    if rows is not None:
        versions[:, :seen] = rows.extras[VERSION]
    drawn = versions[versions >= 0]
    whole = found._replace(extras=found.extras | {VERSION: versions})
    facts = len(versions), int(drawn.size), int(drawn.min(initial=roller.version))
    return Rolled(kept(whole, cell), roller.version, transfer, *facts)


def _placed(roller: Roller, params: Any) -> Any:
    """Weights of the host on the device, but those that are there."""
    there = {id(leaf): array for leaf, array in roller.placed}  # which lives as long as what it is named by
    leaves, structure = jax.tree.flatten(params)
    arrays = [there[id(leaf)] if id(leaf) in there else jnp.asarray(leaf) for leaf in leaves]
    roller.placed = list(zip(leaves, arrays, strict=True))
    return jax.tree.unflatten(structure, arrays)


def _but_version(rows: Trajectories) -> dict[str, Any]:
    return {name: value for name, value in rows.extras.items() if name != VERSION}


class Judge:
    """Verifiers and environments, or the reference scorer: what reads rows and has no weights of the run."""

    def __init__(self, build: Build):
        self.program = build()


def score(judge: Judge, rows: Trajectories | Cell, cell: Cell | None = None) -> Rewards | Cell:
    """Rewards of the rows; raises Missing when a storage unit does not answer."""
    return kept(jax.tree.map(np.asarray, judge.program.score(read(rows))), cell)


def like_each_other(rewards: Sequence[Rewards]) -> list[Rewards]:
    """Rewards of several parts of a step with the same names: rows that were given up have none, and count nowhere."""
    names = {name for one in rewards for name in one.parts or {}}
    if not names:
        return list(rewards)
    nothing = [dict.fromkeys(names, np.full(one.value.shape, np.nan, np.float32)) for one in rewards]
    return [one._replace(parts=empty | (one.parts or {})) for one, empty in zip(rewards, nothing, strict=True)]


def refer(judge: Judge, rows: Trajectories | Cell, cell: Cell | None = None) -> np.ndarray | Cell:
    """Log-probabilities of the reference; raises Missing when a storage unit does not answer."""
    return kept(np.asarray(judge.program.reference(read(rows))), cell)


class Learner:
    """The state that trains, from its newest checkpoint if there is one; with weights to fetch beside it.

    Args:
      shown: versions whose weights are kept on the host: one more than the staleness, then no version that a rollout
        is to begin with is gone before it arrived.
    """

    def __init__(self, build: Build, folder: str, checkpoint_every: int, piece_bytes: int, shown: int):
        self.program = build()
        self.folder, self.every, self.piece_bytes, self.most = folder, checkpoint_every, piece_bytes, shown
        self.state, self.saved, self.metrics = self.program.start(), 0, {}
        path = checkpoint.latest(folder)
        if path is not None:
            self.state = checkpoint.restore(path, self.state)
            self.saved, self.metrics = int(self.state.step), checkpoint.note(path)["metrics"]
        self.shown: dict[int, weight_transfer.Packed] = {}
        self.packer = ThreadPoolExecutor(1, "packing")
        self.packing: Future[None] = Future()
        self.packing.set_result(None)
        _publish(self)
        self.packing.result()


def _publish(learner: Learner) -> None:
    """Packs a copy of the weights to be fetched, beside the next update; of one version at a time."""
    learner.packing.result()
    method, version = learner.program.online, int(learner.state.step)
    acting, before = method.actor(learner.state), next(iter(learner.shown.values()), None)
    changed = partial(trained_part, trained=method.trained)
    if before is not None:  # the base of an adapter is the same in all versions, and not read again
        acting = with_trained(acting, jax.tree.map(jnp.copy, changed(acting)), method.trained)

    def pack() -> None:
        packed = weight_transfer.pack(acting, version, piece_bytes=learner.piece_bytes, before=before, changed=changed)
        found = sorted([*learner.shown, version])[-learner.most :]
        learner.shown = {v: packed if v == version else learner.shown[v] for v in found}  # at once: others read it

    learner.packing = learner.packer.submit(pack)


def _packed(learner: Learner) -> weight_transfer.Manifest:
    """The newest weights that are packed; what is shown is read once, as another thread may replace it in between."""
    shown = learner.shown
    manifest, _ = shown[max(shown)]
    return manifest


def _save(learner: Learner) -> None:
    checkpoint.save(learner.folder, learner.state, note={"metrics": learner.metrics})
    learner.saved = int(learner.state.step)


def keep(learner: Learner) -> Published:
    """A checkpoint of where the learner is, of a run that is to end there."""
    _save(learner)
    return standing(learner)


def standing(learner: Learner) -> Published:
    """Where the learner is."""
    state, manifest = learner.state, _packed(learner)
    return Published(
        int(state.step), on_host(state.sampler), key_data(state.key), manifest, learner.saved, learner.metrics
    )


def newest(learner: Learner) -> weight_transfer.Manifest:
    """The newest weights that can be fetched, once those that are being packed are ready; beside the next update."""
    learner.packing.result()
    return _packed(learner)


def learn(
    learner: Learner, step: int, ids: np.ndarray, rows: Sequence[Trajectories | Cell | Referred],
    rewards: Sequence[Rewards | Cell], last: bool,
) -> Published:  # fmt: skip
    """One update by all parts of a step; then a checkpoint where one is due.

    Raises:
      ValueError: for any other step than the next: no row trains twice, none is left out.
      Missing: when a storage unit does not answer, before anything is changed.
    """
    if int(learner.state.step) != step:
        raise ValueError(f"the rows of step {step} do not train a state at step {int(learner.state.step)}")
    started = time.monotonic()
    rows, rewards = [read(part) for part in rows], [read(part) for part in rewards]
    # the curriculum that learns is that of all lessons before, not that of whoever ordered the rows
    _, sampler = learner.program.draw(learner.state.sampler, learner.state.key, learner.state.step)
    drawn = Drawn(jnp.asarray(ids), sampler, jax.tree.map(jnp.asarray, joined(rows)))
    judged = jax.tree.map(lambda *x: jnp.concatenate([jnp.asarray(part) for part in x]), *like_each_other(rewards))
    learner.state, metrics = learner.program.finish(learner.state, drawn, judged)
    learner.metrics = {name: float(np.asarray(value)) for name, value in metrics.items()}
    learner.metrics["time/update_s"] = time.monotonic() - started
    if last or (step + 1) % learner.every == 0:
        _save(learner)
    if last:  # nobody generates with its weights
        return standing(learner)._replace(lesson=Lesson(*on_host((drawn.trajectories, judged))))
    _publish(learner)
    return standing(learner)


def pieces(learner: Learner, version: int, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Parts of some weights, while the learner trains the next; raises Gone for a version that is not kept."""
    found = learner.shown.get(version)
    if found is None:
        raise Gone(f"version {version} is gone; there are {sorted(learner.shown)}")
    return {name: found[1][name] for name in names}
