"""The one command line of every experiment: flags -> arms -> records -> table, plot, claim."""

import dataclasses
import importlib
import pathlib
import shutil
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Annotated, Any, Literal

import jax
import tyro

from jaxrl_llm.asynchronous.roles import Program, make_program
from jaxrl_llm.distributed import hosts
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, durable, plots, recipes, results
from jaxrl_llm.experiment.claims import Claim
from jaxrl_llm.experiment.durable import Keeping, Stopped
from jaxrl_llm.experiment.evidence import beds, fingerprints, records, store, verdicts
from jaxrl_llm.experiment.own_rows import tasks
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.models.io import hub
from jaxrl_llm.planning import largest_arrays
from jaxrl_llm.run import compile_cache, flags, host_memory, lora_state, quiet, stop
from jaxrl_llm.run.options import LayoutName, planner_of
from jaxrl_llm.run.records import record, track
from jaxrl_llm.train import parity
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train import seed_axis as seeds
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan
from jaxrl_llm.types import TrainState

FRONT_DOOR = "jaxrl_llm.jobs"  # whose modules are commands of ``jaxrl``, not of their own


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run and where to write; no method reads these."""

    arm: tuple[str, ...] = ()  # arms to run; none: all
    seeds: int = 8  # seeds 0, 1, ... of every arm
    until_decided: bool = False  # 8, 16, 32, 64 seeds of the arms of the primary part, until its verdict is there
    smoke: bool = False  # two steps, two seeds
    plan: bool = False  # show and trace the arms, run nothing
    mesh: str = ""  # for example data=2,fsdp=4: one seed after another on these devices; empty: one device
    # parts of a batch, gradients summed; 0: of a model of your own up to 16 where the method allows it, else one
    microbatches: int = 0
    # fused: one compiled program for all seeds; host: one seed after another, kept in folders that survive kill -9;
    # async: as host, rollouts and scores beside the updates. Empty: host for a model of your own or a mesh, else fused
    loop: Literal["", "fused", "host", "async"] = ""
    # how updates on the host compute their rows: padded as they stand, packed into fewer, or as a tree of what the rows
    # of a group share (packed where that is little). Empty: tree for a model of your own, else padded
    layout: LayoutName = ""
    staleness: int = 1  # with --loop async: updates that the weights of a rollout may be behind; 0: those of host
    # with --loop async: threads:N that score; local:N, N rollout workers, a learner and scorers in this process; ray:N,
    # the same as processes on the cluster of Ray
    workers: str = "threads:1"
    # with --loop async: rollouts on devices behind those of --mesh, in this layout, for example tensor=4: weights go
    # there from device to device while the next update runs. Empty: rollouts and updates share the devices of --mesh
    generator_mesh: str = ""
    storage_units: int = 0  # with --loop async: units on which the rows lie, apart from who hands them out; 0: none
    # with local:N or ray:N: rollout workers that fetch new weights at the same time, while all generate; 0: every one
    # fetches them where it begins a row, and waits
    weight_swaps: int = 0
    step_parts: int = 1  # with local:N or ray:N: parts of a step, each rolled out and scored by itself
    scorers: int = 1  # with local:N or ray:N: workers that score
    # with local:N or ray:N: times the seconds after which a worker that says nothing is replaced (900 for its rollout,
    # 120 for verdicts, 3600 for an update); more for slow judges and long responses
    patience: float = 1.0
    checkpoint_every: int = 50  # steps, on the host
    hosts: str = ""  # several processes as one machine: auto (TPU pods, SLURM), or ADDRESS:PORT,COUNT,INDEX
    track: tuple[str, ...] = ()  # also write the figures for tensorboard, wandb
    export: Literal["own", "always", "never"] = "own"  # write the trained models; own: of a model of your own
    most_gap: float = 0.0  # stop where a token's log-probability differs more between sampler and trainer; 0: never
    # updates in a row that are not finite, each left out, until the run stops; 0: never, the seed has then diverged,
    # which is a failure of its arm
    most_skipped: int = 0
    out: str = ""  # folder of the results; empty: runs/<family>/<experiment>
    compile_cache: bool = True  # keep compiled programs in the user's cache folder, for the next start
    fresh: bool = False  # do not reuse the finished seeds of earlier runs
    record: bool = False  # pilot, wide evaluation, fresh seeds; also copy results and plot to results/<family>/
    register: bool = False  # of a record: pilot and tuning, then its registration in results/registered.tsv, and stop
    force_record: bool = False  # a record although its pilot says no, and marked so
    controls: bool = True  # of a record: arms of the harness that must help, or must not, see evidence.controls
    tune: tuple[float, ...] = ()  # learning rates tried for every arm of the primary part before the record
    # beside --tune: FIELD=V,V,V, a coefficient of the method: the arms of the primary part that read it try these
    # values, each at its best rate, and the other arms take the method's
    coefficient: str = ""
    bed: str = ""  # with --record on another task or base model: its name, beside the file's own record


def parse(module: ModuleType, arguments: list[str]) -> tuple[Options, Any, set[str]]:
    """Options, settings before any arm, and the names of the settings that were given as flags.

    Raises:
      UserError: for an unknown flag (naming the nearest one) or a number out of range.
    """
    arguments = merged(arguments, flags.several(Options) | flags.several(module.Settings))
    given = flags.named(arguments)
    flags.check_length(given)
    base = arms.preset(module, smoke="--smoke" in arguments, model=given.get("model", module.Settings().model))
    functions = {f.name: getattr(base, f.name) for f in dataclasses.fields(base) if callable(getattr(base, f.name))}
    own = {f.name for f in dataclasses.fields(Options)}  # one flag serves an option and a setting of the same name
    shown_fields = [f for f in dataclasses.fields(base) if f.name not in functions.keys() | own]
    shown = dataclasses.make_dataclass(
        "Flags",
        [
            (f.name, flags.explained(type(base), f), dataclasses.field(default=getattr(base, f.name)))
            for f in shown_fields
        ],
        frozen=True,
    )
    shown.__doc__ = (module.__doc__ or "").strip().splitlines()[0]
    default = Options(seeds=getattr(module, "SEEDS", Options.seeds), export=getattr(module, "EXPORT", Options.export))
    both = dataclasses.make_dataclass(
        "Command", [("options", Annotated[Options, tyro.conf.arg(name="")], dataclasses.field(default=default)),
                    ("settings", Annotated[shown, tyro.conf.arg(name="")], dataclasses.field(default=shown()))]
    )  # fmt: skip
    known = [f.name for f in (*dataclasses.fields(Options), *shown_fields)]
    command = flags.read(both, arguments, prog=command_name(module), names=known)
    placed = {"mesh": command.options.mesh}
    settings = type(base)(**dataclasses.asdict(command.settings), **functions, **placed)
    return command.options, settings, given.keys() & {f.name for f in shown_fields}


def merged(arguments: list[str], many: set[str]) -> list[str]:
    """``--arm a --arm b`` as ``--arm a b``; every other flag may stand once.

    Raises:
      UserError: for another flag that is given twice.

    >>> merged(["--arm", "a", "--smoke", "--arm=b", "c"], {"arm"})
    ['--arm', 'a', 'b', 'c', '--smoke']
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            if name in found and name[2:].replace("-", "_") not in many:
                raise UserError(f"{name} is given twice; give it once")
            found.setdefault(name, []).extend([value] if "=" in word else [])
        else:
            found.setdefault(name, []).append(word)
    return [word for name, values in found.items() for word in ([name] if name else []) + values]


