"""Judgements of one named quality, from what annotators write: readers of a principle and a reply that say yes or no.

A principle is a quality (those of ``attribute_text`` and ``worth``, the true utility) and whether it is wanted or
unwanted; in words it is a word for the sign (two are in use) and a word for the quality (three). A reply has a quality
where its score is above ``CUTS``. Combinations named ``HELD_OUT`` are in no training data. An annotator writes a
sentence of six words about one reply: somewhere in it the two words of a principle, at its end the verdict.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from experiments.reward_models.parts import attribute_rewards
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm import reduce
from jaxrl_llm.losses.reward import log_odds_loss
from jaxrl_llm.types import Key, Params

QUALITIES = (*text.NAMES, "worth")
WANTED, UNWANTED = 0, 1
CUTS = (0.75, 0.25, 0.25, 0.25, 0.9, 0.3)  # near the median of the behaviour
HELD_OUT = ((1, UNWANTED), (3, UNWANTED))  # impolite, without actions
SYNONYMS, SIGN_WORDS = 3, 2
# the language of principles: words for qualities, words for signs, then what verdicts and reports are made of
SIGNS = SYNONYMS * len(QUALITIES)
YES, NO, PARTLY, LEVEL = SIGNS + 4, SIGNS + 5, SIGNS + 6, SIGNS + 7
LEVELS, DONE = 5, LEVEL + 5
SENTENCE, WIDTH = 6, 8  # words of an annotator's sentence; of the vectors of phrases
OTHER = 40  # first of four words that say nothing
_FIRST = text.VOCABULARY
READER = strings.make_world(_FIRST + text.READER_WORDS, 2 + text.PROMPT_TOKENS + text.RESPONSE_TOKENS, 1)
CRITIC = strings.make_world(
    _FIRST + text.READER_WORDS, text.PROMPT_TOKENS + text.RESPONSE_TOKENS + 2, text.REPORT, end=_FIRST + DONE
)
_RNG = np.random.default_rng(7)
_MEANINGS = np.linalg.qr(_RNG.normal(size=(WIDTH, WIDTH)))[0][: len(QUALITIES)]
_VECTORS = np.repeat(_MEANINGS, SYNONYMS, axis=0) + _RNG.normal(0, 0.08, (SYNONYMS * len(QUALITIES), WIDTH))


def _hidden(reader: Params, words: Array, prompts: Array, replies: Array) -> Array:
    tokens = jnp.concatenate([_FIRST + words, prompts, replies], axis=1)
    rows = strings.whole(READER, tokens, tokens[:, :0])
    return READER.policy.hidden(reader, rows.tokens, rows.positions, rows.segment_ids)[:, -1]


LANGUAGE = text.LANGUAGE._replace(reading=text.Reading(READER.policy, _hidden, _FIRST, CUTS, CRITIC))


class Feedback(NamedTuple):
    """What annotators wrote of each reply, and what was extracted: words of a principle and a verdict."""

    sentences: Int[Array, "N A S"]
    words: Int[Array, "N A 2"]
    verdicts: Int[Array, "N A"]


def qualities(task: Replies, prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, "N 6"]:
    """The true scores of all qualities."""
    worth = task.utility(prompts, responses)[:, None]
    return jnp.concatenate([task.attributes(prompts, responses), worth], axis=1)


def satisfied(
    task: Replies, prompts: Int[Array, "N P"], responses: Int[Array, "N T"], principles: Int[Array, "N 2"]
) -> Bool[Array, " N"]:
    """Whether each reply does what its principle asks for."""
    at = principles[:, :1]
    score = jnp.take_along_axis(qualities(task, prompts, responses), at, axis=1)[:, 0]
    return (score > jnp.asarray(task.reading.cuts, jnp.float32)[at[:, 0]]) ^ (principles[:, 1] == UNWANTED)


def draw_principles(key: Key, n: int) -> Int[Array, "N 2"]:
    """Uniform over the combinations that are not held out."""
    known = [(q, w) for q in range(len(QUALITIES)) for w in (WANTED, UNWANTED) if (q, w) not in HELD_OUT]
    return jnp.asarray(known, jnp.int32)[jax.random.randint(key, (n,), 0, len(known), jnp.int32)]


def in_words(principles: Int[Array, "N 2"], synonyms: Int[Array, " N"] | int = 0) -> Int[Array, "N 2"]:
    """A word for the sign and one for the quality, the ``synonyms``-th of each.

    >>> in_words(jnp.array([[1, UNWANTED]]), 2).tolist()
    [[20, 5]]
    """
    sign = SIGNS + SIGN_WORDS * principles[:, 1] + synonyms % SIGN_WORDS
    return jnp.stack([sign, SYNONYMS * principles[:, 0] + synonyms % SYNONYMS], axis=1)


def vectors(words: Int[Array, "*B 2"]) -> Float[Array, "*B 8"]:
    """The embedding of a phrase: that of its quality's word, turned round where the sign is unwanted, of length 1."""
    found = jnp.asarray(_VECTORS, jnp.float32)[words[..., 1]]
    found = found / jnp.sqrt(jnp.sum(found**2, axis=-1, keepdims=True))
    return jnp.where((words[..., :1] - SIGNS) // SIGN_WORDS == UNWANTED, -found, found)


def consensus(
    phrases: Float[Array, "N A D"], verdicts: Int[Array, "N A"], *, threshold: float = 0.8
) -> Bool[Array, " N"]:
    """Whether all annotators name one principle and say the same of it, yes or no.

    ``min_ab cos(e_a, e_b) >= threshold``, equal verdicts, none of them "partly".

    From "RLBFF: Binary Flexible Feedback to bridge between Human Feedback & Verifiable Rewards", arXiv:2509.21319.
    Differs from the paper in that its threshold is not known.

    >>> same, other = [1.0, 0.0], [0.6, 0.8]
    >>> consensus(jnp.array([[same, same], [same, other]]), jnp.array([[YES, YES], [YES, YES]])).tolist()
    [True, False]
    """
    length = jnp.sqrt(jnp.sum(phrases.astype(jnp.float32) ** 2, axis=-1, keepdims=True))
    unit = phrases / jnp.maximum(length, 1e-12)
    closest = jnp.min(jnp.sum(unit[:, :, None] * unit[:, None, :], axis=-1), axis=(1, 2))
    clear = jnp.all((verdicts == verdicts[:, :1]) & (verdicts != PARTLY), axis=1)
    return (closest >= threshold) & clear


def span_found(sentences: Int[Array, "N S"], words: Int[Array, "N 2"]) -> Bool[Array, " N"]:
    """Whether the two words stand side by side in the sentence: what is extracted must have been written.

    >>> span_found(jnp.array([[1, 5, 6, 2], [5, 1, 6, 2]]), jnp.array([[5, 6], [5, 6]])).tolist()
    [True, False]
    """
    return jnp.any((sentences[:, :-1] == words[:, :1]) & (sentences[:, 1:] == words[:, 1:]), axis=1)


def balanced(label: Bool[Array, " N"], kept: Bool[Array, " N"]) -> Bool[Array, " N"]:
    """Of what is kept as many yes as no, the first ones of each.

    >>> balanced(jnp.array([True, True, False, True]), jnp.array([True, True, True, False])).tolist()
    [True, False, True, False]
    """
    sides = [kept & label, kept & ~label]
    least = jnp.minimum(*(jnp.sum(side.astype(jnp.int32)) for side in sides))
    first = [side & (jnp.cumsum(side.astype(jnp.int32)) <= least) for side in sides]
    return first[0] | first[1]


def agreed(feedback: Feedback) -> Bool[Array, " N"]:
    """The paper's filter: consensus in principle and verdict, and the span was written by the first annotator."""
    written = span_found(feedback.sentences[:, 0], feedback.words[:, 0])
    return consensus(vectors(feedback.words), feedback.verdicts) & written


def anyhow(feedback: Feedback) -> Bool[Array, " N"]:
    """Whatever the first annotator says, unless it is "partly"."""
    return feedback.verdicts[:, 0] != PARTLY


def draw_feedback(
    task: Replies, key: Key, prompts: Array, replies: Array, *, annotators: int = 3, error_rate: float = 0.2,
    astray: float = 0.1, partly: float = 0.1, invented: float = 0.1,
) -> tuple[Int[Array, "N 2"], Feedback]:  # fmt: skip
    """``(principles of the first annotators, feedback)``.

    Annotators choose their own words. One errs about the reply at ``error_rate``, speaks of another principle at
    ``astray`` and says "partly" at that rate; the extractor names a principle that was not written at ``invented``.
    """
    keys, n = jax.random.split(key, 8), prompts.shape[0]
    meant = jnp.broadcast_to(draw_principles(keys[0], n)[:, None], (n, annotators, 2)).reshape(-1, 2)
    flat = meant.shape[:1]
    meant = jnp.where(jax.random.bernoulli(keys[1], astray, (*flat, 1)), draw_principles(keys[2], flat[0]), meant)
    does = satisfied(task, *(jnp.repeat(x, annotators, axis=0) for x in (prompts, replies)), meant)
    says = jnp.where(does ^ jax.random.bernoulli(keys[3], error_rate, flat), YES, NO)
    says = jnp.where(jax.random.bernoulli(keys[4], partly, flat), PARTLY, says)
    own = jax.random.split(keys[5], 4)
    words = in_words(meant, jax.random.randint(own[0], flat, 0, SYNONYMS * SIGN_WORDS, jnp.int32))
    other = in_words(draw_principles(own[1], flat[0]), 0)
    extracted = jnp.where(jax.random.bernoulli(keys[6], invented, (*flat, 1)), other, words)
    place = jax.random.randint(own[2], flat, 0, SENTENCE - 2, jnp.int32)[:, None]
    column = jnp.arange(SENTENCE, dtype=jnp.int32)[None, :]
    said = jax.random.randint(own[3], (*flat, SENTENCE), OTHER, OTHER + 4, jnp.int32)
    said = jnp.where(column == place, words[:, :1], jnp.where(column == place + 1, words[:, 1:], said))
    said = jnp.where(column == SENTENCE - 1, says[:, None], said)
    shape = (n, annotators)
    feedback = Feedback(said.reshape(*shape, -1), extracted.reshape(*shape, 2), says.reshape(shape))
    return read_back(feedback.words[:, 0]), feedback


def read_back(words: Int[Array, "N 2"]) -> Int[Array, "N 2"]:
    """The principles that words name.

    >>> read_back(in_words(jnp.array([[1, UNWANTED]]), 2)).tolist()
    [[1, 1]]
    """
    return jnp.stack([words[:, 1] // SYNONYMS, (words[:, 0] - SIGNS) // SIGN_WORDS], axis=1)


def draw_judgements(task: Replies, key: Key, n: int, *, keep: Callable[[Feedback], Array] = agreed):
    """``(principles, words, prompts, replies, label, weight)``: what the first annotator says in its own words; weight
    1 where it is kept, as many yes as no."""
    first, second = jax.random.split(key)
    prompts, replies = task.draw_behaviour(first, n)
    principles, feedback = draw_feedback(task, second, prompts, replies)
    label = feedback.verdicts[:, 0] == YES
    weight = balanced(label, keep(feedback))
    return principles, feedback.words[:, 0], prompts, replies, label.astype(jnp.float32), weight.astype(jnp.float32)


def verdict_logits(
    task: Replies, reader: Params, words: Int[Array, "N 2"], prompts: Int[Array, "N P"], replies: Int[Array, "N T"]
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """``(yes, no)`` logits of the reader after principle, prompt and reply."""
    logits = task.reading.policy.unembed(reader, task.reading.hidden(reader, words, prompts, replies))
    return logits[:, task.reading.first + YES], logits[:, task.reading.first + NO]


def named(quality: int | Array, wanted: int | Array, rows: int) -> Int[Array, "N 2"]:
    """One principle in its first words, for so many rows."""
    principle = jnp.stack([jnp.asarray(quality, jnp.int32), jnp.asarray(wanted, jnp.int32)])
    return in_words(jnp.broadcast_to(principle[None], (rows, 2)))


def as_proxy(reads: Callable[..., Float[Array, " N"]]) -> Callable[..., Float[Array, " N"]]:
    """The ``Proxy`` of one principle, of what ``reads(task, params, words, prompts, replies)`` says of any."""

    def proxy(task, params, prompts, responses, *, quality: int | Array, wanted: int | Array = WANTED):
        return reads(task, params, named(quality, wanted, prompts.shape[0]), prompts, responses)

    return proxy


def log_odds(
    task: Replies, params: Params, words: Int[Array, "N 2"], prompts: Array, replies: Array
) -> Float[Array, " N"]:
    """Of yes against no, by the reader."""
    yes, no = verdict_logits(task, params["reader"], words, prompts, replies)
    return yes - no


score = as_proxy(log_odds)


def judgement_loss(task: Replies, params: Params, rows: tuple[Array, ...]) -> tuple[Array, dict[str, Array]]:
    """Cross-entropy of the two verdict tokens on kept judgements."""
    _, words, prompts, replies, label, weight = rows
    yes, no = verdict_logits(task, params["reader"], words, prompts, replies)
    return _kept_loss(yes, no, label, weight)


def _kept_loss(yes: Array, no: Array, label: Array, weight: Array) -> tuple[Array, dict[str, Array]]:
    terms, kept = log_odds_loss(yes, no, label), weight > 0
    return reduce.scalars(terms.loss, kept), {"fit/accuracy": reduce.scalars(terms.aux["accuracy"], kept)}


def matched(
    task: Replies, params: Params, words: Int[Array, "N 2"], prompts: Array, replies: Array
) -> Float[Array, " N"]:
    """``h(prompt, reply) . e(principle)``: the baseline that meets a principle as a vector and never reads it."""
    found = attribute_rewards.scores(task, params["reward"], prompts, replies)[:, :WIDTH]
    return jnp.sum(found * vectors(words), axis=1)


matched_score = as_proxy(matched)


def matched_loss(task: Replies, params: Params, rows: tuple[Array, ...]) -> tuple[Array, dict[str, Array]]:
    """Cross-entropy of ``matched`` on kept judgements."""
    _, words, prompts, replies, label, weight = rows
    found = matched(task, params, words, prompts, replies)
    return _kept_loss(found, jnp.zeros_like(found), label, weight)


def ranking(
    task: Replies, params: Params, key: Key, *, proxy_of: Callable[[Array, Array], Callable], rows: int = 256
) -> dict[str, Array]:
    """How often a proxy ranks two replies as a principle does, over known and held-out principles, and where the worse
    reply is the longer one.

    A score that does not hear the principle ranks the two forms of a quality right in shares that add up to 1. The ten
    known principles are both forms of four qualities and the wanted one of two, so that its ``rank/known`` is at most
    0.6, and its ``rank/held_out`` falls with what it knows of those two: these tell no such score from another.

    Args:
      proxy_of: ``(quality, wanted) -> Proxy``; both are numbers of the program.
    """
    pairs = task.draw_pairs(key, rows, sharpness=0.0)
    truth = qualities(task, pairs.prompts, pairs.first) - qualities(task, pairs.prompts, pairs.second)
    longer = task.lengths(pairs.first) - task.lengths(pairs.second)
    every = [(q, w) for q in range(len(QUALITIES)) for w in (WANTED, UNWANTED)]

    def of_principle(principle: Array) -> tuple[Array, Array]:
        proxy = proxy_of(principle[0], principle[1])
        gap = proxy(task, params, pairs.prompts, pairs.first) - proxy(task, params, pairs.prompts, pairs.second)
        return _right(gap, truth[:, principle[0]] * (1.0 - 2.0 * principle[1].astype(jnp.float32)), longer)

    found, against = jax.lax.map(of_principle, jnp.asarray(every, jnp.int32))
    held = jnp.asarray([x in HELD_OUT for x in every])
    wanted = jnp.asarray([w == WANTED for _, w in every])
    return {
        "rank/known": reduce.scalars(found, ~held),
        "rank/held_out": reduce.scalars(found, held),
        "rank/longer_is_worse": reduce.scalars(against, wanted),
    }


def _right(gap: Array, side: Array, longer: Array) -> tuple[Array, Array]:
    """How often a gap between scores has the sign of the truth: of all pairs, of those whose worse reply is longer."""
    right = jnp.where(jnp.sign(gap) == jnp.sign(side), 1.0, 0.0)
    return reduce.scalars(right, side != 0), reduce.scalars(right, (side != 0) & (side * longer < 0))


def worth_ranking(
    task: Replies, params: Params, key: Key, *, proxy_of: Callable[[Array, Array], Callable], rows: int = 1536
) -> dict[str, Array]:
    """As ``ranking``, by ``worth`` alone, which also a reward model that hears no principle can know.

    A claim rests on it: of so many pairs the worse reply is the longer one in some 500.
    """
    pairs = task.draw_pairs(jax.random.fold_in(key, 1), rows, sharpness=0.0)
    proxy, both = proxy_of(QUALITIES.index("worth"), WANTED), (pairs.first, pairs.second)
    gap, side, longer = (
        of(both[0]) - of(both[1])
        for of in (
            lambda said: proxy(task, params, pairs.prompts, said),
            lambda said: task.utility(pairs.prompts, said),
            task.lengths,
        )
    )
    found, against = _right(gap, side, longer)
    return {"rank/worth": found, "rank/worth_longer_is_worse": against}
