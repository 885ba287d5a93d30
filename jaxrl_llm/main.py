"""The main job: train a language model by GRPO and show that it learned.

``python -m jaxrl_llm`` takes the bundled base model and Countdown; ``--model DIR --data FILE.jsonl`` takes your own.
"""

import dataclasses
import difflib
import json
import pathlib
import shutil
import signal
import sys
import time
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import tyro

from jaxrl_llm.advantages import group
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.errors import UserError
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models import weights
from jaxrl_llm.samplers.epochs import make_epochs
from jaxrl_llm.train import checkpoint, host, job, record
from jaxrl_llm.train.estimates import make_estimate, make_policy_loss
from jaxrl_llm.train.evaluate import Evaluation, evaluate
from jaxrl_llm.train.online import Online, init_state
from jaxrl_llm.train.progress import progress
from jaxrl_llm.types import TrainState


@dataclasses.dataclass(frozen=True)
class Settings:
    """GRPO on verifiable problems: bundled model and Countdown by default, or your own."""

    model: str = "nano"  # tiny, nano, or a Hugging Face folder (Llama, Qwen2/2.5, Qwen3)
    data: str = "countdown"  # countdown, chain, or a .jsonl file with prompt and answer
    steps: int = 450  # iterations: one rollout and one update each
    seed: int = 0
    prompts_per_step: int = 32
    group_size: int = 16  # samples per prompt
    microbatches: int = 1  # parts of a batch whose gradients are summed
    learning_rate: float = 6e-4
    clip_low: float = 0.2
    clip_high: float = 0.28
    temperature: float = 1.0
    prompt_tokens: int = 0  # columns for prompts; 0: the longest prompt
    max_new_tokens: int = 28
    train_problems: int = 4096  # size of the generated training set
    eval_problems: int = 1024  # held-out problems, never trained on
    eval_samples: int = 8
    checkpoint_every: int = 50  # steps
    mesh: str = ""  # for example data=2,fsdp=4; empty: one device
    out: str = ""  # run folder; empty: runs/<time>
    resume: str = ""  # run folder to continue bit for bit


def check(settings: Settings) -> None:
    """Raises UserError for a number out of range."""
    counts = ("steps", "prompts_per_step", "group_size", "microbatches", "max_new_tokens", "eval_problems")
    for name in (*counts, "train_problems", "eval_samples", "checkpoint_every"):
        if getattr(settings, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(settings, name)} must be at least 1")
    for name in ("learning_rate", "temperature"):
        if getattr(settings, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(settings, name)} must be positive")


