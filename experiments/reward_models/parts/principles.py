"""Judgements of one named quality: a reader of (principle, prompt, reply) that answers yes or no.

A principle is two tokens, a quality (those of ``attribute_text`` and ``worth``, the true utility) and whether it is
wanted or unwanted. A reply has a quality where its score is above ``CUTS``. Combinations named ``HELD_OUT`` are in no
training data.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm import reduce
from jaxrl_llm.losses.reward import log_odds_loss
from jaxrl_llm.types import Key, Params

QUALITIES = (*text.NAMES, "worth")
WANTED, UNWANTED = 0, 1
CUTS = (0.75, 0.25, 0.25, 0.25, 0.9, 0.3)  # near the median of the behaviour
HELD_OUT = ((1, UNWANTED), (3, UNWANTED))  # impolite, without actions
_FIRST, _YES, _NO = 32, 40, 41  # tokens: qualities, then wanted and unwanted, then the verdicts
READER = strings.make_world(42, 2 + text.PROMPT_TOKENS + text.RESPONSE_TOKENS, 1)


def _hidden(reader: Params, principles: Array, prompts: Array, replies: Array) -> Array:
    asked = jnp.stack([_FIRST + principles[:, 0], _FIRST + len(QUALITIES) + principles[:, 1]], axis=1)
    tokens = jnp.concatenate([asked, prompts, replies], axis=1)
    rows = strings.whole(READER, tokens, tokens[:, :0])
    return READER.policy.hidden(reader, rows.tokens, rows.positions, rows.segment_ids)[:, -1]


LANGUAGE = text.LANGUAGE._replace(reading=text.Reading(READER.policy, _hidden, (_YES, _NO), CUTS))


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


def agreed(votes: Bool[Array, "N A"]) -> Bool[Array, " N"]:
    """Whether all annotators say the same: the consensus that a judgement needs to be kept.

    From "RLBFF: Binary Flexible Feedback to bridge between Human Feedback & Verifiable Rewards", arXiv:2509.21319.
    Differs from the paper, which compares the principles that annotators name in words.
    """
    return jnp.all(votes == votes[:, :1], axis=1)


def anyhow(votes: Bool[Array, "N A"]) -> Bool[Array, " N"]:
    """Every judgement is kept."""
    return jnp.ones(votes.shape[:1], bool)


def draw_judgements(
    task: Replies,
    key: Key,
    n: int,
    *,
    annotators: int = 3,
    error_rate: float = 0.2,
    keep: Callable[[Array], Array] = agreed,
):
    """``(principles, prompts, replies, label, weight)``: the first annotator's label, and weight 1 where it is kept."""
    keys = jax.random.split(key, 3)
    prompts, replies = task.draw_behaviour(keys[0], n)
    principles = draw_principles(keys[1], n)
    wrong = jax.random.uniform(keys[2], (n, annotators)) < error_rate
    votes = satisfied(task, prompts, replies, principles)[:, None] ^ wrong
    weight = keep(votes)
    return principles, prompts, replies, votes[:, 0].astype(jnp.float32), weight.astype(jnp.float32)


def verdict_logits(
    task: Replies, reader: Params, principles: Int[Array, "N 2"], prompts: Int[Array, "N P"], replies: Int[Array, "N T"]
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """``(yes, no)`` logits of the reader after principle, prompt and reply."""
    logits = task.reading.policy.unembed(reader, task.reading.hidden(reader, principles, prompts, replies))
    return logits[:, task.reading.verdicts[0]], logits[:, task.reading.verdicts[1]]


def score(
    task: Replies, params: Params, prompts: Array, responses: Array, *, quality: int, wanted: int = WANTED
) -> Array:
    """The ``Proxy`` of one principle: the log-odds of yes."""
    principle = jnp.broadcast_to(jnp.asarray([[quality, wanted]], jnp.int32), (prompts.shape[0], 2))
    yes, no = verdict_logits(task, params["reader"], principle, prompts, responses)
    return yes - no


def judgement_loss(task: Replies, params: Params, rows: tuple[Array, ...]) -> tuple[Array, dict[str, Array]]:
    """Cross-entropy of the two verdict tokens on kept judgements."""
    principles, prompts, replies, label, weight = rows
    yes, no = verdict_logits(task, params["reader"], principles, prompts, replies)
    terms, kept = log_odds_loss(yes, no, label), weight > 0
    return reduce.scalars(terms.loss, kept), {"fit/accuracy": reduce.scalars(terms.aux["accuracy"], kept)}


def ranking(
    task: Replies, params: Params, key: Key, *, proxy_of: Callable[[int, int], Callable], rows: int = 256
) -> dict[str, Array]:
    """How often a proxy ranks two replies as a principle does, over known and held-out principles, and where the worse
    reply is the longer one.

    Args:
      proxy_of: ``(quality, wanted) -> Proxy``.
    """
    pairs = task.draw_pairs(key, rows, sharpness=0.0)
    truth = qualities(task, pairs.prompts, pairs.first) - qualities(task, pairs.prompts, pairs.second)
    longer = task.lengths(pairs.first) - task.lengths(pairs.second)
    known, held, against = [], [], []
    for quality in range(len(QUALITIES)):
        for wanted in (WANTED, UNWANTED):
            proxy = proxy_of(quality, wanted)
            gap = proxy(task, params, pairs.prompts, pairs.first) - proxy(task, params, pairs.prompts, pairs.second)
            side = truth[:, quality] * (1.0 - 2.0 * wanted)
            right = jnp.where(jnp.sign(gap) == jnp.sign(side), 1.0, 0.0)
            (held if (quality, wanted) in HELD_OUT else known).append(reduce.scalars(right, side != 0))
            if wanted == WANTED:
                against.append(reduce.scalars(right, (side != 0) & (side * longer < 0)))
    named = {"rank/known": known, "rank/held_out": held, "rank/longer_is_worse": against}
    return {name: reduce.scalars(jnp.stack(values)) for name, values in named.items()}
