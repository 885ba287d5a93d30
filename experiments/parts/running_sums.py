"""Parts of experiments on credit for steps, over running sums: values of prefixes by rollouts, pairs at a step."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.parts import running_sums_task as toy
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.types import Key, Metrics, Params

WORLD = strings.make_world(toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, width=48, heads=4)


class StepPairs(NamedTuple):
    """Two responses that agree before ``start``; only what comes from there counts."""

    prompts: Array
    chosen: Array
    rejected: Array
    start: Array  # [N]
    kept: Array  # [N]


def completions(params: Params, prompts: Array, responses: Array, steps: int, key: Key, samples: int) -> Array:
    """``samples`` whole responses ``[N, samples, T]`` that go on from the first ``steps`` steps of each response."""
    prefix = jnp.concatenate([prompts, responses[:, :steps]], axis=1)
    world = WORLD._replace(prompt_tokens=WORLD.prompt_tokens + steps, response_tokens=WORLD.response_tokens - steps)
    drawn = strings.sample(world, params, prefix, key, samples=samples)
    whole = jnp.concatenate([jnp.repeat(responses[:, :steps], samples, axis=0), drawn], axis=1)
    return whole.reshape(prompts.shape[0], samples, -1)


def prefix_values(params: Params, prompts: Array, responses: Array, key: Key, *, samples: int = 4):
    """``(values [N, T + 1], completions [N, T, samples, T])``: the mean success of rollouts from every prefix."""
    values, drawn = [], []
    for step in range(toy.RESPONSE_TOKENS):
        found = completions(params, prompts, responses, step, jax.random.fold_in(key, step), samples)
        hits = toy.right(jnp.repeat(prompts, samples, axis=0), found.reshape(-1, toy.RESPONSE_TOKENS))
        values.append(jnp.mean(hits.reshape(-1, samples).astype(jnp.float32), axis=1))
        drawn.append(found)
    values.append(toy.right(prompts, responses).astype(jnp.float32))
    return jnp.stack(values, axis=1), jnp.stack(drawn, axis=1)


def step_pairs(params: Params, key: Key, *, problems: int, where: Callable[[Array, Key], Array]) -> StepPairs:
    """Wrong responses of the policy against a right completion from the same prefix, at the step that ``where`` picks.

    Args:
      where: ``(advantages [N, T], key) -> [N]``: the step to correct.
    """
    keys = jax.random.split(key, 4)
    prompts = toy.cued(keys[0], problems, 0.8)
    responses = strings.sample(WORLD, params, prompts, keys[1])
    values, drawn = prefix_values(params, prompts, responses, keys[2])
    start = where(toy.values_to_advantages(values), keys[3]).astype(jnp.int32)
    others = jnp.take_along_axis(drawn, start[:, None, None, None], axis=1)[:, 0]
    flat = others.reshape(-1, toy.RESPONSE_TOKENS)
    hits = toy.right(jnp.repeat(prompts, others.shape[1], axis=0), flat).reshape(others.shape[:2])
    chosen = jnp.take_along_axis(others, jnp.argmax(hits, axis=1)[:, None, None], axis=1)[:, 0]
    wrong = ~toy.right(prompts, responses)
    return StepPairs(prompts, chosen, responses, start, wrong & jnp.any(hits, axis=1))


def first_pit(advantages: Array, key: Key) -> Array:
    """The step with the most negative advantage, the first of equals."""
    return jnp.argmin(advantages, axis=1)


def any_step(advantages: Array, key: Key) -> Array:
    """A random step: credit that is shuffled."""
    return jax.random.randint(key, advantages.shape[:1], 0, advantages.shape[1], jnp.int32)


def whole_response(advantages: Array, key: Key) -> Array:
    """The first step: plain DPO on whole responses."""
    return jnp.zeros(advantages.shape[:1], jnp.int32)


def logp_from(params: Params, prompts: Array, responses: Array, start: Array) -> Array:
    """Log-probability of the steps from ``start`` on, ``[N]``."""
    logp = strings.token_logp(WORLD, params, prompts, responses)
    return jnp.sum(jnp.where(jnp.arange(logp.shape[1])[None, :] >= start[:, None], logp, 0.0), axis=1)


def measure(params: Params, key: Key) -> Metrics:
    """Accuracy on plain problems, and where the cue fits and where it is broken."""
    found = {}
    for k, (name, share) in enumerate((("eval/cued", 1.0), ("eval/broken", 0.0))):
        prompts = toy.cued(jax.random.fold_in(key, 2 * k), 256, share)
        drawn = strings.sample(WORLD, params, prompts, jax.random.fold_in(key, 2 * k + 1))
        found[name] = reduce.scalars(toy.right(prompts, drawn).astype(jnp.float32))
    return found | {"eval/accuracy": 0.5 * (found["eval/cued"] + found["eval/broken"])}


@lru_cache(maxsize=8)
def make_rows(problems: int, where: Callable) -> Callable[[Params, Key], tuple[StepPairs, Array]]:
    """Pairs at a step and the log-probabilities of the policy that made them."""

    def rows(params, key):
        pairs = step_pairs(params, key, problems=problems, where=where)
        ref = [logp_from(params, pairs.prompts, y, pairs.start) for y in (pairs.chosen, pairs.rejected)]
        return pairs, jnp.stack(ref, axis=1)

    return rows


@lru_cache(maxsize=8)
def make_answers(problems: int, own: bool) -> Callable[[Params, Key], tuple[Array, Array, Array]]:
    """A teacher's answers, or those of one's own that are right."""

    def rows(params, key):
        prompts = toy.cued(jax.random.fold_in(key, 0), problems, 0.8)
        given = strings.sample(WORLD, params, prompts, jax.random.fold_in(key, 1)) if own else toy.solution(prompts)
        return prompts, given, toy.right(prompts, given)

    return rows
