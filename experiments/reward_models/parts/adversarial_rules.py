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

    def fight(state, own):
        open_to = state.avoided == 0
        flaw = jax.random.categorical(own, jnp.where(open_to | ~jnp.any(open_to), 0.0, -jnp.inf))
        return duel(state, flaw.astype(jnp.int32)), None

    def round_(state, k):
        here = jax.random.fold_in(key, k)
        state, _ = jax.lax.scan(fight, state, jax.random.split(jax.random.fold_in(here, 0), duels))
        if not examples:
            return state, None
        prompts, replies = task.draw_behaviour(jax.random.fold_in(here, 1), examples)
        labels = task.utility(prompts, replies) > good_utility
        rows = task.attributes(prompts, replies), labels
        return jax.lax.scan(lambda state, row: (reflected(state, *row), None), state, rows)

    return jax.lax.scan(round_, started(start), jnp.arange(rounds, dtype=jnp.int32))[0]


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


# --- labels by agents that look up, debate and judge


def similarity(task: Replies, first: Int[Array, "N T"], second: Int[Array, "M T"]) -> Float[Array, "N M"]:
    """Cosine of the counts of tokens of replies, 0 where one is empty.

    >>> import jax.numpy as jnp
    >>> one, two = jnp.array([[8, 8, 11, 31]]), jnp.array([[8, 31, 31, 31], [11, 11, 11, 31]])
    >>> [round(float(x), 3) for x in similarity(text.LANGUAGE, one, two)[0]]  # 2 / sqrt(5) and 1 / sqrt(5)
    [0.894, 0.447]
    """

    def counts(replies):
        here = replies[:, :, None] == jnp.arange(task.size, dtype=jnp.int32)[None, None, :]
        found = jnp.sum((here & task.spoken(replies)[:, :, None]).astype(jnp.float32), axis=1)
        return found / jnp.maximum(jnp.linalg.norm(found, axis=1, keepdims=True), 1e-6)

    return counts(first) @ counts(second).T


def retrieved(alike: Float[Array, "N M"], known: Float[Array, "M 5"], *, nearest: int = 4) -> Float[Array, "N 5"]:
    """The mean qualities of the most similar labelled references: what the retrieval agent hands to the debate.

    >>> import jax.numpy as jnp
    >>> known = jnp.array([[0.0] * 5, [0.5] * 5, [1.0] * 5])
    >>> retrieved(jnp.array([[0.1, 0.9, 0.8]]), known, nearest=2)[0].tolist()
    [0.75, 0.75, 0.75, 0.75, 0.75]
    """
    _, at = jax.lax.top_k(alike, nearest)
    return jnp.mean(known[at], axis=1)


def debated(
    opinions: Float[Array, "N 5"], readings: Float[Array, "N R 5"], *, level: float = 0.25
) -> tuple[Bool[Array, "N 5"], Int[Array, "N 5"]]:
    """``(charges that stand, times each quality was argued)`` after as many rounds as there are readings.

    Each round the critic charges the quality that looks worst among those not yet settled; the advocate reads the
    reply again, and the opinion of that quality becomes the mean of all readings of it so far. A quality is settled
    once it was argued twice. The judge lets a charge stand where the opinion is below ``level`` at the end.

    From "Igniting Creative Writing in Small Language Models: LLM-as-a-Judge versus Multi-Agent Refined Rewards",
    arXiv:2508.21476, section 3.1: an advocate and a critic argue with what was retrieved, a judge rules, a reflecting
    agent looks at the ruling again. Differs from the paper, where all of them are language models.

    >>> import jax.numpy as jnp
    >>> first = jnp.array([[0.9, 0.9, 0.1, 0.9, 0.3]])
    >>> again = jnp.array([[[0.9, 0.9, 0.6, 0.9, 0.0], [0.9, 0.9, 0.6, 0.9, 0.0]]])
    >>> stands, argued = debated(first, again)  # the third is cleared: (0.1 + 0.6) / 2; the fifth falls: 0.3 / 2
    >>> stands[0].tolist(), argued[0].tolist()
    ([False, False, False, False, True], [0, 0, 1, 0, 1])
    """

    def argue(state, reading):
        opinion, argued = state
        charged = jnp.argmin(jnp.where(argued < 2, opinion, jnp.inf), axis=1)
        here = jnp.arange(opinion.shape[1], dtype=jnp.int32)[None, :] == charged[:, None]
        here = here & (argued < 2)  # nothing is left to argue: all are settled
        count = (argued + 1).astype(jnp.float32)
        moved = (opinion * count + reading) / (count + 1)
        return (jnp.where(here, moved, opinion), argued + here.astype(jnp.int32)), None

    start = opinions, jnp.zeros(opinions.shape, jnp.int32)
    (opinion, argued), _ = jax.lax.scan(argue, start, jnp.moveaxis(readings, 1, 0))
    return opinion < level, argued


def debated_label(
    task: Replies, key: Key, prompts: Array, replies: Array, references: tuple[Array, Array], *, rounds: int = 6,
    noise: float = 0.3, trust: float = 0.2,
) -> Bool[Array, " N"]:  # fmt: skip
    """Whether agents that look up, debate and judge call each reply good in every respect.

    An agent's reading of a quality is the truth with an error of deviation ``noise``; the first opinion mixes one
    reading with what was ``retrieved`` from the ``references`` (replies and their qualities) by ``trust``. The agent
    that reflects withdraws a lone charge that a last reading does not confirm.
    """
    true, shape = task.attributes(prompts, replies), (prompts.shape[0], len(text.NAMES))
    first = true + noise * jax.random.normal(jax.random.fold_in(key, 0), shape)
    near = retrieved(similarity(task, replies, references[0]), references[1])
    readings = true[:, None] + noise * jax.random.normal(jax.random.fold_in(key, 1), (shape[0], rounds, shape[1]))
    stands, _ = debated((1 - trust) * first + trust * near, readings)
    last = true + noise * jax.random.normal(jax.random.fold_in(key, 2), shape)
    lone = jnp.sum(stands.astype(jnp.int32), axis=1, keepdims=True) == 1
    return ~jnp.any(stands & ~(lone & (last >= 0.25)), axis=1)


def draw_debated_pairs(
    task: Replies, key: Key, n: int, *, rounds: int = 6, references: int = 64, trust: float = 0.2
) -> text.Pairs:
    """``draw_labelled_pairs`` with labels of agents that look up labelled references and debate each reply."""
    pairs = task.draw_pairs(jax.random.fold_in(key, 0), n, sharpness=0.0)
    asked, known = task.draw_behaviour(jax.random.fold_in(key, 3), references)
    store = known, task.attributes(asked, known)
    first, second = (
        debated_label(
            task, jax.random.fold_in(key, 1 + side), pairs.prompts, replies, store, rounds=rounds, trust=trust
        )
        for side, replies in enumerate((pairs.first, pairs.second))
    )
    return ordered(pairs, first, second)


def ordered(pairs: text.Pairs, first: Bool[Array, " N"], second: Bool[Array, " N"]) -> text.Pairs:
    """The pairs with the reply that alone was labelled good in front; the others as they are."""
    swap = (second & ~first)[:, None]
    return text.Pairs(
        pairs.prompts, jnp.where(swap, pairs.second, pairs.first), jnp.where(swap, pairs.first, pairs.second)
    )


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
    return ordered(pairs, *labels)
