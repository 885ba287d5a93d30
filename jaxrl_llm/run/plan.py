"""``python -m jaxrl_llm plan``: what fits on a TPU slice, and how fast it could be at best."""

import dataclasses
import json
import sys
from typing import Any, Literal, get_args

import jax.numpy as jnp

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import buffers, chips, compiled, cost, estimate, reshard_cost, search
from jaxrl_llm.planning.chips import Chip, Topology
from jaxrl_llm.planning.known_models import shape_of
from jaxrl_llm.planning.parallel_layout import Number, Sizes, held
from jaxrl_llm.planning.search import Plan
from jaxrl_llm.planning.work import Work, sampled_bytes, shared
from jaxrl_llm.run import compile_cache, flags
from jaxrl_llm.run.options import BaseName, LayoutName, base_of, check_rank, planner_of
from jaxrl_llm.run.parts import CacheNumbers

GIB = 2**30
# what a reference is for: without a term that asks for it a run keeps none. The weight is the user's to choose
REFERENCE = "--kl k3_gradient_terms --kl-weight 0.01"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Memory and a roofline of one GRPO step on a TPU slice or on GPUs, without one."""

    model: str = "nano"  # a known name such as Qwen3-8B, nano or tiny, a model folder, or a config.json
    topology: str = "v5e:2x4"  # v4, v5e, v5p, v6e or v7x, and the sides of the slice; or h100, h200, b200 and how many
    prompt: int | None = None  # tokens; None: 1024, or a quarter of the positions where those are fewer
    response: int | None = None  # tokens; None: what the prompt leaves, at most 3072
    positions: int = 0  # to which the model has been stretched, for longer rows; 0: those of its config
    prompts: int = 16  # per step
    group: int = 8  # responses to each prompt
    reference: bool = False  # a frozen copy scores every response
    reward: tuple[str, ...] = ()  # reward models that read every response: known names, folders, or config.json
    # what the matrices that train are kept in, as of the main job
    weights: Literal["float32", "bfloat16"] = "float32"
    lora: int = 0  # rank of an adapter that trains in place of the weights, as of the main job; 0: all weights train
    lora_base: BaseName = ""  # with it the frozen matrices are in few bits, as of the main job
    rollout_weights: Literal["", "int8", "int4", "float8_e4m3fn"] = ""  # rollouts read matrices in few bits
    rollout_cache: CacheNumbers = ""  # rollouts keep keys and values in a byte
    layout: Literal["padded", "packed", "tree"] = "padded"  # of rows in scores and update, as of the main job
    filled: float = 1.0  # mean length of a response, of --response: what rows in a layout hold
    mesh: str = ""  # of training, for example fsdp=8,tensor=2; empty: the best
    rollout_mesh: str = ""  # of sampling: data, expert and tensor; empty: the best
    estimate: bool = False  # closed form alone, also where libtpu is installed
    effort: float = -1.0  # of the compiler, for the speed of what is not run here: -1 to 1, 0 is that of a run
    show: int = 3  # how many choices
    buffers: bool = False  # memory as soon as the compiler knows it: it is ended before it makes code
    schedule: bool = False  # what each phase takes by the TPU compiler's own count, and its dearest places
    json: bool = False  # for programs


def sizes_of(spec: str, topology: Topology, flag: str) -> Sizes | None:
    """A mesh that the user names, None for none."""
    if not spec:
        return None
    try:
        given = [(name.strip(), int(size)) for name, size in (part.split("=") for part in spec.split(","))]
        sizes = Sizes(**dict(given))
    except (TypeError, ValueError) as error:
        raise UserError(f"{flag} {spec}: give data=N,fsdp=N,expert=N,context=N,tensor=N, any of them") from error
    if len(dict(given)) < len(given):
        raise UserError(f"{flag} {spec}: an axis is given twice; give each of them once")
    if min(sizes) < 1 or sizes.chips != topology.chips:
        raise UserError(f"{flag} {spec} has no {topology.chips} devices, as {topology.name} has")
    return sizes


def lengths_of(settings: Settings, config: ModelConfig) -> tuple[int, int]:
    """Tokens of prompt and response: the user's, else 1024 and 3072 or as much of them as the model has positions."""
    prompt = min(1024, config.max_positions // 4) if settings.prompt is None else settings.prompt
    response = min(3072, config.max_positions - prompt) if settings.response is None else settings.response
    return prompt, response


def work_of(settings: Settings, config: ModelConfig) -> Work:
    """What the settings ask for.

    Raises:
      UserError: for numbers that are not positive, or more tokens than the model has positions.
    """
    if settings.schedule and (settings.estimate or not compiled.available()):
        raise UserError("--schedule is the compiler's count: pip install 'jaxrl_llm[plan]', and no --estimate")
    if settings.schedule and settings.buffers:
        raise UserError("--schedule needs the compiler's code, which --buffers leaves out; give one of them")
    if settings.buffers and settings.estimate:
        raise UserError("--buffers is the compiler's count of memory, which --estimate leaves out; give one of them")
    prompt, response = lengths_of(settings, config)
    if settings.response is None and response < 1 <= prompt:
        raise UserError(
            f"--prompt {prompt} leaves no room for a response in the {config.max_positions} positions; lower it, or "
            "give --positions N for a model that has been stretched"
        )
    counts = {"prompt": prompt, "response": response}
    for name, count in (counts | {key: getattr(settings, key) for key in ("prompts", "group", "show")}).items():
        if count < 1:
            raise UserError(f"{flags.spell(name)} {count} must be at least 1")
    if not -1 <= settings.effort <= 1:
        raise UserError(f"--effort {settings.effort:g} must lie between -1 (quickest) and 1")
    if prompt + response > config.max_positions:
        raise UserError(
            f"--prompt {prompt} and --response {response} exceed the {config.max_positions} positions"
            "; give --positions N for a model that has been stretched"
        )
    if not 0 < settings.filled <= 1:
        raise UserError(f"--filled {settings.filled:g} is a share of --response: more than 0, at most 1")
    if settings.filled < 1 and settings.layout == "padded":
        raise UserError("--filled is what rows in a layout hold, and padded rows are computed whole: give --layout")
    check_rank(settings)
    if settings.lora and settings.weights == "bfloat16":
        raise UserError(f"--weights bfloat16 with --lora {settings.lora}: the base of an adapter is kept in the type "
                        "that computes anyway; drop one of them")  # fmt: skip
    rows, planner = settings.prompts * settings.group, planner_of(settings.layout, own=False)
    return Work(
        prompt, response, rows, rows, group=settings.group, scores=int(settings.reference),
        planner=planner, filled=settings.filled, weights=jnp.dtype(settings.weights), adapter=settings.lora,
        base=base_of(settings), sampled=settings.rollout_weights, cached=settings.rollout_cache,
        judges=tuple(  # they say no token: no projection to the vocabulary is read
            dataclasses.replace(shape_of(name, "--reward"), tie_embeddings=True) for name in settings.reward
        ),
    )  # fmt: skip


def compile_plan(
    config: ModelConfig,
    plan: Plan,
    devices: Any,
    effort: float,
    chip: Chip | None = None,
    buffers_on: Topology | None = None,
) -> tuple[Plan, dict[str, compiled.Compiled]]:
    """The plan with the compiler's figures in place of the estimated ones.

    Args:
      buffers_on: where only the assignment of buffers is wanted, ``planning.buffers``; None: whole programs.
    """
    if buffers_on is not None:
        sizes = {
            name: buffers.peak(config, plan.train, plan.rollout, plan.work, buffers_on, name, effort=effort)
            for name in plan.peaks
        }
        found = {name: compiled.Compiled(size, 0.0, 0.0, 0.0) for name, size in sizes.items()}
        return plan._replace(peaks=estimate.of_the_loop(config, plan.train, sizes, plan.work, plan.rollout)), found
    found = compiled.of_step(
        config, plan.train, plan.rollout, plan.work, devices, names=tuple(plan.peaks), effort=effort, chip=chip
    )
    alone = {name: c.peak for name, c in found.items()}
    peaks = estimate.of_the_loop(config, plan.train, alone, plan.work, plan.rollout)
    return plan._replace(peaks=peaks), found


def best(settings: Settings) -> tuple[ModelConfig, Topology, list[Plan], list[dict[str, compiled.Compiled]]]:
    """The choices to show, compiled where the compiler is there."""
    config, topology = shape_of(settings.model), chips.parse(settings.topology)
    for name in ("schedule", "buffers"):
        if getattr(settings, name) and not topology.tpu:
            raise UserError(f"--{name} is the TPU compiler's count, and {topology.name} is none; drop it")
    if settings.positions < 0:
        raise UserError(f"--positions {settings.positions} must not be negative; 0: those of the model's config")
    if settings.positions:
        config = dataclasses.replace(config, max_positions=settings.positions)
    work = work_of(settings, config)
    train = sizes_of(settings.mesh, topology, "--mesh")
    rollout = sizes_of(settings.rollout_mesh, topology, "--rollout-mesh")
    if rollout and rollout.context > 1:
        raise UserError(f"--rollout-mesh {settings.rollout_mesh}: context is of training; sample along data and tensor")
    if train and train.context > 1 and work.base:
        raise UserError(f"--mesh {settings.mesh}: a base in few bits is sampled where it trains, and context is of "
                        "training alone; drop context, or --lora-base")  # fmt: skip
    if train and work.length % train.context:
        raise UserError(f"--mesh {settings.mesh}: context does not divide the {work.length} tokens of a row")
    found = search.plans(config, topology, work, train=train, rollout=rollout)
    if not found:
        raise UserError(
            f"--prompts {settings.prompts} and --group {settings.group} divide over no mesh of {topology.chips} chips; "
            "choose a multiple of the chips"
        )
    shown, details = found[: settings.show], []
    if not settings.estimate and compiled.available(topology):
        compile_cache.enable(False)  # programs for devices that are not there cannot be loaded again
        devices, pairs = compiled.devices(topology), []
        for plan in shown:
            timed = topology.chip if settings.schedule else None
            alone = topology if settings.buffers else None
            pairs.append(compile_plan(config, plan, devices, settings.effort, timed, alone))
            print(f"compiled {plan.train.spec}", file=sys.stderr)
        shown, details = [plan for plan, _ in pairs], [figures for _, figures in pairs]
    return config, topology, shown, details


def job_flags(plan: Plan, rewards: tuple[str, ...] = ()) -> str:
    """The flags of the main job that run what is planned, but for rollouts in parts, which have none.

    Args:
      rewards: names of the reward models.
    """
    work = plan.work
    apart = [] if shared(plan.train, plan.rollout, work) else [f"--rollout-mesh {plan.rollout.spec}"]
    words = [f"--mesh {plan.train.spec}", *apart, "--compute bfloat16 --attention auto"]
    words += [f"--prompts-per-step {work.rows // work.group} --group-size {work.group}"]
    words += [f"--prompt-tokens {work.prompt} --max-new-tokens {work.response} --microbatches {work.microbatches}"]
    layouts = {planner_of(name, own=False): name for name in get_args(LayoutName) if name}
    words += ["--weights bfloat16"] * (work.weights == jnp.bfloat16)
    words += [f"--rollout-weights {work.sampled}"] * (work.sampled != "")
    words += [f"--rollout-cache {work.cached}"] * (work.cached != "")
    words += [f"--lora {work.adapter}"] * (work.adapter > 0) + [f"--lora-base {work.base}"] * (work.base != "")
    words += [f"--reward {' '.join(rewards)}"] * bool(rewards)
    words += [REFERENCE] * (work.scores > 0)
    return " ".join([*words, f"--layout {layouts[work.planner]}", *["--remat"] * work.remat])


def resharded(config: ModelConfig, plan: Plan) -> tuple[Number, Number]:
    """GiB that the chip which receives most, and all together, receive before a rollout."""
    found, one = reshard_cost.received(config, plan.train, plan.rollout), Sizes()
    lighter = sampled_bytes(config, one, plan.work) / (2 * held(config, one)) if plan.work.sampled else 1.0
    return max(found) * lighter / GIB, sum(found) * lighter / GIB


def as_data(
    config: ModelConfig, plan: Plan, topology: Topology, figures: dict[str, compiled.Compiled],
    rewards: tuple[str, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """One choice for programs."""
    most, whole = resharded(config, plan)
    return {
        "flags": job_flags(plan, rewards),
        "mesh": plan.train.spec,
        "rollout_mesh": plan.rollout.spec,
        "microbatches": plan.work.microbatches,
        "rollout_rows": plan.work.rollout_rows,
        "remat": plan.work.remat,
        "peak_gib": {name: round(peak / GIB, 3) for name, peak in plan.peaks.items()},
        "loop_peak_gib": round(plan.peak / GIB, 3),
        "limit": plan.limit,
        "reshard_gib": {"most_of_a_chip": round(most, 3), "all_chips": round(whole, 3)},
        "fits": plan.peak <= topology.chip.hbm,
        "roofline_seconds": {name: round(seconds, 4) for name, seconds in plan.seconds.items()},
        "step_seconds": round(plan.step, 3),
        **({"schedule_ms": timed} if (timed := scheduled(config, plan, topology, figures)) else {}),
        "compile_seconds": {name: round(c.seconds, 1) for name, c in figures.items()},
    }


def scheduled(
    config: ModelConfig, plan: Plan, topology: Topology, figures: dict[str, compiled.Compiled]
) -> dict[str, dict[str, Any]]:
    """Of every phase that was compiled and fits: milliseconds of one chip, their share of the roof, dearest places."""
    least = cost.least_seconds(config, topology.chip, plan.train, plan.rollout, plan.work)
    out = {}
    for name, figure in figures.items():
        if figure.schedule is not None:
            found, total = figure.schedule._asdict(), figure.schedule.total
            places = [
                place._asdict() | {"milliseconds": round(1e3 * place.seconds, 3)} for place in found.pop("places")
            ]
            unknown = found.pop("unknown_loops")
            out[name] = {part: round(1e3 * seconds, 3) for part, seconds in found.items()} | {
                "total": round(1e3 * total, 3), "least": round(1e3 * least[name], 3),
                "share_of_roof": round(least[name] / total, 3) if total else 0.0, "places": places,
                "unknown_loops": unknown,
            }  # fmt: skip
    return out


def schedule_lines(phases: dict[str, dict[str, Any]]) -> list[str]:
    """``scheduled`` for people."""
    parts = ("computing", "kernels", "collectives", "exposed", "waiting", "total", "least")
    out = ["   milliseconds of a chip by the compiler's cycles; kernels by operations and bytes, collectives by links:"]
    out.append(f"   {'phase':<8} " + " ".join(f"{part:>11}" for part in parts) + "  of the roof")
    for name, found in phases.items():
        out.append(f"   {name:<8} " + " ".join(f"{found[part]:>11.1f}" for part in parts)
                   + f" {found['share_of_roof']:>11.0%}")  # fmt: skip
    for name, found in phases.items():
        out.append(f"   dearest places of {name}:")
        out += [
            f"     {p['milliseconds']:>10.2f} ms {p['kind']:<9} {p['where']}  {p['operation']}" for p in found["places"]
        ]
    return out


def lines(config: ModelConfig, plan: Plan, topology: Topology, number: int, rewards: tuple[str, ...] = ()) -> list[str]:
    """One choice for people."""
    work = plan.work
    verdict = "fits" if plan.peak <= topology.chip.hbm else "DOES NOT FIT"
    out = [
        f"{number}. train {plan.train.spec} in {work.microbatches} parts, activations "
        f"{'recomputed' if work.remat else 'kept'}; sample {plan.rollout.spec}, {work.rollout_rows} rows at a time",
        f"   {'phase':<8} {'GiB/chip':>9} {'seconds':>9}",
    ]
    out += [f"   {name:<8} {peak / GIB:>9.2f} {plan.seconds[name]:>9.2f}" for name, peak in plan.peaks.items()]
    if shared(plan.train, plan.rollout, work):
        out.append("   rollouts read the weights that are there: nothing moves for them")
    else:
        most, whole = resharded(config, plan)
        out.append(f"   resharding brings {most:.2f} GiB to the chip that receives most, {whole:.1f} in all")
    out.append(f"   flags of the main job: {job_flags(plan, rewards)}")
    share = plan.peak / topology.chip.hbm
    out.append(
        f"   {verdict}: {plan.peak / GIB:.2f} of {topology.chip.hbm / GIB:.2f} GiB ({share:.0%}), limited by "
        f"{plan.limit}; a step takes {plan.step:.1f} s at best"
    )
    return out


def otherwise(config: ModelConfig, topology: Topology, shown: list[Plan]) -> dict[str, Plan]:
    """Where none of ``shown`` fits: what would, see ``search.would_fit``."""
    if any(plan.peak <= topology.chip.hbm for plan in shown):
        return {}
    return search.would_fit(config, topology, shown[0].work)


def run(settings: Settings) -> int:
    """Prints the choices, and what would fit where none does; 1 where none fits."""
    config, topology, shown, details = best(settings)
    larger = otherwise(config, topology, shown)
    how = "compiled ahead of time" if details else "estimated in closed form"
    missing = not compiled.available(topology)
    if settings.json:
        pairs = zip(shown, details or [{}] * len(shown), strict=True)
        data = [as_data(config, plan, topology, figures, settings.reward) for plan, figures in pairs]
        would = {name: {"mesh": p.train.spec, "peak_gib": round(p.peak / GIB, 3)} for name, p in larger.items()}
        print(json.dumps({"model": settings.model, "parameters": config.num_parameters, "topology": topology.name,
                          "chips": topology.chips, "hbm_gib": topology.chip.hbm / GIB, "memory": how,
                          "plans": data, "would_fit": would}, indent=1))  # fmt: skip
    else:
        rows = settings.prompts * settings.group
        count = config.num_parameters
        size = f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count:,}"
        print(f"{settings.model}, {size} parameters, on {topology.name}: ", end="")
        print(topology.size)
        prompt, response = lengths_of(settings, config)
        kept = {"float32": "float32 masters", "bfloat16": "bfloat16 weights without masters"}[settings.weights]
        if settings.lora:
            kept = f"an adapter of rank {settings.lora} beside weights in {settings.lora_base or 'bfloat16'}"
        print(f"a step: {settings.prompts} prompts x {settings.group} = {rows} rows of {prompt} + "
              f"{response} tokens; AdamW, {kept}, bfloat16 compute")  # fmt: skip
        why = f": {compiled.installed_by(topology)}" if missing and not settings.estimate else ""
        print(f"memory {how}{why}; seconds by a roofline, for ranking\n")
        for number, plan in enumerate(shown, start=1):
            print("\n".join(lines(config, plan, topology, number, settings.reward)))
            if settings.schedule:
                print("\n".join(schedule_lines(scheduled(config, plan, topology, details[number - 1]))))
        if not any(plan.peak <= topology.chip.hbm for plan in shown):
            names = [f"{name} ({plan.train.spec}, {plan.peak / GIB:.1f} GiB a chip)" for name, plan in larger.items()]
            print(f"nothing fits {topology.name}; by the closed form would: " + (", ".join(names) or "no slice"))
    return 0 if any(plan.peak <= topology.chip.hbm for plan in shown) else 1


def cli(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 where nothing fits, 2 for a mistake."""
    try:
        words = sys.argv[1:] if arguments is None else arguments
        return run(flags.read(Settings, words, prog="python -m jaxrl_llm plan"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(cli())