def command_name(module: ModuleType) -> str:
    """``python -m experiments.<family>.<slug>``, also where that runs as ``__main__``, or ``jaxrl sft``."""
    package, _, name = module_name(module).rpartition(".")
    return f"jaxrl {name.replace('_', '-')}" if package == FRONT_DOOR else f"python -m {module_name(module)}"


def module_name(module: ModuleType) -> str:
    """By which a module is imported, also where it runs as ``__main__``."""
    spec = getattr(module, "__spec__", None)
    return spec.name if spec else module.__name__


def check_flags(
    module: ModuleType, resolved: dict[str, Any], base: Any, given: set[str], reads: dict[str, set[str]]
) -> None:
    """Raises UserError for a flag that changes nothing: no chosen arm reads the field, or every one overrides it.

    An arm whose number is so many times that of the settings (``arms.Times``) takes the flag's.
    """
    for name in sorted(given):
        if not any(name in fields for fields in reads.values()):
            raise UserError(f"{flags.spell(name)} is read by no chosen arm ({', '.join(reads)}); drop it")
        follows = [isinstance(module.ARMS[arm].get(name), arms.Times) for arm in resolved]
        if not any(follows) and all(getattr(s, name) != getattr(base, name) for s in resolved.values()):
            raise UserError(f"{flags.spell(name)} is set by every chosen arm ({', '.join(resolved)}) itself; drop it")


