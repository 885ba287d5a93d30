"""A scripted ranker of toy responses whose noise falls with the quality of the examples that it is shown."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.parts import strings
from experiments.parts.preference_task import Preferences
from jaxrl_llm.curriculum import pairs
from jaxrl_llm.types import Key

CANDIDATES, EXAMPLES = 4, 3
UNIT = 2.8  # deviation of the true reward of the strings, for errors over rows of one's own
NOISE, LEFT = 4.0, 0.1  # deviation of the ranker's error without help, and the share of it that perfect examples leave
PEOPLE = 3.0  # deviation of the error of those who wrote the fixed examples


def right_pairs(gold: Array, kept: Array) -> Array:
    """How many pairs of the kept places of a ranking are in the true order, ties included."""
    return jnp.sum((_pairs(kept) & (gold[:, None] >= gold[None, :])).astype(jnp.float32))


def _pairs(kept: Array) -> Array:
    place = jnp.arange(kept.shape[0])
    return kept[:, None] & kept[None, :] & (place[:, None] < place[None, :])


def quality(gold: Array, kept: Array) -> Array:
    """Right less wrong pairs of the kept places over all of them: 1 a true order, 0 on average a random one.

    >>> import jax.numpy as jnp
    >>> [round(float(quality(jnp.array(x), jnp.ones(3, bool))), 2) for x in ([3.0, 2.0, 1.0], [2.0, 3.0, 1.0])]
    [1.0, 0.33]
    """
    both = _pairs(kept)
    signs = jnp.sign(gold[:, None] - gold[None, :])
    count = jnp.sum(both.astype(jnp.float32))
    return jnp.sum(jnp.where(both, signs, 0.0)) / jnp.maximum(count, 1.0)


def deviation(examples: Array) -> Array:
    """Of the ranker's error: it falls with the mean quality of what it is shown, and misleading examples help nothing.

    >>> import jax.numpy as jnp
    >>> [round(float(deviation(jnp.full(3, q))), 2) for q in (-1.0, 0.0, 0.5, 1.0)]
    [4.0, 4.0, 2.2, 0.4]
    """
    mean = jnp.clip(jnp.sum(examples) / examples.shape[0], 0.0, 1.0)
    return NOISE * (1.0 - (1.0 - LEFT) * mean)


def fixed_examples(task: Preferences, key: Key) -> Array:
    """Quality of the demonstrations that people wrote once and for all: rankings of the data with their own errors."""
    prompts = jnp.repeat(task.draw_prompts(jax.random.fold_in(key, 0), EXAMPLES), CANDIDATES, axis=0)
    responses = task.draw_responses(jax.random.fold_in(key, 1), prompts)
    gold = task.gold_reward(prompts, responses).reshape(EXAMPLES, CANDIDATES)
    error = PEOPLE * jax.random.normal(jax.random.fold_in(key, 2), gold.shape)
    if task.spread is not None:
        error = error * task.spread(gold) / UNIT
    order = jnp.argsort(-(gold + error), axis=1)
    return jax.vmap(quality)(jnp.take_along_axis(gold, order, axis=1), jnp.ones(gold.shape, bool))


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
def make_rows(task: Preferences, prompts: int, example: Callable):
    """Ranked candidates; the ranker meets the prompts one after another and remembers its last examples.

    Every call begins anew with the demonstrations: no round hands its examples on to the next.
    """

    def rows(params, key):
        asked, given = task.draw_behaviour(jax.random.fold_in(key, 0), prompts)
        drawn = strings.sample(task.world, params["policy"], asked, jax.random.fold_in(key, 1), samples=CANDIDATES - 1)
        four = jnp.concatenate([drawn.reshape(prompts, CANDIDATES - 1, -1), given[:, None]], axis=1)
        flat, many = four.reshape(prompts * CANDIDATES, -1), jnp.repeat(asked, CANDIDATES, axis=0)
        gold = task.gold_reward(many, flat).reshape(prompts, CANDIDATES)
        unit = None if task.spread is None else task.spread(gold) / UNIT
        likely = strings.sum_logp(task.world, params["policy"], many, flat)
        if task.world.start is not None:  # generated strings are of one length
            likely = likely / strings.token_counts(task.world, flat)
        white = jnp.argsort(-likely.reshape(prompts, CANDIDATES), axis=1)

        def judge(examples, row):
            gold, white, key = row
            noise = deviation(examples) * jax.random.normal(key, gold.shape)
            noise = noise if unit is None else noise * unit
            black = jnp.argsort(-(gold + noise))
            order, kept = example(black, white, jax.random.fold_in(key, 1))
            shown = jnp.concatenate([examples[1:], quality(gold[order], kept)[None]])
            enough = jnp.sum(kept.astype(jnp.int32)) > 1
            return jnp.where(enough, shown, examples), (black, right_pairs(gold[black], kept | True))

        keys = jax.random.split(jax.random.fold_in(key, 2), prompts)
        _, (black, right) = jax.lax.scan(judge, params["examples"], (gold, white, keys))
        return asked, jnp.take_along_axis(four, black[:, :, None], axis=1), right / (CANDIDATES * (CANDIDATES - 1) / 2)

    return rows
