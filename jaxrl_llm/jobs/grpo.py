"""The main job, an experiment with one arm and one seed: train a language model by GRPO and show that it learned.

``python -m jaxrl_llm`` takes the bundled base model and Countdown; ``--model DIR --data FILE.jsonl`` takes your own.
"""

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm.advantages import group
from jaxrl_llm.asynchronous.roles import Program, make_program
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.data.problem import Problem, all_known
from jaxrl_llm.distributed import hosts, rollout_weights, rules
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.errors import UserError, from_callbacks
from jaxrl_llm.experiment import durable
from jaxrl_llm.experiment.durable import EVAL_KEY, Keeping, SeedRun, Stopped
from jaxrl_llm.models.decoder import as_used
from jaxrl_llm.models.io import hub
from jaxrl_llm.planning import utilisation
from jaxrl_llm.rollout.per_device import per_device
from jaxrl_llm.run import compile_cache, evaluate, host_memory, lora_state, method, parts, rated
from jaxrl_llm.run.options import keeps_narrow, planner_of, sampling_of
from jaxrl_llm.run.records import health, record, report
from jaxrl_llm.run.records.progress import progress
from jaxrl_llm.run.settings import (
    Settings,
    about_schedule,
    by_device,
    check,
    horizon,
    located,
    parse,
    remember,
    run_folder,
)
from jaxrl_llm.run.stop import Stop, interruptible
from jaxrl_llm.train import checkpoint, host, parity, refill
from jaxrl_llm.train.methods.builders import make_batch_loss, make_estimate, with_collision
from jaxrl_llm.train.methods.shared_prompt import share_prompts
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.optimisers import muon, stochastic_rounding
from jaxrl_llm.train.packing import reads_layouts, takes
from jaxrl_llm.train.plan import (
    Plan,
    Referred,
    Stage,
    most_parts,
    referred,
    start,
    with_parked_optimiser,
    with_whole_reference,
)
from jaxrl_llm.train.skipped import NotFinite
from jaxrl_llm.train.step import trained_part
from jaxrl_llm.types import Batch, Key, Params, Rewards, TrainState, Trajectories
from jaxrl_llm.verifiers.pool import VerifierPool
from jaxrl_llm.verifiers.verdict import Verifier

SHOWN = {
    "reward": "reward/mean", "tokens": "length/mean_tokens", "kl": "kl/ref", "gap": "kl/sampler_max",
    "tokens/s": "tokens/per_s",
    "roof/rollout": "roof/rollout", "roof/update": "roof/update",
}  # fmt: skip


def count_microbatches(settings: Settings, mesh: Mesh | None) -> int:
    """``--microbatches``, or the most parts (at most 16) that hold whole groups, divide over the mesh and add up."""
    if settings.microbatches or settings.strict:  # whose sampler scores all rows at once
        return settings.microbatches or 1
    if method.whole_batch(settings):
        return 1
    devices = 1 if mesh is None else meshes.batch_parts(mesh)
    return most_parts(settings.prompts_per_step, settings.group_size, devices)


def rollout_layout(settings: Settings, mesh: Mesh | None) -> Mesh | None:
    """Where rollouts run: ``--rollout-mesh``, or where training does."""
    if not settings.rollout_mesh:
        return mesh
    return meshes.parse_mesh(settings.rollout_mesh, flag="--rollout-mesh")


OVERFLOW = {"drop": refill.dropped, "keep": refill.recovered}


def with_spread(trajectories: Trajectories, rewards: Rewards) -> Array:
    """Rows of groups whose rewards are not all equal."""
    return group.group_spread(rewards.value, trajectories.group_ids, valid=rewards.valid) > 0


def beside_base(estimate: Callable[..., Batch]) -> Callable[..., Batch]:
    """The same estimate where a state keeps the adapter alone of its reference: it has the base of the policy."""

    def estimated(params, extras, trajectories, rewards):
        return estimate(params, with_whole_reference(params, extras, lora_state.PART), trajectories, rewards)

    return reads_layouts(estimated) if takes(estimate) else estimated


