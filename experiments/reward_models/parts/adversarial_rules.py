"""A detector of flawed replies whose rules grow by play against a generator that learns which flaws are seen.

A rule is a quality of ``attribute_text`` and the level that it must reach. The players are scripts: the generator
writes a reply that breaks one rule, the detector calls it bad if that rule is among its own.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from experiments.reward_models.parts import attribute_text as text
from jaxrl_llm.types import Key, Params

LEVELS = (0.25, 0.5)
RULES = tuple((quality, level) for quality in range(len(text.NAMES)) for level in LEVELS)
MOST = 10


class Strategies(NamedTuple):
    """What the generator avoids because it was seen, and the rules of the detector, the newest last."""

    avoided: tuple[int, ...]
    rules: tuple[int, ...]


def merged(rules: Sequence[int], more: Sequence[int], *, most: int = MOST) -> tuple[int, ...]:
    """Both without repeats, the oldest ones dropped beyond ``most``.

    >>> merged((3, 1), (1, 2)), merged(range(10), (10,))[0]
    ((3, 1, 2), 1)
    """
    every = list(dict.fromkeys([*rules, *more]))
    return tuple(every[-most:])


def duel(strategies: Strategies, flaw: int) -> Strategies:
    """One round on a reply that breaks the rule ``flaw``: who was fooled learns.

    From "Igniting Creative Writing in Small Language Models: LLM-as-a-Judge versus Multi-Agent Refined Rewards",
    arXiv:2508.21476, section 3.2. Differs from the paper, where both strategies are texts that language models rewrite.
    """
    if flaw in strategies.rules:  # seen: the generator will try something else
        return strategies._replace(avoided=merged(strategies.avoided, (flaw,)))
    return strategies._replace(rules=merged(strategies.rules, (flaw,)))


def breaks(scores: Sequence[float], rule: int) -> bool:
    """Whether a reply with these qualities breaks a rule."""
    quality, level = RULES[rule]
    return scores[quality] < level


def reflected(strategies: Strategies, scores: Sequence[float], good: bool) -> Strategies:
    """What a labelled example teaches the detector: a rule against what it passed wrongly, none against the good."""
    broken = [rule for rule in strategies.rules if breaks(scores, rule)]
    if good and broken:
        return strategies._replace(rules=tuple(rule for rule in strategies.rules if rule not in broken))
    if not good and not broken:
        found = [rule for rule in range(len(RULES)) if breaks(scores, rule)]
        # the worst quality explains the label best
        worst = sorted(found, key=lambda rule: scores[RULES[rule][0]])[:1]
        return strategies._replace(rules=merged(strategies.rules, worst))
    return strategies


def play(
    start: Sequence[int], *, rounds: int, duels: int = 4, examples: int = 4, good_utility: float = 0.35, seed: int = 0
) -> Strategies:
    """Rounds of duels and of reflection on labelled examples of the behaviour; ``examples=0`` leaves these out."""
    rng = np.random.default_rng(seed)
    prompts, replies = text.draw_behaviour(jax.random.key(seed), max(1, rounds * examples))
    labelled = np.asarray(text.attributes(prompts, replies)), np.asarray(text.utility(prompts, replies))
    strategies = Strategies((), tuple(start))
    for k in range(rounds):
        for _ in range(duels):
            open_to = [rule for rule in range(len(RULES)) if rule not in strategies.avoided] or list(range(len(RULES)))
            strategies = duel(strategies, int(rng.choice(open_to)))
        for j in range(k * examples, (k + 1) * examples):
            strategies = reflected(strategies, labelled[0][j].tolist(), bool(labelled[1][j] > good_utility))
    return strategies


def kept_rules(scores: Float[Array, "B 5"], rules: Sequence[int]) -> Bool[Array, "B R"]:
    """Which of the rules each reply keeps."""
    quality = jnp.asarray([RULES[r][0] for r in rules], jnp.int32)
    level = jnp.asarray([RULES[r][1] for r in rules], jnp.float32)
    return scores[:, quality] >= level[None, :]


def make_detector(rules: Sequence[int]) -> Callable[[Params, Array, Array], Array]:
    """The ``Proxy`` of a detector: the share of its rules that a reply keeps; 1 is the verdict good.

    Raises:
      ValueError: for a detector without rules.
    """
    if not rules:
        raise ValueError("a detector without rules calls everything good; give it at least one")

    def detector(params: Params, prompts: Array, responses: Array) -> Array:
        kept = kept_rules(text.attributes(prompts, responses), rules).astype(jnp.float32)
        return jnp.sum(kept, axis=1) / len(rules)

    return detector


def strict_label(scores: Float[Array, "B 5"], *, level: float = 0.25) -> Bool[Array, " B"]:
    """The judge agent's rule: 1 only for a reply that is good in every respect.

    From arXiv:2508.21476, section 3.1.
    """
    return jnp.all(scores >= level, axis=1)


def draw_labelled_pairs(key: Key, n: int, *, error_rate: float, strict: bool) -> text.Pairs:
    """Pairs of a reply labelled good and one labelled bad, as far as the labels tell; else in the order drawn.

    Args:
      error_rate: chance that a label is wrong: several agents that check each other err less than one.
      strict: good in every respect; else above the middle of the utility.
    """
    pairs = text.draw_pairs(jax.random.fold_in(key, 0), n, sharpness=0.0)
    labels = []
    for side, replies in enumerate((pairs.first, pairs.second)):
        scores = text.attributes(pairs.prompts, replies)
        good = strict_label(scores) if strict else text.utility(pairs.prompts, replies) > 0.25
        labels.append(good ^ (jax.random.uniform(jax.random.fold_in(key, 1 + side), (n,)) < error_rate))
    swap = (labels[1] & ~labels[0])[:, None]
    return text.Pairs(
        pairs.prompts, jnp.where(swap, pairs.second, pairs.first), jnp.where(swap, pairs.first, pairs.second)
    )