def check_model(base: Any, given: set[str]) -> None:
    """Raises UserError for a model without the data of its own that would bring it in."""
    if "model" in given and getattr(base, "data", None) == "":
        raise UserError(f"--model {base.model} without --data: these arms train a decoder of their own in an embedded "
                        "world; give --data with it, or drop it")  # fmt: skip


def check_embedded(module: ModuleType, arguments: list[str]) -> None:
    """Refuses a model or rows of one's own where a file says that it is about its embedded world alone.

    Raises:
      UserError: with the file's reason.
    """
    why = getattr(module, "EMBEDDED_ONLY", "")
    wrong = next((w for w in arguments if w.partition("=")[0] in ("--model", "--data")), "") if why else ""
    if wrong:
        raise UserError(f"{wrong.partition('=')[0]}: this experiment has its embedded world alone: {why}")


def check_sizes(settings: Any, microbatches: int) -> None:
    """Refuses a mesh or a number of parts that does not divide the batch, before a model is loaded.

    Raises:
      UserError: naming the flag.
    """
    if microbatches < 0:
        raise UserError(f"--microbatches {microbatches} must not be negative; 0 chooses")
    mesh = meshes.given_mesh(settings.mesh)
    sizes = {name: getattr(settings, name, 0) for name in ("prompts_per_step", "rows_per_step")}
    sizes = {flags.spell(name): size for name, size in sizes.items() if size}  # a stage has the one or the other
    if sizes and microbatches and all(size % microbatches for size in sizes.values()):
        given = " and ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(f"--microbatches {microbatches} does not divide {given}; choose a divisor")
    if mesh is not None and isinstance(settings, recipes.OnlineSettings):
        if all(size % meshes.batch_parts(mesh) for size in sizes.values()):
            meshes.check_rows(mesh, settings.prompts_per_step, "--prompts-per-step")


AMOUNTS = ("learning_rate", "epochs", "weight_decay", "max_grad_norm", "centering", "margin_scale", "value_weight")
LEAST = {name: 1 for name in ("steps", "eval_every", "rows_per_step", "eval_rows", "prompts_per_step", "group_size",
                              "train_problems", "eval_problems", "eval_samples", "max_new_tokens",
                              "train_rows")}  # fmt: skip
LEAST |= {name: 0 for name in ("warmup_steps", "bad_rows")}


def check_numbers(settings: Any) -> None:
    """Refuses numbers that no update can be made with, of the fields that the settings have.

    A learning rate of 0 is one: an arm that is measured as it was loaded has it.

    Raises:
      UserError: naming the flag.
    """
    for name, lowest in LEAST.items():
        if (value := getattr(settings, name, lowest)) < lowest:
            raise UserError(f"{flags.spell(name)} {value} must be at least {lowest}")
    for name in AMOUNTS:
        flags.check_amount(name, getattr(settings, name, 0.0))
    for field in dataclasses.fields(settings):
        if (value := getattr(settings, field.name)) != value and isinstance(value, float):
            raise UserError(f"{flags.spell(field.name)} {value} is no number")


def in_parts(plan: Plan, settings: Any, microbatches: int = 0) -> Plan:
    """The plan of an arm with its batches in parts, see ``Options.microbatches``, its adapter, and what is offloaded.

    Raises:
      UserError: as ``train.plan.in_parts``.
    """
    devices = meshes.batch_parts(meshes.parse_mesh(settings.mesh)) if settings.mesh else 1
    parts = microbatches or (1 if arms.bundled(settings.model) else 0)
    if settings.lora and plan.model is not None:
        plan = plans.with_adapter(plan, lora_state.PART)
    if settings.offload:
        plan = plans.with_parked_optimiser(plan)
    return plans.in_parts(plan, parts, devices=devices)


