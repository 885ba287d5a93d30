"""Replies of a synthetic language whose qualities are known: safe, polite, relevant, actionable, varied; all pure JAX.

A prompt is a topic ``0 .. 3``, a tone (``BENIGN`` or ``RISKY``) and a filler ``0 .. 3``. Response tokens: ``8 .. 10``
are polite, ``11 .. 18`` on a topic (two for each), ``19 .. 22`` give an action, ``23 .. 25`` are unsafe, ``26 .. 30``
say nothing; ``END`` ends the reply. After a risky prompt actions are unsafe, too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from jaxrl_llm.types import Policy

OWN_ROWS = "experiments.reward_models.parts.text_attributes"  # opens ``Replies`` of rows of one's own
NAMES = ("safe", "polite", "relevant", "actionable", "varied")
VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 3, 12
BENIGN, RISKY = 4, 5
POLITE, TOPICAL, ACTION, UNSAFE, FILLER, END = 8, 11, 19, 23, 26, 31  # first token of each kind
TOPICS = 4
READER_WORDS, REPORT = 31, 4  # of the language of principles; tokens of a report


class Pairs(NamedTuple):
    """``N`` prompts with two replies; ``first`` is preferred."""

    prompts: Int[Array, "N P"]
    first: Int[Array, "N T"]
    second: Int[Array, "N T"]


def spoken(responses: Int[Array, "N T"]) -> Bool[Array, "N T"]:
    """The tokens before the end."""
    return jnp.cumsum((responses == END).astype(jnp.int32), axis=1) == 0


def lengths(responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """Tokens before the end."""
    return jnp.sum(spoken(responses).astype(jnp.float32), axis=1)


def _count(responses: Array, low: int | Array, high: int | Array) -> Array:
    return jnp.sum((spoken(responses) & (responses >= low) & (responses < high)).astype(jnp.float32), axis=1)


def attributes(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, "N 5"]:
    """The true qualities in [0, 1], in the order of ``NAMES``.

    Two unsafe tokens make a reply unsafe; two polite, three topical, three actions are enough; varied is the share of
    different tokens (0 for an empty reply).

    >>> import jax.numpy as jnp
    >>> reply = jnp.array([[8, 11, 19, 19, 31, 31]])
    >>> attributes(jnp.array([[0, BENIGN, 1]]), reply).round(4).tolist()
    [[1.0, 0.5, 0.33329999446868896, 0.666700005531311, 0.75]]
    >>> attributes(jnp.array([[0, RISKY, 1]]), reply).round(4).tolist()[0][0]
    0.0
    """
    topic = TOPICAL + 2 * prompts[:, :1]
    action = _count(responses, ACTION, UNSAFE)
    risky = (prompts[:, 1] == RISKY).astype(jnp.float32)
    harm = _count(responses, UNSAFE, FILLER) + risky * action
    own = _count(responses, topic, topic + 2)
    here = responses[:, :, None] == jnp.arange(VOCABULARY, dtype=jnp.int32)[None, None, :]
    kinds = jnp.sum(jnp.any(here & spoken(responses)[:, :, None], axis=1).astype(jnp.float32), axis=1)
    length = lengths(responses)
    found = (
        1.0 - jnp.minimum(harm / 2, 1.0),
        jnp.minimum(_count(responses, POLITE, TOPICAL) / 2, 1.0),
        jnp.minimum(own / 3, 1.0),
        jnp.minimum(action / 3, 1.0),
        jnp.where(length > 0, kinds / jnp.maximum(length, 1.0), 0.0),
    )
    return jnp.stack(found, axis=1)


def utility(
    prompts: Int[Array, "N P"], responses: Int[Array, "N T"], *, qualities: Callable[..., Array] = attributes
) -> Float[Array, " N"]:
    """The true worth of a reply in [0, 1]: the mean of the other qualities, times how safe it is."""
    scores = qualities(prompts, responses)
    return scores[:, 0] * jnp.sum(scores[:, 1:], axis=1) / 4


def draw_prompts(key: Array, n: int) -> Int[Array, "N P"]:
    """Uniform topics and fillers; half of the prompts are risky."""
    keys = jax.random.split(key, 2)
    words = jax.random.randint(keys[0], (n, 2), 0, TOPICS, jnp.int32)
    tone = jnp.where(jax.random.uniform(keys[1], (n, 1)) < 0.5, RISKY, BENIGN).astype(jnp.int32)
    return jnp.concatenate([words[:, :1], tone, words[:, 1:]], axis=1)


def draw_responses(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """The behaviour: each reply has a skill in [0, 1] and a length of 4 to 12 tokens that owes nothing to it.

    A token is on its topic with chance ``0.1 + 0.3 skill``, polite with ``0.2``, an action with ``0.2``, unsafe with
    ``0.3 (1 - skill)``, else it says nothing.
    """
    keys, shape = jax.random.split(key, 5), (prompts.shape[0], RESPONSE_TOKENS)
    skill = jax.random.uniform(keys[0], (shape[0], 1))
    chances = [0.1 + 0.3 * skill, 0.2 + 0.0 * skill, 0.2 + 0.0 * skill, 0.3 * (1 - skill)]
    kind = jnp.sum((jax.random.uniform(keys[1], shape)[:, :, None] > jnp.cumsum(jnp.stack(chances, 2), axis=2)), axis=2)
    within = jax.random.uniform(keys[2], shape)
    first = jnp.stack([jnp.broadcast_to(TOPICAL + 2 * prompts[:, :1], shape)]
                      + [jnp.full(shape, x, jnp.int32) for x in (POLITE, ACTION, UNSAFE, FILLER)], axis=2)  # fmt: skip
    sizes = jnp.asarray([2, 3, 4, 3, 5], jnp.int32)[kind]
    start = jnp.take_along_axis(first, kind[:, :, None], axis=2)[:, :, 0]
    words = start + jnp.minimum(jnp.floor(within * sizes.astype(jnp.float32)).astype(jnp.int32), sizes - 1)
    length = jax.random.randint(keys[3], (shape[0], 1), 4, RESPONSE_TOKENS + 1, jnp.int32)
    return jnp.where(jnp.arange(RESPONSE_TOKENS, dtype=jnp.int32)[None, :] < length, words, END)


def draw_behaviour(
    key: Array, n: int, *, draw: Callable[..., Array] = draw_responses
) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """Prompts and one reply to each; ``draw`` here and below is who replies."""
    prompts = draw_prompts(jax.random.fold_in(key, 0), n)
    return prompts, draw(jax.random.fold_in(key, 1), prompts)


def draw_pairs(
    key: Array, n: int, *, sharpness: float = 8.0, flip_rate: float = 0.0, length_bias: float = 0.0,
    draw: Callable[..., Array] = draw_responses, worth: Callable[..., Array] = utility,
) -> Pairs:  # fmt: skip
    """Two replies of the behaviour to each prompt, ordered by an annotator.

    ``P(first preferred) = sigmoid(sharpness (utility difference) + length_bias (length difference))``, turned round
    with chance ``flip_rate``.
    """
    if not 0 <= flip_rate < 0.5:
        raise ValueError(f"flip_rate={flip_rate} must lie in [0, 0.5)")
    keys = jax.random.split(key, 5)
    prompts = draw_prompts(keys[0], n)
    one, two = draw(keys[1], prompts), draw(keys[2], prompts)
    better = sharpness * (worth(prompts, one) - worth(prompts, two)) + length_bias * (lengths(one) - lengths(two))
    wins = jax.random.uniform(keys[3], (n,)) < jax.nn.sigmoid(better)
    wins = (wins ^ (jax.random.uniform(keys[4], (n,)) < flip_rate))[:, None]
    return Pairs(prompts, jnp.where(wins, one, two), jnp.where(wins, two, one))


def benign(prompts: Int[Array, "N P"]) -> Bool[Array, " N"]:
    """Prompts after which an action does no harm."""
    return prompts[:, 1] == BENIGN


class Reading(NamedTuple):
    """A decoder that reads a principle, a prompt and a reply and answers yes or no.

    ``hidden(model, words [N, 2], prompts, replies) -> [N, D]`` is its state behind all; word ``w`` of the language of
    principles, which has ``READER_WORDS``, is token ``first + w``. A reply has quality k where its score is above
    ``cuts[k]``. ``critic`` is the world of a judge that writes: prompt, reply and two words, then a report.
    """

    policy: Policy
    hidden: Callable[..., Array]
    first: int
    cuts: tuple[float, ...]
    critic: strings.World


class Replies(NamedTuple):
    """Prompts, replies and their qualities: the language of this module, or rows of one's own.

    Functions have the signatures of those of this module; ``size`` is the number of tokens, ``reading`` None where an
    experiment has no reader of principles.
    """

    world: strings.World
    size: int
    spoken: Callable[[Array], Array]
    lengths: Callable[[Array], Array]
    benign: Callable[[Array], Array]
    attributes: Callable[[Array, Array], Array]
    utility: Callable[[Array, Array], Array]
    draw_prompts: Callable[..., Array]
    draw_behaviour: Callable[..., tuple[Array, Array]]
    draw_pairs: Callable[..., Pairs]
    reading: Reading | None = None
    agents: Any = None  # ``writing_agents.Agents``: language models in the roles of judges


LANGUAGE = Replies(
    world=strings.make_world(VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS, end=END), size=VOCABULARY, spoken=spoken,
    lengths=lengths, benign=benign, attributes=attributes, utility=utility, draw_prompts=draw_prompts,
    draw_behaviour=draw_behaviour, draw_pairs=draw_pairs,
)  # fmt: skip


def draw_tastes(task: Replies, key: Array, rules: int) -> Float[Array, "K V"]:
    """What each rater likes that has nothing to do with its rule: a weight for every token."""
    return jax.random.normal(key, (rules, task.size))


def rate(
    task: Replies, tastes: Float[Array, "K V"], key: Array, prompts: Int[Array, "N P"], responses: Int[Array, "N T"],
    *, levels: int, careless: tuple[float, ...], worth: float = 0.6, cut: float = 0.5,
) -> Int[Array, "N K"]:  # fmt: skip
    """Ratings ``0 .. levels - 1`` of as many rules as there are tastes.

    Rule k has the highest level where ``worth`` parts of the utility and the rest of one quality are above ``cut``,
    else the lowest. With chance ``careless[k]`` its rater goes by taste, all levels equally often over the replies. A
    taste is of the words, so that a head learns it: dice would be averaged away, and a head fitted to them would be
    small by itself. Rules of the second half have the qualities in the opposite order.
    """
    rules, count = len(careless), len(NAMES)
    place = jnp.arange(rules, dtype=jnp.int32) % count
    quality = jnp.where(jnp.arange(rules) < count, place, count - 1 - place)
    seen = worth * task.utility(prompts, responses)[:, None]
    seen = seen + (1 - worth) * task.attributes(prompts, responses)[:, quality]
    kept = jnp.where(seen > cut, levels - 1, 0).astype(jnp.int32)
    there = task.spoken(responses)
    liked = jnp.sum(jnp.where(there[:, :, None], tastes.T[responses], 0.0), axis=1)
    liked = liked / jnp.sqrt(jnp.maximum(jnp.sum(there.astype(jnp.float32), axis=1), 1.0))[:, None]
    rank = jnp.argsort(jnp.argsort(liked, axis=0), axis=0)
    by_taste = (rank * levels // liked.shape[0]).astype(jnp.int32)
    return jnp.where(jax.random.uniform(key, kept.shape) < jnp.asarray(careless)[None, :], by_taste, kept)
