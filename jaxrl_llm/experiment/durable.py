"""One seed of an arm on the host, kept in a folder: it survives ``kill -9`` and goes on bit for bit.

The folder holds ``identity.json``, ``metrics.jsonl`` (a line a step), ``measured.jsonl`` (a line a measurement),
``episodes.jsonl`` (for ``jaxrl view``), ``checkpoints/`` and at the end ``model/`` (and ``adapter/``). What a run
yields again after it was ended is read from the first two; what it computes begins at the newest intact checkpoint.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.asynchronous import apart, conductor, limits, lockstep, threads
from jaxrl_llm.asynchronous.ray_workers import RayWorkers, load_ray
from jaxrl_llm.asynchronous.roles import Program
from jaxrl_llm.asynchronous.workers import Threads, Workers
from jaxrl_llm.distributed import hosts, rollout_weights, rules
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.models.io import safetensors_io
from jaxrl_llm.run import flags, lora_state
from jaxrl_llm.run.records import record, report, track, transcripts, view
from jaxrl_llm.run.stop import Stop
from jaxrl_llm.train import checkpoint, host, offline, skipped, streamed
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train.host import HostLoop
from jaxrl_llm.train.online import Online, model_part
from jaxrl_llm.train.packing import Planner, packed_rows
from jaxrl_llm.train.plan import Plan, Stage
from jaxrl_llm.types import Key, Params, Rewards, TrainState, Trajectories

EVAL_KEY = 20_000
SHOWN_ROWS = 8  # of a rollout, written to be read; two groups at least


class Remote(NamedTuple):
    """Rollouts, scores and updates in workers of the asynchronous loop, see ``asynchronous.conductor``."""

    workers: Callable[[], Workers]  # they start anew behind every checkpoint and measurement
    build: Callable[[int], Program]  # of a stage; every worker makes its own, so it can be sent to one
    sizes: limits.Sizes = limits.Sizes(rollers=1)  # its staleness is that of the run
    patience: limits.Limits = limits.Limits()


def check_workers(workers: str) -> tuple[str, int]:
    """Kind and number of ``threads:N``, ``local:N`` or ``ray:N``.

    Raises:
      UserError: for anything else, or Ray where it is not installed.
    """
    kind, _, number = workers.partition(":")
    if kind not in ("threads", "local", "ray") or not number.isdecimal() or int(number) < 1:
        raise UserError(f"--workers {workers!r} must be threads:N, local:N or ray:N with N at least 1")
    if kind == "ray":
        load_ray()
    return kind, int(number)


def check_sizes(options: Any) -> None:
    """Refuses numbers of an asynchronous run that are too small, or that nothing reads.

    Args:
      options: with the fields named below.

    Raises:
      UserError: naming the flag.
    """
    kind, _ = check_workers(options.workers)
    for name, least in (("storage_units", 0), ("weight_swaps", 0), ("step_parts", 1), ("scorers", 1)):
        value = getattr(options, name)
        given = f"{flags.spell(name)} {value}"
        if value < least:
            raise UserError(f"{given} must be at least {least}")
        if value > least and options.loop != "async":
            raise UserError(f"{given} belongs to --loop async: give it, or drop {flags.spell(name)}")
        if value > least and kind == "threads" and name != "storage_units":
            raise UserError(f"{given} is of several workers: give --workers local:N or ray:N with it, or drop it")
    if not 0 < options.patience < float("inf"):
        raise UserError(f"--patience {options.patience} must be positive and finite")
    if options.patience != 1.0 and (options.loop != "async" or kind == "threads"):
        raise UserError(f"--patience {options.patience} is of workers of --loop async: give --workers local:N or ray:N "
                        "with it, or drop it")  # fmt: skip


def remote_of(options: Any, mesh: str, build: Callable[[int], Program], *refused: tuple[bool, str]) -> Remote | None:
    """Who works in the asynchronous loop in place of threads of this process, by ``--workers``.

    Args:
      options: with ``workers``, ``loop``, ``most_gap`` and the fields of ``check_sizes``.
      refused: what else its workers cannot do: whether it is asked for, and why not.

    Raises:
      UserError: for what they cannot do.
    """
    check_sizes(options)
    kind, number = check_workers(options.workers)
    together = options.loop == "async" and jax.process_count() > 1
    if together and options.workers != "threads:1":
        raise UserError(f"--workers {options.workers} are of one process: several score their rows in one order, give "
                        "--workers threads:1 with --hosts")  # fmt: skip
    if together and options.storage_units:
        raise UserError(f"--storage-units {options.storage_units} are of one process: drop them, or --hosts")
    if kind == "threads":
        return None
    for asked, why in (
        (options.loop != "async", "belongs to --loop async"),
        (bool(mesh), f"does not go with --mesh {mesh}: every worker has one device"),
        (options.most_gap > 0, f"does not watch --most-gap {options.most_gap}: drop one of them"),
        *refused,
    ):
        if asked:
            raise UserError(f"--workers {options.workers} {why}")
    sizes = limits.Sizes(
        rollers=number, judges=options.scorers, parts=options.step_parts, units=options.storage_units,
        swaps=options.weight_swaps,
    )  # fmt: skip
    waited = limits.longer(limits.Limits(), options.patience)
    return Remote(RayWorkers if kind == "ray" else Threads, build, sizes, waited)


class Generator(NamedTuple):
    """Rollouts on devices beside those of ``--mesh``, see ``asynchronous.apart``."""

    plan: Plan  # the same, made for that mesh
    mesh: Mesh
    prepare: Callable[[Params], Params] | None  # what travels there in the place of the parameters


def check_generator(options: Any) -> None:
    """Refuses rollouts on devices of their own where nothing makes them.

    Args:
      options: with ``generator_mesh``, ``mesh``, ``loop`` and ``workers``.

    Raises:
      UserError: naming the flag.
    """
    if not (spec := options.generator_mesh):
        return
    meshes.parse_sizes(spec, "--generator-mesh")
    for asked, why in (
        (options.loop != "async", "belongs to --loop async: give it, or drop --generator-mesh"),
        (not options.mesh, "is beside the devices that train: give --mesh with it, data=1 for one"),
        (not options.workers.startswith("threads"), f"is of one process: drop --workers {options.workers}"),
    ):
        if asked:
            raise UserError(f"--generator-mesh {spec} {why}")


def generator_of(options: Any, settings: Any, plan: Plan, build: Callable[[Any], Plan]) -> Generator | None:
    """Where ``--generator-mesh`` rolls out: on the devices behind those of ``--mesh``; None: where it trains.

    Args:
      options: with ``generator_mesh``, ``loop`` and ``workers``.
      settings: of the arm, with ``mesh``.
      plan: of the arm.
      build: makes the plan of other settings.

    Raises:
      UserError: for what cannot run apart.
    """
    check_generator(options)
    if not (spec := options.generator_mesh):
        return None
    for asked, why in (
        (plan.world is not None, "does not play episodes in Python: drop it"),
        (plan.of_seed is not None, "does not make what belongs to each seed: drop it"),
        (plan.move is not None, "is in the place of --rollout-mesh: drop one of them"),
        (jax.process_count() > 1, "is of one process: drop --hosts"),
    ):
        if asked:
            raise UserError(f"--generator-mesh {spec} {why}")
    devices = meshes.devices_apart(meshes.parse_mesh(settings.mesh), spec, "--generator-mesh")
    with meshes.on_devices(devices):
        mesh = meshes.parse_mesh(spec, flag="--generator-mesh")
        there = build(dataclasses.replace(settings, mesh=spec))
    lighter = getattr(settings, "compute", "float32") != "float32" and plan.model is not None
    prepare = rollout_weights.travelling(plan.model.config, jnp.dtype(settings.compute)) if lighter else None
    return Generator(there, mesh, prepare and partial(of_model, prepare))


def of_model(prepare: Callable[[Params], Params], params: Params) -> Params:
    """``prepare`` of the model's own weights; heads beside it stay as they are."""
    if "model" in params:
        return params | {"model": prepare(params["model"])}
    return prepare(params)


