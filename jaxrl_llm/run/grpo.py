"""The main job: train a language model by GRPO and show that it learned.

``python -m jaxrl_llm`` takes the bundled base model and Countdown; ``--model DIR --data FILE.jsonl`` takes your own.
"""

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.distributed import hosts, rollout_weights, rules
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.planning import utilisation
from jaxrl_llm.rollout.per_device import per_device
from jaxrl_llm.run import compile_cache, host_memory, lora_state, method, parts
from jaxrl_llm.run.evaluate import Evaluation, evaluate, figures
from jaxrl_llm.run.records import health, record, report, track, transcripts, view
from jaxrl_llm.run.records.progress import progress
from jaxrl_llm.run.settings import Settings, about_schedule, by_device, check, horizon, located, parse, run_folder
from jaxrl_llm.run.stop import Stop, interruptible
from jaxrl_llm.train import checkpoint, host
from jaxrl_llm.train.methods.builders import current_anchor, make_estimate, make_policy_loss, stored_anchor
from jaxrl_llm.train.methods.shared_prompt import share_prompts
from jaxrl_llm.train.online import Online, init_state
from jaxrl_llm.train.optimisers import muon
from jaxrl_llm.train.plan import most_parts
from jaxrl_llm.train.skipped import NotFinite
from jaxrl_llm.types import Params, Rewards, TrainState, Trajectories
from jaxrl_llm.verifiers.pool import VerifierPool
from jaxrl_llm.verifiers.verdict import Verifier

SHOWN = {
    "reward": "reward/mean", "tokens": "length/mean_tokens", "gap": "kl/sampler_max", "tokens/s": "tokens/per_s",
    "roof/rollout": "roof/rollout", "roof/update": "roof/update",
}  # fmt: skip
SHOWN_GROUPS = 2  # of a batch, written to be read


def count_microbatches(settings: Settings, mesh: Mesh | None) -> int:
    """``--microbatches``, or the most parts (at most 16) that hold whole groups and divide over the mesh."""
    if settings.microbatches or settings.strict:  # whose sampler scores all rows at once
        return settings.microbatches or 1
    devices = 1 if mesh is None else meshes.batch_parts(mesh)
    return most_parts(settings.prompts_per_step, settings.group_size, devices)


def rollout_layout(settings: Settings, mesh: Mesh | None) -> Mesh | None:
    """Where rollouts run: ``--rollout-mesh``, or where training does."""
    if not settings.rollout_mesh:
        return mesh
    return meshes.parse_mesh(settings.rollout_mesh, flag="--rollout-mesh")


def with_spread(trajectories: Trajectories, rewards: Rewards) -> Array:
    """Rows of groups whose rewards are not all equal."""
    return group.group_spread(rewards.value, trajectories.group_ids, valid=rewards.valid) > 0


def reference(extras: dict[str, Any]) -> Params:
    """The model that was loaded, from the state."""
    return extras["reference"]


def make_online(settings: Settings, model: parts.Model, tables: parts.Tables, mesh: Mesh | None) -> Online:
    """The method of the flags; by default GRPO with clip-higher, dynamic filtering, a token mean and no KL."""
    prompts = len(tables.train)
    if settings.prompts_per_step > prompts:
        raise UserError(f"--prompts-per-step {settings.prompts_per_step} exceeds the {prompts} training prompts")

    steps = horizon(settings) * settings.inner_epochs  # updates, which the schedule counts
    schedule = method.learning_rate(settings, steps)
    several = settings.inner_epochs > 1
    score = share_prompts(settings.group_size, settings.max_new_tokens)
    return Online(
        policy=model.policy,
        problems=tables.train_table,
        sampler=make_epochs(settings.seed),
        prompts_per_step=settings.prompts_per_step,
        group_size=settings.group_size,
        rollout=make_rollout(
            settings,
            model,
            settings.group_size,
            mesh,
            few_bits=settings.rollout_weights if rollout_layout(settings, mesh) == mesh else "",  # ``make_move`` has it
            strict=score if settings.strict else None,
        ),
        score=lambda answers, trajectories: None,  # the host scores
        estimate=make_estimate(
            model.policy,
            method.estimator(settings),
            reduction=settings.reduction,
            temperature=settings.temperature,
            recompute_old=several,
            reference=reference if settings.kl else None,
            keep=method.keep(settings, with_spread if settings.filter_groups else None),
        ),
        loss=make_policy_loss(
            model.policy,
            method.token_loss(settings),
            reduction=settings.reduction,
            length_tokens=settings.max_new_tokens if settings.reduction == "constant" else None,
            temperature=settings.temperature,
            anchor=stored_anchor if several else current_anchor,
            token_weights=method.correction(settings),
            extra_terms=method.kl_terms(settings),
            score=score,
        ),
        tx=muon(model.config, schedule) if settings.optimiser == "muon" else method.adam(settings, schedule),
        max_grad_norm=settings.max_grad_norm or None,
        updates_per_rollout=settings.inner_epochs,
        microbatches=count_microbatches(settings, mesh),
        trained=lora_state.PART if settings.lora else "",
    )


