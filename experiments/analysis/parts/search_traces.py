"""Parts of experiments on search in text: a model, imitation of traces, GRPO on solved puzzles, equal test compute."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from experiments.analysis.parts import search_puzzles
from experiments.analysis.parts import search_traces_task as toy
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.train import fused, offline
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Params

WIDTH, LAYERS = 64, 2
WORLD = strings.make_world(
    toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, end=toy.END, width=WIDTH, layers=LAYERS, heads=4
)
# the same model with room for a whole search; a base of either is one of both
LONG = strings.make_world(
    toy.VOCABULARY, toy.PROMPT_TOKENS, toy.SEARCH_TOKENS, end=toy.END, width=WIDTH, layers=LAYERS, heads=4
)
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
    world: strings.World = WORLD,
) -> Callable:
    """The table of ``strings.make_imitation``: traces of so many puzzles, always the same ones; see ``make_table``."""
    prompts, responses = toy.make_table(task, back, puzzles, 0, swapped, how, shown, width=world.response_tokens)
    return lambda params, key: (jnp.asarray(prompts), jnp.asarray(responses), jnp.ones((puzzles,), bool))


def imitation_stage(
    rows: Callable, *, steps: int, rows_per_step: int, learning_rate: float, world: strings.World = WORLD
) -> Stage:
    """Supervised training on traces, measured when it ends."""
    sizes = {"steps": steps, "rows_per_step": rows_per_step, "learning_rate": learning_rate}
    return strings.table_stage(rows, strings.make_imitation(world), **sizes)._replace(eval_every=steps)


# Which of a teacher's samples a learner reads: ``(right, ended) [N, S] -> bool [N, S]``.
Kept = Callable[[Array, Array], Array]


def right_ones(right: Bool[Array, "N S"], ended: Bool[Array, "N S"]) -> Bool[Array, "N S"]:
    """Samples that solve their puzzle."""
    return right


def wrong_ones(right: Bool[Array, "N S"], ended: Bool[Array, "N S"]) -> Bool[Array, "N S"]:
    """Samples that come to an end and do not."""
    return ended & ~right


def chosen_samples(
    prompts: Int[Array, "N P"], drawn: Int[Array, "N S T"], fits: Bool[Array, "N S"]
) -> tuple[Array, Array, Array, Array]:
    """Rows ``(prompts, responses, kept, found)``: the first fitting sample of each puzzle that has one.

    The rows of puzzles without any are those of the others once more, so that a table has as many rows whichever
    samples fit; ``found`` says how many puzzles had one, the same in every row. Nothing is kept where none had.

    >>> prompts, drawn = jnp.array([[1], [2], [3]]), jnp.arange(6).reshape(3, 2, 1)
    >>> rows = chosen_samples(prompts, drawn, jnp.array([[False, True], [False, False], [True, True]]))
    >>> [x.ravel().tolist() for x in rows[:3]], round(float(rows[3][0]), 4)
    ([[1, 3, 1], [1, 4, 1], [True, True, True]], 0.6667)
    """
    there = jnp.any(fits, axis=1)
    first = jnp.take_along_axis(drawn, jnp.argmax(fits, axis=1)[:, None, None], axis=1)[:, 0]
    number, count = jnp.arange(there.shape[0], dtype=jnp.int32), jnp.sum(there, dtype=jnp.int32)
    rows = jnp.argsort(~there, stable=True)[number % jnp.maximum(count, 1)]
    share = count.astype(jnp.float32) / there.shape[0]
    return prompts[rows], first[rows], jnp.broadcast_to(count > 0, there.shape), jnp.broadcast_to(share, there.shape)


def after_stages(stages: tuple[Stage, ...], params: Params, key: Key) -> Params:
    """The parameters behind some stages, inside a compiled program."""
    for index, stage in enumerate(stages):
        state = plans.start(stage, params, jax.random.fold_in(key, index))
        scan = fused.scan_steps if isinstance(stage.method, Online) else offline.scan_steps
        params = scan(stage.method, state, stage.steps)[0].params
    return params


@lru_cache(maxsize=8)
def distilled(
    task: int, keep: Kept, swapped: str, *, teacher: tuple[int, int], taught: int, puzzles: int, samples: int,
    imitation_rate: float, learning_rate: float, rows_per_step: int, prompts_per_step: int,
) -> Callable:  # fmt: skip
    """The table of ``distilled_stage``: samples of a stronger run from the same parameters.

    The teacher reads depth-first searches and is then rewarded for solutions; it draws ``samples`` traces of each
    puzzle, of which ``keep`` says which fit.

    Args:
      swapped: ``traces``: every puzzle has the whole trace of the one before it.
      teacher: its steps of imitation and of GRPO, on ``taught`` puzzles; ``imitation_rate`` and ``learning_rate`` are
        those of either.
    """
    searches = traces(task, (0,), how=toy.by_search, puzzles=taught)
    sizes = {"rows_per_step": rows_per_step, "learning_rate": imitation_rate}
    groups = {"prompts_per_step": prompts_per_step, "group_size": rows_per_step // prompts_per_step}
    stages = (
        imitation_stage(searches, steps=teacher[0], **sizes),
        reward_stage(task, steps=teacher[1], learning_rate=learning_rate, puzzles=taught, **groups),
    )
    prompts = toy.make_table(task, (0,), puzzles, 0)[0]

    def rows(params: Params, key: Key) -> tuple[Array, ...]:
        train, draw = jax.random.split(key)
        learned, asked = after_stages(stages, params, train), jnp.asarray(prompts)

        def of(part: tuple[Array, Array]) -> Array:
            given, key = part
            return strings.sample(WORLD, learned, given, key, samples=samples)

        size = max(n for n in range(1, 129) if puzzles % n == 0)  # puzzles that are sampled together
        parts = asked.reshape(-1, size, asked.shape[1]), jax.random.split(draw, puzzles // size)
        drawn = jax.lax.map(of, parts).reshape(puzzles * samples, -1)
        right = toy.right(jnp.repeat(asked, samples, axis=0), drawn).reshape(puzzles, samples)
        ended = jnp.any(drawn == toy.END, axis=1).reshape(puzzles, samples)
        own, said, kept, found = chosen_samples(asked, drawn.reshape(puzzles, samples, -1), keep(right, ended))
        return own, jnp.roll(said, 1, axis=0) if swapped == "traces" else said, kept, found

    return rows


@lru_cache(maxsize=1)
def _imitate_distilled() -> Callable:
    imitate = strings.make_imitation(WORLD)

    def loss(params, extras, batch):
        value, metrics = imitate(params, extras, batch[:3])
        return value, metrics | {"teacher/kept": reduce.scalars(batch[3])}

    return loss


def distilled_stage(rows: Callable, *, steps: int, rows_per_step: int, learning_rate: float) -> Stage:
    """``imitation_stage`` of ``distilled``; ``teacher/kept`` is the share of puzzles of which a sample fitted."""
    sizes = {"steps": steps, "rows_per_step": rows_per_step, "learning_rate": learning_rate}
    return strings.table_stage(rows, _imitate_distilled(), **sizes)._replace(eval_every=steps)


def reward_stage(
    task: int, *, steps: int, prompts_per_step: int, group_size: int, learning_rate: float, puzzles: int = 3000,
    world: strings.World = WORLD,
) -> Stage:  # fmt: skip
    """GRPO on training puzzles, 1 for a last path that solves."""
    prompts = jnp.asarray(toy.make_table(task, (0,), puzzles, 0)[0])
    return strings.grpo_stage(
        world, prompts, toy.right, steps=steps, prompts_per_step=prompts_per_step, group_size=group_size,
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


def measure(task: int, params, key, *, problems: int, samples: int, world: strings.World = WORLD):
    """Accuracy, pass@k, tokens, backtracks, and ``budget<b>/solved`` at the compute of b direct answers.

    None of the puzzles stands in a table to imitate, of the base or of rewards.

    ``eval/room`` is how far accuracy is from what it cannot leave: the smaller of its distances to ``toy.FLOORS`` and
    to 1. Near 0, or below, the task is out of reach or done, and two arms that are both there cannot differ.

    Args:
      samples: of each puzzle; 64 of them spend the largest budget, as none is cheaper than a direct answer.
    """
    with jax.core.eval_context():
        prompts = jnp.asarray(toy.make_table(task, (0,), problems, 77, measured=True)[0])
    drawn = strings.sample(world, params, prompts, key, samples=samples)
    right = toy.right(jnp.repeat(prompts, samples, axis=0), drawn).reshape(problems, samples)
    alive = jnp.cumsum((drawn == toy.END).astype(jnp.int32), axis=1) == 0
    tokens = jnp.sum(alive.astype(jnp.float32), axis=1)
    spent = trace_flops(jnp.minimum(tokens + 1.0, float(world.response_tokens))).reshape(problems, samples)
    accuracy = reduce.scalars(right.reshape(-1).astype(jnp.float32))
    return {
        "eval/accuracy": accuracy,
        "eval/room": jnp.minimum(accuracy - toy.FLOORS[task], 1.0 - accuracy),
        "eval/pass@8": reduce.scalars(jnp.any(right[:, :8], axis=1).astype(jnp.float32)),
        "eval/backs": reduce.scalars(toy.backs(drawn).astype(jnp.float32)),
        "eval/tokens": reduce.scalars(tokens),
    } | {f"budget{b}/solved": solved_within(right, spent, b * direct_flops(task)) for b in BUDGETS}
