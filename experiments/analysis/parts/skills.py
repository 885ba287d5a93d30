"""Parts of experiments on composing functions: the model, its base, right samples, accuracy by level."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.analysis.parts import functions as toy
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.types import Key, Metrics, Params

WORLD = strings.make_world(toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, end=toy.END, width=48, heads=4)
SHORT = WORLD._replace(response_tokens=4 * toy.WIDTH + 1)  # two functions, and two idle words
SHOWN = (1, 2, 3, 4, 6, 8)  # levels that are measured


def measure(params: Params, key: Key) -> Metrics:
    """Accuracy by level, with functions whose compositions training held and with those it did not, and on sums."""
    found = {}
    for k, (name, functions) in enumerate((("heldout", toy.HELD_OUT), ("trained", toy.TRAIN))):
        asked = [
            toy.draw_prompts(jax.random.fold_in(key, 10 * k + level), 96, levels=(level,), functions=functions)
            for level in SHOWN
        ]
        prompts = jnp.concatenate(asked)
        drawn = strings.sample(WORLD, params, prompts, jax.random.fold_in(key, 100 + k))
        right = toy.right(prompts, drawn).astype(jnp.float32).reshape(len(SHOWN), -1)
        found |= {f"level{level}/{name}": reduce.scalars(x) for level, x in zip(SHOWN, right, strict=True)}
    for level in (1, 2, 3):
        prompts = toy.draw_sums(jax.random.fold_in(key, 200 + level), 96, levels=(level,))
        drawn = strings.sample(WORLD, params, prompts, jax.random.fold_in(key, 210 + level))
        found[f"sums{level}/accuracy"] = reduce.scalars(toy.right_sum(prompts, drawn).astype(jnp.float32))
    return found


@lru_cache(maxsize=4)
def right_samples(levels: tuple[int, ...], samples: int) -> Callable[[Params, Key], tuple[Array, Array, Array]]:
    """Samples of the policy, and which of them are right."""

    def rows(params, key):
        asked = toy.draw_prompts(jax.random.fold_in(key, 0), samples, levels=levels, functions=toy.TRAIN)
        drawn = strings.sample(SHORT, params, asked, jax.random.fold_in(key, 1))
        return asked, drawn, toy.right(asked, drawn)

    return rows
