"""Preferences with a known truth over strings of 32 tokens: what is good depends on the prompt; all pure JAX.

A prompt is 4 tokens of ``0 .. 3``, the first of them its topic. Response tokens ``4 .. 30`` belong to class
``token % 4``: the class of the topic is good, the next one bad. ``STYLE`` (31) is worth nothing, but in the data
better responses show it more often; ``24 .. 30`` never occur in the data.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

OWN_ROWS = "experiments.parts.text_pairs"  # the same names over rows of one's own
VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 4, 12
FIRST, UNSEEN, STYLE = 4, 24, 31  # first response token; first token that the data lacks; the spurious one


class Pairs(NamedTuple):
    """``N`` prompts with a chosen and a rejected response."""

    prompts: Int[Array, "N P"]
    chosen: Int[Array, "N T"]
    rejected: Int[Array, "N T"]


def gold_reward(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """The truth: +1 a good token, -1 a bad one, -0.1 a token equal to the one before it.

    >>> import jax.numpy as jnp
    >>> x, y = jnp.array([[2, 0, 1, 3]]), jnp.array([[6, 6, 10, 7, 5, 31]])
    >>> round(float(gold_reward(x, y)[0]), 4)  # good, good again, good, bad, neutral, style
    1.9
    """
    topic = prompts[:, :1]
    real = (responses >= FIRST) & (responses != STYLE)
    good, bad = real & (responses % 4 == topic), real & (responses % 4 == (topic + 1) % 4)
    repeat = responses[:, 1:] == responses[:, :-1]
    worth = jnp.sum(good.astype(jnp.float32), axis=1) - jnp.sum(bad.astype(jnp.float32), axis=1)
    return worth - 0.1 * jnp.sum(repeat.astype(jnp.float32), axis=1)


def uncovered(responses: Int[Array, "N T"]) -> Bool[Array, "N T"]:
    """Tokens that no response of the data has."""
    return (responses < FIRST) | ((responses >= UNSEEN) & (responses != STYLE))


def draw_prompts(key: Array, n: int) -> Int[Array, "N P"]:
    """Uniform prompts."""
    return jax.random.randint(key, (n, PROMPT_TOKENS), 0, FIRST, jnp.int32)


def draw_responses(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """The behaviour policy: each response has a skill ``s`` in [0, 1].

    A token is ``STYLE`` with chance ``0.2 s``, else good with chance ``0.5 s``, else any token of ``4 .. 23``.
    """
    keys, shape = jax.random.split(key, 5), (prompts.shape[0], RESPONSE_TOKENS)
    skill = jax.random.uniform(keys[0], (shape[0], 1))
    good = FIRST + prompts[:, :1] + 4 * jax.random.randint(keys[1], shape, 0, (UNSEEN - FIRST) // 4, jnp.int32)
    anything = jax.random.randint(keys[2], shape, FIRST, UNSEEN, jnp.int32)
    plain = jnp.where(jax.random.uniform(keys[3], shape) < 0.5 * skill, good, anything)
    return jnp.where(jax.random.uniform(keys[4], shape) < 0.2 * skill, STYLE, plain)


def draw_behaviour(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """Prompts and one response to each."""
    prompts = draw_prompts(jax.random.fold_in(key, 0), n)
    return prompts, draw_responses(jax.random.fold_in(key, 1), prompts)


def chance(
    prompts: Int[Array, "N P"], first: Int[Array, "N T"], second: Int[Array, "N T"], *, flip_rate: float = 0.0,
    cycle: float = 0.0,
) -> Float[Array, " N"]:  # fmt: skip
    """The law of the labels: ``P(first chosen) = (1 - 2 f) sigmoid(gold(first) - gold(second) + cycle c) + f``.

    ``c`` is 1, 0 or -1 by the difference of the first tokens modulo 3, as in rock, paper, scissors: no reward has it.
    """
    if not 0 <= flip_rate < 0.5:
        raise ValueError(f"flip_rate={flip_rate} must lie in [0, 0.5)")
    around = (first[:, 0] - second[:, 0]) % 3
    around = jnp.where(around == 2, -1, around).astype(jnp.float32)
    gap = gold_reward(prompts, first) - gold_reward(prompts, second) + cycle * around
    return (1.0 - 2.0 * flip_rate) * jax.nn.sigmoid(gap) + flip_rate


def draw_pairs(key: Array, n: int, *, flip_rate: float = 0.0, cycle: float = 0.0) -> Pairs:
    """Pairs of the behaviour policy, labelled with ``chance``."""
    keys = jax.random.split(key, 5)
    prompts = draw_prompts(keys[0], n)
    first, second = draw_responses(keys[1], prompts), draw_responses(keys[2], prompts)
    wins = jax.random.uniform(keys[3], (n,)) < chance(prompts, first, second, flip_rate=flip_rate, cycle=cycle)
    wins = wins[:, None]
    return Pairs(prompts, jnp.where(wins, first, second), jnp.where(wins, second, first))


# --- a behaviour to remove: "rude" tokens, worth nothing, which about half of the responses of the data are full of

RUDE, CLASSES = 20, 4  # 20 .. 23


def is_rude(responses: Int[Array, "N T"]) -> Bool[Array, "N T"]:
    """Rude tokens."""
    return (responses >= RUDE) & (responses < RUDE + CLASSES)


def draw_politeness(key: Array, prompts: Int[Array, "N P"], rude: Bool[Array, " N"]) -> Int[Array, "N T"]:
    """Responses without rude tokens, or with 40 % of them; else as ``draw_responses``."""
    keys = jax.random.split(key, 3)
    plain = draw_responses(keys[0], prompts)
    plain = jnp.where(is_rude(plain), plain - CLASSES, plain)  # the same class, so the same worth
    insult = jax.random.randint(keys[1], plain.shape, RUDE, RUDE + CLASSES, jnp.int32)
    return jnp.where(rude[:, None] & (jax.random.uniform(keys[2], plain.shape) < 0.4), insult, plain)


def draw_mixed_company(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """Prompts and responses, half of them rude."""
    prompts = draw_prompts(jax.random.fold_in(key, 0), n)
    rude = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, (n,))
    return prompts, draw_politeness(jax.random.fold_in(key, 2), prompts, rude)


def polite_reward(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """``gold_reward`` where rude tokens are worth nothing."""
    return gold_reward(prompts, jnp.where(is_rude(responses), STYLE, responses))
