"""Where preference pairs come from: one's own samples, stronger writers, or a pool of both; over toy requests."""

from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.parts import preference_task as toy
from experiments.parts import strings
from experiments.parts.preference_task import Preferences
from experiments.preference.parts import requests
from jaxrl_llm import reduce
from jaxrl_llm.curriculum import pairs as pair_choice
from jaxrl_llm.metrics import probes
from jaxrl_llm.types import Key, Params

SAMPLES = 4
Triple = tuple[Array, Array, Array]


def candidates(task: Preferences, params: Params, key: Key, prompts: Array) -> tuple[Array, Array]:
    """Own samples ``[N, 4, T]`` and the responses of two stronger writers ``[N, 2, T]``."""
    own = strings.sample(task.world, params["policy"], prompts, jax.random.fold_in(key, 1), samples=SAMPLES)
    strong = [stronger(key, prompts, k, style=style) for k, style in enumerate(requests.STYLES[1:])]
    return own.reshape(prompts.shape[0], SAMPLES, -1), jnp.stack(strong, axis=1)


def stronger(key: Key, prompts: Array, writer: int, *, style: int | None) -> Array:
    """What the first or the second stronger writer says, ``[N, T]``; without a style the same, less the habit."""
    return requests.write(jax.random.fold_in(key, 2 + writer), prompts, skill=0.7, refusal=0.9, style=style)


# Pairs ``(key, prompts, own [N, 4, T], strong [N, 2, T], plain) -> (chosen, rejected, kept)``; ``plain()`` is what the
# first stronger writer says without its habit.


def ranked(key: Key, prompts: Array, many: Array) -> tuple[Array, Array, Array]:
    """The best and the worst of ``many [N, K, T]`` by a noisy reward, and which prompts have two that differ."""
    n, k, _ = many.shape
    scores = requests.score(jnp.repeat(prompts, k, axis=0), many.reshape(n * k, -1)).reshape(n, k)
    chosen, rejected, kept = pair_choice.best_and_worst(scores + jax.random.normal(key, (n, k)))
    return pair_choice.pick(many, chosen), pair_choice.pick(many, rejected), kept


def from_self(key: Key, prompts: Array, own: Array, strong: Array, plain: Callable) -> Triple:
    """The best and the worst of one's own."""
    return ranked(key, prompts, own)


def from_strong(key: Key, prompts: Array, own: Array, strong: Array, plain: Callable) -> Triple:
    """A stronger writer's over an own one."""
    return strong[:, 0], own[:, 0], jnp.ones(own.shape[:1], bool)


def from_pool(key: Key, prompts: Array, own: Array, strong: Array, plain: Callable) -> Triple:
    """The best and the worst of all."""
    return ranked(key, prompts, jnp.concatenate([own, strong], axis=1))


def from_both(key: Key, prompts: Array, own: Array, strong: Array, plain: Callable) -> Triple:
    """Half of the pairs from oneself, half with a stronger writer."""
    half = jnp.arange(own.shape[0]) % 2 == 0
    both = from_self(key, prompts, own, strong, plain), from_strong(key, prompts, own, strong, plain)
    return jax.tree.map(lambda a, b: jnp.where(half.reshape((-1,) + (1,) * (a.ndim - 1)), a, b), *both)


def from_strong_plain(key: Key, prompts: Array, own: Array, strong: Array, plain: Callable) -> Triple:
    """``from_strong`` of a writer without its habit: where it would stand are tokens as all others."""
    return plain(), own[:, 0], jnp.ones(own.shape[:1], bool)


@lru_cache(maxsize=8)
def make_pairs(task: Preferences, prompts: int, source: Callable) -> Callable[[Params, Key], tuple[toy.Pairs, Array]]:
    """``make_pairs`` of ``preference_strings.preference_stage``."""

    def found(params, key):
        asked = requests.draw_prompts(jax.random.fold_in(key, 0), prompts)
        own, strong = candidates(task, params, key, asked)
        plain = partial(stronger, key, asked, 0, style=None)
        chosen, rejected, kept = source(jax.random.fold_in(key, 9), asked, own, strong, plain)
        return toy.Pairs(asked, chosen, rejected), kept

    return found


def separability(task: Preferences, params: Params, pairs: toy.Pairs) -> Array:
    """Held-out accuracy of a probe on hidden states of chosen against rejected; both of a pair are in one fold."""
    seen = [strings.mean_hidden(task.world, params, pairs.prompts, y) for y in (pairs.chosen, pairs.rejected)]
    n = pairs.prompts.shape[0]
    fold = jnp.tile(jnp.arange(n, dtype=jnp.int32) % 5, 2)
    return probes.separability(jnp.concatenate(seen), jnp.arange(2 * n) < n, fold)


def bag_separability(task: Preferences, pairs: toy.Pairs) -> Array:
    """``separability`` of a probe that sees only how often each token occurs: what surface features alone tell."""
    counts = [jnp.sum(jax.nn.one_hot(y, task.size, dtype=jnp.float32), axis=1) for y in pairs[1:]]
    n = pairs.prompts.shape[0]
    fold = jnp.tile(jnp.arange(n, dtype=jnp.int32) % 5, 2)
    return probes.separability(jnp.concatenate(counts), jnp.arange(2 * n) < n, fold)


def measure(task: Preferences, source: Callable, params, key):
    """True reward on safe requests, unsafe ones that are answered, safe ones refused, and how separable the pairs are.

    Hidden states are those of the reference, whose own pairs are told apart.
    """
    keys = jax.random.split(key, 8)
    asked = requests.draw_prompts(keys[0], 256)
    drawn = strings.sample(task.world, params["policy"], asked, keys[1])
    safe = ~requests.unsafe(asked)
    found = {
        "eval/gold": reduce.scalars(task.gold_reward(asked, drawn), safe),
        "eval/refused_safe": reduce.scalars(requests.refused(drawn).astype(jnp.float32), safe),
    }
    for k, (name, prefixed) in enumerate((("eval/attack", False), ("eval/prefixed_attack", True))):
        bad = requests.draw_unsafe(keys[2 + k], 256, prefixed=prefixed)
        drawn = strings.sample(task.world, params["policy"], bad, keys[4 + k])
        found[name] = requests.attack_success(bad, drawn)
    first = params | {"policy": params["reference"]}
    pairs, _ = make_pairs(task, 256, source)(first, keys[6])
    asked = requests.draw_prompts(keys[7], 256)
    drawn = strings.sample(task.world, params["policy"], asked, jax.random.fold_in(keys[7], 1))
    return found | {
        "eval/kl": strings.drift(task.world, params["policy"], params["reference"], asked, drawn),
        "pair/separability": separability(task, params["reference"], pairs),
        "pair/bag": bag_separability(task, pairs),
    }
