"""A scripted ranker of toy responses whose noise falls with the quality of the examples that it is shown."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from jaxrl_llm.curriculum import pairs
from jaxrl_llm.types import Key

WORLD, CANDIDATES, EXAMPLES, NOISE = preference_strings.WORLD, 4, 3, 4.0


def right_pairs(gold: Array, kept: Array) -> Array:
    """How many pairs of the kept places of a ranking are in the true order, ties included."""
    both = kept[:, None] & kept[None, :] & (jnp.arange(gold.shape[0])[:, None] < jnp.arange(gold.shape[0])[None, :])
    return jnp.sum((both & (gold[:, None] >= gold[None, :])).astype(jnp.float32))


# Which ranking becomes an example: ``(black [K], white [K], key) -> (order [K], kept [K])``.


def agreed(black: Array, white: Array, key: Key) -> tuple[Array, Array]:
    """Of the ranker's order what the policy's agrees with."""
    return black, pairs.common_order(black[None], white[None])[0]


def nothing(black: Array, white: Array, key: Key) -> tuple[Array, Array]:
    """The examples stay as they were."""
    return black, jnp.zeros(black.shape, bool)


def own(black: Array, white: Array, key: Key) -> tuple[Array, Array]:
    """The policy's order."""
    return white, jnp.ones(white.shape, bool)


def shuffled(black: Array, white: Array, key: Key) -> tuple[Array, Array]:
    """Any order."""
    return jax.random.permutation(key, black), jnp.ones(black.shape, bool)


@lru_cache(maxsize=8)
def make_rows(prompts: int, example: Callable):
    """Ranked candidates; the ranker meets the prompts one after another and remembers its last examples."""

    def rows(params, key):
        asked, given = toy.draw_behaviour(jax.random.fold_in(key, 0), prompts)
        drawn = strings.sample(WORLD, params["policy"], asked, jax.random.fold_in(key, 1), samples=CANDIDATES - 1)
        four = jnp.concatenate([drawn.reshape(prompts, CANDIDATES - 1, -1), given[:, None]], axis=1)
        flat, many = four.reshape(prompts * CANDIDATES, -1), jnp.repeat(asked, CANDIDATES, axis=0)
        gold = toy.gold_reward(many, flat).reshape(prompts, CANDIDATES)
        white = jnp.argsort(-strings.sum_logp(WORLD, params["policy"], many, flat).reshape(prompts, CANDIDATES), axis=1)

        def judge(examples, row):
            gold, white, key = row
            noise = NOISE / (1.0 + jnp.sum(examples)) * jax.random.normal(key, gold.shape)
            black = jnp.argsort(-(gold + noise))
            order, kept = example(black, white, jax.random.fold_in(key, 1))
            right = right_pairs(gold[order], kept)
            shown = jnp.concatenate([examples[1:], right[None]])
            enough = jnp.sum(kept.astype(jnp.int32)) > 1
            return jnp.where(enough, shown, examples), (black, right_pairs(gold[black], kept | True))

        keys = jax.random.split(jax.random.fold_in(key, 2), prompts)
        _, (black, right) = jax.lax.scan(judge, jnp.zeros((EXAMPLES,), jnp.float32), (gold, white, keys))
        return asked, jnp.take_along_axis(four, black[:, :, None], axis=1), right / (CANDIDATES * (CANDIDATES - 1) / 2)

    return rows