def make_online(settings: Settings, model: job.Model, tables: job.Tables) -> Online:
    """GRPO: group-normalised advantages, clip-higher, token mean, one update per rollout, no KL."""
    if (settings.prompts_per_step * settings.group_size) % settings.microbatches:
        raise UserError(f"--microbatches {settings.microbatches} does not divide the batch of sequences")

    def advantages(trajectories, rewards):
        values = group.group_normalized_advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    # a short warm-up, then down to zero by a cosine: the last steps average out the noise of the batches
    warmup = min(10, settings.steps // 2)
    schedule = optax.schedules.warmup_cosine_decay_schedule(0.0, settings.learning_rate, warmup, settings.steps + 1)
    token_loss = partial(clipped_policy_loss, clip_low=settings.clip_low, clip_high=settings.clip_high)
    return Online(
        policy=model.policy,
        problems=tables.train_table,
        sampler=make_epochs(settings.seed),
        prompts_per_step=settings.prompts_per_step,
        group_size=settings.group_size,
        rollout=job.make_rollout(
            model,
            group_size=settings.group_size,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
        ),
        score=lambda answers, trajectories: None,  # the host scores
        estimate=make_estimate(model.policy, advantages, temperature=settings.temperature),
        loss=make_policy_loss(model.policy, token_loss, temperature=settings.temperature),
        tx=optax.adam(schedule, 0.9, 0.99),
        microbatches=settings.microbatches,
    )


def start_state(settings: Settings, online: Online, model: job.Model, run: pathlib.Path) -> TrainState:
    """A fresh state, or the newest intact checkpoint of the run; placed on the mesh where one is given."""
    state = init_state(online, model.params, jax.random.key(settings.seed))
    if settings.mesh:
        state = rules.shard(state, meshes.parse_mesh(settings.mesh))
    path = checkpoint.latest(run / "checkpoints")
    if path is None:
        return state
    state = checkpoint.restore(path, state)
    print(f"resuming {run} at step {int(state.step)}")
    return state


class _Stop:
    """Ctrl-C asks the loop to stop after the current step; a second one interrupts at once."""

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def train(settings: Settings, online: Online, state: TrainState, score: Any, run: pathlib.Path) -> TrainState | None:
    """Runs to the last step with records and checkpoints; None when stopped by Ctrl-C."""
    loop, stop = host.make_host_loop(online, score), _Stop()
    record.rewind(run / "metrics.jsonl", int(state.step))
    clock = time.monotonic()
    with progress(settings.steps, start=int(state.step)) as shown:
        for iteration in host.iterations(loop, state, settings.steps):
            state, now = iteration.state, time.monotonic()
            step, figures = int(state.step), dict(iteration.metrics)
            figures |= {"time/step_s": now - clock, "compile/count": iteration.compiled}
            figures["tokens/per_s"] = figures["tokens/generated"] / (now - clock)
            clock = now
            record.append_line(run / "metrics.jsonl", {"step": step} | figures)
            shown.step(
                step,
                {
                    "reward": figures["reward/mean"],
                    "tokens": figures["length/mean_tokens"],
                    "gap": figures["kl/sampler_max"],
                    "tokens/s": figures["tokens/per_s"],
                },
            )
            if step % settings.checkpoint_every == 0 or step == settings.steps or stop.asked:
                checkpoint.save(run / "checkpoints", state)
            if stop.asked and step < settings.steps:
                print(f"stopped at step {step}; continue with: python -m jaxrl_llm --resume {run}")
                return None
    return state


def _as_dict(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "pass@1": evaluation.pass_at_1._asdict(),
        f"pass@{evaluation.k}": evaluation.pass_at_k._asdict(),
        "mean_tokens": evaluation.mean_tokens,
        "truncated_fraction": evaluation.truncated,
        "invalid": evaluation.invalid,
    }


def report(settings, model, tables, run, before: Evaluation, after: Evaluation, seconds: float) -> None:
    """Prints and writes what the run did."""
    lines = record.read_lines(run / "metrics.jsonl")
    pairs = job.side_by_side(model.tokenizer, tables.heldout, before, after)
    gain = after.pass_at_1.mean - before.pass_at_1.mean
    results = {
        "command": " ".join(["python -m jaxrl_llm", *sys.argv[1:]]),
        "settings": dataclasses.asdict(settings),
        "versions": record.versions(),
        "before": _as_dict(before),
        "after": _as_dict(after),
        "gain": gain,
        "sampler_trainer_gap": {
            "mean": float(np.mean([r["kl/sampler_mean"] for r in lines])),
            "max": float(np.max([r["kl/sampler_max"] for r in lines])),
        },
        "tokens_per_s": float(np.median([r["tokens/per_s"] for r in lines])),
        "rollouts": len(lines) * settings.prompts_per_step * settings.group_size,
        "seconds": seconds,
    }
    record.write_json(run / "results.json", results)
    for prompt, old, new in pairs:
        record.append_line(run / "samples.jsonl", {"prompt": prompt, "before": old, "after": new})
    points = {0: before.pass_at_1[:3], settings.steps: after.pass_at_1[:3]}
    record.plot_curves(run / "curve.png", lines, f"GRPO, {settings.model}, {settings.data}", points)
    print(f"\nheld-out {settings.data}, {before.pass_at_1.n} problems x {before.k} samples, 95 % intervals")
    print(f"  pass@1  before {before.pass_at_1}   after {after.pass_at_1}   gain {gain:+.3f}")
    print(f"  pass@{before.k}  before {before.pass_at_k}   after {after.pass_at_k}")
    print(f"  sampler/trainer log-prob gap: mean {results['sampler_trainer_gap']['mean']:.2g}, ", end="")
    print(f"max {results['sampler_trainer_gap']['max']:.2g}   {results['tokens_per_s']:,.0f} tokens/s")
    print("generations on held-out prompts:")
    for prompt, old, new in pairs:
        print(f"  {prompt}\n    before  {old}\n    after   {new}")
    print(f"run folder: {run} (settings, metrics, results, curve.png, samples, checkpoints, model)")


def save_model(run: pathlib.Path, model: job.Model, state: TrainState) -> None:
    """The trained model in Hugging Face layout, tokenizer files beside it."""
    weights.save(run / "model", model.config, state.params)
    for file in model.tokenizer.files:
        shutil.copy(file, run / "model" / file.name)


def resumed(settings: Settings) -> Settings:
    """The settings of the run to resume; only --steps may differ."""
    run = record.open_run(settings.resume, resume=True)
    stored = Settings(**json.loads((run / "settings.json").read_text()))
    defaults = {f.name: f.default for f in dataclasses.fields(Settings)}
    for name, value in dataclasses.asdict(settings).items():
        if name not in ("resume", "steps") and value not in (defaults[name], getattr(stored, name)):
            raise UserError(f"--resume takes {name}={getattr(stored, name)!r} from the run; drop --{name}")
    steps = settings.steps if settings.steps != defaults["steps"] else stored.steps
    return dataclasses.replace(stored, steps=steps, resume=str(run))


def run_folder(settings: Settings) -> pathlib.Path:
    """The folder of this run; a new one holds its settings before anything else happens."""
    if settings.resume:
        return pathlib.Path(settings.resume)
    run = record.open_run(settings.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}", resume=False)
    record.write_json(run / "settings.json", dataclasses.asdict(settings))
    return run


def main(settings: Settings) -> int:
    """Loads, evaluates, trains, evaluates again, reports; the exit code."""
    settings = resumed(settings) if settings.resume else settings
    check(settings)
    if settings.mesh:
        meshes.check_rows(meshes.parse_mesh(settings.mesh), settings.prompts_per_step, "--prompts-per-step")
    problems = job.load_problems(
        settings.data, train=settings.train_problems, heldout=settings.eval_problems, seed=settings.seed
    )
    model = job.load_model(settings.model)
    tables = job.make_tables(
        model, problems, prompt_tokens=settings.prompt_tokens, max_new_tokens=settings.max_new_tokens
    )
    online = make_online(settings, model, tables)
    run = run_folder(settings)
    started = time.monotonic()
    rollout = jax.jit(
        job.make_rollout(
            model,
            group_size=settings.eval_samples,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
        )
    )
    measure = partial(
        evaluate,
        rollout,
        job.make_scorer(model.tokenizer, tables.heldout, tables.verifier),
        problems=tables.heldout_table,
        key=jax.random.key(20_000),
        samples=settings.eval_samples,
    )
    before = measure(params=model.params)
    print(f"{settings.model}: {model.config.num_parameters:,} parameters; pass@1 before {before.pass_at_1}", flush=True)
    state = start_state(settings, online, model, run)
    score = job.make_scorer(model.tokenizer, tables.train, tables.verifier)
    state = train(settings, online, state, score, run)
    if state is None:
        return 130
    after = measure(params=state.params)
    save_model(run, model, state)
    report(settings, model, tables, run, before, after, time.monotonic() - started)
    return 0


def parse(arguments: list[str]) -> Settings:
    """Settings from flags; an unknown flag is an error that names the nearest known one."""
    settings, unknown = tyro.cli(Settings, args=arguments, prog="python -m jaxrl_llm", return_unknown_args=True)
    if unknown:
        known = [f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(Settings)]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        raise UserError(f"unknown argument {unknown[0]!r}; {hint}")
    return settings


def cli(arguments: list[str] | None = None) -> int:
    """Command line: one clear line and exit code 2 for a mistake."""
    try:
        return main(parse(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
