"""Settings of the main job: what they are, whether they are in range, and how flags or a stored run give them."""

import dataclasses
import json
import math
import pathlib
import time
from typing import Literal

from jaxrl_llm.data import sources
from jaxrl_llm.distributed import hosts
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.planning import presets
from jaxrl_llm.run import flags, method, parts
from jaxrl_llm.run.method import MethodSettings
from jaxrl_llm.run.options import (
    BaseName,
    LayoutName,
    ModelSettings,
    SamplingSettings,
    base_of,
    sampling_of,
    told_of_size,
    unflagged,
)
from jaxrl_llm.run.records import record, track


@dataclasses.dataclass(frozen=True)
class Settings(MethodSettings, SamplingSettings, ModelSettings):
    """GRPO on verifiable problems: bundled model and Countdown by default, or your own; jaxrl commands lists others."""

    # countdown, chain, FILE.jsonl, FILE.json, FILE.csv, FILE.parquet, FOLDER[:SPLIT] saved by datasets, tfds:NAME
    data: str = "countdown"
    # the columns of a file; see data.formats
    format: parts.Format = "plain"
    bad_rows: int = 0  # unreadable rows of a file that may be left out
    # empty: that of the format
    verifier: parts.VerifierName = ""
    steps: int = 650  # iterations: one rollout and one update each
    epochs: float = 0.0  # passes over the training prompts, in the place of --steps; 0: --steps
    # steps of the learning rate's warm-up and way down to 0, which a resumed run keeps whatever its --steps; 0: --steps
    schedule_steps: int = 0
    seed: int = 0  # of the samples, the order of the problems and the generated ones
    prompts_per_step: int = 32  # each with --group-size responses
    group_size: int = 16  # samples per prompt
    microbatches: int = 0  # parts of a batch, gradients summed; 0: up to 16, filtered groups cost nothing
    # how an update computes its rows: padded as they stand, packed into fewer, or as a tree of what the rows of a group
    # share (packed where that is little). Empty: tree for a model of your own, padded for a bundled one
    layout: LayoutName = ""
    filter_groups: bool = True  # groups whose rewards are all equal leave the loss and its denominator
    # DAPO's dynamic sampling: groups of unequal rewards are collected over steps until they are a whole batch, which
    # trains; the schedule counts these updates. What is left over is dropped, or (keep) begins the next batch
    refill: Literal["", "drop", "keep"] = ""
    learning_rate: float = 6e-4  # behind the warm-up, where it is highest
    chat: bool = False  # prompts that are text become a user's message, by the model's chat template
    prompt_tokens: int = 0  # columns for prompts; 0: the longest prompt
    max_new_tokens: int = 28
    strict: bool = False  # sample by the trainer's own pass: its gap is then exactly 0, at many times the work
    most_gap: float = 0.0  # stop where a token's log-probability differs more between sampler and trainer; 0: never
    most_skipped: int = 10  # updates in a row that are not finite, each left out, until the run stops; 0: never
    attention: Literal["xla", "auto", "pallas", "cudnn"] = "auto"  # who computes it; auto: a kernel where there is one
    optimiser: Literal["adam", "muon"] = "adam"  # muon: for the matrices of the layers, Adam for the rest
    # QLoRA: with --lora the frozen matrices of the layers are kept in few bits, 64 inputs to a scale
    lora_base: BaseName = ""
    # what the matrices that train are kept in; bfloat16: without a float32 copy, every update is rounded at random
    weights: Literal["float32", "bfloat16"] = "float32"
    train_problems: int = 10240  # size of the generated training set
    eval_problems: int = 1024  # held-out problems, never trained on
    eval_samples: int = 8
    eval_data: str = ""  # rows to be measured on, as --data; all of --data then trains. Empty: a tenth of --data
    # the columns of --eval-data; empty: --format. Those of another format are judged by its verifier, others as --data
    eval_format: parts.EvalFormat = ""
    eval_every: int = 0  # steps between evaluations while training; 0: only before and after
    track: tuple[str, ...] = ()  # also write figures and samples for tensorboard, wandb
    checkpoint_every: int = 50  # steps
    loop: Literal["host", "async"] = "host"  # async: rollouts and scores beside the updates
    staleness: int = 1  # with --loop async: updates that the weights of a rollout may be behind; 0: those of host
    # with --loop async: threads:N that score; local:N, N rollout workers, a learner and scorers in this process; ray:N,
    # the same as processes on the cluster of Ray
    workers: str = "threads:1"
    storage_units: int = 0  # with --loop async: units on which the rows lie, apart from who hands them out; 0: none
    # with local:N or ray:N: rollout workers that fetch new weights at the same time, while all generate; 0: every one
    # fetches them where it begins a row, and waits
    weight_swaps: int = 0
    step_parts: int = 1  # with local:N or ray:N: parts of a step, each rolled out and scored by itself
    scorers: int = 1  # with local:N or ray:N: workers that score
    # with local:N or ray:N: times the seconds after which a worker that says nothing is replaced (900 for its rollout,
    # 120 for verdicts, 3600 for an update); more for slow judges and long responses
    patience: float = 1.0
    mesh: str = ""  # for example data=2,fsdp=4; empty: one device, with --hosts all of them along data
    # rollouts on the same devices in another layout, for example data=4,tensor=2; empty: that of --mesh
    rollout_mesh: str = ""
    # with --loop async: rollouts on devices behind those of --mesh, in this layout; weights go there while the next
    # update runs. Empty: rollouts and updates share the devices of --mesh
    generator_mesh: str = ""
    hosts: str = ""  # several processes as one machine: auto (TPU pods, SLURM), or ADDRESS:PORT,COUNT,INDEX
    out: str = ""  # run folder; empty: runs/<time>
    compile_cache: bool = True  # keep compiled programs in the user's cache folder, for the next start
    resume: str = ""  # run folder to continue bit for bit