def method_of_flags(settings: Settings, model: parts.Model, tables: parts.Tables, mesh: Mesh | None) -> Online:
    """The method of the flags; by default GRPO with clip-higher, dynamic filtering, a token mean and no KL."""
    prompts = len(tables.train)
    if settings.prompts_per_step > prompts:
        raise UserError(f"--prompts-per-step {settings.prompts_per_step} exceeds the {prompts} training prompts")

    steps = horizon(settings) * settings.inner_epochs  # updates, which the schedule counts
    schedule = method.learning_rate(settings, steps)
    score = share_prompts(settings.group_size, settings.max_new_tokens)
    estimated = with_collision(make_estimate) if method.needs_collision(settings) else make_estimate
    estimate = estimated(
        model.policy,
        method.estimator(settings),
        reduction=settings.reduction,
        temperature=settings.temperature,
        recompute_old=method.rescores(settings),
        reference=referred if method.needs_reference(settings) else None,
        keep=method.keep(settings, with_spread if settings.filter_groups else None),
        row_extras=method.row_extras(settings),
        shows=method.shown(settings),
    )
    if settings.lora and method.needs_reference(settings):
        estimate = beside_base(estimate)
    tx, slots = optimiser_of_flags(settings, model, schedule), {"estimate": estimate}
    if settings.refill:
        slots = refill.make_refill(estimate, with_spread, settings.group_size, overflow=OVERFLOW[settings.refill])
        slots |= {"figures": refill.filling}
        tx = refill.skip_empty(tx)
    else:
        slots |= {"remember": method.moved_weights(settings)}
    return Online(
        policy=model.policy,
        problems=tables.train_table,
        sampler=make_epochs(settings.seed),
        prompts_per_step=settings.prompts_per_step,
        group_size=settings.group_size,
        rollout=rollout_of_flags(
            settings,
            model,
            settings.group_size,
            mesh,
            few_bits=settings.rollout_weights if rollout_layout(settings, mesh) == mesh else "",  # ``make_move`` has it
            strict=score if settings.strict else None,
            greedy_last=method.needs_greedy(settings),
        ),
        score=lambda answers, trajectories: None,  # the host scores
        loss=make_batch_loss(
            model.policy,
            method.token_loss(settings, method.anchor(settings)),
            reduction=settings.reduction,
            length_tokens=settings.max_new_tokens if settings.reduction == "constant" else None,
            temperature=settings.temperature,
            token_weights=method.correction(settings),
            extra_terms=method.extra_terms(settings),
            diagnostics=method.diagnostics(settings),
            score=score,
        ),
        tx=tx,
        max_grad_norm=settings.max_grad_norm or None,
        updates_per_rollout=settings.inner_epochs,
        of_first=(parity.NAMES, "kl/ref"),  # later updates of a rollout are away from its sampler by their own doing
        microbatches=count_microbatches(settings, mesh),
        trained=lora_state.PART if settings.lora else "",
        **slots,
    )