class Keeping(NamedTuple):
    """How the seeds of an arm are run on the host, and what is kept of them."""

    folder: pathlib.Path | None = None  # of the arm; None: nothing is kept
    identity: str = ""  # of all that a seed's numbers depend on
    checkpoint_every: int = 50  # steps; a stage's end is always kept
    staleness: int | None = None  # updates that rollouts may lag behind in the asynchronous loop; None: the host loop
    scorers: int = 1  # threads that score in the asynchronous loop
    units: int = 0  # on which its rows lie; 0 is one
    generator: Generator | None = None  # of the asynchronous loop: where it rolls out; None: where it trains
    remote: Remote | None = None  # who works in the asynchronous loop in place of threads
    trackers: tuple[str, ...] = ()  # see ``run.records.track``
    export: bool = False  # write the trained model of every seed
    most_gap: float = 0.0  # see ``train.host.make_host_loop``
    most_skipped: int = 0
    planner: Planner | None = None  # arranges the rows of updates, see ``train.packing``
    # where a seed lies in ``folder``, and where a stage in its checkpoints; empty: right there
    of_seed: str = "seed_{}"
    of_stage: str = "stage_{}"
    note: dict[str, Any] = {}  # what its checkpoints hold beside the step

    def seed_folder(self, seed: int) -> pathlib.Path | None:
        """Where a seed is kept."""
        return None if self.folder is None else self.folder / self.of_seed.format(seed)


