"""Two domains in one table: problems of mathematics, and chains, or programs with unit tests that run in the sandbox.

Both are judged by their own rule.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from experiments.parts.judged_apart import judged_apart
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.run.bench import is_generated, most_heldout, problem_sets
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.types import Params, Problems, Rewards, Sampler, Trajectories


class Domains(NamedTuple):
    """A bench of both domains, mathematics first, and the benches of each; the joint one trains, they measure."""

    joint: Bench
    maths: Bench
    code: Bench


def _beside(first: Problems, second: Problems, pad: int) -> Problems:
    """One table, as wide as the wider: prompts are filled on their left. The host knows the answers."""
    width = max(first.tokens.shape[1], second.tokens.shape[1])

    def filled(table: Problems, name: str, fill: int):
        found = getattr(table, name)
        return jnp.pad(found, ((0, 0), (width - found.shape[1], 0)), constant_values=fill)

    tokens, valid = (
        jnp.concatenate([filled(table, name, fill) for table in (first, second)])
        for name, fill in (("tokens", pad), ("valid", False))
    )
    return first._replace(
        tokens=tokens, valid=valid, answers={}, level=jnp.concatenate([first.level, second.level])
    )  # fmt: skip


class Answers(NamedTuple):
    """What both domains know of every row of the joint table, zeros of those of the other, and which domain it is."""

    first: Any
    second: Any
    domain: Int[Array, " N"]  # 0 or 1


def _on_device(joint: Bench, first: Bench, second: Bench) -> Bench:
    """The joint bench with each row judged by the rule of its own domain, in compiled programs."""
    count, more = (bench.train.tokens.shape[0] for bench in (first, second))

    def filled(answers: Any, before: int, after: int) -> Any:
        return jax.tree.map(lambda x: jnp.pad(x, ((before, after), *[(0, 0)] * (x.ndim - 1))), answers)

    def score(answers: Answers, rows: Trajectories) -> Rewards:
        found = first.score(answers.first, rows), second.score(answers.second, rows)
        return jax.tree.map(lambda a, b: jnp.where(answers.domain == 0, a, b), *found)

    domain = (jnp.arange(count + more, dtype=jnp.int32) >= count).astype(jnp.int32)
    answers = Answers(filled(first.train.answers, 0, more), filled(second.train.answers, count, 0), domain)
    return joint._replace(train=joint.train._replace(answers=answers), score=score)


def open_domains(settings: OnlineSettings, code: OnlineSettings) -> Domains:
    """The benches of both settings, which share a model, and theirs together, judged on the device where both are."""
    maths, programs = recipes.bench(settings), recipes.bench(code)
    count, more = maths.train.tokens.shape[0], programs.train.tokens.shape[0]
    own = np.r_[np.arange(count), np.full(more, -1)]
    theirs = np.r_[np.full(count, -1), np.arange(more)]
    joint = maths._replace(
        train=_beside(maths.train, programs.train, maths.model.tokenizer.pad_id),
        score=None,
        host_score=judged_apart([(own, maths.host_score), (theirs, programs.host_score)]),
    )
    both = maths.score is not None and programs.score is not None
    return Domains(_on_device(joint, maths, programs) if both else joint, maths, programs)


def make_shares(first: np.ndarray, second: np.ndarray, share: float) -> Sampler:
    """Uniform draws, ``round(share n)`` of every n from the ``second`` rows, the others from the ``first``.

    Raises:
      ValueError: for a share outside 0 to 1, or rows that are wanted and not there.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} must lie in [0, 1]")
    parts = [np.flatnonzero(rows).astype(np.int32) for rows in (first, second)]
    if (share < 1 and not parts[0].size) or (share > 0 and not parts[1].size):
        raise ValueError("rows is empty: no prompt of one of the domains belongs to this stage; widen its condition")

    def draw(state, key, n):
        count = round(share * n)
        drawn = [
            jnp.asarray(rows)[jax.random.randint(k, (size,), 0, rows.size, jnp.int32)]
            for rows, k, size in zip(parts, jax.random.split(key), (n - count, count), strict=True)
            if size
        ]
        return jnp.concatenate(drawn), state

    return Sampler(lambda n: jnp.asarray(n, jnp.int32), draw, lambda state, ids, scores, valid: state)


@recipes.cached_by_task
def warmed(settings: OnlineSettings, code: OnlineSettings, steps: int) -> Params:
    """The model after fine-tuning on the solutions of both domains."""
    pairs = [(p.prompt, p.solution) for one in (settings, code) for p in recipes.solved_problems(one)]
    model = recipes.bench(settings).model
    width = max(len(model.tokenizer.encode(prompt + solution)) for prompt, solution in pairs) + 3
    return supervised.imitated_pairs(model, pairs, width=width, steps=steps)


def ladder_of_copies(settings: OnlineSettings, code: OnlineSettings, steps: int, samples: int) -> list[np.ndarray]:
    """Pass rates on the programs of three copies: a quarter, half and all of the fine-tuning of ``warmed``."""
    found = recipes.bench(code)
    every = np.arange(found.train.tokens.shape[0])
    sampling = {"samples": samples, "max_new_tokens": code.max_new_tokens, "temperature": code.temperature}
    return [
        curricula.pass_rates(found, found.model._replace(params=warmed(settings, code, part)), every, **sampling)
        for part in (max(1, steps // 4), max(1, steps // 2), steps)
    ]


def solvable(code: OnlineSettings) -> np.ndarray:
    """Which training programs have a reference solution that passes their own tests, where they are rows of a file."""
    problems, _, verify = problem_sets(code)
    if is_generated(code.data):
        return np.ones(len(problems), bool)
    return np.asarray([not p.solution or verify(p.answer, p.solution).value == 1.0 for p in problems])


def code_settings(settings: OnlineSettings, data: str, layout: str, levels: tuple[int, ...]) -> OnlineSettings:
    """The settings of the second domain: another source, all else alike; no more problems than are made."""
    plain = {field.name: getattr(settings, field.name) for field in dataclasses.fields(OnlineSettings)}
    asked = OnlineSettings(**plain | {"data": data, "format": layout, "levels": levels, "verifier": ""})
    return dataclasses.replace(asked, eval_problems=most_heldout(asked))
