"""Parts that several experiments share beside their bench: rollout, online method, arms, held-out measurement."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxrl_llm import reduce
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.distributed import hosts
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.models import heads
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.run import parts as job
from jaxrl_llm.run.bench import (
    Bench,
    OnlineSettings,
    Settings,
    bench,
    bench_identity,
    cached_by_task,
    demonstrations,
    is_generated,
    solved_problems,
)
from jaxrl_llm.run.options import sampling_of
from jaxrl_llm.train import seed_axis
from jaxrl_llm.train.methods.actor_critic import model_of
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.methods.supervised import SupervisedRows, joined
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan, Setup, Stage, no_extras
from jaxrl_llm.types import Key, Params, Problems, Responses, Rewards, TrainState, Trajectories, declared
from jaxrl_llm.verifiers import answers as answer_verifiers
from jaxrl_llm.verifiers import tokens as token_verifiers

__all__ = [
    "Bench", "OnlineSettings", "Settings", "bench", "bench_identity", "demonstrations", "cached_by_task",
    "solved_problems",  # one import serves an experiment
    "Outside", "behaviour_extras", "beside", "demonstrating_rollout", "host_judge", "lagged_actor", "lagged_extras",
    "last_members", "make_answer_reader", "make_measure", "make_online", "measure_on_host", "rollout_of_model",
    "model_of", "one_stage", "outside_of", "rollout_of", "sample_all", "stale_actor", "summary",
    "single_turn", "unscored", "with_heads", "with_texts",
]  # fmt: skip


def rollout_of_model(model: job.Model, *, group_size: int, **sampling: Any) -> Callable[..., Trajectories]:
    """The ``rollout`` slot for a loaded model, in the form that is fast for many seeds (see ``train.seed_axis``).

    On a mesh its rows are divided.

    Args:
      sampling: ``max_new_tokens`` and ``temperature``, or all of ``run.options.Sampling``.
    """
    rollout = job.make_rollout(model, group_size=group_size, early_exit=seed_axis.in_turn(), **sampling)
    return job.split_rows(rollout, model.mesh)


def rollout_of(
    settings: OnlineSettings,
    found: Bench,
    *,
    group_size: int | None = None,
    temperature: float | None = None,
    measured: bool = False,
) -> Callable[..., Trajectories]:
    """``rollout_of_model`` of a bench with the sampling of the settings, where no other numbers are given.

    Args:
      measured: samples of an evaluation come from the weights themselves, not from a copy in few bits.
    """
    sampling = sampling_of(settings, temperature=temperature)
    if measured:
        sampling = sampling._replace(few_bits="")
    return rollout_of_model(
        found.model, group_size=settings.group_size if group_size is None else group_size, **sampling._asdict()
    )


def make_online(settings: OnlineSettings, found: Bench, *, estimate: Callable, loss: Callable, tx, **slots) -> Online:
    """The ``Online`` of a bench: its rollout and its judge; ``slots`` replace any of them.

    Generated problems, which never end, are drawn uniformly; rows of one's own in shuffled epochs, each once in every.
    """
    parts = {
        "policy": found.model.policy,
        "problems": found.train,
        "sampler": make_uniform() if is_generated(settings.data) else make_epochs(None),
        "prompts_per_step": settings.prompts_per_step,
        "group_size": settings.group_size,
        "score": found.score or unscored,
        "rollout": rollout_of(settings, found),
    }
    return Online(**parts | {"estimate": estimate, "loss": loss, "tx": tx} | slots)


def unscored(answers: Any, trajectories: Trajectories) -> None:
    """The ``score`` of an online method whose rewards come from the host, see ``host_judge``."""


def host_judge(
    found: Bench, stages: Iterable[Stage], host_score: Callable[[Trajectories], Rewards] | None = None
) -> Callable[[Trajectories], Rewards] | None:
    """What judges training responses in Python: the given one, else the bench's own; None where the stages judge.

    A stage whose ``score`` is its own (it judges with the hint, leaves out what was never drawn) keeps it: nothing that
    an experiment adds to the reward is lost where the bench judges on the host.

    Raises:
      ValueError: where some stages have a score of their own and others none.
    """
    if found.score is not None:
        return None
    own = [stage.method.score is not unscored for stage in stages if isinstance(stage.method, Online)]
    if host_score is not None or not any(own):
        return host_score or found.host_score
    if not all(own):
        raise ValueError("some stages have a score= of their own and others none: give host_score=")
    return None


def make_answer_reader(found: Bench) -> Callable[[Trajectories], tuple[Array, Array]]:
    """``trajectories -> (answer [B], answered [B])``: which answers are the same, without a label.

    Where the bench judges on the device, the whole number after the last ``#`` (jittable), or after the last ``=``
    where solutions are steps to a target; else the final part of each decoded text, numbered by first appearance.
    """
    tokenizer = found.model.tokenizer
    if found.score is not None:
        classes = token_verifiers.character_classes(
            tokenizer.encode, tokenizer.eos_ids, found.model.config.padded_vocab_size
        )
        return token_verifiers.make_value_reader(*classes, mark="=" if "target" in found.train.answers else "#")

    def read(trajectories):
        parts = [answer_verifiers.final_part(text).strip() for text in job.responses(tokenizer, trajectories)]
        numbers: dict[str, int] = {}
        values = [numbers.setdefault(part, len(numbers)) for part in parts]
        return jnp.asarray(values, jnp.int32), jnp.asarray([bool(part) for part in parts])

    return read


def last_members(rows: int, group_size: int) -> Array:
    """Which of ``rows`` is the last of its group: the place of a demonstration."""
    return jnp.arange(rows, dtype=jnp.int32) % group_size == group_size - 1


class Outside(NamedTuple):
    """Extras of a batch: which responses another than the policy wrote."""

    outside: Bool[Array, " B"]


def outside_of(extras: dict[str, Any]) -> Bool[Array, " B"]:
    """Which responses another than the policy wrote, from the extras of a batch with ``Outside``."""
    return declared(Outside, extras).outside


def with_texts(
    settings: OnlineSettings, found: Bench, problems: Sequence[Problem], texts: Sequence[str]
) -> SupervisedRows:
    """Rows to imitate: the training problems of a bench, which ``problems`` are as text, each with a text behind it."""
    prompts = [problem.prompt for problem in problems]
    said = encode_responses(found.model.tokenizer, texts, prompts=prompts, chat=settings.chat)
    return joined(found.train.tokens, found.train.valid, *map(jnp.asarray, said))


def demonstrating_rollout(settings: OnlineSettings, found: Bench, rollout: Callable[..., Trajectories]):
    """``rollout`` with the last member of each group replaced by the problem's solution.

    Its ``sampler_logp`` is that of the acting policy, so that every ratio to it starts at 1.
    """
    tokens, valid = demonstrations(settings)
    size = settings.group_size

    def mixed(params, prompt_tokens, prompt_valid, keys, problem_ids):
        rows = rollout(params, prompt_tokens, prompt_valid, keys, problem_ids)
        outside, ids = last_members(rows.tokens.shape[0], size), rows.problem_ids
        rows = given_responses.with_responses(rows, outside, tokens[ids], valid[ids])
        shown = jax.tree.map(lambda x: x[size - 1 :: size], rows)
        logp, _ = score_tokens(found.model.policy, params, shown, temperature=settings.temperature)
        logp = jnp.where(outside[:, None] & rows.mask, jnp.repeat(logp, size, axis=0), rows.sampler_logp)
        return rows._replace(sampler_logp=logp)

    return mixed


def with_heads(found: Bench, plan: Plan, **outputs: int) -> Plan:
    """The plan of an arm whose parameters are ``{"model": ..., name: head of so many outputs, ...}``.

    Heads start at zero weights where they have one output (a value) and small normal ones else. Rollouts and
    measurement see the plain model; see ``train.methods.actor_critic``.
    """
    width, measure = found.model.config.hidden_size, plan.measure

    def init(key):
        names = {name: jax.random.fold_in(key, i) for i, name in enumerate(sorted(outputs))}
        drawn = {
            name: heads.init_head(width, k, outputs=outputs[name], scale=0.0 if outputs[name] == 1 else width**-0.5)
            for name, k in names.items()
        }
        return {"model": plan.init(key), **drawn}

    return plan._replace(init=init, measure=_of_model(measure))


@lru_cache(maxsize=8)
def _of_model(measure: Callable) -> Callable[[Params, Key], dict[str, Array]]:
    return lambda params, key: measure(params["model"], key)


class Behaviour(NamedTuple):
    """Extras of a state whose samples come from other parameters than those that train."""

    behaviour: Params


def behaviour_of(state: TrainState) -> Params:
    """The parameters that draw, of a state with ``Behaviour``."""
    return declared(Behaviour, state.extras).behaviour


def stale_actor(every: int) -> dict[str, Callable]:
    """Slots of ``Online``: samples come from ``Behaviour``, a copy of the policy renewed ``every`` steps.

    The stage's ``extras`` put the first copy there, see ``behaviour_extras``; ``every=1`` is on-policy.
    """
    if every < 1:
        raise ValueError(f"every={every} must be at least 1 step between synchronisations")

    def remember(state, batch, trajectories, rewards):
        now = state.step % every == 0
        kept = jax.tree.map(lambda new, old: jnp.where(now, new, old), state.params, behaviour_of(state))
        return state.extras | Behaviour(kept)._asdict()

    return {"actor": behaviour_of, "remember": remember}


def behaviour_extras(params: Params, key: Key) -> dict[str, Params]:
    """The ``extras`` of a stage with ``stale_actor``."""
    return Behaviour(jax.tree.map(jnp.copy, params))._asdict()


def lagged_actor(lag: int) -> dict[str, Callable]:
    """Slots of ``Online``: samples come from the policy of ``lag`` updates ago; 0 is on-policy.

    The stage's ``extras`` are those of ``lagged_extras(lag)``.
    """
    if lag < 0:
        raise ValueError(f"lag={lag} must not be negative")
    if lag == 0:
        return {}

    def remember(state, batch, trajectories, rewards):
        before = behaviour_of(state)
        kept = jax.tree.map(lambda old, new: jnp.concatenate([old[1:], new[None]]), before, state.params)
        return state.extras | Behaviour(kept)._asdict()

    return {"actor": lambda state: jax.tree.map(lambda x: x[0], behaviour_of(state)), "remember": remember}


@lru_cache(maxsize=8)
def lagged_extras(lag: int) -> Callable[[Params, Key], dict[str, Any]]:
    """The ``extras`` of a stage with ``lagged_actor``: the first policy ``lag + 1`` times, oldest first, if any."""
    if lag == 0:
        return no_extras
    return lambda params, key: Behaviour(jax.tree.map(lambda x: jnp.stack([x] * (lag + 1)), params))._asdict()


def old_actor(lag: int, every: int) -> tuple[dict[str, Callable], Callable[[Params, Key], dict[str, Any]]]:
    """Slots of ``Online`` and the ``extras`` of their stage: samples come from older weights.

    With ``lag`` above 0 every sample is so many updates old; with ``lag=0`` the sampler is renewed ``every`` updates,
    so that samples are 0 to ``every - 1`` updates old and ``every=1`` is on-policy.
    """
    if lag:
        return lagged_actor(lag), lagged_extras(lag)
    return stale_actor(every), behaviour_extras


def one_stage(
    settings: OnlineSettings,
    found: Bench,
    online: Online,
    *,
    extras: Callable[[Params, Key], dict[str, Any]] = no_extras,
    host_score: Callable[[Trajectories], Rewards] | None = None,
) -> Plan:
    """The usual arm: ``settings.steps`` of one online method from the bench's model, measured on held-out problems.

    Args:
      host_score: where the bench judges on the host, what judges training responses; see ``host_judge``.
    """
    stages = (Stage(online, settings.steps, extras),)
    return single_turn(found, make_measure(settings), stages, host_score).plan(*stages)


def single_turn(
    found: Bench,
    measure: Callable[[Params, Key], dict[str, Array]],
    stages: Sequence[Stage] = (),
    host_score: Callable[[Trajectories], Rewards] | None = None,
) -> Setup:
    """The bench's model and who judges its responses, as the setup of an experiment.

    Args:
      stages: that will train, where some may have a score of their own; see ``host_judge``.
      host_score: as in ``host_judge``.
    """
    judge = host_judge(found, stages, host_score)
    fields = {"on_host": found.score is None, "host_score": judge, "model": found.model}
    return Setup(found.model, lambda key: found.model.params, measure, fields=fields)


def of_samples(found: Bench, answers: Any, rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """``summary`` of the responses to all held-out problems."""
    return summary(rows.mask, rewards, rows.tokens.shape[0] // found.heldout.tokens.shape[0])


def make_measure(
    settings: OnlineSettings,
    opened: Callable[[OnlineSettings], Bench] = bench,
    figures: Callable[[Bench, Any, Trajectories, Rewards], dict[str, Array]] = of_samples,
) -> Callable[[Params, Key], dict[str, Array]]:
    """``measure(params, key)``: figures of ``eval_samples`` responses to every held-out problem of a bench.

    Equal arguments give the same function, so that arms share its compiled program.

    Args:
      opened: the bench of the settings: which problems are measured, and by whom they are judged.
      figures: of the bench, the answers of the rows' problems, the rows and their rewards. A bench that judges on the
        host is summed up by ``summary`` alone.
    """
    return _measure(bench_identity(settings), settings.temperature, settings.eval_samples, opened, figures)


@lru_cache(maxsize=8)
def beside(measure: Callable, other: Callable, prefix: str) -> Callable[[Params, Key], dict[str, Array]]:
    """Two measurements in one: ``eval/<name>`` of the other becomes ``<prefix>/<name>``."""

    def both(params, key):
        return measure(params, key) | {f"{prefix}/{k.split('/', 1)[1]}": x for k, x in other(params, key).items()}

    return both


@lru_cache(maxsize=8)
def _measure(
    identity: tuple, temperature: float, samples: int, opened: Callable, figures: Callable
) -> Callable[[Params, Key], dict[str, Array]]:
    settings = OnlineSettings(**dict(identity))
    found = opened(settings)
    rollout = rollout_of(settings, found, group_size=samples, temperature=temperature, measured=True)
    if found.score is None:
        return partial(measure_on_host, jit_sampling(rollout), found.heldout, found.heldout_score, samples)

    def measure(params, key):
        rows = sample_all(rollout, params, found.heldout, key, samples)
        answers = jax.tree.map(lambda x: x[rows.problem_ids], found.heldout.answers)
        return figures(found, answers, rows, found.score(answers, rows))

    return measure


def sample_all(rollout: Callable[..., Trajectories], params: Params, problems: Problems, key: Key, samples: int):
    """``samples`` responses to every problem of a table, in one batch."""
    ids = jnp.arange(problems.tokens.shape[0], dtype=jnp.int32)
    return rollout(params, problems.tokens, problems.valid, sample_keys(key, 0, ids, samples), ids)


def sample_in_parts(
    rollout: Callable[..., Trajectories], params: Params, problems: Problems, key: Key, samples: int,
    *, rows: np.ndarray | None = None, chunk: int = 64,
) -> Iterator[tuple[Trajectories, int]]:  # fmt: skip
    """``(responses, how many are real)``: ``samples`` responses to each problem, so many problems at a time.

    The last part is filled with repeats so that one shape serves all; those are behind the real ones.

    Args:
      rollout: compiled, makes groups of ``samples``.
      rows: of the table; None: all of them.
    """
    rows = np.arange(problems.tokens.shape[0]) if rows is None else rows
    count, size = len(rows), min(chunk, len(rows))
    for begin in range(0, count, size or 1):
        ids = jnp.asarray(rows[np.minimum(np.arange(begin, begin + size), count - 1)], jnp.int32)
        found = rollout(params, problems.tokens[ids], problems.valid[ids], sample_keys(key, 0, ids, samples), ids)
        yield hosts.gathered(found), samples * min(size, count - begin)


def summary(mask: Array, rewards: Rewards, samples: int, *, judged: bool = True) -> dict[str, Array]:
    """Accuracy over samples, unbiased pass@k for k = 2, 4, ... and ``samples``, lengths of right and wrong responses.

    ``pass@samples`` is the share of problems with a right sample; see ``intervals.pass_at_k`` for the others.
    ``problems/right`` is no scalar: the right samples of each problem, ``[problems]``.

    Args:
      judged: every response has a valid verdict, as judges inside a program give it. Else pass@k is a mean over the
        problems whose samples all have one, the accuracy one over samples, and NaN where there is none.
    """
    length = jnp.sum(mask.astype(jnp.float32), axis=1)
    right = rewards.valid & (rewards.value > 0.5)
    solved_by = jnp.sum(right.reshape(-1, samples).astype(jnp.float32), axis=1)
    wrong = samples - solved_by
    failing, solved = jnp.ones(wrong.shape, jnp.float32), {}
    whole = None if judged else jnp.all(rewards.valid.reshape(-1, samples), axis=1)
    for k in range(1, samples + 1):
        failing = failing * jnp.maximum(wrong - (k - 1), 0.0) / (samples - k + 1.0)
        if k == samples or k > 1 and k & (k - 1) == 0:
            solved[f"eval/pass@{k}"] = jnp.maximum(reduce.scalars(1.0 - failing, whole), 0.0)
            if whole is not None:
                solved[f"eval/pass@{k}"] = jnp.where(jnp.any(whole), solved[f"eval/pass@{k}"], jnp.nan)
    accuracy = reduce.scalars(right.astype(jnp.float32), rewards.valid)
    return {
        "eval/accuracy": accuracy if judged else jnp.where(jnp.any(rewards.valid), accuracy, jnp.nan),
        **solved,
        "eval/tokens": reduce.scalars(length),
        "eval/right_tokens": reduce.scalars(length, right),
        "eval/wrong_tokens": reduce.scalars(length, rewards.valid & ~right),
        "problems/right": solved_by,
    }


def measure_on_host(
    rollout: Callable[..., Trajectories],
    problems: Problems,
    score: Callable[[Trajectories], Rewards],
    samples: int,
    params: Params,
    key: Key,
    *,
    chunk: int = 64,
    more: Callable[[Responses, Rewards], dict[str, Array]] | None = None,
) -> dict[str, Array]:
    """``summary`` of all problems, judged in Python, so many problems at a time.

    Args:
      rollout: compiled, makes groups of ``samples``.
      more: ``(responses, rewards) -> metrics`` of all rows, beside the summary.
    """
    masks, values, valids, tokens = [], [], [], []
    for rows, real in sample_in_parts(rollout, params, problems, key, samples, chunk=chunk):
        rewards = score(rows)
        tokens.append(np.asarray(rows.tokens)[:real])
        masks.append(np.asarray(rows.mask)[:real])
        values.append(np.asarray(rewards.value)[:real])
        valids.append(np.asarray(rewards.valid)[:real])
    whole = Rewards(jnp.asarray(np.concatenate(values)), jnp.asarray(np.concatenate(valids)))
    mask = jnp.asarray(np.concatenate(masks))
    ids = jnp.repeat(jnp.arange(problems.tokens.shape[0], dtype=jnp.int32), samples)
    found = {} if more is None else more(Responses(jnp.asarray(np.concatenate(tokens)), mask, ids), whole)
    return summary(mask, whole, samples, judged=False) | found
