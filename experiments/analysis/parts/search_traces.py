"""Parts of experiments on search in text: a model, imitation of traces, GRPO on solved puzzles, equal test compute."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.analysis.parts import search_puzzles
from experiments.analysis.parts import search_traces_task as toy
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key

WIDTH, LAYERS = 64, 2
WORLD = strings.make_world(
    toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, end=toy.END, width=WIDTH, layers=LAYERS, heads=4
)
HELD_OUT = 96  # puzzles to be measured on, from another seed than those to imitate
BUDGETS = (1, 4, 16, 64)  # in direct samples


def _read(tasks: tuple[int, ...], key: Key, n: int) -> tuple[Array, Array]:
    found = []
    for task in tasks:
        for swapped in ("", "traces"):
            found.append(toy.make_table(task, (0,), 600, 9, swapped))
    prompts, responses = (jnp.asarray(x) for x in map(jnp.concatenate, zip(*found, strict=True)))
    ids = jax.random.randint(key, (n,), 0, prompts.shape[0], jnp.int32)
    return prompts[ids], responses[ids]


def draw_first(key: Key, n: int) -> tuple[Array, Array]:
    """What the base of Countdown, Sudoku and lines has read: paths alone, half of them those of another puzzle."""
    return _read(tuple(toy.FIRST), key, n)


def draw_others(key: Key, n: int) -> tuple[Array, Array]:
    """What the base of the five families of ``search_puzzles`` has read, likewise."""
    return _read(tuple(search_puzzles.MAKERS), key, n)


@lru_cache(maxsize=32)
def traces(
    task: int,
    back: tuple[int, ...],
    swapped: str = "",
    how: toy.Writer = toy.by_number,
    shown: float = 1.0,
    puzzles: int = 3000,
) -> Callable:
    """The table of ``strings.make_imitation``: traces of so many puzzles, always the same ones; see ``make_table``."""
    prompts, responses = toy.make_table(task, back, puzzles, 0, swapped, how, shown)
    return lambda params, key: (jnp.asarray(prompts), jnp.asarray(responses), jnp.ones((puzzles,), bool))


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


def trace_flops(tokens: Array) -> Array:
    """Operations to generate so many tokens behind a prompt, ``[...]``."""
    whole = toy.PROMPT_TOKENS + tokens.astype(jnp.float32)
    linear = 2.0 * parameters() * tokens.astype(jnp.float32)
    return linear + 2.0 * LAYERS * WIDTH * (whole**2 - float(toy.PROMPT_TOKENS) ** 2)


def direct_flops(task: int) -> float:
    """Operations of one direct answer, its end included: the unit of the budgets."""
    sizes = {"parameters": parameters(), "layers": LAYERS, "width": WIDTH}
    whole = toy.PROMPT_TOKENS + toy.DIRECT_TOKENS[task] + 1
    return generation_flops(whole, **sizes) - generation_flops(toy.PROMPT_TOKENS, **sizes)


def solved_within(right: Array, spent: Array, budget: float) -> Array:
    """Share of the puzzles that are solved by samples drawn one after another while the budget lasts, ``[N, S]``.

    A sample counts when it was finished in time; a first sample that is longer than the whole budget is cut, so that it
    solves nothing.

    >>> right, spent = jnp.array([[False, True], [True, False]]), jnp.array([[2.0, 3.0], [9.0, 1.0]])
    >>> [float(solved_within(right, spent, budget)) for budget in (4.0, 5.0, 9.0)]
    [0.0, 0.5, 1.0]
    """
    in_time = jnp.cumsum(spent, axis=1) <= budget
    return reduce.scalars(jnp.any(right & in_time, axis=1).astype(jnp.float32))


def measure(task: int, params, key, *, samples: int):
    """Accuracy, pass@k, tokens, backtracks, and ``budget<b>/solved`` at the compute of b direct answers.

    Args:
      samples: of each puzzle; direct answers want 64 of them, to spend the largest budget.
    """
    with jax.core.eval_context():
        prompts = jnp.asarray(toy.make_table(task, (0,), HELD_OUT, 77)[0])
    drawn = strings.sample(WORLD, params, prompts, key, samples=samples)
    right = toy.right(jnp.repeat(prompts, samples, axis=0), drawn).reshape(HELD_OUT, samples)
    alive = jnp.cumsum((drawn == toy.END).astype(jnp.int32), axis=1) == 0
    tokens = jnp.sum(alive.astype(jnp.float32), axis=1)
    spent = trace_flops(jnp.minimum(tokens + 1.0, float(toy.RESPONSE_TOKENS))).reshape(HELD_OUT, samples)
    return {
        "eval/accuracy": reduce.scalars(right.reshape(-1).astype(jnp.float32)),
        "eval/pass@8": reduce.scalars(jnp.any(right[:, :8], axis=1).astype(jnp.float32)),
        "eval/backs": reduce.scalars(toy.backs(drawn).astype(jnp.float32)),
        "eval/tokens": reduce.scalars(tokens),
    } | {f"budget{b}/solved": solved_within(right, spent, b * direct_flops(task)) for b in BUDGETS}