def arm_program(name: str, arguments: list[str], arm: str, index: int) -> Program:
    """What a worker computes of a stage of an arm: it reads the command again, in its own process.

    Args:
      name: of the module of the experiment.
      index: of the stage.
    """
    module = importlib.import_module(name)
    options, base, given = parse(tasks.with_rows(module), arguments)
    module, base = tasks.over_rows(module, base, given)
    settings = arms.resolve(module, base, (arm,))[arm]
    plan = in_parts(module.build(settings), settings, options.microbatches)

    def start() -> TrainState:
        key = jax.random.key(0)  # only its shapes count: the learner begins with a checkpoint
        return durable.shared_start(plan.stages[index], plan.init(key), key, index)

    return make_program(plan.stages[index].method, start, plan.host_score)


def keeping_of(
    options: Options, plan: Plan, settings: Any, out: pathlib.Path, arm: str, build: Callable[[int], Program],
    remake: Callable[[Any], Plan] | None = None,
) -> Keeping | None:  # fmt: skip
    """How an arm runs on the host; None for one that is a compiled program for all seeds.

    Args:
      build: makes what a worker computes of a stage.
      remake: makes the plan of the arm with other settings.

    Raises:
      UserError: for a loop that cannot run this plan.
    """
    on_host = plan.on_host or bool(settings.mesh)
    staleness = options.staleness if plan.staleness is None else plan.staleness
    remote = durable.remote_of(
        options, settings.mesh, build,
        (plan.world is not None, "does not play episodes in Python: give threads:N"),
        (plan.of_seed is not None, "does not make what belongs to each seed: give threads:N"),
        (options.layout in ("packed", "tree"), f"trains rows as they stand: drop --layout {options.layout}"),
    )  # fmt: skip
    if options.loop == "fused" and on_host:
        why = f"--mesh {settings.mesh}" if settings.mesh else "its rewards or its world are Python"
        raise UserError(f"--loop fused: {why}; drop one of them")
    leaves = plan.stages or plan.finish is not plans.as_trained  # untrained, and yet another model than before
    if not leaves or not (on_host or options.loop in ("host", "async")):
        if options.layout in ("packed", "tree"):
            raise UserError(f"--layout {options.layout} is planned on the host: give --loop host with it, or drop it")
        if settings.offload:
            raise UserError(f"--offload {settings.offload} is of the host loop: give --loop host with it, or drop it")
        if options.hosts:
            raise UserError("--hosts runs a model of your own (--model DIR --data FILE), or a --mesh; give one")
        if options.most_gap:
            raise UserError(
                f"--most-gap {options.most_gap:g} stops one seed after another: give --loop host with it, or drop it"
            )
        if options.track:
            raise UserError(
                f"--track {' '.join(options.track)} follows one seed after another: give --loop host with it"
            )
        return None
    return Keeping(
        folder=out / "seeds" / arm,
        checkpoint_every=options.checkpoint_every,
        staleness=staleness if options.loop == "async" else None,
        scorers=durable.check_workers(options.workers)[1],
        units=options.storage_units,
        generator=durable.generator_of(options, settings, plan, remake),
        remote=remote,
        trackers=options.track,
        export=options.export == "always" or options.export == "own" and not arms.bundled(settings.model),
        most_gap=options.most_gap,
        planner=planner_of(options.layout, own=not arms.bundled(settings.model)),
    )


def build_arms(
    module: ModuleType,
    resolved: dict[str, Any],
    microbatches: int = 0,
    formed: dict[str, largest_arrays.Formed] | None = None,
) -> tuple[dict[str, Plan], dict[str, set[str]]]:
    """The plan of every arm, traced, and the fields it read; ``formed`` is given the largest array of each.

    Raises:
      UserError: for settings that do not serve, or an arm that forms an array which its devices do not hold.
    """
    for settings in resolved.values():
        check_sizes(settings, microbatches)
        check_numbers(settings)
    built, reads = {}, {}
    for name, settings in resolved.items():
        copy, reads[name] = arms.watched(settings)
        built[name] = in_parts(module.build(copy), settings, microbatches)
        devices = jax.device_count() if getattr(settings, "mesh", "") else 1
        largest = largest_arrays.check(name, arms.trace(built[name]), devices)
        if formed is not None:
            formed[name] = largest
        reads[name] |= {"eval_every", *(("offload",) if built[name].stages else ())}
    return built, reads


