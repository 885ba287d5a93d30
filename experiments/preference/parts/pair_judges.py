"""Pairwise judges of toy preferences: a decoder that reads a prompt and two responses and says which is better."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from jaxrl_llm import reduce
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.losses.ranking import verdict_loss
from jaxrl_llm.models import heads
from jaxrl_llm.train import offline
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.types import Key, Metrics, Params

FIRST, SECOND, ASK = toy.VOCABULARY, toy.VOCABULARY + 1, toy.VOCABULARY + 2  # verdicts, and the token before them
WORLD = strings.make_world(toy.VOCABULARY + 3, toy.PROMPT_TOKENS + 2 * toy.RESPONSE_TOKENS + 1, 1)


def _hidden(model: Params, prompts: Array, first: Array, second: Array) -> Array:
    asked = jnp.concatenate([prompts, first, second, jnp.full((prompts.shape[0], 1), ASK, jnp.int32)], axis=1)
    positions = jnp.broadcast_to(jnp.arange(asked.shape[1], dtype=jnp.int32)[None, :], asked.shape)
    return WORLD.policy.hidden(model, asked, positions, jnp.ones_like(asked))[:, -1]


def generated(judge: Params, prompts: Array, first: Array, second: Array) -> Array:
    """Score of "the first": difference of the logits of the two verdict tokens, ``[N]``."""
    logits = WORLD.policy.unembed(judge["model"], _hidden(judge["model"], prompts, first, second))
    return logits[:, FIRST] - logits[:, SECOND]


def discriminated(judge: Params, prompts: Array, first: Array, second: Array) -> Array:
    """The same from a linear head on the last hidden state."""
    hidden = _hidden(judge["model"], prompts, first, second)
    return heads.apply_head(judge["head"], hidden[:, None])[:, 0, 0]


def fit(
    score: Callable[..., Array], pairs: toy.Pairs, key: Key, *, steps: int, consistency: float, rows_per_step: int = 32
) -> Params:
    """A judge ``{"model", "head"}`` trained from scratch on labelled pairs in both orders."""

    def loss(params, extras, batch):
        prompts, won, lost = batch
        both = score(params, jnp.tile(prompts, (2, 1)), jnp.concatenate([won, lost]), jnp.concatenate([lost, won]))
        return reduce.scalars(verdict_loss(*jnp.split(both, 2), consistency=consistency).loss), {}

    first = {
        "model": WORLD.policy.init(key),
        "head": heads.init_head(preference_strings.WIDTH, key, scale=preference_strings.WIDTH**-0.5),
    }
    method = Offline(lambda extras: extras["rows"], make_uniform(), rows_per_step, loss, optax.adam(3e-3))
    state = offline.init_state(method, first, jax.random.fold_in(key, 1), extras={"rows": pairs})
    return offline.scan_steps(method, state, steps)[0].params


def accuracy(score: Callable[..., Array], judge: Params, key: Key) -> Metrics:
    """Accuracy in both orders and swap inconsistency on fresh pairs ordered by the true reward."""
    pairs = toy.draw_pairs(key, 256)
    gap = toy.gold_reward(pairs.prompts, pairs.chosen) - toy.gold_reward(pairs.prompts, pairs.rejected)
    scores = score(judge, pairs.prompts, pairs.chosen, pairs.rejected)
    swapped = score(judge, pairs.prompts, pairs.rejected, pairs.chosen)
    right = 0.5 * (((scores > 0) == (gap > 0)).astype(jnp.float32) + ((swapped < 0) == (gap > 0)).astype(jnp.float32))
    off = jnp.abs(jax.nn.sigmoid(scores) + jax.nn.sigmoid(swapped) - 1.0)
    return {"judge/accuracy": reduce.scalars(right, gap != 0), "judge/inconsistency": reduce.scalars(off)}


def bradley_terry(judge: Params, prompts: Array, first: Array, second: Array) -> Array:
    """A scalar reward model as a pairwise score: it has no position to prefer."""
    return preference_strings.reward_of(judge, prompts, first) - preference_strings.reward_of(judge, prompts, second)


def anchor_response(prompts: Array) -> Array:
    """A fixed answer to each prompt: every other token good, the others neutral; its true reward is 6."""
    column = jnp.arange(toy.RESPONSE_TOKENS, dtype=jnp.int32)[None, :]
    kind = jnp.where(column % 2 == 0, prompts[:, :1], (prompts[:, :1] + 2) % 4)
    return toy.FIRST + kind + 4 * (column % 5)


KINDS = {  # name: score, weight of consistency
    "bt": (bradley_terry, 0.0),
    "generative": (generated, 1.0),
    "no_consistency": (generated, 0.0),
    "discriminative": (discriminated, 1.0),
}


@lru_cache(maxsize=4)
def make_start(reference_steps: int, judge_steps: int):
    """The reference and every judge, all from the same labels."""
    base = preference_strings.make_start(reference_steps=reference_steps)

    def init(key):
        parts, labels = base(key), toy.draw_pairs(jax.random.fold_in(key, 10), 1024, flip_rate=0.1)
        for k, (name, (score, c)) in enumerate(KINDS.items()):
            own = jax.random.fold_in(key, 20 + k)
            if name == "bt":
                parts[name] = preference_strings.fit_reward(parts["reference"], labels, own, steps=judge_steps)
            else:
                parts[name] = fit(score, labels, own, steps=judge_steps, consistency=c)
        return parts

    return init


@lru_cache(maxsize=8)
def make_measure(judge: str):
    """The policy against the truth, its judge against the truth."""

    def measure(params, key):
        found = preference_strings.measure_parts(params, key)
        prompts = toy.draw_prompts(jax.random.fold_in(key, 5), 256)
        drawn = strings.sample(preference_strings.WORLD, params["policy"], prompts, jax.random.fold_in(key, 6))
        better = toy.gold_reward(prompts, drawn) > toy.gold_reward(prompts, anchor_response(prompts))
        found["eval/beats_anchor"] = reduce.scalars(better.astype(jnp.float32))
        return found | accuracy(KINDS[judge][0], params[judge], jax.random.fold_in(key, 7))

    return measure
