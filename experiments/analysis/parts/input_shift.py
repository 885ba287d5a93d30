"""Toy preferences with inputs that shift: training prompts never have a 3 in the second place; diversity of samples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.analysis.parts import diversity
from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from jaxrl_llm import reduce
from jaxrl_llm.types import Key, Params

SAMPLES = 16
LEAST = 0.1  # of true reward, to which a share can be taken


def draw_behaviour(task: Preferences, key: Key, n: int) -> tuple[Array, Array]:
    """``preference_task.draw_behaviour`` on training prompts; the second token changes nothing of what is good."""
    prompts, responses = task.draw_behaviour(key, n)
    return task.seen(prompts), responses


def draw_pairs(task: Preferences, key: Key, n: int, *, flip_rate: float = 0.0) -> toy.Pairs:
    """Labelled pairs on training prompts."""
    pairs = task.draw_pairs(key, n, flip_rate=flip_rate)
    return pairs._replace(prompts=task.seen(pairs.prompts))


def trained(task: Preferences) -> Array:
    """A table of training prompts."""
    return task.seen(task.draw_prompts(jax.random.key(0), 1024))


Draw = Callable[[int], Array]  # so many samples of every prompt, ``[P, K, T]``


def first(task: Preferences, params: dict[str, Params], prompts: Array, draw: Draw) -> Array:
    """Samples as they are, ``[P, K, T]``."""
    return draw(SAMPLES)


def best_of_n(task: Preferences, params: dict[str, Params], prompts: Array, draw: Draw) -> Array:
    """Each of K outcomes is the best by the reward model of K samples of its own."""
    drawn = draw(SAMPLES * SAMPLES)
    p, k, t = drawn.shape
    scores = preference_strings.proxy(task, params, jnp.repeat(prompts, k, axis=0), drawn.reshape(p * k, t))
    best = jnp.argmax(scores.reshape(p, SAMPLES, SAMPLES), axis=2)
    index = best + SAMPLES * jnp.arange(SAMPLES, dtype=best.dtype)[None, :]
    return jnp.take_along_axis(drawn, index[:, :, None], axis=1)


def sentences(task: Preferences, params: dict[str, Params], prompts: Array, responses: Array) -> Array:
    """What a sentence encoder says of responses: the reference's mean last hidden state over them, ``[N, D]``."""
    return strings.mean_hidden(task.world, params["reference"], prompts, responses)


def apart(said: Array) -> Array:
    """Share of the pairs of ``said [N, K]`` that differ: diversity by inference, which knows same and not the same.

    >>> round(float(apart(jnp.array([[1, 0], [1, 0], [2, 0]]))), 4)
    0.6667
    """
    n = said.shape[0]
    if n < 2:
        raise ValueError(f"{n} responses have no pairs; draw at least two")
    same = jnp.all(said[:, None, :] == said[None, :, :], axis=2).astype(jnp.float32)
    return 1.0 - (jnp.sum(same) - n) / (n * (n - 1))


def _figures(task: Preferences, params: dict[str, Params], prompts: Array, sets: Array) -> dict[str, Array]:
    """EAD, sentence and meaning diversity of sets ``[S, N, T]`` of responses to ``prompts [S, N, P]``: mean of sets."""

    def of_one(asked, tokens):
        ead = diversity.mean_adjusted(tokens, strings.spoken(task.world, tokens), vocabulary=task.size)
        seen = diversity.dissimilarity(sentences(task, params, asked, tokens))
        return {"ead": ead, "sentence": seen, "meaning": apart(task.meanings(asked, tokens))}

    return {name: reduce.scalars(x) for name, x in jax.vmap(of_one)(prompts, sets).items()}


def measure(task: Preferences, pick: Callable, params, key, *, prompts: int):
    """True reward on both kinds of prompts, diversity per input and across inputs."""
    keys, found = jax.random.split(key, 8), {}
    plain = task.draw_prompts(keys[0], prompts)
    shifted = task.strange(plain)
    for k, (name, asked) in enumerate((("eval", task.seen(plain)), ("shift", shifted))):

        def draw(samples, asked=asked, key=keys[1 + k]):
            rows = strings.sample(task.world, params["policy"], asked, key, samples=samples)
            return rows.reshape(prompts, samples, -1)

        drawn = pick(task, params, asked, draw)
        many = jnp.repeat(asked, SAMPLES, axis=0)
        found[f"{name}/gold"] = reduce.scalars(task.gold_reward(many, drawn.reshape(many.shape[0], -1)))
        if name == "eval":
            sets = many.reshape(prompts, SAMPLES, -1)
            for kind, x, y in (("per_input", sets, drawn), ("across", sets.swapaxes(0, 1), drawn.swapaxes(0, 1))):
                found |= {f"{kind}/{part}": value for part, value in _figures(task, params, x, y).items()}
    found["per_input/relative"] = found["per_input/ead"] / jnp.maximum(found["across/ead"], 1e-6)
    more = preference_strings.measure_within(task, params, keys[5])
    found |= {name: more[name] for name in ("eval/kl", "rm/accuracy", "rm/within")}
    kept = found["shift/gold"] / jnp.maximum(found["eval/gold"], LEAST)
    return found | {"shift/kept": kept, "shift/drop": found["eval/gold"] - found["shift/gold"]}