def _asked(stop: Stop) -> bool:
    """Whether any process was asked to stop: then all of them do."""
    return hosts.anywhere(stop.asked)


class Stopped(Exception):
    """The run was asked to stop and is safe in its folder, at ``step``."""

    def __init__(self, step: int):
        super().__init__(f"stopped at step {step}; the same command goes on")
        self.step = step


def given_start(stage: Stage, params: Params, key: Key, index: int) -> TrainState:
    """The state at the beginning of a stage; the only seed trains the first parameters themselves."""
    return plans.start(stage, params, jax.random.fold_in(key, index))


def shared_start(stage: Stage, params: Params, key: Key, index: int) -> TrainState:
    """``given_start`` where the first parameters belong to all seeds, so that a copy is trained."""
    return jax.tree.map(jnp.copy, given_start(stage, params, key, index))


def unseen(step: int, row: dict[str, float]) -> None:
    """Nobody watches the steps of a run."""


def unmeasured(iteration: host.Iteration) -> dict[str, float]:
    """Nothing is measured between two steps."""
    return {}


def stretches(stages: tuple[Stage, ...], every: int) -> Iterator[tuple[int, Stage, int, int]]:
    """``(index, stage, steps of this stretch, steps of the stage before it)``."""
    for index, stage in enumerate(stages):
        apart = max(every, stage.eval_every)
        for done in range(0, stage.steps, apart):
            yield index, stage, min(apart, stage.steps - done), done