def said(prog: str, arguments: list[str]) -> str:
    """The command as a record keeps it: all that shapes the numbers, not where they were written."""
    kept, words = [], iter(arguments)
    for word in words:
        if word == "--out":
            next(words, None)
        elif word not in ("--record", "--fresh", "--register") and not word.startswith("--out="):
            kept.append(word)
    return " ".join([prog, *kept])


def _write(module: ModuleType, options: Options, settings: Any, found: Results, claim: Claim, out: pathlib.Path,
           command: str, instrument: dict[str, Any] | None = None) -> None:  # fmt: skip
    """``results.json``, ``table.md`` and ``plot.png``; with ``--record`` also the committed copy.

    Args:
      instrument: what a record under the standard rests on, see ``evidence.standard``.
    """
    name = module_name(module)
    whole = {
        "experiment": ".".join(name.split(".")[1:]),
        "paper": next((x[6:].strip() for x in (module.__doc__ or "").splitlines() if x.startswith("Paper:")), ""),
        "command": command,
        "versions": record.versions(),
        "settings": results.plain({f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}),
        "looks": list(found.looks),
        "d_star": results.plain(found.d_star),
        "instrument": results.plain(instrument),
        "arms": results.plain({k: dataclasses.asdict(v) for k, v in found.arms.items()}),
        "claim": records.plain_claim(claim),
    }
    table = results.table(found, module.METRICS)
    record.write_json(out / "results.json", whole)
    (out / "table.md").write_text(table)
    plots.plot(out / "plot.png", found, getattr(module, "CURVES", module.METRICS), records.title(whole),
               claim=claim, caption=records.caption(whole))  # fmt: skip
    if options.record:
        family, slug = name.split(".")[-2:]
        slug = f"{slug}@{options.bed}" if options.bed else slug
        keep_copy(whole, out / "plot.png", pathlib.Path("results") / family, slug)
    print(f"\n{table}")
    if claims_nothing(module):
        print(f"results in {out}")
        return
    print(f"Claim: {claim.statement}")
    for kind, parts in (("primary", claim.parts[:1]), ("secondary", claim.parts[1:])):
        for part in parts:
            print(f"  {kind:9s} {part.verdict:19s} {part}")
    for problem in claim.bed:
        print(f"  test bed  {problem}")
    print(f"{claim.verdict}; results in {out}")


def write(*what: Any) -> None:
    """As ``_write``, by the first process; the others wait until all lies there."""
    hosts.by_first("results", lambda: _write(*what))


def keep_copy(whole: dict[str, Any], plot: pathlib.Path, folder: pathlib.Path, slug: str) -> None:
    """The committed copy of a run: its results with few line breaks, and its plot."""
    folder.mkdir(parents=True, exist_ok=True)
    records.save(whole, folder / f"{slug}.json")
    shutil.copy(plot, folder / f"{slug}.png")


def show_plan(
    resolved: dict[str, Any], built: dict[str, Plan], base: Any, seeds: int, formed: dict[str, largest_arrays.Formed]
) -> None:
    """Prints what would run: what every arm changes, what it may spend, and the largest array that it forms."""
    for name, settings in resolved.items():
        fields = [f.name for f in dataclasses.fields(base) if getattr(settings, f.name) != getattr(base, f.name)]
        changes = results.plain({f: getattr(settings, f) for f in fields}) or "baseline"
        where = "host loop" if built[name].on_host else "one compiled program for all seeds"
        print(f"{name}: {changes}; {plans.updates(built[name]):,} updates and {plans.rollouts(built[name]):,} rollouts "
              f"for each of {seeds} seeds; {where}; largest array {formed[name]}")  # fmt: skip
    print(f"settings: {results.plain({f.name: getattr(base, f.name) for f in dataclasses.fields(base)})}")


def open_folder(folder: str) -> pathlib.Path:
    """The folder of a run, made where it is missing.

    Raises:
      UserError: when it cannot be written.
    """
    out = pathlib.Path(folder)
    try:
        (out / "arms").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); choose a folder you own") from error
    return out


