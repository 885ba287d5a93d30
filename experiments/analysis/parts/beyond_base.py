"""Parts of experiments on what training adds to a base: problems that the base never solves; over running sums.

A problem is eight digits below 7, its answer the seven running sums modulo 7. Digits from 4 on are unfamiliar: in what
the base has read, a sum to which one is added is right once in five, little more than by chance. The digits of problems
of training have an even sum, those of problems of evaluation an odd one, so that none is in both.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import running_sums_task as toy
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Params

OWN_ROWS = "experiments.analysis.parts.text_pool"  # opens ``Pool`` of problems of one's own
DIGITS, FAMILIAR = 8, 4
UNFAMILIAR = (6, 2, 0)  # digits of each kind of problem
POOL = (0, 1, 2)  # kinds, from those that the base never solves to those that it often does
EASY = (2,)
SLIPS, STRANGE_SLIPS = 0.08, 0.8  # chances of a wrong sum in what the base has read
SHORT = 16  # samples of the lesser pass@k


def _draw(key: Key, n: int, kinds: tuple[int, ...], parity: int) -> Array:
    keys = jax.random.split(key, 5)
    kind = jnp.asarray(kinds, jnp.int32)[jax.random.randint(keys[0], (n,), 0, len(kinds), jnp.int32)]
    # the first digit is familiar, and the last, which also makes the parity
    places = jax.random.uniform(keys[1], (n, DIGITS - 2))
    strange = jnp.argsort(jnp.argsort(places, axis=1), axis=1) < jnp.asarray(UNFAMILIAR, jnp.int32)[kind][:, None]
    strange = jnp.pad(strange, ((0, 0), (1, 0)))
    shape = (n, DIGITS - 1)
    known = jax.random.randint(keys[2], shape, 0, FAMILIAR, jnp.int32)
    digits = jnp.where(strange, jax.random.randint(keys[3], shape, FAMILIAR, toy.MODULUS, jnp.int32), known)
    last = 2 * jax.random.randint(keys[4], (n,), 0, FAMILIAR // 2, jnp.int32)
    last = last + (jnp.sum(digits, axis=1, dtype=jnp.int32) + parity) % 2
    return jnp.concatenate([digits, last[:, None]], axis=1)


def draw_problems(key: Key, n: int, kinds: tuple[int, ...] = POOL) -> Int[Array, "N P"]:
    """Problems of training, of these kinds alike often."""
    return _draw(key, n, kinds, 0)


def draw_fresh(key: Key, n: int) -> Int[Array, "N P"]:
    """Problems of evaluation, of all kinds: training never draws one of them."""
    return _draw(key, n, POOL, 1)


def draw_attempts(key: Key, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """What a base has read: problems of all kinds with slips, each carried on, most of them at unfamiliar digits."""
    keys = jax.random.split(key, 3)
    prompts = draw_problems(keys[0], n)
    chance = jnp.where(prompts[:, 1:] >= FAMILIAR, STRANGE_SLIPS, SLIPS)
    offsets = jax.random.randint(keys[2], chance.shape, 1, toy.MODULUS, jnp.int32)
    slips = jnp.where(jax.random.bernoulli(keys[1], chance), offsets, 0)
    return prompts, (toy.solution(prompts) + jnp.cumsum(slips, axis=1)) % toy.MODULUS


def right(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
    """The whole answer: every running sum is right.

    >>> asked = jnp.array([[3, 6, 5, 0, 4]])
    >>> [bool(right(asked, jnp.array([x]))[0]) for x in ([2, 0, 0, 4], [2, 0, 1, 4])]
    [True, False]
    """
    return jnp.all(responses == toy.solution(prompts), axis=1)


def easy(prompts: Int[Array, "N P"]) -> Bool[Array, " N"]:
    """Problems without an unfamiliar digit."""
    return jnp.all(prompts < FAMILIAR, axis=1)


class Pool(NamedTuple):
    """Problems of several difficulties, which the base has seen attempts at: sums, or problems of one's own.

    ``draw_problems(key, n, kinds)`` draws of these kinds, the highest the easiest, ``draw_fresh(key, n)`` of all those
    that training never draws; ``right`` is of whole answers.
    """

    world: strings.World
    draw_problems: Callable[..., Array]
    draw_fresh: Callable[[Key, int], Array]
    right: Callable[[Array, Array], Array]
    solution: Callable[[Array], Array]
    draw_attempts: Callable[..., tuple[Array, Array]]
    easy: Callable[[Array], Array]


SUMS = Pool(
    strings.make_world(toy.MODULUS, DIGITS, DIGITS - 1, width=48, heads=4),
    draw_problems, draw_fresh, right, toy.solution, draw_attempts, easy,
)  # fmt: skip


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


def pass_at(right: Int[Array, " N"], samples: int, k: int) -> Float[Array, " N"]:
    """``1 - C(n - c, k) / C(n, k)``: the chance that one of ``k`` of the ``n`` samples is right, where ``c`` are.

    >>> [round(float(x), 4) for x in pass_at(jnp.array([0, 1, 4]), 4, 2)]
    [0.0, 0.5, 1.0]
    """
    left = samples - jnp.arange(k, dtype=jnp.float32)
    return 1.0 - jnp.prod(jnp.maximum(left[None, :] - right.astype(jnp.float32)[:, None], 0.0) / left[None, :], axis=1)


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
    """Expansion, shrinkage, accuracy and pass@k on fresh problems, from samples of the policy and two of the base.

    The second samples of the base say what expansion is without any change: of the problems without a right one among
    the first, ``eval/still_never`` have none among the second either; ``eval/beyond`` is expansion beyond the others.
    """
    keys = jax.random.split(key, 4)
    prompts = task.draw_fresh(keys[0], problems)
    base, again, now = (
        _right(task, params[name], prompts, k, samples)
        for name, k in zip(("base", "base", "policy"), keys[1:], strict=True)
    )
    (grown, shrunk), (chance, _) = expansion(base, now), expansion(base, again)
    return {
        "eval/beyond": grown - chance,
        "eval/expansion": grown,
        "eval/still_never": 1.0 - chance,
        "eval/shrinkage": shrunk,
        "eval/accuracy": reduce.scalars(now.astype(jnp.float32) / samples),
        "eval/pass": reduce.scalars((now > 0).astype(jnp.float32)),
        "eval/never": reduce.scalars((base == 0).astype(jnp.float32)),
        "eval/easy": reduce.scalars(now.astype(jnp.float32) / samples, task.easy(prompts)),
        "never/pass@16": reduce.scalars(pass_at(now, samples, min(SHORT, samples)), base == 0),
    }
