"""Parts of experiments on missing premises: a model, its base, a teacher beside it, rewards, measurement."""

from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.analysis.parts import premises_task as toy
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Metrics, Params

WORLD = strings.make_world(
    toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, end=toy.END, width=48, layers=2, heads=4
)
# what the base has read: some of it wrong, some worked again; one in ten ill-posed, half of those given up
draw_behaviour = partial(toy.draw_text, ill=0.1, wrong=0.3, abstain=0.5, again=0.3)
# instruction data: short and right; none is ill-posed, as in the rewards of rl: neither is taught to give up
draw_plain = partial(toy.draw_text, ill=0.0, wrong=0.0, abstain=0.0, again=0.0)


@lru_cache(maxsize=4)
def make_start(*, steps: int) -> Callable[[Key], dict[str, Params]]:
    """The ``init`` of a plan: the policy and, for distillation, a teacher that starts alike."""
    base = strings.make_base(WORLD, draw_behaviour, steps=steps, table=8192, learning_rate=3e-3)

    def init(key):
        params = base(key)
        return {"policy": params, "teacher": jax.tree.map(jnp.copy, params)}

    return init


def correct(prompts: Array, responses: Array) -> Array:
    """1 for the right answer to a well-posed question."""
    answer, _ = toy.read(responses)
    return (toy.well_posed(prompts) & (answer == toy.truth(prompts))).astype(jnp.float32)


def correct_and_frank(prompts: Array, responses: Array, *, cost: float = 0.01) -> Array:
    """1 for the right answer, or for abstaining from an ill-posed question; a cost for every token."""
    _, abstains = toy.read(responses)
    frank = (~toy.well_posed(prompts) & abstains).astype(jnp.float32)
    return correct(prompts, responses) + frank - cost * toy.lengths(responses)


def reward_stage(
    reward: Callable[[Array, Array], Array], *, part: str, ill: float, steps: int, prompts_per_step: int,
    group_size: int, learning_rate: float,
) -> Stage:  # fmt: skip
    """GRPO of one part of the parameters on questions of which a share ``ill`` lacks a premise."""
    asked, _ = toy.draw_text(jax.random.key(0), 2048, ill=ill, wrong=0.0, abstain=0.0, again=0.0)
    return strings.grpo_stage(
        WORLD, asked, reward, steps=steps, prompts_per_step=prompts_per_step, group_size=group_size,
        learning_rate=learning_rate, part=part,
    )  # fmt: skip


@lru_cache(maxsize=4)
def teacher_traces(rows: int) -> Callable[[dict[str, Params], Key], tuple[Array, Array, Array]]:
    """The teacher's own responses to ill-posed questions, all of them kept."""

    def made(params, key):
        asked = toy.without_premise(jax.random.fold_in(key, 0), toy.draw_questions(jax.random.fold_in(key, 1), rows))
        drawn = strings.sample(WORLD, params["teacher"], asked, jax.random.fold_in(key, 2))
        return asked, drawn, jnp.ones((rows,), bool)

    return made


@lru_cache(maxsize=4)
def plain_text(rows: int) -> Callable[[dict[str, Params], Key], tuple[Array, Array, Array]]:
    """Instruction data."""
    return lambda params, key: (*draw_plain(key, rows), jnp.ones((rows,), bool))


def imitation_stage(make_rows: Callable, *, steps: int, rows_per_step: int, learning_rate: float) -> Stage:
    """The policy imitates a table."""
    loss = strings.make_imitation(WORLD, "policy")
    return strings.table_stage(make_rows, loss, steps=steps, rows_per_step=rows_per_step, learning_rate=learning_rate)


def _figures(prompts: Array, drawn: Array) -> Metrics:
    """What responses to one set of questions are like."""
    waits = drawn == toy.WAIT
    doubts, spoken = jnp.any(waits, axis=1), toy.lengths(drawn)
    before = toy.first_round(drawn).astype(jnp.float32)
    return {
        "abstain": reduce.scalars(toy.read(drawn)[1].astype(jnp.float32)),
        "tokens": reduce.scalars(spoken),
        "waits": reduce.scalars(jnp.sum(waits.astype(jnp.float32), axis=1)),
        "suspicion": reduce.scalars(doubts.astype(jnp.float32)),
        "first_doubt": reduce.scalars(before / jnp.maximum(spoken, 1.0), doubts),
        "tokens_after_doubt": reduce.scalars(spoken - before, doubts),
        "waits_after_doubt": reduce.scalars(jnp.sum(waits.astype(jnp.float32), axis=1) - 1.0, doubts),
        "step_similarity": reduce.scalars(toy.repeated_steps(drawn), doubts),
    }


def measure(params: dict[str, Params], key: Key) -> Metrics:
    """Accuracy on well-posed questions; on the same without a premise, by constructor: abstention, length ratio, waits,
    where doubt begins and what comes after it, and how alike the rounds of a response are."""
    keys = jax.random.split(key, 3)
    well = toy.draw_questions(keys[0], 192)
    drawn = strings.sample(WORLD, params["policy"], well, keys[1])
    found = {f"well/{name}": value for name, value in _figures(well, drawn).items()}
    found["well/accuracy"] = reduce.scalars(correct(well, drawn))
    every = []
    for k, (name, make) in enumerate(toy.CONSTRUCTORS.items()):
        ill = make(jax.random.fold_in(keys[2], 2 * k), well)
        drawn = strings.sample(WORLD, params["policy"], ill, jax.random.fold_in(keys[2], 2 * k + 1))
        figures = _figures(ill, drawn)
        ratio = figures["tokens"] / jnp.maximum(found["well/tokens"], 1.0)
        found |= {f"{name}/abstain": figures["abstain"], f"{name}/length_ratio": ratio}
        every.append(figures | {"length_ratio": ratio})
    return found | {f"mip/{name}": sum(x[name] for x in every) / len(every) for name in every[0]}
