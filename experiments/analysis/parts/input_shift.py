"""Toy preferences with inputs that shift: training prompts never have a 3 in the second place; diversity of samples."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from jaxrl_llm import reduce
from jaxrl_llm.metrics import diversity
from jaxrl_llm.types import Key, Metrics, Params

WORLD, SAMPLES, PROMPTS = preference_strings.WORLD, 16, 32


def _seen(prompts: Array) -> Array:
    return jnp.concatenate([prompts[:, :1], prompts[:, 1:2] % 3, prompts[:, 2:]], axis=1)


def draw_behaviour(key: Key, n: int) -> tuple[Array, Array]:
    """``toy_preferences.draw_behaviour`` on training prompts; the second token changes nothing of what is good."""
    prompts, responses = toy.draw_behaviour(key, n)
    return _seen(prompts), responses


def draw_pairs(key: Key, n: int, *, flip_rate: float = 0.0) -> toy.Pairs:
    """Labelled pairs on training prompts."""
    pairs = toy.draw_pairs(key, n, flip_rate=flip_rate)
    return pairs._replace(prompts=_seen(pairs.prompts))


TRAINED = _seen(toy.draw_prompts(jax.random.key(0), 1024))


def first(params: dict[str, Params], prompts: Array, drawn: Array, key: Key) -> Array:
    """All samples as they are, ``[P, K, T]``."""
    return drawn


def best_of_n(params: dict[str, Params], prompts: Array, drawn: Array, key: Key) -> Array:
    """Each of K outcomes is the best by the reward model of K samples drawn with replacement from the stored ones."""
    p, k, t = drawn.shape
    scores = preference_strings.proxy(params, jnp.repeat(prompts, k, axis=0), drawn.reshape(p * k, t)).reshape(p, k)
    again = jax.random.randint(key, (p, k, k), 0, k, jnp.int32)
    best = jnp.argmax(jnp.take_along_axis(scores[:, None, :], again, axis=2), axis=2)
    index = jnp.take_along_axis(again, best[:, :, None], axis=2)
    return jnp.take_along_axis(drawn, index, axis=1)


def _embedded(params: dict[str, Params], responses: Array) -> Array:
    return jnp.mean(params["reference"]["embed"][responses], axis=1)


def _figures(params: dict[str, Params], sets: Array) -> tuple[Array, Array]:
    """EAD and embedding diversity of sets of responses ``[S, N, T]``, mean over sets."""

    def of_one(tokens):
        ead = diversity.mean_adjusted(tokens, tokens >= 0, vocabulary=toy.VOCABULARY)
        return ead, diversity.dissimilarity(_embedded(params, tokens))

    ead, apart = jax.vmap(of_one)(sets)
    return reduce.scalars(ead), reduce.scalars(apart)


@lru_cache(maxsize=8)
def make_measure(pick: Callable) -> Callable[[dict[str, Params], Key], Metrics]:
    """True reward on both kinds of prompts, diversity per input and across inputs."""

    def measure(params, key):
        keys, found = jax.random.split(key, 8), {}
        plain = toy.draw_prompts(keys[0], PROMPTS)
        shifted = jnp.concatenate([plain[:, :1], jnp.full((PROMPTS, 1), 3, jnp.int32), plain[:, 2:]], axis=1)
        for k, (name, prompts) in enumerate((("eval", _seen(plain)), ("shift", shifted))):
            drawn = strings.sample(WORLD, params["policy"], prompts, keys[1 + k], samples=SAMPLES)
            drawn = pick(params, prompts, drawn.reshape(PROMPTS, SAMPLES, -1), keys[3 + k])
            many = jnp.repeat(prompts, SAMPLES, axis=0)
            found[f"{name}/gold"] = reduce.scalars(toy.gold_reward(many, drawn.reshape(many.shape[0], -1)))
            if name == "eval":
                ead, apart = _figures(params, drawn)
                found |= {"per_input/ead": ead, "per_input/embedding": apart}
                ead, apart = _figures(params, jnp.swapaxes(drawn, 0, 1))
                found |= {"across/ead": ead, "across/embedding": apart}
        kl = preference_strings.measure_parts(params, keys[5])["eval/kl"]
        return found | {"shift/drop": found["eval/gold"] - found["shift/gold"], "eval/kl": kl}

    return measure
