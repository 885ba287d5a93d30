"""New problems where a model is weak: a first round of RL that is watched, then chains made from what it fails at."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.curriculum.parts import chain_concepts, weakness
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.arms import bundled
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.train import fused
from jaxrl_llm.train.online import init_state
from jaxrl_llm.types import Key, Params, Problems


class FirstRound(NamedTuple):
    """What a first round of RL leaves: its parameters, and the accuracy of every training problem after each epoch."""

    params: Params
    history: np.ndarray  # [N, E]
    solved: np.ndarray  # [N]: accuracy of the parameters, from more samples
    heldout: float  # their accuracy on the held-out problems


def solved_share(
    settings: OnlineSettings, params: Params, problems: Problems, samples: int = 8, seed: int = 0
) -> np.ndarray:
    """Share of right answers to each problem of a table ``[N]``."""
    count = problems.tokens.shape[0]
    rows = np.minimum(np.arange(1 << max(count - 1, 1).bit_length()), count - 1)  # sizes that share compiled programs
    problems = jax.tree.map(lambda x: x[rows], problems)
    return np.asarray(_share_of(_common(settings), samples)(params, problems, _key(11, seed)))[:count]


def _key(purpose: int, seed: int) -> Key:
    return jax.random.fold_in(jax.random.key(purpose), seed)


@lru_cache(maxsize=8)
def _share_of(settings: OnlineSettings, samples: int):
    found = recipes.bench(settings)
    roll = recipes.rollout_of(settings, found, group_size=samples)
    judge = curricula.device_score(found)

    @jax.jit
    def share(params, problems, key):
        rows = recipes.sample_all(roll, params, problems, key, samples)
        right = judge(jax.tree.map(lambda x: x[rows.problem_ids], problems.answers), rows).value > 0.5
        return jnp.sum(right.reshape(-1, samples).astype(jnp.float32), axis=1) / samples

    return share


def _common(settings: OnlineSettings) -> OnlineSettings:
    """What arms have in common."""
    return OnlineSettings(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(OnlineSettings)})


def first_round(settings: OnlineSettings, epochs: int, seed: int) -> FirstRound:
    """GRPO over all training problems for some epochs, with order and samples of its seed; the same for every arm.

    Those of many seeds are kept for the other arms, of a model of one's own only the last one.
    """
    keep = _small_first_round if bundled(settings.model) else _large_first_round
    return keep(_common(settings), epochs, seed)


def _first_round(settings: OnlineSettings, epochs: int, seed: int) -> FirstRound:
    found = recipes.bench(settings)
    run, online = _epoch(settings)
    state = init_state(online, jax.tree.map(jnp.copy, found.model.params), _key(5, seed))
    cursor, ids = state.sampler  # of ``make_epochs``, whose orders are orders of these
    state, history = state._replace(sampler=(cursor, jax.random.permutation(_key(6, seed), ids))), []
    for _ in range(epochs):
        state, _ = run(state)
        history.append(train_share(settings, found, state.params, 8, seed))
    solved = train_share(settings, found, state.params, 32, seed)
    held = found._replace(train=found.heldout, host_score=found.heldout_score)
    heldout = float(train_share(settings, held, state.params, 8, seed).mean())
    return FirstRound(state.params, np.stack(history, axis=1), solved, heldout)


_small_first_round, _large_first_round = lru_cache(maxsize=64)(_first_round), lru_cache(maxsize=1)(_first_round)


@lru_cache(maxsize=2)
def _epoch(settings: OnlineSettings):
    """The program of an epoch, compiled once for all seeds, and its method."""
    found = recipes.bench(settings)
    online = curricula.make_single_turn_grpo(settings, found, sampler=make_epochs(), score=curricula.train_score(found))
    return fused.make_run(online, max(1, found.train.tokens.shape[0] // settings.prompts_per_step)), online


def train_share(settings: OnlineSettings, found: Bench, params: Params, samples: int, seed: int) -> np.ndarray:
    """Share of right answers to each training problem of a bench, wherever they are judged ``[N]``."""
    if found.score is not None:
        return solved_share(settings, params, found.train, samples, seed)
    rows, by = np.arange(found.train.tokens.shape[0]), found.model._replace(params=params)
    return curricula.pass_rates(found, by, rows, samples=samples, max_new_tokens=settings.max_new_tokens)


class Aim(NamedTuple):
    """Problems whose concepts new ones shall have, and how many new ones of each level."""

    examples: list[Problem]
    budgets: dict[int, int]


def _levels(problems: Sequence[Problem]) -> tuple[list[int], np.ndarray]:
    levels = sorted({p.level for p in problems})
    return levels, np.asarray([levels.index(p.level) for p in problems], np.int32)


def at_weakness(problems: Sequence[Problem], first: FirstRound, total: int) -> Aim:
    """SwS: like the problems that were never learnt, each level by its share of them; ``everywhere`` without any."""
    weak = weakness.weak_problems(jnp.asarray(first.history, jnp.float32))
    if not bool(jnp.any(weak)):
        return everywhere(problems, first, total)
    levels, place = _levels(problems)
    counts = weakness.category_budgets(weak, jnp.asarray(place), total=total, count=len(levels))
    examples = [p for p, failed in zip(problems, weak.tolist(), strict=True) if failed]
    return Aim(examples, dict(zip(levels, counts.tolist(), strict=True)))


def everywhere(problems: Sequence[Problem], first: FirstRound, total: int) -> Aim:
    """Like any problem, as many of each level."""
    levels, _ = _levels(problems)
    return Aim(list(problems), dict.fromkeys(levels, total // len(levels)))


def at_failures(problems: Sequence[Problem], first: FirstRound, total: int) -> Aim:
    """An oracle: like any problem, each level by its error rate after the first round, measured with many samples."""
    levels, place = _levels(problems)
    errors = np.asarray([1 - first.solved[place == k].mean() for k in range(len(levels))])
    counts = np.floor(total * errors / max(errors.sum(), 1e-9)).astype(int)
    return Aim(list(problems), dict(zip(levels, counts.tolist(), strict=True)))


def concept_matrix(problems: Sequence[Problem], concepts: Sequence[str]) -> np.ndarray:
    """Which of the concepts each problem has, 0 or 1 ``[N, K]``."""
    return np.asarray([[c in chain_concepts.concepts_of(p) for c in concepts] for p in problems], np.float32)


def concept_embeddings(found: Bench, concepts: Sequence[str]) -> np.ndarray:
    """Mean embedding of each concept's text in the model ``[K, D]``, of length 1."""
    table = np.asarray(found.model.params["embed"], np.float32)
    mean = np.stack([table[found.model.tokenizer.encode(c)].mean(axis=0) for c in concepts])
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How problems are made and which are kept; the defaults are those of SwS, but for the size of a concept set."""

    set_size: int = 3
    set_temperature: float = 0.2
    consistency: float = 0.5  # share of the solver's answers that must agree
    solver_samples: int = 5
    error_rate: float = 0.2  # of the solver
    broken: float = 0.1  # share of problems whose statement has lost an operand
    low: float = 0.125  # accuracy of the model on a kept problem, at least
    high: float = 0.875  # and at most
    surplus: int = 4  # problems made for each one wanted


def candidates(
    rng: np.random.Generator, examples: Sequence[Problem], count: int, found: Bench, recipe: Recipe
) -> list[Problem]:
    """Up to ``count`` new problems with concepts that occur together in the examples, answered and voted on.

    From "SwS", arXiv:2506.08989, section 2. Differs from the paper in that recipes stand in for language models:
    problems are chains, two judges see 9 of 10 broken statements, and the solver is right but for ``error_rate``.
    """
    levels = sorted({p.level for p in examples})
    concepts = chain_concepts.names(levels)
    has, vectors = concept_matrix(examples, concepts), jnp.asarray(concept_embeddings(found, concepts))
    together = has.T @ has * (1 - np.eye(len(concepts), dtype=np.float32)) / max(len(examples), 1)
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), count)
    bounds = {"size": min(recipe.set_size, len(concepts)), "temperature": recipe.set_temperature}
    sets = drawn_sets(keys, jnp.asarray(has.sum(0)), jnp.asarray(together), vectors, **bounds)
    made, answers, ratings = [], [], []
    for row in np.asarray(sets):
        problem = chain_concepts.make_from(rng, [c for c, there in zip(concepts, row, strict=True) if there], levels)
        if broken := rng.random() < recipe.broken:
            cut = problem.prompt.rindex(problem.answer["operators"][-1]) + 1
            problem = problem._replace(prompt=problem.prompt[:cut] + "=>")
        seen = rng.random(2) < 0.9
        fine = np.where(rng.random(2) < 0.7, weakness.PERFECT, weakness.ACCEPTABLE)
        ratings.append(np.where(broken & seen, weakness.BAD, fine))
        answers.append(chain_concepts.solver_answers(rng, problem, recipe.solver_samples, error_rate=recipe.error_rate))
        made.append(problem)
    value, share = weakness.consistent_answers(jnp.asarray(np.stack(answers), jnp.int32))
    good = np.asarray(weakness.passes_vote(jnp.asarray(np.stack(ratings), jnp.int32)))
    good = good & (np.asarray(share) >= recipe.consistency)
    kept, known = [], {p.identity for p in examples}
    for problem, answer, use in zip(made, np.asarray(value), good, strict=True):
        if use and problem.identity not in known and not tables.is_heldout(problem.identity):
            known.add(problem.identity)
            kept.append(problem._replace(answer=problem.answer | {"value": int(answer)}))
    return kept


@partial(jax.jit, static_argnames=("size", "temperature"))
def drawn_sets(keys: Key, frequency: Array, together: Array, vectors: Array, *, size: int, temperature: float) -> Array:
    """``weakness.draw_concepts`` for every key, ``[N, K]``."""
    draw = partial(weakness.draw_concepts, size=size, temperature=temperature)
    return jax.vmap(draw, in_axes=(0, None, None, None))(keys, frequency, together, vectors)


def synthesise(settings: OnlineSettings, aim: Aim, params: Params, recipe: Recipe, seed: int) -> list[Problem]:
    """For each level as many new problems as its budget, like the examples of that level and of middling difficulty."""
    found, rng, out = recipes.bench(settings), np.random.default_rng([3, seed]), []
    for level, wanted in sorted(aim.budgets.items()):
        mine = [p for p in aim.examples if p.level == level]
        if not wanted or not mine:
            continue
        fresh = candidates(rng, mine, wanted * recipe.surplus, found, recipe)
        if fresh and (recipe.low > 0 or recipe.high < 1):
            share = solved_share(settings, params, encode(found, fresh), 8, seed)
            fresh = [p for p, s in zip(fresh, share, strict=True) if recipe.low <= s <= recipe.high]
        out += fresh[:wanted]
    return out


def encode(found: Bench, problems: Sequence[Problem]) -> Problems:
    """A table of the given problems, at least as wide as the bench's."""
    make = partial(tables.encode_problems, found.model.tokenizer, problems, answers=tables.value_answers)
    return make(prompt_tokens=max(found.train.tokens.shape[1], make().tokens.shape[1]))