def make_rollout(
    settings: Settings, model: parts.Model, group_size: int, mesh: Mesh | None, **training: Any
) -> Callable[..., Any]:
    """The rollout of training and of evaluation: they differ in the size of a group, and in ``training``.

    Where rollouts have a layout of their own, its weights are those of ``make_move``.
    """
    layout = rollout_layout(settings, mesh)
    apart = layout is not None and by_device(settings)
    if apart or layout != mesh:
        make = parts.policy_maker(
            None if apart else layout, int8_cache=settings.int8_cache, attention=settings.attention
        )
        policy = make(model.config, compute_dtype=jnp.dtype(settings.compute))
        model = lora_state.computed(model, settings.lora, policy)
    rollout = parts.make_rollout(
        model,
        group_size=group_size,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        stop=settings.stop,
        slots=settings.slots,
        cache_stages=settings.cache_stages,
        row_stages=settings.row_stages,
        **training,
    )
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


def make_measure(
    settings: Settings, model: parts.Model, tables: parts.Tables, mesh: Mesh | None, score: host.Scorer
) -> Callable[[Params], Evaluation]:
    """Evaluation on the held-out problems, in the layout of rollouts."""
    rollout = jax.jit(make_rollout(settings, model, settings.eval_samples, mesh))
    move = make_move(settings, model, mesh)

    def measure(params: Params) -> Evaluation:
        return evaluate(
            rollout,
            score,
            params if move is None else move(params)[0],
            tables.heldout_table,
            jax.random.key(20_000),
            samples=settings.eval_samples,
        )

    return measure


def make_loop(
    settings: Settings, model: parts.Model, online: Online, mesh: Mesh | None, score: host.Scorer
) -> host.HostLoop:
    """The compiled halves of a step."""
    return host.make_host_loop(
        online,
        score,
        place=None if mesh is None else partial(rules.constrain, mesh=mesh),
        move=make_move(settings, model, mesh, few_bits=settings.rollout_weights),
        most_gap=settings.most_gap,
        most_skipped=settings.most_skipped,
    )


def start_state(
    settings: Settings, online: Online, model: parts.Model, run: pathlib.Path, mesh: Mesh | None, digest: str
) -> TrainState:
    """A fresh state, or the newest intact checkpoint of the run; placed on the mesh where one is given."""
    extras = {"reference": jax.tree.map(jnp.copy, model.params)} if settings.kl else {}
    state = init_state(online, model.params, jax.random.key(settings.seed), extras=extras)
    if mesh is not None:
        state = rules.shard(state, mesh)
    path = checkpoint.latest(run / "checkpoints")
    if path is None:
        return state
    if checkpoint.note(path).get("problems") != digest:
        raise UserError(f"checkpoint {path} belongs to other problems than --data {settings.data} holds now")
    state = lora_state.whole(
        checkpoint.restore(path, lora_state.kept(state, settings.lora)), state.params, settings.lora
    )
    hosts.say(f"resuming {run} at step {int(state.step)}")
    return state


def train(
    settings: Settings,
    loop: host.HostLoop,
    state: TrainState,
    run: pathlib.Path,
    note: dict[str, Any],
    look: Callable[..., list[dict[str, Any]]],
    roof: Callable[..., dict[str, float]],
    measure: Callable[[Params], Evaluation],
    tracker: track.Tracker = track.nothing,
) -> TrainState | None:
    """Runs to the last step with records, evaluations and checkpoints; None when stopped by Ctrl-C."""
    stop, watch = Stop(f"stopped; {record.how_to_resume(run)}"), health.Health()
    used = with_spread if settings.filter_groups else None
    with stop.listening(), progress(settings.steps, start=int(state.step)) as shown:
        if hosts.is_first():
            record.rewind(run / "metrics.jsonl", int(state.step))
            record.rewind(run / view.FILE, int(state.step))
        clock = time.monotonic()
        for iteration in host.iterations(loop, state, settings.steps):
            state, now = iteration.state, time.monotonic()
            step, drawn = int(state.step), iteration.drawn.trajectories
            values = health.without_empty(iteration.metrics, drawn, iteration.rewards, used)
            values |= {"time/step_s": now - clock, "compile/count": iteration.compiled}
            values["tokens/per_s"] = values["tokens/generated"] / (now - clock)
            clock = now
            values |= {f"time/{phase}_s": seconds for phase, seconds in iteration.seconds.items()}
            values |= roof(iteration.drawn.trajectories, iteration.rewards, iteration.seconds)
            if settings.eval_every and step % settings.eval_every == 0 and step < settings.steps:
                values |= figures(measure(state.params))
                hosts.say(f"step {step}: pass@1 {values['eval/pass@1']:.3f}")
                clock = time.monotonic()  # what is measured is no time of training
            if hosts.is_first():
                record.append_line(run / "metrics.jsonl", {"step": step} | values)
                tracker.write(step, values)
            stopping = hosts.anywhere(stop.asked)
            shown.step(step, {name: values[key] for name, key in SHOWN.items() if key in values})
            for line in watch.see(values):
                hosts.say(f"step {step}: {line}")
            keep = step % settings.checkpoint_every == 0 or step == settings.steps or stopping
            if keep or step == 1:
                lines = look(state, iteration.drawn.trajectories, iteration.rewards, step)
                for line in lines if hosts.is_first() else ():
                    record.append_line(run / view.FILE, line)
                if hosts.is_first():
                    tracker.text(step, "samples", track.samples(lines))
            if keep:
                checkpoint.save(run / "checkpoints", lora_state.kept(state, settings.lora), note=note)
            if stopping:  # after the last step too: evaluation and report may be longer than whoever asks will wait
                hosts.say(f"stopped at step {step}; {record.how_to_resume(run)}")
                return None
        if hosts.anywhere(stop.asked):  # while the last step was kept
            hosts.say(f"stopped at step {settings.steps}; {record.how_to_resume(run)}")
            return None
    return state