def check(settings: Settings) -> None:
    """Raises UserError for a number out of range."""
    least = {name: 1 for name in ("steps", "prompts_per_step", "eval_problems")}
    least |= {"train_problems": 1, "eval_samples": 1, "checkpoint_every": 1, "prompt_tokens": 0}
    least |= {"bad_rows": 0, "microbatches": 0, "lora": 0, "most_skipped": 0, "schedule_steps": 0, "eval_every": 0}
    least |= {"staleness": 0}
    least |= {"group_size": 2}  # the group is its own baseline
    for name, lowest in least.items():
        if getattr(settings, name) < lowest:
            raise UserError(f"{flags.spell(name)} {getattr(settings, name)} must be at least {lowest}")
    flags.check_seed(settings.seed)
    flags.check_amount("epochs", settings.epochs)
    for name in ("learning_rate", "temperature", "clip_low", "clip_high"):
        value = getattr(settings, name)
        if not (value > 0 and math.isfinite(value)):
            raise UserError(f"{flags.spell(name)} {value} must be positive and finite")
    if not 0 <= settings.most_gap < math.inf:
        raise UserError(f"--most-gap {settings.most_gap} must be finite and not negative; 0 allows any")
    if settings.strict:
        check_strict(settings)
    sampling_of(settings)
    check_measured(settings)
    if settings.optimiser == "muon" and settings.lora:
        raise UserError(f"--optimiser muon is for the matrices of layers; drop it, or --lora {settings.lora}")
    if settings.weights == "bfloat16" and settings.compute != "bfloat16":
        raise UserError(f"--weights bfloat16 is of --compute bfloat16, and it is {settings.compute}; give both")
    if settings.weights == "bfloat16" and settings.lora:
        raise UserError(f"--weights bfloat16 with --lora {settings.lora}: the base of an adapter is kept in the type "
                        "of --compute as it is; drop --weights")  # fmt: skip
    if settings.rollout_mesh:
        check_layouts(settings)
    if settings.refill:
        check_refill(settings)
    base_of(settings)
    method.check(settings, settings.max_new_tokens)
    if not settings.resume:  # whose flags are those of the run, which went on with them
        method.check_unread(settings)
        method.check_combined(settings)
        check_loop(settings)
    rows = settings.prompts_per_step * settings.group_size
    if settings.microbatches and rows % settings.microbatches:
        raise UserError(f"--microbatches {settings.microbatches} does not divide the batch of {rows} sequences")
    if settings.microbatches and settings.prompts_per_step % settings.microbatches:
        if comparing := method.compares_groups(settings):
            raise UserError(f"--microbatches {settings.microbatches} would cut groups, whose members {comparing} "
                            f"compares; give a divisor of --prompts-per-step {settings.prompts_per_step}")  # fmt: skip


def check_loop(settings: Settings) -> None:
    """Raises UserError for what only ``--loop async`` reads; workers of other kinds than threads say so themselves."""
    if settings.loop != "async":
        names = ("staleness", "workers") if settings.workers.startswith("threads:") else ("staleness",)
        flags.check_default(settings, names, "belongs to --loop async: give it")
    elif settings.eval_every and not settings.workers.startswith("threads:"):
        raise UserError(f"--eval-every {settings.eval_every} is of loops in one process: with --workers "
                        f"{settings.workers} a run is measured at its start and end; drop one of them")  # fmt: skip


