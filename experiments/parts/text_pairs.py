"""Preference pairs of one's own in the place of the strings of ``preference_task``.

What is true of the strings by design is here what the rows say: good is what the judge of the rows prefers
(``text_rows.make_gold``), uncovered are tokens that no response of the rows has, the spurious habit ``style`` is
brevity (columns behind the end), and rude tokens are those that rejected responses have at least twice as often as
chosen ones. Prompts of another kind than those of training are the longest of the held-out ones. Labels are those of
the rows; noise that an experiment adds (``flip_rate`` beyond the 0.1 that all embedded labels have) is added to them, a
cycle (``cycle``) is not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings, text_rows
from experiments.parts.preference_task import Judging, Pairs, Preferences
from jaxrl_llm.experiment.own_rows.tasks import Opened
from jaxrl_llm.types import Params

Settings = text_rows.Settings
BASE_NOISE = 0.1  # of the embedded labels
LONGEST = 10  # the longest tenth of the held-out prompts are the strange ones
RUDE = 2.0  # how much more often rejected responses have a rude token


def _counts(responses: np.ndarray, size: int, end: int) -> np.ndarray:
    found = np.bincount(np.asarray(responses).reshape(-1), minlength=size).astype(float)
    found[end] = 0.0
    return found


class Typical(NamedTuple):
    """Of every token whether rejected, or chosen, responses have it at least ``RUDE`` times as often; and at all."""

    rejected: Bool[Array, " V"]
    chosen: Bool[Array, " V"]
    seen: Bool[Array, " V"]


def typical(rows: text_rows.Rows) -> Typical:
    """What the responses of the rows are told apart by."""
    size, end = rows.model.config.padded_vocab_size, rows.model.tokenizer.eos_ids[0]
    good, bad = (
        sum(_counts(np.asarray(getattr(part, name)), size, end) for part in (rows.train, rows.heldout))
        for name in ("chosen", "rejected")
    )
    shares = [(x + 1) / (x.sum() + size) for x in (good, bad)]
    seen = jnp.asarray(good + bad > 0).at[end].set(True)
    return Typical(jnp.asarray(shares[1] >= RUDE * shares[0]), jnp.asarray(shares[0] >= RUDE * shares[1]), seen)


def open_task(settings: Any) -> Opened:
    """The ``Preferences`` of the rows of the settings."""
    rows = text_rows.opened(settings)
    return Opened(preferences(rows, settings), text_rows.finish(rows))


def preferences(rows: text_rows.Rows, settings: Any) -> Preferences:
    """Prompts, pairs and a judge of rows of one's own."""
    model, end = rows.model, rows.model.tokenizer.eos_ids[0]
    size = model.config.padded_vocab_size
    gold = text_rows.make_gold(rows, settings)
    number_of = text_rows.numbers_of(rows)
    every = [jnp.concatenate(both) for both in zip(rows.train, rows.heldout, strict=True)]
    marks = typical(rows)
    longest = jnp.argsort(-jnp.sum((rows.heldout.prompts != strings.PAD).astype(jnp.int32), axis=1))
    longest = rows.heldout.prompts[longest[: max(1, len(longest) // LONGEST)]]

    def some(key: Array, n: int) -> text_rows.Table:
        table = rows.now()
        return jax.tree.map(lambda x: x[jax.random.randint(key, (n,), 0, table.prompts.shape[0], jnp.int32)], table)

    def uncovered(responses: Int[Array, "N T"]) -> Bool[Array, "N T"]:
        return ~marks.seen[responses]

    def draw_prompts(key: Array, n: int) -> Int[Array, "N P"]:
        return some(key, n).prompts

    def draw_responses(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
        return draw_politeness(key, prompts, jax.random.bernoulli(key, 0.5, prompts.shape[:1]))

    def draw_behaviour(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
        prompts = draw_prompts(jax.random.fold_in(key, 0), n)
        return prompts, draw_responses(jax.random.fold_in(key, 1), prompts)

    def chance(prompts, first, second, *, flip_rate: float = 0.0, cycle: float = 0.0) -> Float[Array, " N"]:
        gap = gold(prompts, first) - gold(prompts, second)
        return (1.0 - 2.0 * flip_rate) * jax.nn.sigmoid(gap) + flip_rate

    def draw_pairs(key: Array, n: int, *, flip_rate: float = 0.0, cycle: float = 0.0) -> Pairs:
        found = some(jax.random.fold_in(key, 0), n)
        extra = max(0.0, flip_rate - BASE_NOISE)
        turned = jax.random.bernoulli(jax.random.fold_in(key, 1), extra, (n, 1))
        chosen, rejected = (jnp.where(turned, b, a) for a, b in ((found[1], found[2]), (found[2], found[1])))
        return Pairs(found.prompts, chosen, rejected)

    def is_rude(responses: Int[Array, "N T"]) -> Bool[Array, "N T"]:
        return marks.rejected[responses]

    def draw_politeness(key: Array, prompts: Int[Array, "N P"], rude: Bool[Array, " N"]) -> Int[Array, "N T"]:
        number = number_of(prompts)
        return jnp.where(rude[:, None], every[2][number], every[1][number])

    def draw_negatives(key: Array, n: int) -> tuple[Array, Array]:
        """Half of them rejected responses, half chosen ones."""
        prompts = draw_prompts(key, n)
        return prompts, draw_politeness(key, prompts, jnp.arange(n) % 2 == 0)

    def strange(prompts: Int[Array, "N P"]) -> Int[Array, "N P"]:
        return longest[number_of(prompts) % longest.shape[0]]

    def meanings(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Int[Array, "N 2"]:
        there = strings.counted(responses, end)
        kinds = [marks.chosen[responses] & there, marks.rejected[responses] & there]
        return jnp.stack([jnp.sum(x.astype(jnp.int32), axis=1) for x in kinds], axis=1)

    def lengths(responses: Int[Array, "N T"]) -> Float[Array, " N"]:
        there = strings.counted(responses, end) & (responses != end)
        return jnp.sum(there.astype(jnp.float32), axis=1)

    asked = bool(settings.rater or settings.judge_model)  # it errs by itself

    def spread(scores: Float[Array, "*B"]) -> Float[Array, ""]:
        return jnp.zeros(()) if asked else jnp.std(scores)

    world = text_rows.world_maker(rows, settings)(size, every[0].shape[1], every[1].shape[1])
    width = model.config.hidden_size
    return Preferences(
        world=world, width=width, size=size, style=end, gold_reward=gold, liked=gold, uncovered=uncovered,
        draw_prompts=draw_prompts, draw_responses=draw_responses, draw_behaviour=draw_behaviour,
        draw_pairs=draw_pairs, chance=chance, is_rude=is_rude, draw_politeness=draw_politeness,
        draw_mixed_company=draw_behaviour, polite_reward=gold, draw_negatives=draw_negatives,
        seen=lambda prompts: prompts, strange=strange, meanings=meanings,
        disputed=lambda prompts: jnp.zeros((prompts.shape[0], 1), bool),
        lengths=lengths,
        spread=spread,
        judging=judging(world, width, size, lambda prompts: every[1][number_of(prompts)]),
    )  # fmt: skip


def judging(world: strings.World, width: int, size: int, anchor_response: Callable[[Array], Array]) -> Judging:
    """A judge that starts as the loaded model; the last three tokens of its vocabulary are verdicts and question."""

    def hidden_of_two(params: Params, prompts: Array, first: Array, second: Array) -> Array:
        """The hidden state behind a prompt and two responses, what is no token left out, ``[N, D]``."""
        return strings.in_pieces(world, partial(read, params), prompts, first, second)

    def read(params: Params, prompts: Array, first: Array, second: Array) -> Array:
        real = [prompts != strings.PAD, strings.counted(first, world.end), strings.counted(second, world.end)]
        ask = jnp.full((prompts.shape[0], 1), size - 1, jnp.int32)
        asked = jnp.concatenate([prompts, first, second, ask], axis=1)
        there = jnp.concatenate([*real, jnp.ones((prompts.shape[0], 1), bool)], axis=1).astype(jnp.int32)
        positions = jnp.maximum(jnp.cumsum(there, axis=1) - 1, 0)
        return world.policy.hidden(params, jnp.where(there > 0, asked, world.end), positions, there)[:, -1]

    return Judging(
        world.policy, hidden_of_two, width, (size - 3, size - 2), world, anchor_response,
        lambda prompts: jnp.zeros(prompts.shape[:1], jnp.float32),
    )  # fmt: skip
