"""Parts of experiments that choose prompts, hints or the number of responses by what the policy can already solve."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxrl_llm import reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum.subset import make_subset
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.run import parts as job
from jaxrl_llm.train.methods import builders, episode_methods, supervised
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan, Stage
from jaxrl_llm.types import Params, Rewards, Sampler, Trajectories


def device_score(found: Bench) -> Callable[[Any, Trajectories], Rewards]:
    """The judge on the device, of any table of problems.

    Raises:
      UserError: where answers are judged on the host only, by the bench's own problems.
    """
    if found.score is None:
        raise UserError(
            "this method judges problems of its own making on the device; choose --data chain or countdown with a "
            "tokenizer of one token a character"
        )
    return found.score


def train_score(found: Bench) -> Callable[[Any, Trajectories], Rewards]:
    """The judge of the bench's training problems inside a compiled step: on the device, else by callback."""
    return found.score or found.callback


def train_problems(settings: OnlineSettings) -> list[Problem]:
    """The problems behind ``bench(settings).train`` as text, in the same order.

    Raises:
      UserError: for a file: what follows is known of generated problems only, for example their operations.
    """
    if settings.data not in job.TASKS:
        tasks = " and ".join(sorted(job.TASKS))
        raise UserError(f"--data {settings.data}: this method knows how {tasks} are made; choose one")
    return recipes.solved_problems(settings)


def sample_pass_rates(
    found: Bench, settings: OnlineSettings, rows: np.ndarray, *, samples: int, model: str = "", temperature: float = 1.0
) -> np.ndarray:
    """Share of right responses of a named model (empty: the bench's own) to the given training rows; computed once.

    Where answers are judged on the host, so are these.
    """
    key = tuple(int(k) for k in rows)
    return _pass_rates(recipes.bench_identity(settings), key, model or settings.model, samples, temperature)


@lru_cache(maxsize=32)
def _pass_rates(identity: tuple, rows: tuple[int, ...], model: str, samples: int, temperature: float) -> np.ndarray:
    settings = OnlineSettings(**dict(identity))
    found = recipes.bench(settings)
    by = found.model if model == settings.model else job.load_model(model, mesh=found.model.mesh)
    sampling = {"samples": samples, "max_new_tokens": settings.max_new_tokens, "temperature": temperature}
    return pass_rates(found, by, np.asarray(rows, int), **sampling)


def pass_rates(
    found: Bench, by: job.Model, rows: np.ndarray, *, samples: int, max_new_tokens: int, temperature: float = 1.0
) -> np.ndarray:
    """Share of right responses of a model of the bench's tokenizer to the given training rows ``[len(rows)]``."""
    rollout = jit_sampling(
        recipes.rollout_of_model(by, group_size=samples, max_new_tokens=max_new_tokens, temperature=temperature)
    )
    score = jax.jit(found.score) if found.score else lambda answers, sampled: found.host_score(sampled)
    rates, key = [], jax.random.key(7)
    parts = recipes.sample_in_parts(rollout, by.params, found.train, key, samples, rows=rows, chunk=128)
    for sampled, real in parts:
        rewards = score(jax.tree.map(lambda x, at=sampled.problem_ids: x[at], found.train.answers), sampled)
        rates.append((np.asarray(rewards.value)[:real] > 0.5).reshape(-1, samples).mean(axis=1))
    return np.concatenate(rates)


def make_chosen(rows: np.ndarray, which: str) -> Sampler:
    """``curriculum.subset.make_subset`` of rows chosen by pass rates.

    Raises:
      UserError: when there are none, as for a model that solves nothing.
    """
    try:
        return make_subset(rows)
    except ValueError as error:
        raise UserError(
            f"no training problem is {which} for this model; give other problems (--data, --levels), more of them "
            "(--train-problems) or another --model"
        ) from error