def check_run(options: Any) -> None:
    """Refuses no seed at all, and a record of a short run.

    Raises:
      UserError: naming the flag.
    """
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds} must be at least 1")
    if options.record and options.smoke:
        raise UserError("--record keeps whole runs only: drop --smoke or --record")


OF_RUNS = ("loop", "layout", "track", "most_gap", "checkpoint_every")


def check_kept(options: Options) -> None:
    """Refuses what records and certificates do not read: their arms run as their plans say, and leave numbers alone.

    Raises:
      UserError: naming the flag.
    """
    flags.check_default(options, OF_RUNS, "is read by no record or certificate: give it to a run that is none")
    if options.export == "always":
        raise UserError("--export always: a record or certificate leaves no models; drop it")


def claims_nothing(module: ModuleType) -> bool:
    """Whether a module is a job of the front door, whose claim has no text."""
    return not module.claim.__doc__


def check_claims(module: ModuleType, options: Options) -> None:
    """Refuses what rests on a claim where a module, as those of the front door, has none.

    Raises:
      UserError: naming the flag.
    """
    for name in ("record", "until_decided"):
        if getattr(options, name) and claims_nothing(module):
            raise UserError(f"{flags.spell(name)} is of experiments with a claim, and {command_name(module)} has none; "
                            "drop it")  # fmt: skip


def check_options(options: Options, arguments: list[str]) -> None:
    """Refuses flags that contradict each other.

    Raises:
      UserError: naming them.
    """
    check_run(options)
    if options.checkpoint_every < 1:
        raise UserError(f"--checkpoint-every {options.checkpoint_every} must be at least 1")
    if options.staleness < 0:
        raise UserError(f"--staleness {options.staleness} must not be negative")
    if not options.most_gap >= 0:
        raise UserError(f"--most-gap {options.most_gap} must not be negative; 0 allows any")
    durable.check_sizes(options)
    if options.loop != "async":
        flags.check_default(options, ("staleness", "workers"), "belongs to --loop async: give it")
    durable.check_generator(options)
    track.check(options.track)
    if options.record:
        check_kept(options)
    if options.record and options.arm:
        raise UserError("--record keeps every arm: drop --arm or --record")
    for name in ("register", "force_record", "tune", "coefficient", "bed"):
        if getattr(options, name) and not options.record:
            raise UserError(f"{flags.spell(name)} belongs to a record: give --record with it, or drop it")
    if options.coefficient and not options.tune:
        raise UserError(f"--coefficient {options.coefficient} is tried at the best rate of --tune: give it, too")
    if options.until_decided and any(word.split("=")[0] == "--seeds" for word in arguments):
        raise UserError("--until-decided chooses the number of seeds: drop it or --seeds")
    if options.until_decided and options.smoke:
        raise UserError("--until-decided takes whole runs: drop it, or --smoke")
    if options.bed and not options.bed.replace("_", "").replace("-", "").isalnum():
        raise UserError(f"--bed {options.bed}: a name of letters, digits, - and _")


def check_staleness(options: Options, built: dict[str, Plan]) -> None:
    """Refuses a loop whose samples are fresh where an arm is about old ones, and an asynchronous one without samples.

    Raises:
      UserError: naming the arm, or the loop.
    """
    trains = [stage.method for plan in built.values() for stage in plan.stages]
    if options.loop == "async" and trains and not any(isinstance(method, Online) for method in trains):
        raise UserError(f"--loop async: {', '.join(built)} draws no responses that could run ahead of its updates; "
                        "drop it")  # fmt: skip
    old = [name for name, plan in built.items() if plan.staleness and options.loop != "async"]
    if old:
        raise UserError(f"arm {old[0]} learns from samples of up to {built[old[0]].staleness} updates ago: "
                        "give --loop async, or --arm with others")  # fmt: skip


def check_gap(options: Options, built: dict[str, Plan]) -> None:
    """Refuses a limit to what no step of an arm measures: it would hold whatever the sampler does.

    Raises:
      UserError: naming the arm.
    """
    for name, plan in built.items() if options.most_gap else ():
        named = arms.figure_names(plan)
        if plan.world is None and not (named and all(parity.LARGEST in names for names in named)):
            raise UserError(f"--most-gap {options.most_gap:g}: arm {name} does not measure how far its sampler lies "
                            "from its trainer; drop the flag")  # fmt: skip


