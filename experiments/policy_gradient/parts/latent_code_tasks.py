"""Benches whose policy chooses among learned codes, and measurements of what a method leaves of everything else."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import jax
from jaxtyping import Array

from experiments.policy_gradient.parts import latent_code_layers, latent_codes
from experiments.policy_gradient.parts import latent_code_training as training
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.run import parts as job
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.types import Key, Params

Sources = Sequence[tuple[ModuleType, tuple[int, ...]]]  # tasks of data.tasks, each with its levels


class Codes(NamedTuple):
    """How many codes there are, and how many layers what chooses among them has."""

    number: int  # 0: a policy over tokens
    layers: int = 0  # of each part, see ``latent_code_layers``; 0: perceptrons
    sharpness: float = 4.0  # factor of the world model's logits


def form_of(settings: OnlineSettings, how: Codes) -> latent_codes.Form:
    """What the parts are made of."""
    return _form(recipes.bench_identity(settings), how.number, how.layers)


@lru_cache(maxsize=4)
def _form(identity: tuple, codes: int, layers: int) -> latent_codes.Form:
    if not layers:
        return latent_codes.PERCEPTRONS
    model = recipes.bench(OnlineSettings(**dict(identity))).model
    return latent_code_layers.transformers(model.config, codes=codes, layers=layers)


def over_codes(settings: OnlineSettings, how: Codes) -> Bench:
    """``recipes.bench(settings)`` with a policy over codes, see ``latent_codes``; over tokens where there are none."""
    found = recipes.bench(settings)
    if not how.number:
        return found
    form = form_of(settings, how)
    policy = latent_codes.make_latent_policy(found.model.policy, sharpness=how.sharpness, form=form)
    return found._replace(model=found.model._replace(policy=policy))


def solution_rows(
    settings: OnlineSettings, sources: Sources, *, split: str, n: int, own: Sequence[Problem] = ()
) -> supervised.SupervisedRows:
    """``n`` prompts with solutions from each source, and the given ones, as rows of one table."""
    problems = [p for task, levels in sources for p in tables.make_split(task, split=split, n=n, seed=0, levels=levels)]
    problems, model = [*own, *problems], recipes.bench(settings).model
    width = 2 + max(len(model.tokenizer.encode(p.prompt)) + len(model.tokenizer.encode(p.solution)) for p in problems)
    return supervised.supervised_rows(model, [(p.prompt, p.solution) for p in problems], width=width)


@recipes.cached_by_task
def learned_codes(
    settings: OnlineSettings, sources: Sources, how: Codes, *, steps: int, tune_steps: int = 0, usage: float,
    learning_rate: float = 3e-3,
) -> Callable[[Key], Params]:  # fmt: skip
    """The ``init`` of a plan: parameters of ``over_codes`` whose codes a seed drew and learned from solutions.

    Args:
      sources: the task that is rewarded first. Rows of a file take its place with their own solutions.
      tune_steps: of fine-tuning to that task alone, in which the codes keep their meaning.
    """
    form, model = form_of(settings, how), recipes.bench(settings).model
    count = settings.train_problems // len(sources)
    own = [] if settings.data in job.TASKS else recipes.solved_problems(settings)
    rewarded = [] if own else sources[:1]
    stages = (([*rewarded, *sources[1:]], steps, training.PARTS), (rewarded, tune_steps, training.GUIDED))
    stages = [stage for stage in stages if stage[1]]
    taught = [solution_rows(settings, read, split="train", n=count, own=own) for read, *_ in stages]
    numbers = {"rows_per_step": min(32, count), "learning_rate": learning_rate, "usage": usage, "form": form}

    @jax.jit  # the language model is an argument, and no result: it is neither a constant of the program nor copied
    def learned(base: Params, taught: list[supervised.SupervisedRows], key: Key) -> Params:
        params = latent_codes.init_latent(base, model.config.hidden_size, key, codes=how.number, form=form)
        for k, (rows, (_, some, trained)) in enumerate(zip(taught, stages, strict=True)):
            more = numbers | {"steps": some, "trained": trained}
            params = training.learn_world(model.policy, params, rows, jax.random.fold_in(key, k), **more)
        return {name: part for name, part in params.items() if name != "model"}

    def init(key: Key) -> Params:
        # the stages of a plan fold their own small numbers into the seed's key
        return learned(model.params, taught, jax.random.fold_in(key, 0xC0DE)) | {"model": model.params}

    return init


def measure_of_codes(settings: OnlineSettings, other: Sources, how: Codes) -> Callable[[Params, Key], dict[str, Array]]:
    """``recipes.summary``, ``eval/distinct`` (share of different samples), ``eval/kept`` (likelihood of other text).

    Args:
      other: tasks whose held-out solutions are scored, and which training does not touch.
    """
    identity = recipes.bench_identity(settings)
    return _measure(identity, tuple(other), settings.temperature, settings.eval_samples, how)


@lru_cache(maxsize=4)
def _measure(identity: tuple, other: Sources, temperature: float, samples: int, how: Codes):
    settings = OnlineSettings(**dict(identity))
    found = over_codes(settings, how)
    rows = solution_rows(settings, other, split="heldout", n=settings.eval_problems)
    rollout = recipes.rollout_of(settings, found, group_size=samples, temperature=temperature, measured=True)
    if found.score is None:
        parts = jax.jit(rollout), found.heldout, found.heldout_score, samples
        likelihood = jax.jit(lambda params: training.likelihood(found.model.policy, params, rows))

        def distinct_of(said, rewards):
            return {"eval/distinct": training.distinct_fraction(said.tokens, said.mask, samples)}

        def on_host(params, key):
            figures = recipes.measure_on_host(*parts, params, key, more=distinct_of)
            return figures | {"eval/kept": likelihood(params)}

        return on_host

    def measure(params, key):
        got = recipes.sample_all(rollout, params, found.heldout, key, samples)
        rewards = found.score(jax.tree.map(lambda x: x[got.problem_ids], found.heldout.answers), got)
        distinct = training.distinct_fraction(got.tokens, got.mask, samples)
        kept = training.likelihood(found.model.policy, params, rows)
        return recipes.summary(got.mask, rewards, samples) | {"eval/distinct": distinct, "eval/kept": kept}

    return measure