def optimiser_of_flags(
    settings: Settings, model: parts.Model, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """``--optimiser``; of weights in bfloat16 it rounds what it adds."""
    tx = muon(model.config, schedule) if settings.optimiser == "muon" else method.adam(settings, schedule)
    return stochastic_rounding(tx, seed=settings.seed) if settings.weights == "bfloat16" else tx


def rollout_of_flags(
    settings: Settings, model: parts.Model, group_size: int, mesh: Mesh | None, *, few_bits: str = "", **training: Any
) -> Callable[..., Any]:
    """The rollout of training and of evaluation: they differ in the size of a group, ``few_bits`` and ``training``.

    Where rollouts have a layout of their own, its weights are those of ``make_move``.
    """
    layout = rollout_layout(settings, mesh)
    apart = layout is not None and by_device(settings)
    if apart or layout != mesh:
        make = parts.policy_maker(
            None if apart else layout, rollout_cache=settings.rollout_cache, attention=settings.attention
        )
        policy = make(model.config, compute_dtype=jnp.dtype(settings.compute))
        model = lora_state.computed(model, settings.lora, policy)
    sampling = sampling_of(settings)._replace(few_bits=few_bits)
    rollout = parts.make_rollout(model, group_size=group_size, **sampling._asdict(), **training)
    rollout = per_device(rollout, layout) if apart else parts.split_rows(rollout, layout)
    return rollout if layout == mesh else parts.handed_over(rollout, mesh)


def make_move(
    settings: Settings, model: parts.Model, mesh: Mesh | None, *, few_bits: str = ""
) -> rollout_weights.Move | None:
    """Makes the weights of a rollout; None where it reads those that train."""
    layout = rollout_layout(settings, mesh)
    if mesh is None or layout is None or layout == mesh:
        return None
    return rollout_weights.make_move(
        model.config,
        model.params,
        mesh,
        layout,
        compute_dtype=jnp.dtype(settings.compute),
        few_bits=few_bits,
        whole=by_device(settings),
    )


def measure_of_samples(
    settings: Settings, model: parts.Model, tables: parts.Tables, mesh: Mesh | None, score: host.Scorer
) -> Callable[[Params, Key], dict[str, Any]]:
    """Samples of the held-out problems, in the layout of rollouts; the same keys at every step and seed."""
    rollout = jit_sampling(rollout_of_flags(settings, model, settings.eval_samples, mesh))
    move = make_move(settings, model, mesh)

    def measure(params: Params, key: Key) -> dict[str, Any]:
        found = evaluate.sampled(
            rollout,
            score,
            params if move is None else move(params)[0],
            tables.heldout_table,
            jax.random.key(EVAL_KEY),
            samples=settings.eval_samples,
        )
        return found | evaluate.figures(evaluate.of_samples(found, tables.heldout_table))  # which trackers show

    return measure


class Opened(NamedTuple):
    """What a run stands on: model and problems of the settings."""

    settings: Settings
    model: parts.Model
    tables: parts.Tables
    mesh: Mesh | None
    digest: str  # of the problems, which a run that goes on must meet again


def build(found: Opened, pool: VerifierPool | None) -> Plan:
    """The one arm: ``steps`` of the method of the flags, measured on the held-out problems."""
    settings, model, tables, mesh, _ = found

    load = rated.load_named(tables.verifier, mesh=mesh, compute=settings.compute, attention=settings.attention)

    def scorer(problems: list[Problem], verifier: Verifier) -> host.Scorer:
        judges = pool if parts.needs_pool(verifier) else None
        rate = rated.make_rate(load, model.tokenizer, problems, chat=settings.chat)
        return parts.make_scorer(model.tokenizer, problems, verifier, judges, rate)

    def copied(params: Params) -> Params:
        """As a reference needs it, which never trains; of an adapter the base is that of the policy."""
        if settings.lora:
            return jax.tree.map(jnp.copy, trained_part(params, lora_state.PART))
        narrow = as_used(model.config, params, jnp.dtype(settings.compute))
        return jax.tree.map(lambda x, old: jnp.copy(x) if x.dtype == old.dtype else x, narrow, params)

    def extras(params: Params, key: Key) -> dict[str, Any]:
        kept = Referred(copied(params))._asdict() if method.needs_reference(settings) else {}
        if method.needs_optimal_values(settings):  # those of the run are measured where it begins, see ``begin_with``
            kept |= method.Optimal(jnp.zeros((len(tables.train),), jnp.float32))._asdict()
        if settings.refill:
            width = tables.train_table.tokens.shape[1] + settings.max_new_tokens
            empty = refill.empty_pool(settings.prompts_per_step * settings.group_size, width)
            kept[refill.POOL] = jax.tree.map(jnp.copy, empty)  # a step gives each buffer away
        return kept | method.first_weights(settings, len(tables.train))

    measure = measure_of_samples(
        settings, model, tables, mesh, scorer(tables.heldout, tables.heldout_verifier or tables.verifier)
    )
    plan = Plan(
        init=lambda key: model.params,
        stages=(Stage(method_of_flags(settings, model, tables, mesh), settings.steps, extras),),
        measure=measure,
        on_host=True,
        host_score=scorer(tables.train, tables.verifier),
        move=make_move(settings, model, mesh, few_bits=settings.rollout_weights),
        model=model,
    )
    return with_parked_optimiser(plan) if settings.offload else plan


def only_start(stage: Stage, params: Params, key: Key, index: int) -> TrainState:
    """The state of the one seed: the weights that were loaded are those that train, with no copy beside them."""
    return start(stage, params, key)


def begin_with(found: Opened, plan: Plan, run: pathlib.Path) -> Callable[[Stage, Params, Key, int], TrainState]:
    """``only_start``, with the values of prompts where the loss asks for them and no checkpoint has them."""
    settings, tables = found.settings, found.tables

    def begun(stage: Stage, params: Params, key: Key, index: int) -> TrainState:
        state = only_start(stage, params, key, index)
        if not method.needs_optimal_values(settings) or checkpoint.latest(run / "checkpoints"):
            return state
        samples = settings.value_samples
        hosts.say(f"values of {len(tables.train)} training prompts, by {samples} responses of the loaded model to each")
        rollout = jit_sampling(rollout_of_flags(settings, found.model, samples, found.mesh))
        drawn = evaluate.sampled(
            rollout, plan.host_score, params if plan.move is None else plan.move(params)[0], tables.train_table,
            jax.random.fold_in(jax.random.key(EVAL_KEY), settings.seed), samples=samples,
        )  # fmt: skip
        values = method.optimal_values(settings, drawn["eval/value"], drawn["eval/valid"])
        return state._replace(extras=state.extras | method.Optimal(values)._asdict())

    return begun


def make_figures(found: Opened) -> Callable[[host.Iteration], dict[str, float]]:
    """Of a step: its metrics but those of empty sets, and its shares of the roofs."""
    settings, model, _, mesh, _ = found
    keep = method.keep(settings, with_spread if settings.filter_groups else None)
    roof = utilisation.make_roof(
        model.config, jnp.dtype(settings.compute), group_size=settings.group_size,
        mesh=rollout_layout(settings, mesh),  # which an update's roof knows by its number of chips alone
        keep=keep, adapter=settings.lora > 0,
    )  # fmt: skip

    def figures(iteration: host.Iteration) -> dict[str, float]:
        rows = iteration.drawn.trajectories
        values = health.without_empty(iteration.metrics, rows, iteration.rewards, keep)
        if iteration.seconds:  # phases that overlap have no share of a roof
            values |= roof(rows, iteration.rewards, iteration.seconds)
        return values

    return figures


def make_between(found: Opened, plan: Plan) -> Callable[[host.Iteration], dict[str, float]]:
    """The evaluations while training."""
    settings = found.settings

    def between(iteration: host.Iteration) -> dict[str, float]:
        step = int(iteration.state.step)
        if not settings.eval_every or step % settings.eval_every or step >= settings.steps:
            return {}
        measured = plan.measure(iteration.state.params, jax.random.key(settings.seed))
        values = evaluate.figures(evaluate.of_samples(measured, found.tables.heldout_table))
        hosts.say(f"step {step}: pass@1 {values['eval/pass@1']:.3f}")
        return values

    return between


def worker_program(settings: Settings, index: int) -> Program:
    """What a worker of the asynchronous loop computes; it opens everything by itself."""
    found = opened(settings)
    plan, key = build(found, _pool(found)), jax.random.key(settings.seed)
    stage = plan.stages[index]
    return make_program(stage.method, lambda: only_start(stage, found.model.params, key, index), plan.host_score)


def execute(found: Opened, run: pathlib.Path, pool: VerifierPool | None) -> int:
    """Evaluates, trains, evaluates again, reports; the exit code."""
    started, settings = time.monotonic(), found.settings
    plan, threads = build(found, pool), durable.check_workers(settings.workers)[1]
    watch = health.Health(silent=health.silent_of(group_size=settings.group_size))
    stop = Stop(f"stopped; {record.how_to_resume(run)}")

    def see(step: int, row: dict[str, float]) -> None:
        bar.step(step, {name: row[key] for name, key in SHOWN.items() if key in row})
        for line in watch.see(row):
            hosts.say(f"step {step}: {line}")

    keeping = Keeping(
        folder=run, checkpoint_every=settings.checkpoint_every, trackers=settings.track, export=True,
        most_gap=settings.most_gap, most_skipped=settings.most_skipped, of_seed="", of_stage="",
        note={"problems": found.digest}, staleness=settings.staleness if settings.loop == "async" else None,
        scorers=threads, units=settings.storage_units,
        generator=durable.generator_of(settings, settings, plan, lambda other: build(opened(other), pool)),
        remote=durable.remote_of(settings, settings.mesh, partial(worker_program, settings)),
        planner=None if settings.strict else planner_of(settings.layout, own=pathlib.Path(settings.model).is_dir()),
    )  # fmt: skip
    one = SeedRun(
        plan, settings.steps, settings.mesh, keeping, temperature=settings.temperature,
        start=begin_with(found, plan, run),
        figures=make_figures(found), between=make_between(found, plan), see=see,
    ).run(settings.seed, stop)  # fmt: skip
    before = after = evaluate.of_samples(next(one)[2], found.tables.heldout_table)
    remember(settings, run)  # the run holds its folder now, and can go on with these
    hosts.say(f"{settings.model}: {found.model.config.num_parameters:,} parameters; pass@1 before {before.pass_at_1}")
    for told in (about_schedule(settings), *method.told(settings)):
        if told:
            hosts.say(told)
    try:
        with progress(settings.steps, start=max(checkpoint.steps(run / "checkpoints"), default=0)) as bar:
            for _, _, measured in one:
                after = evaluate.of_samples(measured, found.tables.heldout_table)
    except Stopped as stopped:
        hosts.say(f"stopped at step {stopped.step}; {record.how_to_resume(run)}")
        return 130
    seconds = time.monotonic() - started
    told = dataclasses.asdict(settings), found.model, found.tables, run, before, after, seconds
    hosts.by_first("report", lambda: report.report(*told))
    return 0


def evaluated_on(settings: Settings) -> tuple[list[parts.Problem] | None, Verifier | None]:
    """The rows of ``--eval-data`` and their verifier; without the flag neither.

    Rows of another format than those that train have other answers, which ``--verifier`` says nothing of.

    Raises:
      UserError: for a source that cannot be read.
    """
    if not settings.eval_data:
        return None, None
    layout = settings.eval_format or settings.format
    return parts.load_evaluated(
        settings.eval_data, most=settings.eval_problems, layout=layout,
        verifier=settings.verifier if layout == settings.format else "", bad_rows=settings.bad_rows, chat=settings.chat,
    )  # fmt: skip


def _pool(found: Opened) -> VerifierPool | None:
    verifiers = (found.tables.verifier, found.tables.heldout_verifier)
    return parts.shared_pool(*(one for one in verifiers if one is not None))


def opened(settings: Settings) -> Opened:
    """Loads and checks everything.

    Raises:
      UserError: for a model, rows or a mesh that do not serve.
    """
    mesh = meshes.given_mesh(settings.mesh)
    if mesh is not None:
        meshes.check_rows(mesh, settings.prompts_per_step, "--prompts-per-step")
    if settings.rollout_mesh:
        name = f"--rollout-mesh {settings.rollout_mesh}: --prompts-per-step"
        meshes.check_rows(rollout_layout(settings, mesh), settings.prompts_per_step, name)
    evaluated, verifier = evaluated_on(settings)
    problems = parts.load_problems(
        settings.data,
        train=settings.train_problems,
        heldout=settings.eval_problems,
        seed=settings.seed,
        verifier=settings.verifier,
        layout=settings.format,
        bad_rows=settings.bad_rows,
        chat=settings.chat,
        evaluated=evaluated,
    )
    digest = parts.digest(problems)
    if settings.reward:
        known = ([all_known(problem) for problem in split] for split in problems[:2])
        problems, verifier = (*known, method.own_rewards(settings)), None
    model = parts.load_model(
        settings.model,
        mesh=mesh,
        rollout_cache=settings.rollout_cache,
        compute_dtype=jnp.dtype(settings.compute),
        remat=settings.remat,
        attention=settings.attention,
        frozen=settings.weights == "bfloat16" or keeps_narrow(settings),
    )
    model = lora_state.with_adapter(model, settings.lora, settings.seed, base=settings.lora_base)
    if mesh is not None:
        model = model._replace(params=rules.shard(model.params, mesh))
    tables = parts.make_tables(
        model,
        problems,
        prompt_tokens=settings.prompt_tokens,
        max_new_tokens=settings.max_new_tokens,
        chat=settings.chat,
        heldout_verifier=verifier,
    )
    settings = method.in_epochs(settings, len(tables.train), settings.prompts_per_step)
    method_of_flags(settings, model, tables, mesh)  # refuses what does not serve, before there is a folder
    return Opened(settings, model, tables, mesh, digest)


def main(settings: Settings) -> int:
    """Opens everything, then makes the run folder and trains; the exit code."""
    settings = located(settings)
    check(settings)
    compile_cache.enable(settings.compile_cache)
    hosts.connect(settings.hosts)
    if settings.hosts and not settings.mesh:
        settings = dataclasses.replace(settings, mesh=f"data={jax.device_count()}")
        check(settings)
    method.check_computed(settings)
    refused = (
        (method.needs_optimal_values(settings), f"does not measure the values that --loss {settings.loss} takes"),
        (settings.layout in ("packed", "tree"), f"trains rows as they stand: drop --layout {settings.layout}"),
    )
    # refuses what does not serve, before anything is loaded
    durable.check_generator(settings)
    durable.remote_of(settings, settings.mesh, worker_program, *refused)
    found = opened(settings)
    run = run_folder(found.settings)
    stopped = f"stopped; {record.how_to_resume(run)}"
    try:
        with interruptible(stopped), record.resumable(run), contextlib.ExitStack() as stack:
            stack.enter_context(checkpoint.held(run))
            if pool := _pool(found):
                stack.enter_context(pool)
            return execute(found, run, pool)
    except KeyboardInterrupt:
        print(stopped)
        return 130
    except NotFinite as error:
        good = checkpoint.latest(run / "checkpoints")
        kept = f"the last checkpoint, {good}, is good" if good else "there is no checkpoint yet"
        raise UserError(f"{error}; {kept}") from error


def cli(arguments: list[str] | None = None) -> int:
    """Command line: one clear line and exit code 2 for a mistake."""
    host_memory.keep_freed_pages()
    try:
        with interruptible(), from_callbacks():
            return main(parse(hub.located(sys.argv[1:] if arguments is None else arguments)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped before the run began", file=sys.stderr)
        return 130
