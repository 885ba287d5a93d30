"""Parts of experiments on missing premises: a model, its base, a teacher beside it, rewards, measurement."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.analysis.parts import premises_task as toy
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Metrics, Params

OWN_ROWS = "experiments.analysis.parts.text_premises"  # opens ``Premises`` of problems of one's own


class Premises(NamedTuple):
    """Questions, the same without a premise, and what responses say: those of ``premises_task``, or of one's own.

    Functions have the signatures of those of that module; ``constructors`` are ``(name, make(key, prompts))``,
    ``correct(prompts, responses) -> [N]`` is 1 for the right answer to a well-posed question, ``abstains(responses)``
    and ``waits(responses) -> [N, T]`` tell who gives up and the tokens of doubt.
    """

    world: strings.World
    draw_questions: Callable[..., Array]
    draw_text: Callable[..., tuple[Array, Array]]
    without_premise: Callable[[Key, Array], Array]
    constructors: tuple[tuple[str, Callable[[Key, Array], Array]], ...]
    well_posed: Callable[[Array], Array]
    correct: Callable[[Array, Array], Array]
    abstains: Callable[[Array], Array]
    lengths: Callable[[Array], Array]
    waits: Callable[[Array], Array]
    first_round: Callable[[Array], Array]
    repeated_steps: Callable[[Array], Array]


def _correct(prompts: Array, responses: Array) -> Array:
    answer, _ = toy.read(responses)
    return (toy.well_posed(prompts) & (answer == toy.truth(prompts))).astype(jnp.float32)


CHAINS = Premises(
    world=strings.make_world(
        toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, end=toy.END, width=48, layers=2, heads=4
    ),
    draw_questions=toy.draw_questions, draw_text=toy.draw_text, without_premise=toy.without_premise,
    constructors=tuple(toy.CONSTRUCTORS.items()), well_posed=toy.well_posed, correct=_correct,
    abstains=lambda responses: toy.read(responses)[1], lengths=toy.lengths,
    waits=lambda responses: responses == toy.WAIT, first_round=toy.first_round, repeated_steps=toy.repeated_steps,
)  # fmt: skip


def draw_behaviour(task: Premises, key: Key, n: int) -> tuple[Array, Array]:
    """What the base has read: some of it wrong, some worked again, which is less often wrong; one in ten ill-posed.

    Half of those are given up.
    """
    return task.draw_text(key, n, ill=0.1, wrong=0.5, abstain=0.5, again=0.3)


def draw_plain(task: Premises, key: Key, n: int) -> tuple[Array, Array]:
    """Instruction data: short and right; none is ill-posed, as in the rewards of rl: neither is taught to give up."""
    return task.draw_text(key, n, ill=0.0, wrong=0.0, abstain=0.0, again=0.0)


@lru_cache(maxsize=4)
def make_start(task: Premises, *, steps: int) -> Callable[[Key], dict[str, Params]]:
    """The ``init`` of a plan: the policy and, for distillation, a teacher that starts alike."""
    base = strings.make_base(
        task.world, strings.bound(draw_behaviour, task), steps=steps, table=8192, learning_rate=3e-3
    )

    def init(key):
        params = base(key)
        return {"policy": params, "teacher": jax.tree.map(jnp.copy, params)}

    return init


def correct(task: Premises, prompts: Array, responses: Array) -> Array:
    """1 for the right answer to a well-posed question."""
    return task.correct(prompts, responses)


def correct_and_frank(task: Premises, prompts: Array, responses: Array, *, cost: float = 0.01) -> Array:
    """1 for the right answer, or for abstaining from an ill-posed question; a cost for every token."""
    abstains = task.abstains(responses)
    frank = (~task.well_posed(prompts) & abstains).astype(jnp.float32)
    return correct(task, prompts, responses) + frank - cost * task.lengths(responses)


def reward_stage(
    task: Premises, reward: Callable[[Premises, Array, Array], Array], *, part: str, ill: float, steps: int,
    prompts_per_step: int, group_size: int, learning_rate: float,
) -> Stage:  # fmt: skip
    """GRPO of one part of the parameters on questions of which a share ``ill`` lacks a premise."""
    asked, _ = task.draw_text(jax.random.key(0), 2048, ill=ill, wrong=0.0, abstain=0.0, again=0.0)
    return strings.grpo_stage(
        task.world, asked, strings.bound(reward, task), steps=steps, prompts_per_step=prompts_per_step,
        group_size=group_size, learning_rate=learning_rate, part=part,
    )  # fmt: skip


@lru_cache(maxsize=4)
def teacher_traces(task: Premises, rows: int) -> Callable[[dict[str, Params], Key], tuple[Array, Array, Array]]:
    """The teacher's own responses to ill-posed questions, all of them kept."""

    def made(params, key):
        asked = task.without_premise(jax.random.fold_in(key, 0), task.draw_questions(jax.random.fold_in(key, 1), rows))
        drawn = strings.sample(task.world, params["teacher"], asked, jax.random.fold_in(key, 2))
        return asked, drawn, jnp.ones((rows,), bool)

    return made