def check_refill(settings: Settings) -> None:
    """Raises UserError for what does not go with a batch of several rollouts."""
    given = f"--refill {settings.refill}"
    if not settings.filter_groups:
        raise UserError(f"{given} fills the places of groups that leave the loss; drop it, or --no-filter-groups")
    if settings.loop == "async":
        raise UserError(f"{given} waits for rollouts of the weights that train; drop it, or --loop async")
    for name in ("kl_target", "entropy_target"):
        if value := getattr(settings, name):
            raise UserError(f"{flags.spell(name)} {value:g} moves a weight at every step, and with {given} not every "
                            "step trains; drop one of them")  # fmt: skip
    if asked := method.beside_rows(settings):
        raise UserError(f"--advantages {settings.advantages} asks for {asked} of the rollout at hand, and a batch of "
                        f"{given} is of several; drop one of them")  # fmt: skip


def check_measured(settings: Settings) -> None:
    """Raises UserError for rows to be measured on, or trackers, that do not serve."""
    if settings.eval_format and not settings.eval_data:
        raise UserError(f"--eval-format {settings.eval_format} belongs to --eval-data, which is not given")
    if settings.eval_data in parts.TASKS:
        parts.check_generated(settings.eval_data, "--eval", layout=settings.eval_format or "plain")
    track.check(settings.track)


def check_strict(settings: Settings) -> None:
    """Raises UserError for what sampling by the trainer's own pass does not know."""
    without = ("slots", "rollout_cache", "rollout_weights", "mesh", "rollout_mesh", "generator_mesh", "hosts",
               "top_p", "top_k", "min_p",
               "layout")  # fmt: skip
    for name in without:
        if (value := getattr(settings, name)) != getattr(Settings, name):
            raise UserError(f"--strict samples as the trainer scores, on one device; drop {flags.spell(name)} {value}")
    if settings.microbatches > 1:
        raise UserError(f"--strict scores whole batches; drop --microbatches {settings.microbatches}")
    for name in ("cache_stages", "row_stages"):
        if (value := getattr(settings, name)) > 1:
            raise UserError(f"{flags.spell(name)} {value} is of rollouts in lock-step; drop it, or --strict, which has "
                            "no cache")  # fmt: skip


def check_layouts(settings: Settings) -> None:
    """Raises UserError for a rollout layout that does not go with the other settings."""
    sizes = meshes.parse_sizes(settings.rollout_mesh, "--rollout-mesh")
    given = f"--rollout-mesh {settings.rollout_mesh}"
    if settings.mesh:
        trained, devices = (math.prod(found.values()) for found in (meshes.parse_sizes(settings.mesh), sizes))
        if trained != devices:
            raise UserError(
                f"{given} has {devices} devices and --mesh {settings.mesh} has {trained}; give both the same devices"
            )
    elif not settings.hosts:
        raise UserError(f"{given} is another layout of the devices of --mesh, which is empty; give both, or drop it")
    repeated = [f"{axis}={sizes[axis]}" for axis in ("context", "tensor") if sizes[axis] > 1]
    if by_device(settings) and repeated:
        flag = f"--slots {settings.slots}" if settings.slots else f"--row-stages {settings.row_stages}"
        raise UserError(
            f"{flag} is of each device by itself, of which {','.join(repeated)} in {given} would repeat each other's "
            f"rows; give --rollout-mesh data={math.prod(sizes.values())}, or drop {flag}"
        )


def by_device(settings: Settings) -> bool:
    """Whether every device of a mesh runs a rollout of its own, for its rows alone."""
    return settings.slots > 0 or settings.row_stages > 1


def located(settings: Settings) -> Settings:
    """Folders and files as absolute paths: a run is resumed from anywhere."""
    model = pathlib.Path(settings.model)
    return dataclasses.replace(
        settings,
        model=str(model.resolve()) if model.is_dir() else settings.model,
        data=sources.located(settings.data) if settings.data not in parts.TASKS else settings.data,
        reward=tuple(str(pathlib.Path(x).resolve()) if method.is_model(x) else x for x in settings.reward),
        eval_data=sources.located(settings.eval_data) if settings.eval_data not in parts.TASKS else settings.eval_data,
    )


def stored_settings(folder: str) -> Settings:
    """The settings of the run to resume."""
    run = record.open_run(folder, resume=True)
    try:
        raw = json.loads((run / "settings.json").read_text())
        if not isinstance(raw, dict):
            raise ValueError(f"a {type(raw).__name__} where names and values are expected")
        raw |= {name: tuple(value) for name, value in raw.items() if isinstance(value, list)}  # JSON has lists alone
        for field in dataclasses.fields(Settings):
            if isinstance(field.default, tuple) and isinstance(raw.get(field.name), str):  # it took one value once
                raw[field.name] = tuple(filter(None, [raw[field.name]]))
            value = raw.get(field.name, field.default)
            if type(value) is not type(field.default):
                raise ValueError(f"{field.name} is {value!r}")
        stored = Settings(**raw)
    except (ValueError, TypeError) as error:
        raise UserError(f"--resume {run}: settings.json is of no run of this version ({error})") from error
    return dataclasses.replace(stored, resume=folder)


