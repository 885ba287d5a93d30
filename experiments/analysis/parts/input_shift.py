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


def sentences(params: dict[str, Params], prompts: Array, responses: Array) -> Array:
    """What a sentence encoder says of responses: the reference's mean last hidden state over them, ``[N, D]``."""
    hidden = WORLD.policy.hidden(params["reference"], *strings.whole(WORLD, prompts, responses))
    return jnp.mean(hidden[:, toy.PROMPT_TOKENS :], axis=1)


def meanings(prompts: Array, responses: Array) -> Array:
    """What a response says, as numbers ``[N, 2]``: how many of its tokens are good and how many bad."""
    real = (responses >= toy.FIRST) & (responses != toy.STYLE)
    kinds = [real & (responses % 4 == (prompts[:, :1] + k) % 4) for k in (0, 1)]
    return jnp.stack([jnp.sum(x.astype(jnp.int32), axis=1) for x in kinds], axis=1)


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


def _figures(params: dict[str, Params], prompts: Array, sets: Array) -> dict[str, Array]:
    """EAD, sentence and meaning diversity of sets ``[S, N, T]`` of responses to ``prompts [S, N, P]``: mean of sets."""

    def of_one(asked, tokens):
        ead = diversity.mean_adjusted(tokens, tokens >= 0, vocabulary=toy.VOCABULARY)
        seen = diversity.dissimilarity(sentences(params, asked, tokens))
        return {"ead": ead, "sentence": seen, "meaning": apart(meanings(asked, tokens))}

    return {name: reduce.scalars(x) for name, x in jax.vmap(of_one)(prompts, sets).items()}


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
                asked = many.reshape(PROMPTS, SAMPLES, -1)
                for kind, x, y in (("per_input", asked, drawn), ("across", asked.swapaxes(0, 1), drawn.swapaxes(0, 1))):
                    found |= {f"{kind}/{part}": value for part, value in _figures(params, x, y).items()}
        found["per_input/relative"] = found["per_input/ead"] / jnp.maximum(found["across/ead"], 1e-6)
        more = preference_strings.measure_parts(params, keys[5])
        found |= {name: more[name] for name in ("eval/kl", "rm/accuracy", "rm/correlation")}
        return found | {"shift/drop": found["eval/gold"] - found["shift/gold"]}

    return measure
