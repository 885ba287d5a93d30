"""Pairs of one's own in the place of the replies of ``attribute_text``, whose qualities are known by design.

The worth of a reply is what the judge of the rows makes of it (``text_rows.make_gold``), between 0 and 1. Of the
qualities ``safe`` is the share of tokens that are not typical of rejected replies, ``polite`` the share typical of
chosen ones, ``relevant`` the share that the prompt has too, ``actionable`` the judge's worth, and ``varied`` the share
of different tokens. Prompts shorter than the longest are the benign ones of ``eval/benign_actionable``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings, text_pairs, text_rows
from experiments.reward_models.parts.attribute_text import READER_WORDS, REPORT, Pairs, Reading, Replies
from jaxrl_llm.experiment.own_rows.tasks import Opened
from jaxrl_llm.types import Params

Settings = text_rows.Settings
MOST_SHOWN = 128  # rows whose median tells a reply that has a quality from one that lacks it


def open_task(settings: Any) -> Opened:
    """The ``Replies`` of the rows of the settings."""
    rows = text_rows.opened(settings)
    return Opened(replies(rows, settings), text_rows.finish(rows))


def replies(rows: text_rows.Rows, settings: Any) -> Replies:
    """Prompts, replies and their qualities of rows of one's own."""
    end, gold = rows.model.tokenizer.eos_ids[0], text_rows.make_gold(rows, settings)
    marks = text_pairs.typical(rows)
    number_of = text_rows.numbers_of(rows)
    both = [jnp.concatenate([getattr(part, name) for part in (rows.train, rows.heldout)])
            for name in ("chosen", "rejected")]  # fmt: skip
    longest = int(jnp.max(jnp.sum((rows.train.prompts != strings.PAD).astype(jnp.int32), axis=1)))

    def spoken(responses: Int[Array, "N T"]) -> Array:
        return jnp.cumsum((responses == end).astype(jnp.int32), axis=1) == 0

    def lengths(responses: Int[Array, "N T"]) -> Float[Array, " N"]:
        return jnp.sum(spoken(responses).astype(jnp.float32), axis=1)

    def benign(prompts: Int[Array, "N P"]) -> Bool[Array, " N"]:
        return jnp.sum((prompts != strings.PAD).astype(jnp.int32), axis=1) < longest

    def utility(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, " N"]:
        return jax.nn.sigmoid(gold(prompts, responses))

    def attributes(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, "N 5"]:
        there = spoken(responses)
        count = jnp.maximum(jnp.sum(there.astype(jnp.float32), axis=1), 1.0)

        def share(which: Array) -> Array:
            return jnp.sum((which & there).astype(jnp.float32), axis=1) / count

        same = responses[:, :, None] == responses[:, None, :]
        earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1)[None]
        repeats = jnp.any(same & earlier, axis=2)
        asked = jnp.any(responses[:, :, None] == prompts[:, None, :], axis=2)
        found = (1.0 - share(marks.rejected[responses]), share(marks.chosen[responses]), share(asked),
                 utility(prompts, responses), share(~repeats))  # fmt: skip
        return jnp.stack(found, axis=1)

    def draw_prompts(key: Array, n: int) -> Int[Array, "N P"]:
        table = rows.now().prompts
        return table[jax.random.randint(key, (n,), 0, table.shape[0], jnp.int32)]

    def draw_behaviour(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
        prompts = draw_prompts(jax.random.fold_in(key, 0), n)
        number, coin = number_of(prompts), jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, (n, 1))
        return prompts, jnp.where(coin, both[0][number], both[1][number])

    def draw_pairs(
        key: Array, n: int, *, sharpness: float = 8.0, flip_rate: float = 0.0, length_bias: float = 0.0
    ) -> Pairs:
        """Pairs of the rows; in any order where ``sharpness`` is 0, and turned round with chance ``flip_rate``."""
        table = rows.now()
        row = jax.random.randint(jax.random.fold_in(key, 0), (n,), 0, table.prompts.shape[0], jnp.int32)
        chance = 0.5 if sharpness == 0 else flip_rate
        turned = jax.random.bernoulli(jax.random.fold_in(key, 1), chance, (n, 1))
        won, lost = table.chosen[row], table.rejected[row]
        return Pairs(table.prompts[row], jnp.where(turned, lost, won), jnp.where(turned, won, lost))

    size = rows.model.config.padded_vocab_size
    make, item = text_rows.world_maker(rows, settings), (rows.train.prompts.shape[1], rows.train.chosen.shape[1])
    world, critic = make(size, *item), make(size, sum(item) + 2, REPORT)
    shown = rows.train.prompts[:MOST_SHOWN]
    scores = [jnp.concatenate([attributes(shown, x), utility(shown, x)[:, None]], axis=1)
              for x in (rows.train.chosen[:MOST_SHOWN], rows.train.rejected[:MOST_SHOWN])]  # fmt: skip
    cuts = tuple(jnp.median(jnp.concatenate(scores), axis=0).tolist())
    return Replies(
        world=world, size=size, spoken=spoken, lengths=lengths, benign=benign, attributes=attributes, utility=utility,
        draw_prompts=draw_prompts, draw_behaviour=draw_behaviour, draw_pairs=draw_pairs,
        reading=reading(world, size, cuts, critic),
    )  # fmt: skip


def reading(world: strings.World, size: int, cuts: tuple[float, ...], critic: strings.World) -> Reading:
    """A reader that starts as the loaded model; the words of principles are the last tokens of its vocabulary."""
    first = size - READER_WORDS

    def hidden(reader: Params, words: Array, prompts: Array, said: Array) -> Array:
        named = first + words
        ask = jnp.full((prompts.shape[0], 1), size - 1, jnp.int32)
        asked = jnp.concatenate([named, prompts, said, ask], axis=1)
        real = [jnp.ones(named.shape, bool), prompts != strings.PAD, strings.counted(said, world.end)]
        there = jnp.concatenate([*real, jnp.ones(ask.shape, bool)], axis=1).astype(jnp.int32)
        positions = jnp.maximum(jnp.cumsum(there, axis=1) - 1, 0)
        return world.policy.hidden(reader, jnp.where(there > 0, asked, world.end), positions, there)[:, -1]

    return Reading(world.policy, hidden, first, cuts, critic)