def execute(
    settings: Settings,
    model: parts.Model,
    tables: parts.Tables,
    online: Online,
    mesh: Mesh | None,
    run: pathlib.Path,
    digest: str,
    pool: VerifierPool | None,
) -> int:
    """Evaluates, trains, evaluates again, reports; the exit code."""
    started = time.monotonic()

    def scorer(problems: list[parts.Problem], other: Verifier | None = None) -> host.Scorer:
        verifier = other or tables.verifier
        return parts.make_scorer(model.tokenizer, problems, verifier, pool if parts.needs_pool(verifier) else None)

    measure = make_measure(settings, model, tables, mesh, scorer(tables.heldout, tables.heldout_verifier))
    before = measure(model.params)
    hosts.say(f"{settings.model}: {model.config.num_parameters:,} parameters; pass@1 before {before.pass_at_1}")
    state = start_state(settings, online, model, run, mesh, digest)
    if told := about_schedule(settings):
        hosts.say(told)
    loop = make_loop(settings, model, online, mesh, scorer(tables.train))
    look = transcripts.make_look(
        online,
        model.tokenizer.decode,
        rows=settings.group_size * min(SHOWN_GROUPS, settings.prompts_per_step),
        temperature=settings.temperature,
    )
    keep = method.keep(settings, with_spread if settings.filter_groups else None)
    dtype = jnp.dtype(settings.compute)
    layout = rollout_layout(settings, mesh)  # which an update's roof knows by its number of chips alone
    roof = utilisation.make_roof(model.config, dtype, group_size=settings.group_size, mesh=layout, keep=keep)
    tracker = track.open_trackers(settings.track if hosts.is_first() else (), run, begin=int(state.step))
    with contextlib.closing(tracker):
        state = train(settings, loop, state, run, {"problems": digest}, look, roof, measure, tracker)
    if state is None:
        return 130
    after = measure(state.params)
    params = hosts.gathered(state.params)
    if hosts.is_first():
        report.save_model(run, model, lora_state.save(run / "adapter", model, params, settings.lora))
        report.report(dataclasses.asdict(settings), model, tables, run, before, after, time.monotonic() - started)
    hosts.barrier("report")
    return 0


def evaluated_on(settings: Settings) -> tuple[list[parts.Problem] | None, Verifier | None]:
    """The rows of ``--eval-data`` and their verifier; without the flag neither.

    Raises:
      UserError: for a source that cannot be read.
    """
    if not settings.eval_data:
        return None, None
    return parts.load_evaluated(
        settings.eval_data, most=settings.eval_problems, layout=settings.eval_format or settings.format,
        verifier="" if settings.eval_format else settings.verifier, bad_rows=settings.bad_rows, chat=settings.chat,
    )  # fmt: skip


def main(settings: Settings) -> int:
    """Loads and checks everything, then makes the run folder and trains; the exit code."""
    settings = located(settings)
    check(settings)
    compile_cache.enable(settings.compile_cache)
    hosts.connect(settings.hosts)
    if settings.hosts and not settings.mesh:
        settings = dataclasses.replace(settings, mesh=f"data={jax.device_count()}")
        check(settings)
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
    if settings.reward:
        problems, verifier = (*problems[:2], method.own_reward(settings.reward)), None
    model = parts.load_model(
        settings.model,
        mesh=mesh,
        int8_cache=settings.int8_cache,
        compute_dtype=jnp.dtype(settings.compute),
        remat=settings.remat,
        attention=settings.attention,
    )
    model = lora_state.with_adapter(model, settings.lora, settings.seed)
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
    online = make_online(settings, model, tables, mesh)
    run = run_folder(settings)
    stopped = f"stopped; {record.how_to_resume(run)}"
    try:
        with interruptible(stopped), record.resumable(run), contextlib.ExitStack() as stack:
            if hosts.is_first():
                stack.enter_context(record.locked(run))
            if pool := parts.shared_pool(tables.verifier, tables.heldout_verifier or tables.verifier):
                stack.enter_context(pool)
            return execute(settings, model, tables, online, mesh, run, parts.digest(problems), pool)
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
        with interruptible():
            return main(parse(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped before the run began", file=sys.stderr)
        return 130