def make_single_turn_grpo(
    settings: OnlineSettings,
    found: Bench,
    *,
    advantages: Callable[..., Array] = group.group_normalized_advantages,
    clip: float = 0.2,
    keep: Callable[[Trajectories, Rewards], Array] | None = None,
    row_extras: Callable[..., dict[str, Array]] | None = None,
    diagnostics: Callable[..., dict[str, Array]] | None = None,
    kl_weight: float = 0.0,
    **slots,
) -> Online:
    """The baseline of a curriculum: GRPO with a token mean; ``slots`` as in ``recipes.make_online``.

    Args:
      kl_weight: of k3 to the policy in the stage's ``extras`` (``episode_methods.reference_for``); 0: no reference.
      advantages: ``(rewards, group_ids, *, valid) -> [B]``.
      keep, row_extras: as in ``builders.make_estimate``; diagnostics: as in ``builders.make_policy_loss``.
    """

    def spread(trajectories, rewards):
        return group.per_token(
            advantages(rewards.value, trajectories.group_ids, valid=rewards.valid), trajectories.mask
        )

    policy = found.model.policy
    parts = {
        "estimate": builders.make_estimate(
            policy,
            spread,
            temperature=settings.temperature,
            keep=keep,
            row_extras=row_extras,
            **episode_methods.against(kl_weight),
        ),
        "loss": builders.make_policy_loss(
            policy,
            partial(clipped_policy_loss, clip_low=clip, clip_high=clip),
            temperature=settings.temperature,
            extra_terms=episode_methods.divergence(kl_weight),
            diagnostics=diagnostics,
        ),
        "tx": optax.adam(settings.learning_rate),
    }
    return recipes.make_online(settings, found, **parts | slots)


def make_single_turn_plan(
    settings: OnlineSettings, found: Bench, stages: Sequence[Stage], *, more=None, host_score=None
) -> Plan:
    """An arm of several stages from the bench's model, measured on held-out problems.

    Args:
      more: ``bench -> (rows, rewards) -> metrics`` beside ``recipes.summary``, on the device only; a module-level
        function, so that arms share its compiled program.
      host_score: where the bench judges on the host: replaces its judge of training responses; see
        ``recipes.host_judge``.
    """
    if more is None or found.score is None:
        measure = recipes.make_measure(settings)
    else:
        measure = _measure(recipes.bench_identity(settings), settings.temperature, settings.eval_samples, more)
    return recipes.single_turn(found, measure, stages, host_score).plan(*stages)


@lru_cache(maxsize=8)
def _measure(identity: tuple, temperature: float, samples: int, more) -> Callable[..., dict[str, Array]]:
    settings = OnlineSettings(**dict(identity))
    found = recipes.bench(settings)
    rollout = recipes.rollout_of(settings, found, group_size=samples, temperature=temperature, measured=True)
    figures = more(found)

    def measure(params, key):
        rows = recipes.sample_all(rollout, params, found.heldout, key, samples)
        rewards = found.score(jax.tree.map(lambda x: x[rows.problem_ids], found.heldout.answers), rows)
        return recipes.summary(rows.mask, rewards, samples) | figures(rows, rewards)

    return measure


def by_level(found: Bench) -> Callable[[Trajectories, Rewards], dict[str, Array]]:
    """``eval/accuracy_<level>`` for every level of the held-out problems: a ``more`` of ``make_single_turn_plan``."""
    levels = sorted({int(x) for x in np.asarray(found.heldout.level)})

    def figures(rows, rewards):
        right = (rewards.value > 0.5).astype(jnp.float32)
        at = found.heldout.level[rows.problem_ids]
        return {f"eval/accuracy_{k}": reduce.scalars(right, rewards.valid & (at == k)) for k in levels}

    return figures


def distinct_right(found: Bench) -> Callable[[Trajectories, Rewards], dict[str, Array]]:
    """``eval/distinct_right``: different right responses to a problem, as a share of its samples.

    A ``more`` of ``make_single_turn_plan``: accuracy without what is only said again.
    """
    problems = found.heldout.level.shape[0]

    def figures(rows, rewards):
        shown = jnp.where(rows.mask, rows.tokens, -1).reshape(problems, -1, rows.tokens.shape[1])
        right = (rewards.valid & (rewards.value > 0.5)).reshape(problems, -1)
        same = jnp.all(shown[:, :, None] == shown[:, None, :], axis=-1)
        earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1)
        repeated = jnp.any(same & earlier[None] & right[:, None, :], axis=2)
        return {"eval/distinct_right": reduce.scalars((right & ~repeated).astype(jnp.float32).ravel())}

    return figures


# ------------------------------------------------------------------ supervised stages


@recipes.cached_by_task
def solutions_imitated(
    settings: OnlineSettings, *, steps: int, learning_rate: float, rows_per_step: int = 32
) -> Params:
    """The model of ``bench(settings)`` after fine-tuning on the solutions of its training problems."""
    found, (tokens, valid) = recipes.bench(settings), recipes.demonstrations(settings)
    model, asked = found.model, found.train
    rows = supervised.joined(asked.tokens, asked.valid, tokens, valid)
    numbers = {"steps": steps, "rows_per_step": rows_per_step, "learning_rate": learning_rate}
    return supervised.imitated(model.policy, model.params, rows, **numbers)
