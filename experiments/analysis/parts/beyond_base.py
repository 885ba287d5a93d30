"""Parts of experiments on what training adds to a base: problems that the base never solves; over running sums."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.parts import running_sums, strings
from experiments.parts import running_sums_task as toy
from jaxrl_llm import reduce
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Params

OWN_ROWS = "experiments.analysis.parts.text_pool"  # opens ``Pool`` of problems of one's own
POOL = (0, 1, 2)  # how many of the first digits are 0: the more, the easier
EASY = (2,)


def draw_problems(key: Key, n: int, zeros: tuple[int, ...] = POOL) -> Array:
    """Sums whose first digits are 0 as often as drawn from ``zeros``: a pool of several difficulties, ``[N, P]``."""
    prompts = toy.draw_prompts(jax.random.fold_in(key, 0), n)
    chosen = jax.random.randint(jax.random.fold_in(key, 1), (n, 1), 0, len(zeros), jnp.int32)
    count = jnp.asarray(zeros, jnp.int32)[chosen]
    return jnp.where(jnp.arange(prompts.shape[1])[None, :] < count, 0, prompts)


def right(prompts: Array, responses: Array) -> Array:
    """The whole answer, four tokens: every running sum is right, ``[N]``.

    >>> asked = jnp.array([[3, 6, 5, 0, 4]])
    >>> [bool(right(asked, jnp.array([x]))[0]) for x in ([2, 0, 0, 4], [2, 0, 1, 4])]
    [True, False]
    """
    return jnp.all(responses == toy.solution(prompts), axis=1)


def easy(prompts: Array) -> Array:
    """Problems of the easiest kind."""
    return prompts[:, 1] == 0


class Pool(NamedTuple):
    """Problems of several difficulties, which the base has seen attempts at: sums, or problems of one's own.

    ``draw_problems(key, n, kinds)`` draws of these kinds, the highest the easiest; ``right`` is of whole answers.
    """

    world: strings.World
    draw_problems: Callable[..., Array]
    right: Callable[[Array, Array], Array]
    solution: Callable[[Array], Array]
    draw_attempts: Callable[..., tuple[Array, Array]]
    easy: Callable[[Array], Array]


SUMS = Pool(running_sums.WORLD, draw_problems, right, toy.solution, toy.draw_attempts, easy)


def expansion(base: Int[Array, " N"], trained: Int[Array, " N"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """``(expansion, shrinkage)`` from how many samples of each problem are right.

    Expansion: share of the problems without a right base sample that have one now; shrinkage: share of the others that
    have none any more. NaN where there is no such problem.

    From "MATH-Beyond", arXiv:2510.11653, section 4.

    >>> [round(float(x), 4) for x in expansion(jnp.array([0, 0, 3, 0]), jnp.array([1, 0, 2, 0]))]
    [0.3333, 0.0]
    """
    never, now = base == 0, trained > 0

    def share(of, among):
        count = jnp.sum(among.astype(jnp.float32))
        return jnp.where(count > 0, jnp.sum((of & among).astype(jnp.float32)) / jnp.maximum(count, 1.0), jnp.nan)

    return share(now, never), share(~now, ~never)


@lru_cache(maxsize=4)
def make_start(task: Pool, *, steps: int) -> Callable[[Key], dict[str, Params]]:
    """The ``init`` of a plan: the policy and, frozen, the base that it was."""
    init = strings.make_base(task.world, task.draw_attempts, steps=steps, learning_rate=5e-3)

    def both(key):
        base = init(key)
        return {"policy": base, "base": jax.tree.map(jnp.copy, base)}

    return both


def teacher_stage(task: Pool, *, steps: int, rows_per_step: int, learning_rate: float) -> Stage:
    """Imitation of right solutions of fresh problems."""
    loss = strings.make_imitation(task.world, "policy")
    sizes = {"steps": steps, "rows_per_step": rows_per_step, "learning_rate": learning_rate}
    return strings.table_stage(strings.bound(_solutions, task), loss, **sizes)


def _solutions(task: Pool, params: Params, key: Key) -> tuple[Array, Array, Array]:
    prompts = task.draw_problems(key, 2048)
    return prompts, task.solution(prompts), jnp.ones((2048,), bool)


def _right(task: Pool, params: Params, prompts: Array, key: Key, samples: int) -> Array:
    drawn = strings.sample(task.world, params, prompts, key, samples=samples)
    found = task.right(jnp.repeat(prompts, samples, axis=0), drawn)
    return jnp.sum(found.reshape(-1, samples).astype(jnp.int32), axis=1)


def measure(task: Pool, params, key, *, problems: int, samples: int):
    """Expansion, shrinkage, accuracy and pass@``samples`` on fresh problems; base and policy draw with own keys."""
    keys = jax.random.split(key, 3)
    prompts = task.draw_problems(keys[0], problems)
    base, now = (
        _right(task, params[name], prompts, k, samples) for name, k in (("base", keys[1]), ("policy", keys[2]))
    )
    grown, shrunk = expansion(base, now)
    return {
        "eval/expansion": grown,
        "eval/shrinkage": shrunk,
        "eval/accuracy": reduce.scalars(now.astype(jnp.float32) / samples),
        "eval/pass": reduce.scalars((now > 0).astype(jnp.float32)),
        "eval/never": reduce.scalars((base == 0).astype(jnp.float32)),
        "eval/easy": reduce.scalars(now.astype(jnp.float32) / samples, task.easy(prompts)),
    }
