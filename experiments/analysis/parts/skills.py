"""Parts of experiments on composing functions: the model, its base, right samples, accuracy by level."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.analysis.parts import functions as toy
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.types import Key, Metrics, Params

OWN_ROWS = "experiments.analysis.parts.text_skills"  # opens ``Skills`` of text
WORLD = strings.make_world(  # two layers: one does not learn all single functions
    toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, end=toy.END, width=48, layers=2, heads=4
)
SHORT = WORLD._replace(response_tokens=4 * toy.WIDTH + 1)  # two functions, and two idle words
SHOWN = (1, 2, 3, 4, 6, 8)  # levels that are measured
PROBLEMS = 512  # fresh ones of every level
WRONG = 3  # the level of which errors are told apart
LENGTHS = (3, 8)  # of single functions behind so many idle words that the last word is where that of this level is


def measure(params: Params, key: Key) -> Metrics:
    """Accuracy by level, with functions whose compositions training held and with those it did not, and on sums.

    ``errors/...``: kinds of wrong responses of level 3 (``functions.error_kinds``), as shares of all; ``length3``, and
    8: single functions at the places of that level's last word, so that nothing but composing is left out.
    """
    found = {}
    for k, (name, functions) in enumerate((("heldout", toy.HELD_OUT), ("trained", toy.TRAIN))):
        asked = [
            toy.draw_prompts(jax.random.fold_in(key, 10 * k + level), PROBLEMS, levels=(level,), functions=functions)
            for level in SHOWN
        ]
        prompts = jnp.concatenate(asked)
        drawn = strings.sample(WORLD, params, prompts, jax.random.fold_in(key, 100 + k))
        right = toy.right(prompts, drawn).astype(jnp.float32).reshape(len(SHOWN), -1)
        found |= {f"level{level}/{name}": reduce.scalars(x) for level, x in zip(SHOWN, right, strict=True)}
        if name == "heldout":
            of = slice(SHOWN.index(WRONG) * PROBLEMS, (SHOWN.index(WRONG) + 1) * PROBLEMS)
            kinds = toy.error_kinds(prompts[of], drawn[of])
            found |= {f"errors/{kind}": reduce.scalars(x.astype(jnp.float32)) for kind, x in kinds.items()}
    for level in LENGTHS:
        key_of = jax.random.fold_in(key, 300 + level)
        prompts = toy.draw_prompts(jax.random.fold_in(key_of, 0), PROBLEMS, levels=(1,), functions=toy.HELD_OUT)
        asked_behind = behind_idle(prompts, level - 1)
        drawn = strings.sample(idle_world(WORLD, level - 1), params, asked_behind, jax.random.fold_in(key_of, 1))
        found[f"length{level}/heldout"] = reduce.scalars(right_behind(asked_behind, drawn).astype(jnp.float32))
    for level in (1, 2, 3):
        prompts = toy.draw_sums(jax.random.fold_in(key, 200 + level), PROBLEMS, levels=(level,))
        drawn = strings.sample(WORLD, params, prompts, jax.random.fold_in(key, 210 + level))
        found[f"sums{level}/accuracy"] = reduce.scalars(toy.right_sum(prompts, drawn).astype(jnp.float32))
    return found


def idle_world(world: strings.World, words: int) -> strings.World:
    """The world in which so many words of a response are given."""
    given = words * toy.WIDTH
    prompt, response = world.prompt_tokens + given, world.response_tokens - given
    return world._replace(prompt_tokens=prompt, response_tokens=response)


def behind_idle(prompts: Array, words: int) -> Array:
    """Prompts and, as the beginning of a response, the start so many times."""
    return jnp.concatenate([prompts, jnp.tile(prompts[:, -toy.WIDTH :], (1, words))], axis=1)


def right_behind(prompts: Array, responses: Array) -> Array:
    """``functions.right`` of responses whose first words stand in the prompt, and which add some of their own.

    A function may leave the start as it is: the words that are given would be its answer.
    """
    asked, given = jnp.split(prompts, (toy.PROMPT_TOKENS,), axis=1)
    return toy.right(asked, jnp.concatenate([given, responses], axis=1)) & (responses[:, 0] != toy.END)


def asked(key: Key, n: int, levels: tuple[int, ...]) -> Array:
    """Compositions that training holds."""
    return toy.draw_prompts(key, n, levels=levels, functions=toy.TRAIN)


class Skills(NamedTuple):
    """Single skills and their compositions: those of ``functions``, or text.

    ``base(key, n) -> (prompts, responses)`` is what a base has read, ``asked(key, n, levels) -> [N, P]`` what is
    trained on, in ``short``, whose responses need be no longer than two skills; ``right(prompts, responses) -> [N]``.
    """

    world: strings.World
    short: strings.World
    base: Callable[..., tuple[Array, Array]]
    asked: Callable[..., Array]
    right: Callable[[Array, Array], Array]
    measure: Callable[[Params, Key], Metrics]


FUNCTIONS = Skills(WORLD, SHORT, toy.draw_skills, asked, toy.right, measure)


@lru_cache(maxsize=4)
def right_samples(
    task: Skills, levels: tuple[int, ...], samples: int
) -> Callable[[Params, Key], tuple[Array, Array, Array]]:
    """Samples of the policy, and which of them are right."""

    def rows(params, key):
        prompts = task.asked(jax.random.fold_in(key, 0), samples, levels)
        drawn = strings.sample(task.short, params, prompts, jax.random.fold_in(key, 1))
        return prompts, drawn, task.right(prompts, drawn)

    return rows