def say_without_ratio(options: Options, built: dict[str, Plan]) -> None:
    """Names the arms that train samples of older weights as if they were of their own."""
    for name, plan in built.items() if options.loop == "async" else ():
        staleness = options.staleness if plan.staleness is None else plan.staleness
        if staleness > 0 and not fingerprints.reads_sampler_logp(plan):
            hosts.say(f"arm {name}: its loss has no ratio to the sampler, so that samples of up to {staleness} updates "
                      "ago train as if they were of present weights")  # fmt: skip


def run(module: ModuleType, arguments: list[str]) -> Results | None:
    """Runs an experiment module with command-line arguments; None for ``--plan`` and ``--register``."""
    from jaxrl_llm.experiment.evidence import standard  # whose tuning builds arms with the functions above

    arms.check_slots(module)
    arguments = hub.located(arguments)
    check_embedded(module, arguments)
    options, base, given = parse(tasks.with_rows(module), arguments)
    check_claims(module, options)
    check_options(options, arguments)
    check_model(base, given)
    hosts.connect(options.hosts)  # before rows of one's own are opened: their model touches the devices
    if options.hosts and not options.mesh:
        base = dataclasses.replace(base, mesh=f"data={jax.device_count()}")
    module, base = tasks.over_rows(module, base, given)
    compile_cache.enable(options.compile_cache)
    if options.record:
        base = standard.widened(base, given)
    resolved = arms.resolve(module, base, options.arm)
    try:
        formed: dict[str, largest_arrays.Formed] = {}
        built, reads = build_arms(module, resolved, options.microbatches, formed)
    except ValueError as error:
        if not given or isinstance(error, UserError):
            raise
        flags_given = " ".join(f"{flags.spell(name)} {getattr(base, name)}" for name in sorted(given))
        raise UserError(f"{flags_given}: {str(error).splitlines()[0]}") from error
    check_flags(module, resolved, base, given, reads)
    check_staleness(options, built)
    check_gap(options, built)
    number = 2 if options.smoke and "--seeds" not in " ".join(arguments) else options.seeds
    if options.plan:
        show_plan(resolved, built, base, number, formed)
        return None
    name = "/".join(module_name(module).split(".")[1:]) or module.__name__
    out = open_folder(options.out or f"runs/{'smoke/' if options.smoke else ''}{name}")
    folder = out / "arms" if options.out or options.smoke else store.FOLDER
    command = said(command_name(module), arguments)
    if options.record:
        job = standard.Job(module, options, base, resolved, built, out, folder)
        done = standard.run(job)
        if done is None:
            return None
        found, claim, instrument = done
        write(module, options, base, found, claim, out, command, instrument)
        return found
    identities = store.identities(module, resolved, built)
    build = partial(arm_program, module_name(module), arguments)

    def remake(settings: Any) -> Plan:
        return in_parts(module.build(settings), settings, options.microbatches)

    keepings = {name: keeping_of(options, built[name], settings, out, name, partial(build, name), remake)
                for name, settings in resolved.items()}  # fmt: skip
    say_without_ratio(options, built)
    looks = verdicts.LOOKS if options.until_decided else (number,)
    done = 0
    for look in looks:
        own = list(range(look))
        ran = store.run_arms(options, resolved, built, identities, own, folder, keepings=keepings, trained=own[:done])
        done, found = look, Results(ran.arms, looks if options.until_decided else ())
        claim = beds.judge(module, found, smoke=options.smoke)
        if claim.verdict != verdicts.UNDECIDED:
            break
    write(module, options, base, found, claim, out, command)
    return found


def main(name: str, arguments: list[str] | None = None) -> None:
    """The last line of an experiment file: ``experiment.main(__name__)``; a mistake is one line and exit code 2."""
    quiet.quieten()
    stop.watch_output()
    host_memory.keep_freed_pages()
    seeds.use_all_cores()
    words = "stopped; the same command goes on"
    try:
        with stop.interruptible(words), record.resumable(pathlib.Path("the run"), "give the same command"):
            run(sys.modules[name], sys.argv[1:] if arguments is None else arguments)
    except (Stopped, KeyboardInterrupt) as stopped:
        print(stopped if isinstance(stopped, Stopped) else words, file=sys.stderr)
        sys.exit(130)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
