"""Preferences with a known truth over strings of 32 tokens: what is good depends on the prompt; all pure JAX.

A prompt is 4 tokens of ``0 .. 3``, the first of them its topic. Response tokens ``4 .. 30`` belong to class
``token % 4``: the class of the topic is good, the next one bad. ``STYLE`` (31) is worth nothing, but in the data
better responses show it more often; ``24 .. 30`` never occur in the data.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from jaxrl_llm.types import Policy

OWN_ROWS = "experiments.parts.text_pairs"  # opens ``Preferences`` of rows of one's own
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


def draw_behaviour(
    key: Array, n: int, *, draw: Callable[..., Array] = draw_responses
) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """Prompts and one response to each; ``draw`` here and below is who responds."""
    prompts = draw_prompts(jax.random.fold_in(key, 0), n)
    return prompts, draw(jax.random.fold_in(key, 1), prompts)


def chance(
    prompts: Int[Array, "N P"], first: Int[Array, "N T"], second: Int[Array, "N T"], *, flip_rate: float = 0.0,
    cycle: float = 0.0, gold: Callable[[Array, Array], Array] = gold_reward,
) -> Float[Array, " N"]:  # fmt: skip
    """The law of the labels: ``P(first chosen) = (1 - 2 f) sigmoid(gold(first) - gold(second) + cycle c) + f``.

    ``c`` is 1, 0 or -1 by the difference of the first tokens modulo 3, as in rock, paper, scissors: no reward has it.
    """
    if not 0 <= flip_rate < 0.5:
        raise ValueError(f"flip_rate={flip_rate} must lie in [0, 0.5)")
    around = (first[:, 0] - second[:, 0]) % 3
    around = jnp.where(around == 2, -1, around).astype(jnp.float32)
    gap = gold(prompts, first) - gold(prompts, second) + cycle * around
    return (1.0 - 2.0 * flip_rate) * jax.nn.sigmoid(gap) + flip_rate


def draw_pairs(
    key: Array, n: int, *, flip_rate: float = 0.0, cycle: float = 0.0, draw: Callable[..., Array] = draw_responses,
    gold: Callable[[Array, Array], Array] = gold_reward,
) -> Pairs:  # fmt: skip
    """Pairs of the behaviour policy, labelled with ``chance``."""
    keys = jax.random.split(key, 5)
    prompts = draw_prompts(keys[0], n)
    first, second = draw(keys[1], prompts), draw(keys[2], prompts)
    chosen = jax.random.uniform(keys[3], (n,))
    wins = (chosen < chance(prompts, first, second, flip_rate=flip_rate, cycle=cycle, gold=gold))[:, None]
    return Pairs(prompts, jnp.where(wins, first, second), jnp.where(wins, second, first))


# --- a behaviour to remove: "rude" tokens, worth nothing, which about half of the responses of the data are full of

RUDE, CLASSES = 20, 4  # 20 .. 23


def is_rude(responses: Int[Array, "N T"]) -> Bool[Array, "N T"]:
    """Rude tokens."""
    return (responses >= RUDE) & (responses < RUDE + CLASSES)


def draw_politeness(
    key: Array, prompts: Int[Array, "N P"], rude: Bool[Array, " N"], *, draw: Callable[..., Array] = draw_responses
) -> Int[Array, "N T"]:
    """Responses without rude tokens, or with 40 % of them; else as ``draw``."""
    keys = jax.random.split(key, 3)
    plain = draw(keys[0], prompts)
    plain = jnp.where(is_rude(plain), plain - CLASSES, plain)  # the same class, so the same worth
    insult = jax.random.randint(keys[1], plain.shape, RUDE, RUDE + CLASSES, jnp.int32)
    return jnp.where(rude[:, None] & (jax.random.uniform(keys[2], plain.shape) < 0.4), insult, plain)


def draw_mixed_company(
    key: Array, n: int, *, draw: Callable[..., Array] = draw_responses
) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """Prompts and responses, half of them rude."""
    prompts = draw_prompts(jax.random.fold_in(key, 0), n)
    rude = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, (n,))
    return prompts, draw_politeness(jax.random.fold_in(key, 2), prompts, rude, draw=draw)


def polite_reward(
    prompts: Int[Array, "N P"], responses: Int[Array, "N T"], *, gold: Callable[[Array, Array], Array] = gold_reward
) -> Float[Array, " N"]:
    """The truth where rude tokens are worth nothing."""
    return gold(prompts, jnp.where(is_rude(responses), STYLE, responses))


def bad_tokens(key: Array, prompts: Int[Array, "N P"], plain: Int[Array, "N T"]) -> Int[Array, "N T"]:
    """A bad token in every place."""
    return FIRST + (prompts[:, :1] + 1) % 4 + 4 * jax.random.randint(key, plain.shape, 0, 5, jnp.int32)


def draw_negatives(
    key: Array, n: int, *, draw: Callable[..., Array] = draw_responses, spoil: Callable[..., Array] = bad_tokens
) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """``(prompts, responses)``: half of them with 60 % bad tokens, half harmless text, every other one a copy."""
    prompts, plain = draw_behaviour(jax.random.fold_in(key, 0), n, draw=draw)
    keys = [jax.random.fold_in(key, k) for k in (1, 2)]
    bad = spoil(keys[0], prompts, plain)
    bad = jnp.where(jax.random.uniform(keys[1], plain.shape) < 0.6, bad, plain)
    place = jnp.arange(n)
    copied = jnp.where(place % 4 == 3, place - 2, place)  # 1, 1, 5, 5, ... are the harmless ones
    return prompts[copied], jnp.where((place % 2 == 0)[:, None], bad, plain)[copied]


# --- inputs that shift


def seen(prompts: Int[Array, "N P"]) -> Int[Array, "N P"]:
    """The same prompts without a 3 in the second place; that token changes nothing of what is good."""
    return jnp.concatenate([prompts[:, :1], prompts[:, 1:2] % 3, prompts[:, 2:]], axis=1)


def strange(prompts: Int[Array, "N P"]) -> Int[Array, "N P"]:
    """The same with a 3 there."""
    return jnp.concatenate([prompts[:, :1], jnp.full((prompts.shape[0], 1), 3, jnp.int32), prompts[:, 2:]], axis=1)


def disputed(prompts: Int[Array, "N P"]) -> Bool[Array, "N 1"]:
    """Prompts with topic 2 or 3, on which people may be made to disagree."""
    return prompts[:, :1] >= 2


# --- what experiments on preferences are given


class Judging(NamedTuple):
    """A decoder that reads a prompt and two responses to it and says which is better.

    ``hidden(model, prompts, first, second) -> [N, D]`` is its state behind both, ``width`` is ``D``; ``verdicts`` are
    the tokens that name the first and the second. ``alone`` is the same decoder on single responses.
    ``anchor_response(prompts) -> [N, T]`` is a fixed answer; ``offset(prompts) -> [N]`` what labels leave open.
    """

    policy: Policy
    hidden: Callable[..., Array]
    width: int
    verdicts: tuple[int, int]
    alone: strings.World
    anchor_response: Callable[[Array], Array]
    offset: Callable[[Array], Array]


class Preferences(NamedTuple):
    """Prompts, two responses to each, and who judges: the strings of this module, or rows of one's own.

    Functions have the signatures of those of this module. ``width`` is that of the policy's hidden states and ``size``
    the number of its tokens. ``liked`` is what labels go by, ``style`` the token that only looks good, ``seen`` and
    ``strange`` make prompts of training and others of given ones, ``meanings(prompts, responses) -> [N, 2]`` counts
    what is said, ``lengths(responses) -> [N]`` tokens. ``judging``: None where an experiment has no judge of pairs.
    ``spread(gold)`` is the unit of an error that an experiment adds to the truth, 0 where no error is to be added;
    None: 1.
    """

    world: strings.World
    width: int
    size: int
    style: int
    gold_reward: Callable[[Array, Array], Array]
    liked: Callable[[Array, Array], Array]
    uncovered: Callable[[Array], Array]
    draw_prompts: Callable[..., Array]
    draw_responses: Callable[..., Array]
    draw_behaviour: Callable[..., tuple[Array, Array]]
    draw_pairs: Callable[..., Pairs]
    chance: Callable[..., Array]
    is_rude: Callable[[Array], Array]
    draw_politeness: Callable[..., Array]
    draw_mixed_company: Callable[..., tuple[Array, Array]]
    polite_reward: Callable[[Array, Array], Array]
    draw_negatives: Callable[..., tuple[Array, Array]]
    seen: Callable[[Array], Array]
    strange: Callable[[Array], Array]
    disputed: Callable[[Array], Array]
    meanings: Callable[[Array, Array], Array]
    lengths: Callable[[Array], Array]
    judging: Judging | None = None
    spread: Callable[[Array], Array] | None = None


def meanings(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Int[Array, "N 2"]:
    """What a response says: how many of its tokens are good and how many bad."""
    real = (responses >= FIRST) & (responses != STYLE)
    kinds = [real & (responses % 4 == (prompts[:, :1] + k) % 4) for k in (0, 1)]
    return jnp.stack([jnp.sum(x.astype(jnp.int32), axis=1) for x in kinds], axis=1)


def lengths(responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """Twelve: nothing ends a response before its last token."""
    return jnp.full(responses.shape[:1], float(responses.shape[1]), jnp.float32)


WIDTH = 32
STRINGS = Preferences(
    world=strings.make_world(VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS, width=WIDTH), width=WIDTH, size=VOCABULARY,
    style=STYLE, gold_reward=gold_reward, liked=gold_reward, uncovered=uncovered, draw_prompts=draw_prompts,
    draw_responses=draw_responses, draw_behaviour=draw_behaviour, draw_pairs=draw_pairs, chance=chance,
    is_rude=is_rude, draw_politeness=draw_politeness, draw_mixed_company=draw_mixed_company,
    polite_reward=polite_reward, draw_negatives=draw_negatives, seen=seen, strange=strange, disputed=disputed,
    meanings=meanings, lengths=lengths,
)  # fmt: skip
# the same preferences and a base of two layers and about seven times the parameters
LARGER = STRINGS._replace(
    world=strings.make_world(VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS, width=64, layers=2, heads=4), width=64
)
