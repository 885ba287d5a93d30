"""Parts of experiments on search in text: a model, imitation of traces, GRPO on solved puzzles, equal test compute."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.analysis.parts import search_traces_task as toy
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Metrics, Params

WIDTH, LAYERS = 64, 2
WORLD = strings.make_world(
    toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, end=toy.END, width=WIDTH, layers=LAYERS, heads=4
)
HELD_OUT = 128  # puzzles to be measured on, from another seed than those to imitate
DIRECT_TOKENS = {toy.COUNTDOWN: 9, toy.SUDOKU: toy.BLANKS + 1}


def draw_first(key: Key, n: int) -> tuple[Array, Array]:
    """What the base has read: paths alone for both kinds of puzzles, half of them those of another puzzle."""
    found = []
    for task in (toy.COUNTDOWN, toy.SUDOKU):
        for swapped in (False, True):
            found.append(toy.make_table(task, (0,), 600, 9, swapped))
    prompts, responses = (jnp.asarray(x) for x in map(jnp.concatenate, zip(*found, strict=True)))
    ids = jax.random.randint(key, (n,), 0, prompts.shape[0], jnp.int32)
    return prompts[ids], responses[ids]


@lru_cache(maxsize=16)
def traces(
    task: int, back: tuple[int, ...], swapped: bool = False, shown: float = 1.0, puzzles: int = 3000
) -> Callable:
    """The table of ``toys.make_imitation``: traces of so many puzzles, always the same ones.

    Args:
      shown: how much of every wrong branch is written; less makes the model look ahead by itself ("think less").
    """
    prompts, responses = toy.make_table(task, back, puzzles, 0, swapped)

    def rows(params: Params, key: Key) -> tuple[Array, Array, Array]:
        texts = jnp.asarray(responses)
        if shown < 1.0:
            texts = without_branches(texts, jax.random.uniform(key, texts.shape) < shown)
        return jnp.asarray(prompts), texts, jnp.ones((puzzles,), bool)

    return rows


def without_branches(responses: Array, keep: Array) -> Array:
    """Traces without the wrong branches whose ``BACK`` is not kept."""
    place = jnp.arange(responses.shape[1])[None, :]
    back = (responses == toy.BACK).astype(jnp.int32)
    branch = jnp.cumsum(back, axis=1) - back
    last = jnp.max(back * (place + 1), axis=1, keepdims=True)
    chosen = jnp.take_along_axis(keep, jnp.minimum(branch, keep.shape[1] - 1), axis=1) | (place >= last)
    order = jnp.argsort(~chosen, axis=1, stable=True)
    count = jnp.sum(chosen.astype(jnp.int32), axis=1, keepdims=True)
    return jnp.where(place < count, jnp.take_along_axis(responses, order, axis=1), toy.END)


def imitation_stage(rows: Callable, *, steps: int, rows_per_step: int, learning_rate: float) -> Stage:
    """Supervised training on traces."""
    sizes = {"steps": steps, "rows_per_step": rows_per_step, "learning_rate": learning_rate}
    return strings.table_stage(rows, strings.make_imitation(WORLD), **sizes)


def reward_stage(
    task: int, *, steps: int, prompts_per_step: int, group_size: int, learning_rate: float, puzzles: int = 3000
) -> Stage:
    """GRPO on training puzzles, 1 for a last path that solves."""
    prompts = jnp.asarray(toy.make_table(task, (0,), puzzles, 0)[0])
    return strings.grpo_stage(
        WORLD, prompts, toy.right, steps=steps, prompts_per_step=prompts_per_step, group_size=group_size,
        learning_rate=learning_rate,
    )  # fmt: skip


def parameters() -> int:
    """Number of parameters of the model."""
    shapes = jax.eval_shape(WORLD.policy.init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


def generation_flops(tokens: int, *, parameters: int, layers: int, width: int) -> float:
    """``2 N L + 2 layers width L^2``: one sample of ``L`` tokens; the second term is causal attention.

    >>> generation_flops(10, parameters=100, layers=0, width=8)
    2000.0
    """
    return 2.0 * parameters * tokens + 2.0 * layers * width * tokens**2


def samples_for(task: int) -> int:
    """How many direct samples cost as much as one sample of full length."""
    cost = [
        generation_flops(toy.PROMPT_TOKENS + n, parameters=parameters(), layers=LAYERS, width=WIDTH)
        - generation_flops(toy.PROMPT_TOKENS, parameters=parameters(), layers=LAYERS, width=WIDTH)
        for n in (toy.RESPONSE_TOKENS, DIRECT_TOKENS[task])
    ]
    return int(cost[0] // cost[1])


@lru_cache(maxsize=8)
def make_measure(task: int, *, samples: int = 8, spent_on_one: bool = True) -> Callable[[Params, Key], Metrics]:
    """Accuracy, pass@``samples``, and ``compute/solved`` at the compute of one sample of full length.

    Args:
      spent_on_one: on a single sample; else on as many direct ones as it pays for, any of which may be right.
    """
    prompts = jnp.asarray(toy.make_table(task, (0,), HELD_OUT, 77)[0])
    many = 1 if spent_on_one else min(samples_for(task), samples)

    def measure(params, key):
        drawn = strings.sample(WORLD, params, prompts, key, samples=samples)
        right = toy.right(jnp.repeat(prompts, samples, axis=0), drawn).reshape(HELD_OUT, samples)
        alive = jnp.cumsum((drawn == toy.END).astype(jnp.int32), axis=1) == 0
        return {
            "eval/accuracy": reduce.scalars(right.reshape(-1).astype(jnp.float32)),
            "compute/solved": reduce.scalars(jnp.any(right[:, :many], axis=1).astype(jnp.float32)),
            f"eval/pass@{samples}": reduce.scalars(jnp.any(right, axis=1).astype(jnp.float32)),
            "eval/backs": reduce.scalars(toy.backs(drawn).astype(jnp.float32)),
            "eval/tokens": reduce.scalars(jnp.sum(alive.astype(jnp.float32), axis=1)),
        }

    return measure
