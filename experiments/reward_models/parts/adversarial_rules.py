"""A detector of flawed replies whose rules grow by play against a generator that learns which flaws are seen.

A rule is a quality of ``attribute_text`` and the level that it must reach; there are fifty, and a detector holds ten at
most. The players are scripts: the generator writes a reply that breaks one rule, the detector calls it bad if that rule
is among its own. When a detector judges a policy it reads the text: a fitted model tells it the qualities.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.reward_models.parts import attribute_rewards
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm.types import Key, Params

LEVELS = tuple(round(0.05 + 0.1 * k, 2) for k in range(10))
RULES = tuple((quality, level) for quality in range(len(text.NAMES)) for level in LEVELS)
MOST = 10


class Strategies(NamedTuple):
    """When each rule was learnt, 0: never: flaws that the generator avoids, rules of the detector; and the time."""

    avoided: Int[Array, " R"]
    rules: Int[Array, " R"]
    clock: Int[Array, ""]


def started(rules: Sequence[int]) -> Strategies:
    """A detector with some rules and a generator that avoids nothing.

    Raises:
      ValueError: for a detector without rules, which calls everything good.
    """
    if not rules:
        raise ValueError("a detector without rules calls everything good; give it at least one")
    stamps = jnp.zeros((len(RULES),), jnp.int32).at[jnp.asarray(rules, jnp.int32)].set(1)
    return Strategies(jnp.zeros((len(RULES),), jnp.int32), stamps, jnp.asarray(1, jnp.int32))


def learnt(stamps: Int[Array, " R"], rule: Array, clock: Array, *, most: int = MOST) -> Int[Array, " R"]:
    """One more rule, if it is new; the oldest one is forgotten beyond ``most``.

    >>> learnt(jnp.array([1, 2, 0]), jnp.array(2), jnp.array(3), most=2).tolist()
    [0, 2, 3]
    >>> learnt(jnp.array([1, 2, 0]), jnp.array(0), jnp.array(3), most=2).tolist()  # known already
    [1, 2, 0]
    """
    known = stamps[rule] > 0
    more = stamps.at[rule].set(clock)
    oldest = jnp.argmin(jnp.where(more > 0, more, jnp.iinfo(jnp.int32).max))
    full = jnp.sum((more > 0).astype(jnp.int32)) > most
    return jnp.where(known, stamps, jnp.where(full, more.at[oldest].set(0), more))


def duel(strategies: Strategies, flaw: Int[Array, ""]) -> Strategies:
    """One round on a reply that breaks the rule ``flaw``: who was fooled learns.

    From "Igniting Creative Writing in Small Language Models: LLM-as-a-Judge versus Multi-Agent Refined Rewards",
    arXiv:2508.21476, section 3.2. Differs from the paper, where both strategies are texts that language models rewrite.
    """
    clock, seen = strategies.clock + 1, strategies.rules[flaw] > 0
    avoided = learnt(strategies.avoided, flaw, clock, most=len(RULES))
    rules = learnt(strategies.rules, flaw, clock)
    return Strategies(jnp.where(seen, avoided, strategies.avoided), jnp.where(seen, strategies.rules, rules), clock)


def breaks(scores: Float[Array, "B 5"]) -> Bool[Array, "B R"]:
    """Which rules replies with these qualities break."""
    quality = jnp.asarray([q for q, _ in RULES], jnp.int32)
    level = jnp.asarray([at for _, at in RULES], jnp.float32)
    return scores[:, quality] < level[None, :]


def reflected(strategies: Strategies, scores: Float[Array, " 5"], good: Bool[Array, ""]) -> Strategies:
    """What a labelled example teaches the detector: a rule against what it passed wrongly, none against the good.

    The worst quality explains a bad label best, and of its broken rules the one that asks for least.
    """
    broken = breaks(scores[None])[0]
    held = strategies.rules > 0
    fewer = jnp.where(broken, 0, strategies.rules)
    quality = jnp.asarray([q for q, _ in RULES], jnp.int32)
    worth = jnp.where(broken, scores[quality], jnp.inf)
    added = learnt(strategies.rules, jnp.argmin(worth), strategies.clock + 1)
    missed = ~good & ~jnp.any(broken & held) & jnp.any(broken)
    rules = jnp.where(good, fewer, jnp.where(missed, added, strategies.rules))
    return Strategies(strategies.avoided, rules, strategies.clock + 1)


def play(
    task: Replies,
    key: Key,
    start: Sequence[int],
    *,
    rounds: int,
    duels: int = 4,
    examples: int = 4,
    good_utility: float = 0.35,
) -> Strategies:
    """Rounds of duels and of reflection on labelled examples of the behaviour; ``examples=0`` leaves these out.

    Every seed plays its own games.
    """
    state = started(start)
    for k in range(rounds):
        here = jax.random.fold_in(key, k)

        def fight(state, own):
            open_to = state.avoided == 0
            flaw = jax.random.categorical(own, jnp.where(open_to | ~jnp.any(open_to), 0.0, -jnp.inf))
            return duel(state, flaw.astype(jnp.int32)), None

        state, _ = jax.lax.scan(fight, state, jax.random.split(jax.random.fold_in(here, 0), duels))
        if not examples:
            continue
        prompts, replies = task.draw_behaviour(jax.random.fold_in(here, 1), examples)
        labels = task.utility(prompts, replies) > good_utility
        rows = task.attributes(prompts, replies), labels
        state, _ = jax.lax.scan(lambda state, row: (reflected(state, *row), None), state, rows)
    return state


def kept_share(scores: Float[Array, "B 5"], rules: Bool[Array, " R"]) -> Float[Array, " B"]:
    """The share of the rules that each reply keeps; 1, the verdict good, where all rules were dropped."""
    kept = (~breaks(scores) & rules[None, :]).astype(jnp.float32)
    count = jnp.sum(rules.astype(jnp.float32))
    return jnp.where(count > 0, jnp.sum(kept, axis=1) / jnp.maximum(count, 1.0), 1.0)


def detector(task: Replies, params: Params, prompts: Array, responses: Array) -> Array:
    """The ``Proxy`` of ``params["rules"]``: what is kept of them, by the qualities that the fitted reader sees."""
    read = attribute_rewards.scores(task, params["reward"], prompts, responses)
    return kept_share(jnp.clip(read, 0.0, 1.0), params["rules"] > 0)


def draw_labelled(task: Replies, key: Key, n: int) -> tuple[Array, Array, Array]:
    """Replies of the behaviour and their qualities: what the reader learns from."""
    prompts, responses = task.draw_behaviour(key, n)
    return prompts, responses, task.attributes(prompts, responses)


def strict_label(scores: Float[Array, "B 5"], *, level: float = 0.25) -> Bool[Array, " B"]:
    """The judge agent's rule: 1 only for a reply that is good in every respect.

    From arXiv:2508.21476, section 3.1.
    """
    return jnp.all(scores >= level, axis=1)


def draw_labelled_pairs(task: Replies, key: Key, n: int, *, error_rate: float, strict: bool) -> text.Pairs:
    """Pairs of a reply labelled good and one labelled bad, as far as the labels tell; else in the order drawn.

    Args:
      error_rate: chance that a label is wrong: several agents that check each other err less than one.
      strict: good in every respect; else above the middle of the utility.
    """
    pairs = task.draw_pairs(jax.random.fold_in(key, 0), n, sharpness=0.0)
    labels = []
    for side, replies in enumerate((pairs.first, pairs.second)):
        scores = task.attributes(pairs.prompts, replies)
        good = strict_label(scores) if strict else task.utility(pairs.prompts, replies) > 0.25
        labels.append(good ^ (jax.random.uniform(jax.random.fold_in(key, 1 + side), (n,)) < error_rate))
    swap = (labels[1] & ~labels[0])[:, None]
    return text.Pairs(
        pairs.prompts, jnp.where(swap, pairs.second, pairs.first), jnp.where(swap, pairs.first, pairs.second)
    )