@lru_cache(maxsize=4)
def plain_text(task: Premises, rows: int) -> Callable[[dict[str, Params], Key], tuple[Array, Array, Array]]:
    """Instruction data."""
    return lambda params, key: (*draw_plain(task, key, rows), jnp.ones((rows,), bool))


def imitation_stage(
    task: Premises, make_rows: Callable, *, steps: int, rows_per_step: int, learning_rate: float
) -> Stage:
    """The policy imitates a table."""
    loss = strings.make_imitation(task.world, "policy")
    return strings.table_stage(make_rows, loss, steps=steps, rows_per_step=rows_per_step, learning_rate=learning_rate)


def _figures(task: Premises, prompts: Array, drawn: Array) -> Metrics:
    """What responses to one set of questions are like."""
    waits = task.waits(drawn)
    doubts, spoken = jnp.any(waits, axis=1), task.lengths(drawn)
    before = task.first_round(drawn).astype(jnp.float32)
    return {
        "abstain": reduce.scalars(task.abstains(drawn).astype(jnp.float32)),
        "tokens": reduce.scalars(spoken),
        "waits": reduce.scalars(jnp.sum(waits.astype(jnp.float32), axis=1)),
        "suspicion": reduce.scalars(doubts.astype(jnp.float32)),
        "first_doubt": reduce.scalars(before / jnp.maximum(spoken, 1.0), doubts),
        "tokens_after_doubt": reduce.scalars(spoken - before, doubts),
        "waits_after_doubt": reduce.scalars(jnp.sum(waits.astype(jnp.float32), axis=1) - 1.0, doubts),
        "step_similarity": reduce.scalars(task.repeated_steps(drawn), doubts),
    }


def measure(task: Premises, params: dict[str, Params], key: Key, *, problems: int) -> Metrics:
    """Accuracy on well-posed questions; on the same without a premise, by constructor: abstention, length ratio, waits,
    where doubt begins and what comes after it, and how alike the rounds of a response are."""
    keys = jax.random.split(key, 3)
    well = task.draw_questions(keys[0], problems)
    drawn = strings.sample(task.world, params["policy"], well, keys[1])
    found = {f"well/{name}": value for name, value in _figures(task, well, drawn).items()}
    found["well/accuracy"] = reduce.scalars(correct(task, well, drawn))
    every = []
    for k, (name, make) in enumerate(task.constructors):
        ill = make(jax.random.fold_in(keys[2], 2 * k), well)
        drawn = strings.sample(task.world, params["policy"], ill, jax.random.fold_in(keys[2], 2 * k + 1))
        figures = _figures(task, ill, drawn)
        ratio = figures["tokens"] / jnp.maximum(found["well/tokens"], 1.0)
        found |= {f"{name}/abstain": figures["abstain"], f"{name}/length_ratio": ratio}
        every.append(figures | {"length_ratio": ratio})
    return found | {f"mip/{name}": sum(x[name] for x in every) / len(every) for name in every[0]}