def next_multiple(at: int, offset: int, every: int) -> int:
    """The first step behind ``at`` that lies a multiple of ``every`` behind ``offset``.

    >>> [next_multiple(at, offset=10, every=50) for at in (10, 59, 60)]
    [60, 60, 110]
    """
    return offset + ((at - offset) // every + 1) * every


LINES = ("metrics.jsonl", "measured.jsonl", view.FILE)  # of a seed, one behind the other


def _forget(folder: pathlib.Path, step: int) -> None:
    for name in LINES:
        if (folder / name).exists():  # there are no lines before the first one
            record.rewind(folder / name, step)


class _Logs:
    """What a seed wrote before, and what it writes now; with no folder nothing."""

    def __init__(self, keeping: Keeping, seed: int):
        self.folder = keeping.seed_folder(seed)
        self.keeping = keeping
        self.metrics: dict[int, dict[str, float]] = {}
        self.measured: dict[int, dict[str, Any]] = {}
        self.track = track.nothing
        self.saved = 0  # the step of the newest checkpoint
        self.compiled = 0  # programs of the processes that ran before this one
        if self.folder is not None and keeping.identity:
            hosts.by_first("folder of a seed", partial(self._open, self.folder))

    def _open(self, folder: pathlib.Path) -> None:
        if record.read_json(folder / "identity.json") == {"identity": self.keeping.identity}:
            return
        if (folder / "checkpoints").is_dir():
            raise UserError(f"{folder} holds a run of other settings, data or code; give --fresh to begin again, or "
                            "another --out")  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        for name in LINES:
            (folder / name).unlink(missing_ok=True)
        record.write_json(folder / "identity.json", {"identity": self.keeping.identity})

    def rewind(self, step: int) -> None:
        """Forgets what lies behind ``step``, which is computed again; reads what lies before it."""
        self.saved = step
        if self.folder is None:
            return
        hosts.by_first("rewinding", partial(_forget, self.folder, step))
        self.metrics = {row.pop("step"): row for row in record.read_lines(self.folder / "metrics.jsonl")}
        self.measured = {row.pop("step"): row for row in record.read_lines(self.folder / "measured.jsonl")}
        self.compiled = max((row.get("compile/count") or 0 for row in self.metrics.values()), default=0)
        self.track = track.open_trackers(self.keeping.trackers if hosts.is_first() else (), self.folder, begin=step)

    def add(self, name: str, step: int, values: dict[str, Any]) -> None:
        if self.folder is not None and hosts.is_first():
            record.append_line(self.folder / name, {"step": step} | values)
            self.track.write(step, values)


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Arrays as nested lists of numbers; read back they are equal to the bit."""
    return {name: np.asarray(value, np.float64).tolist() for name, value in values.items()}


def _arrays(values: dict[str, Any]) -> dict[str, np.ndarray]:
    """``_numbers`` undone; JSON has null for what is not a number."""
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


def _write_export(folder: pathlib.Path, model: Any, params: Params, parts: dict[str, Any]) -> None:
    """Beside what is there, in whose place it is put once it is whole."""
    scratch = folder / ".export"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    merged = lora_state.save(scratch / "adapter", model, params, lora_state.rank_of(params))
    # a reward of one number is read by transformers, too, but for its bias, which no comparison sees
    head = parts.get("reward", {}).get("weight")
    report.save_model(scratch, model, merged, score=None if head is None else np.asarray(head, np.float32).T)
    if parts:  # a value head, a reward head
        flat = {"/".join(str(k.key) for k in path): x for path, x in jax.tree_util.tree_leaves_with_path(parts)}
        safetensors_io.write(scratch / "model" / "heads.safetensors", flat)
    for part in scratch.iterdir():
        shutil.rmtree(folder / part.name, ignore_errors=True)  # of fewer steps
        part.rename(folder / part.name)
    scratch.rmdir()


class SeedRun:
    """The programs of an arm, compiled once for all its seeds, and the loop of one seed."""

    def __init__(
        self,
        plan: Plan,
        every: int,
        mesh: str,
        keeping: Keeping,
        *,
        temperature: float = 1.0,
        start: Callable[[Stage, Params, Key, int], TrainState] = shared_start,
        figures: Callable[[host.Iteration], dict[str, float]] = host.metrics_of,
        between: Callable[[host.Iteration], dict[str, float]] = unmeasured,
        see: Callable[[int, dict[str, float]], None] = unseen,
    ):
        """Compiles nothing yet.

        Args:
          every: steps between measurements.
          start: makes the state of a stage from the parameters before it, the seed's key and the stage's number; but
            for ``shared_start`` it trains these parameters themselves, which nothing else may need.
          figures: of a step of a loop in this process, for its line in ``metrics.jsonl``.
          between: further ones, of a measurement behind the step, which may raise RunStopped.
          see: is told every step with its line.
        """
        self.plan, self.every, self.keeping, self.temperature = plan, every, keeping, temperature
        self.start, self.figures, self.between, self.see = start, figures, between, see
        self.mesh = meshes.parse_mesh(mesh) if mesh else None
        self.place = None if self.mesh is None else partial(rules.constrain, mesh=self.mesh)
        self.shards = 1 if self.mesh is None else meshes.batch_parts(self.mesh)
        on_host = self.mesh is not None and plan.host_score is not None
        self.shown = lockstep.to_all(self.mesh) if on_host else lockstep.as_drawn
        measure = plans.measured(plan)
        self.measure = measure if plan.on_host else jit_sampling(measure)
        self.loops: dict[int, HostLoop] = {}
        self.aparts: dict[int, threads.Apart] = {}
        self.offline: dict[tuple[int, int], Callable[..., Any]] = {}
        self.streams: dict[int, Any] = {}  # by stage, of the seed that runs
        self.seed = 0  # which that is
        self.looks: dict[int, Callable[..., Any]] = {}

    def run(self, seed: int, stop: Stop) -> Iterator[tuple[int, dict | None, dict]]:
        """Yields ``(step, training metrics [steps], measured)``: before training, and after every stretch of it.

        Raises:
          Stopped: when ``stop`` was asked, after a checkpoint.
          RunStopped: where the run's world says so, after a checkpoint of the last step.
          UserError: for a folder of another run, or a disk that is full.
        """
        with contextlib.ExitStack() as held:
            folder = self.keeping.seed_folder(seed)
            # a job without seeds holds its folder from its beginning
            if folder is not None and self.keeping.of_seed:
                held.enter_context(checkpoint.held(folder))
            logs = _Logs(self.keeping, seed)
            held.callback(lambda: logs.track.close())  # the one that is open then
            yield from self._run(seed, stop, logs)

    def _run(self, seed: int, stop: Stop, logs: _Logs) -> Iterator[tuple[int, dict | None, dict]]:
        key, eval_key = jax.random.key(seed), jax.random.fold_in(jax.random.key(EVAL_KEY), seed)
        params, self.streams, self.seed = self.plan.init(key), {}, seed
        at, state = self._resume(logs, params, key)
        end, total = 0, sum(stage.steps for stage in self.plan.stages)
        if at > total:
            raise UserError(f"{logs.folder} is at step {at}, beyond the {total} that are asked for, and its earlier "
                            f"weights are gone; give more --steps, or begin in another --out")  # fmt: skip
        logs.rewind(at)
        yield 0, None, self._measured(logs, 0, params, eval_key)
        if state is not None and self.start is not shared_start and not self._trained(0):
            # a resumed state has its own
            jax.tree.map(lambda x: x.delete(), params)
        for index, stage, steps, done in stretches(self.plan.stages, self.every):
            begin, end = end, end + steps
            if end <= at and end in logs.measured:
                yield end, self._logged(logs, begin, end), _arrays(logs.measured[end])
                params = params if state is None else state.params
                continue
            if end < min(at, total):
                raise UserError(f"{logs.folder}/measured.jsonl has lost the measurement of step {end}, and its weights "
                                "are gone; give --fresh to begin again")  # fmt: skip
            if state is None or begin >= at and done == 0:
                params = params if state is None else state.params
                state = self._begin(index, params, key)
            try:
                with stop.listening():
                    for row, now in self._advance(index, stage, state, begin, end, max(begin, at), done, logs, stop):
                        state = now
                        logs.metrics |= row
                    self._stop_if_asked(stop, logs, index, end, state)  # while the last step was kept
                    params = state.params
                    measured = self._measured(logs, end, params, eval_key)
                    self._stop_if_asked(stop, logs, index, end, state)
            except RunStopped as error:
                raise self._wanting(error, logs, index, begin - done, state) from error
            yield end, self._logged(logs, begin, end), measured
        self._export(logs, params, eval_key)

    def _stop_if_asked(self, stop: Stop, logs: _Logs, index: int, step: int, state: TrainState) -> None:
        """Keeps the state of ``step``, where no checkpoint was due there, and raises ``Stopped``."""
        if _asked(stop):
            if logs.saved < step:
                self._save(logs, index, step, state)
            raise Stopped(step)

    def _wanting(self, error: RunStopped, logs: _Logs, index: int, offset: int, state: TrainState) -> RunStopped:
        """The error of a run that lacks something, behind a checkpoint of its last whole step."""
        if logs.folder is None:
            return error
        step = max(logs.metrics, default=0)
        if self.keeping.staleness is None and step > offset:  # an asynchronous run has given its state away
            self._save(logs, index, step, state)
        how = "the same command goes on there" if self.keeping.of_seed else record.how_to_resume(logs.folder)
        return RunStopped(f"{error}; {logs.folder} is kept at step {step}, {how}")

    def _measured(self, logs: _Logs, step: int, params: Params, key: Key) -> dict[str, np.ndarray]:
        if step in logs.measured:
            return _arrays(logs.measured[step])
        found = _numbers(hosts.gathered(self.measure(params, key)))
        logs.add("measured.jsonl", step, found)
        return _arrays(found)

    @staticmethod
    def _logged(logs: _Logs, begin: int, end: int) -> dict[str, np.ndarray]:
        rows = [logs.metrics.get(step, {}) for step in range(begin + 1, end + 1)]  # a damaged line has no figures
        names = [name for name in max(rows, key=len) if not name.startswith(("time/", "compile/"))]
        names = [name for name in names if name != "tokens/per_s"]
        return {name: np.asarray([row.get(name) for row in rows], np.float64) for name in names}

    def _begin(self, index: int, params: Params, key: Key) -> TrainState:
        """The state of a stage, all of it split over the mesh: parameters, moments, and the copies in its extras."""
        state = self.start(self.plan.stages[index], params, key, index)
        return state if self.mesh is None else rules.shard(state, self.mesh)

    def _trained(self, index: int) -> str:
        return self.plan.stages[index].method.trained

    def _resume(self, logs: _Logs, params: Params, key: Key) -> tuple[int, TrainState | None]:
        """``(steps done, state)`` of the newest intact checkpoint; ``(0, None)`` where there is none."""
        if logs.folder is None:
            return 0, None
        for index in reversed(range(len(self.plan.stages))):
            path = checkpoint.latest(self._checkpoints(logs.folder, index))
            hosts.agree("resume", None if path is None else path.name)  # folders that are not shared may differ
            if path is None:
                continue
            for name, value in self.keeping.note.items():
                if checkpoint.note(path).get(name) != value:
                    raise UserError(f"checkpoint {path} belongs to other {name} than this run has; give what it was "
                                    "made with, or another folder")  # fmt: skip
            before = sum(stage.steps for stage in self.plan.stages[:index])
            adapts = bool(self._trained(index))
            like = self._begin(index, params, key)
            shapes, base = checkpoint.shapes(lora_state.kept(like, adapts)), like.params if adapts else None
            del like  # where a state fits into the memory once, another one beside it need not
            state = lora_state.whole(checkpoint.restore(path, shapes), base, adapts)
            note = checkpoint.note(path)
            if streamed.PLACE in note:
                self._stream(index, self.plan.stages[index]).set_state(note[streamed.PLACE])
            hosts.say(f"resuming {logs.folder} at step {before + int(state.step)}")
            return before + int(state.step), state
        return 0, None

    def _checkpoints(self, folder: pathlib.Path, index: int) -> pathlib.Path:
        return folder / "checkpoints" / self.keeping.of_stage.format(index)

    def _save(self, logs: _Logs, index: int, step: int, state: TrainState) -> None:
        if logs.folder is not None:
            kept = lora_state.kept(state, bool(self._trained(index)))
            note = {"step": step} | self.keeping.note
            if index in self.streams:
                note[streamed.PLACE] = self.streams[index].get_state()
            checkpoint.save(self._checkpoints(logs.folder, index), kept, note=note)
            logs.saved = step

    def _stream(self, index: int, stage: Stage) -> Any:
        """Where the minibatches of a stage come from, at its beginning or where the last call left it."""
        if index not in self.streams:
            self.streams[index] = stage.method.stream(self.seed)
        return self.streams[index]

    def _loop(self, index: int, method: Online) -> HostLoop:
        if index not in self.loops:
            self.loops[index] = host.make_host_loop(
                method, self.plan.host_score, place=self.place, world=self.plan.world, move=self.plan.move,
                most_gap=self.keeping.most_gap, most_skipped=self.keeping.most_skipped, planner=self.keeping.planner,
                shards=self.shards,
            )  # fmt: skip
        return self.loops[index]

    def _advance(
        self, index: int, stage: Stage, state: TrainState, begin: int, end: int, at: int, done: int, logs: _Logs,
        stop: Stop,
    ) -> Iterator[tuple[dict[int, dict[str, float]], TrainState]]:  # fmt: skip
        """From step ``at`` of the run to ``end``: metrics by step and the state behind them, kept as was asked."""
        offset = begin - done  # steps of the stages before
        if isinstance(stage.method, Online):
            pieces = self._online(index, stage, state, offset, at, end, logs, stop)
        else:
            pieces = self._offline(index, stage, state, offset, at, end, stop)
        step = at
        for rows, now, iteration in pieces:
            for step, row in rows.items():
                logs.add("metrics.jsonl", step, row)
                self.see(step, row)
            step, stopping = max(rows, default=step), _asked(stop)  # none: stopped before the first
            every = self.keeping.checkpoint_every
            keep = (step - offset) % every == 0 or step == offset + stage.steps or stopping
            keep = keep and step > offset  # else the stage before has kept what this one begins with
            if iteration is not None and (keep or step == 1):
                self._look(index, iteration.state, iteration.drawn.trajectories, iteration.rewards, step, logs)
            if keep:
                self._save(logs, index, step, now)
            yield rows, now
            if stopping:  # after the last step too: what follows may be longer than whoever asks will wait
                raise Stopped(step)

    def _online(self, index, stage, state, offset, at, end, logs, stop):
        if self.keeping.staleness is not None:
            every, play = self.keeping.checkpoint_every, self._by_workers if self.keeping.remote else self._by_threads
            streak = skipped.Streak(self.keeping.most_skipped)
            while at < end:  # the pipeline is emptied where a checkpoint is due, or where the run is asked to stop
                upto = min(end, next_multiple(at, offset, every))
                state, history = play(index, state, offset, upto, logs, streak, partial(_asked, stop))
                done = offset + int(state.step)
                yield dict(zip(range(at + 1, done + 1), history, strict=True)), state, None
                at = done
            return
        loop = self._loop(index, stage.method)
        line = self._timed(logs)
        for iteration in host.iterations(loop, state, end - offset):
            row, lacking = line(iteration)
            yield {offset + int(iteration.state.step): row}, iteration.state, iteration
            if lacking is not None:  # not before: the state before this step is given away, its own is kept now
                raise lacking

    def _timed(self, logs: _Logs) -> Callable[[host.Iteration], tuple[dict[str, float], RunStopped | None]]:
        """The lines of a loop that begins now: figures of the step, and how long it took.

        Beside a line what its measurement lacks, where that raises it.
        """
        clock = time.monotonic()

        def line(iteration: host.Iteration) -> tuple[dict[str, float], RunStopped | None]:
            nonlocal clock
            took, lacking = time.monotonic() - clock, None
            compiled = logs.compiled + iteration.compiled  # a run that goes on compiles its programs again
            row = self.figures(iteration) | {"time/step_s": took, "compile/count": compiled}
            row |= {f"time/{phase}_s": seconds for phase, seconds in iteration.seconds.items()}
            if "tokens/generated" in row:
                row["tokens/per_s"] = row["tokens/generated"] / took
            try:
                row |= self.between(iteration)
            except RunStopped as error:
                lacking = error
            clock = time.monotonic()  # what is measured for the line is no time of training
            return row, lacking

        return line

    def _by_threads(
        self, index: int, state: TrainState, offset: int, upto: int, logs: _Logs, streak: skipped.Streak,
        asked: Callable[[], bool],
    ) -> tuple[TrainState, list[dict]]:  # fmt: skip
        loop = self._loop(index, self.plan.stages[index].method)
        kept, line = self.keeping, self._timed(logs)

        def seen(iteration: host.Iteration) -> dict[str, float]:
            (row, lacking), step = line(iteration), offset + int(iteration.state.step)
            if lacking is not None:
                raise lacking
            if step in (1, upto):  # rollouts are to be read where a checkpoint is kept, as in the host loop
                self._look(index, iteration.state, iteration.drawn.trajectories, iteration.rewards, step, logs)
            return row

        if jax.process_count() > 1:
            return lockstep.run(
                loop, state, upto - offset, staleness=kept.staleness, shown=self.shown, streak=streak, figures=seen,
                stop=asked,
            )  # fmt: skip
        return threads.run(
            loop, state, upto - offset, staleness=kept.staleness, scorers=kept.scorers, units=max(kept.units, 1),
            apart=self._apart(index), streak=streak, figures=seen, stop=asked,
        )  # fmt: skip

    def _apart(self, index: int) -> threads.Apart | None:
        """The generator of a stage, where it has devices of its own."""
        if self.keeping.generator is not None and index not in self.aparts:
            there, method = self.keeping.generator, self.plan.stages[index].method
            own = there.plan.stages[index].method
            self.aparts[index] = apart.make_apart(method, own, self.mesh, there.mesh, there.prepare)
        return self.aparts.get(index)

    def _by_workers(
        self, index: int, state: TrainState, offset: int, upto: int, logs: _Logs, streak: skipped.Streak,
        asked: Callable[[], bool],
    ) -> tuple[TrainState, list[dict]]:  # fmt: skip
        """The learner begins with this state and leaves the next one, both as checkpoints of a folder of their own."""
        folder, begun, steps = (logs.folder / "workers" / f"stage_{index}").resolve(), int(state.step), upto - offset
        remote, prompts = self.keeping.remote, self.plan.stages[index].method.prompts_per_step
        if prompts % remote.sizes.parts:
            raise UserError(f"--step-parts {remote.sizes.parts} does not divide the {prompts} prompts of a step")
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint.save(folder, state, note={"metrics": {}})
        report = conductor.run(
            remote.workers(), partial(remote.build, index), steps, folder=str(folder),
            sizes=remote.sizes._replace(staleness=self.keeping.staleness), limits=remote.patience,
            checkpoint_every=steps - begun, streak=streak, stop=asked,
        )  # fmt: skip
        for event in report.events:
            hosts.say(f"{event.kind} {event.who}: {event.cause}")
        state = checkpoint.restore(checkpoint.latest(folder), state)
        shutil.rmtree(folder)
        if report.lesson is not None:
            self._look(index, state, *report.lesson, upto, logs)
        return state, report.history

    def _offline(self, index, stage, state, offset, at, end, stop):
        while at < end:
            steps = min(end, next_multiple(at, offset, self.keeping.checkpoint_every)) - at
            if stage.method.stream is not None:
                if (index, 1) not in self.offline:
                    self.offline[index, 1] = streamed.make_step(stage.method, place=self.place)
                rows = self._stream(index, stage)
                state, found = streamed.run(
                    self.offline[index, 1], state, rows, steps=steps, mesh=self.mesh, stop=partial(_asked, stop)
                )
                shown = [{n: float(hosts.gathered(x)) for n, x in one.items()} for one in found]
                yield dict(enumerate(shown, at + 1)), state, None
                at += len(shown)
                continue
            if (index, steps) not in self.offline:
                self.offline[index, steps] = offline.make_run(
                    stage.method,
                    steps,
                    place=self.place,
                    shards=self.shards,
                    planner=None if self.keeping.planner is None else packed_rows,  # rows of a table have no groups
                )
            state, metrics = self.offline[index, steps](state)
            host_side = {name: np.asarray(hosts.gathered(x), np.float64) for name, x in metrics.items()}
            yield {at + 1 + k: {n: float(x[k]) for n, x in host_side.items()} for k in range(steps)}, state, None
            at += steps

    def _look(
        self, index: int, state: TrainState, rollouts: Trajectories, rewards: Rewards, step: int, logs: _Logs
    ) -> None:
        """Writes the first rows of a rollout to be read, where there is a tokenizer to read them with."""
        model, method = self.plan.model, self.plan.stages[index].method
        if logs.folder is None or model is None:
            return
        if index not in self.looks:
            groups = min(max(2, SHOWN_ROWS // method.group_size), method.prompts_per_step)
            self.looks[index] = transcripts.make_look(
                method, model.tokenizer.decode, rows=groups * method.group_size, temperature=self.temperature
            )
        lines = self.looks[index](state, rollouts, rewards, step)
        if hosts.is_first():
            for line in lines:
                record.append_line(logs.folder / view.FILE, line)
            logs.track.text(step, "samples", track.samples(lines))

    def _export(self, logs: _Logs, params: Params, key: Key) -> None:
        """The trained model as a model folder."""
        model, exported = self.plan.model, self.plan.exported
        if logs.folder is None or model is exported is None or not self.keeping.export:
            return
        found = hosts.gathered(plans.finished(self.plan, params, key))
        parts: dict[str, Any] = {}
        if exported is not None:
            if (of_model := exported(found)) is None:
                return
            model, found = of_model
        elif "model" in found:
            parts = {name: part for name, part in found.items() if name != "model"}
            found = model_part(found)
        hosts.by_first("export", partial(_write_export, logs.folder, model, found, parts))
