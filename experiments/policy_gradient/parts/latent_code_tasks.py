"""Benches whose policy chooses among learned codes, and measurements of what a method leaves of everything else."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType

import jax
from jaxtyping import Array

from experiments.policy_gradient.parts import latent_code_training, latent_codes
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.run import parts as job
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.types import Key, Params

Sources = Sequence[tuple[ModuleType, tuple[int, ...]]]  # tasks of data.tasks, each with its levels


def over_codes(settings: OnlineSettings, sharpness: float) -> Bench:
    """``recipes.bench(settings)`` with a policy over codes, see ``latent_codes``; over tokens for 0."""
    found = recipes.bench(settings)
    if not sharpness:
        return found
    policy = latent_codes.make_latent_policy(found.model.policy, sharpness=sharpness)
    return found._replace(model=found.model._replace(policy=policy))


def solution_rows(
    settings: OnlineSettings, sources: Sources, *, split: str, n: int, own: Sequence[Problem] = ()
) -> supervised.SupervisedRows:
    """``n`` prompts with solutions from each source, and the given ones, as rows of one table."""
    problems = [p for task, levels in sources for p in tables.make_split(task, split=split, n=n, seed=0, levels=levels)]
    problems, model = [*own, *problems], recipes.bench(settings).model
    width = 2 + max(len(model.tokenizer.encode(p.prompt)) + len(model.tokenizer.encode(p.solution)) for p in problems)
    return supervised.supervised_rows(model, [(p.prompt, p.solution) for p in problems], width=width)


def learned_codes(
    settings: OnlineSettings, sources: Sources, *, codes: int, steps: int, usage: float, learning_rate: float = 3e-3
) -> Params:
    """Parameters of ``over_codes`` whose codes were learned from solutions; computed once, also while tracing.

    Args:
      sources: the task that is rewarded first. Rows of a file take its place with their own solutions.
    """
    with jax.core.eval_context():
        identity = recipes.bench_identity(settings)
        return _learned_codes(identity, tuple(sources), codes, steps, usage, learning_rate)


@lru_cache(maxsize=4)
def _learned_codes(identity: tuple, sources: Sources, codes: int, steps: int, usage: float, rate: float) -> Params:
    settings = OnlineSettings(**dict(identity))
    model, count = recipes.bench(settings).model, settings.train_problems // len(sources)
    own = [] if settings.data in job.TASKS else recipes.solved_problems(settings)
    rows = solution_rows(settings, sources[1:] if own else sources, split="train", n=count, own=own)
    numbers = {"steps": steps, "rows_per_step": min(32, count), "learning_rate": rate, "usage": usage}
    first = latent_codes.init_latent(model.params, model.config.hidden_size, jax.random.key(0), codes=codes)
    return jax.jit(lambda p: latent_code_training.learn_world(model.policy, p, rows, jax.random.key(1), **numbers))(
        first
    )


def measure_of_codes(
    settings: OnlineSettings, other: Sources, *, sharpness: float
) -> Callable[[Params, Key], dict[str, Array]]:
    """``recipes.summary``, ``eval/distinct`` (share of different samples), ``eval/kept`` (likelihood of other text).

    Args:
      other: tasks whose held-out solutions are scored, and which training does not touch.
    """
    identity = recipes.bench_identity(settings)
    return _measure(identity, tuple(other), settings.temperature, settings.eval_samples, sharpness)


@lru_cache(maxsize=4)
def _measure(identity: tuple, other: Sources, temperature: float, samples: int, sharpness: float):
    settings = OnlineSettings(**dict(identity))
    found = over_codes(settings, sharpness)
    rows = solution_rows(settings, other, split="heldout", n=settings.eval_problems)
    rollout = recipes.rollout_of(settings, found, group_size=samples, temperature=temperature)
    if found.score is None:
        parts = jax.jit(rollout), found.heldout, found.heldout_score, samples
        likelihood = jax.jit(lambda params: latent_code_training.likelihood(found.model.policy, params, rows))

        def distinct_of(said, rewards):
            return {"eval/distinct": latent_code_training.distinct_fraction(said.tokens, said.mask, samples)}

        def on_host(params, key):
            figures = recipes.measure_on_host(*parts, params, key, more=distinct_of)
            return figures | {"eval/kept": likelihood(params)}

        return on_host

    def measure(params, key):
        got = recipes.sample_all(rollout, params, found.heldout, key, samples)
        rewards = found.score(jax.tree.map(lambda x: x[got.problem_ids], found.heldout.answers), got)
        distinct = latent_code_training.distinct_fraction(got.tokens, got.mask, samples)
        kept = latent_code_training.likelihood(found.model.policy, params, rows)
        return recipes.summary(got.mask, rewards, samples) | {"eval/distinct": distinct, "eval/kept": kept}

    return measure