def run_folder(settings: Settings) -> pathlib.Path:
    """The folder of this run; a new one holds its settings before anything else happens."""
    if settings.resume:
        return pathlib.Path(settings.resume)
    run = settings.out or f"runs/{hosts.of_first(time.strftime('%Y%m%d-%H%M%S'))}"  # clocks differ

    def begin() -> None:
        with record.resumable(record.open_run(run, resume=False)):
            record.write_json(pathlib.Path(run) / "settings.json", dataclasses.asdict(settings))

    hosts.by_first("run folder", begin)
    return pathlib.Path(run)


def remember(settings: Settings, run: pathlib.Path) -> None:
    """What a run was resumed with is what it goes on with where nothing is given the next time."""
    if settings.resume and hosts.is_first():
        record.write_json(run / "settings.json", dataclasses.asdict(settings) | {"resume": ""})


def _from_flags(arguments: list[str], default: Settings) -> Settings:
    return flags.read(Settings, arguments, prog="python -m jaxrl_llm", default=default)


CHANGEABLE = (  # none of them changes what a step computes
    "resume", "steps", "epochs", "hosts", "compile_cache", "most_skipped", "eval_every", "track",
)  # fmt: skip


def value_of(flag: str, arguments: list[str], otherwise: str) -> str:
    """What a command line says of a flag with one value, before it is read as a whole."""
    found = otherwise
    for k, word in enumerate(arguments):
        name, given, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if given else "".join(arguments[k + 1 : k + 2])
    return found


def by_size(arguments: list[str]) -> tuple[Settings, str]:
    """What stands where no flag is given, and a line that says so for a model of one's own.

    The quickstart's numbers are those of the bundled models; another model has the presets of its size.
    """
    default = Settings()
    model, lora = value_of("--model", arguments, default.model), value_of("--lora", arguments, "0")
    adapter = int(lora) if lora.isdecimal() else 0
    values, size = presets.for_model(model, lora=adapter)
    if not values:
        return default, ""
    told = told_of_size(model, size, unflagged(values, arguments))
    return dataclasses.replace(default, **values), told


def parse(arguments: list[str]) -> Settings:
    """Settings from flags; with ``--resume`` those of the run, where only ``CHANGEABLE`` ones may change."""
    default, told = by_size(arguments)
    settings = _from_flags(arguments, default)
    named = flags.named(arguments)
    flags.check_length(named)
    if not settings.resume:
        if "resume" in named:
            raise UserError("--resume '' names no run folder; give the folder of the run to go on with")
        if told:
            print(told, flush=True)
        return settings
    stored = stored_settings(settings.resume)
    given = located(_from_flags(arguments, stored))
    for field in dataclasses.fields(Settings):
        old, new = getattr(stored, field.name), getattr(given, field.name)
        if old != new and field.name not in CHANGEABLE:
            raise UserError(f"--resume takes {field.name}={old!r} from the run; drop {flags.spell(field.name)}")
    if "steps" in named:  # in the place of the passes that the run was begun with
        given = dataclasses.replace(given, epochs=0.0)
    return dataclasses.replace(given, schedule_steps=horizon(stored))


def horizon(settings: Settings) -> int:
    """Where the learning rate has come down to 0: more steps of a resumed run must not bend its way there."""
    return settings.schedule_steps or settings.steps


def about_schedule(settings: Settings) -> str:
    """What the steps of a run mean for its learning rate, where they are not those of its schedule; else nothing.

    A constant rate comes down nowhere, whatever its steps.
    """
    end, steps = horizon(settings), settings.steps
    if settings.schedule == "constant" or steps == end:
        return ""
    if settings.refill:  # not every step trains, and the schedule counts those that do
        updates, most = (count * settings.inner_epochs for count in (end, steps))
        return (
            f"the learning rate of this run comes down to 0 over {updates} updates, and --steps {steps} make at most "
            f"{most}: with --refill {settings.refill} a step whose batch is not full yet makes none"
        )
    if steps > end:
        return (
            f"the learning rate of this run comes down to 0 at step {end}: what --steps {steps} adds changes nothing; "
            "to train on, begin a run with --model RUN/model"
        )
    return f"the run stops at step {steps} of the {end} of its learning rate's schedule"
