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
# instruction data: short and right; one in ten ill-posed, all of those given up
draw_plain = partial(toy.draw_text, ill=0.1, wrong=0.0, abstain=1.0, again=0.0)


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


def measure(params: dict[str, Params], key: Key) -> Metrics:
    """Accuracy on well-posed questions; on the same without a premise: abstention, length ratio, waits, first doubt."""
    keys = jax.random.split(key, 4)
    well = toy.draw_questions(keys[0], 256)
    ill = toy.without_premise(keys[1], well)
    found, spent = {}, []
    for name, prompts, own in (("well", well, keys[2]), ("mip", ill, keys[3])):
        drawn = strings.sample(WORLD, params["policy"], prompts, own)
        waits = drawn == toy.WAIT
        doubt = jnp.where(jnp.any(waits, axis=1), jnp.argmax(waits, axis=1), 0).astype(jnp.float32)
        spent.append(reduce.scalars(toy.lengths(drawn)))
        found |= {
            f"{name}/abstain": reduce.scalars(toy.read(drawn)[1].astype(jnp.float32)),
            f"{name}/tokens": spent[-1],
            f"{name}/waits": reduce.scalars(jnp.sum(waits.astype(jnp.float32), axis=1)),
            f"{name}/first_doubt": reduce.scalars(doubt / jnp.maximum(toy.lengths(drawn), 1.0), jnp.any(waits, axis=1)),
        }
        if name == "well":
            found["well/accuracy"] = reduce.scalars(correct(prompts, drawn))
    return found | {"mip/length_ratio": spent[1] / jnp.maximum(spent[0], 1.0)}
