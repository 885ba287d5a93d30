"""Preference pairs of one's own in the place of the strings of ``preference_task``.

What is true of the strings by design is here what the rows say: good is what the judge of the rows prefers
(``text_rows.make_gold``), ``UNSEEN`` are tokens that no response of the rows has, the spurious habit ``STYLE`` is
brevity (columns behind the end), and rude tokens are those that rejected responses have at least twice as often as
chosen ones. Labels are those of the rows; noise that an experiment adds (``flip_rate`` beyond the 0.1 that all
embedded labels have) is added to them, a cycle (``cycle``) is not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings, text_rows
from jaxrl_llm.experiment.own_rows import rebound
from jaxrl_llm.experiment.own_rows.rebound import Own
from jaxrl_llm.types import Params

Settings = text_rows.Settings
BASE_NOISE = 0.1  # of the embedded labels
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


def make(settings: Any, smoke: bool) -> Own:
    """The names of ``preference_task``, and of what is built on it, over the rows of the settings."""
    rows = text_rows.opened(settings)
    model, end = rows.model, rows.model.tokenizer.eos_ids[0]
    size = model.config.padded_vocab_size
    gold = text_rows.make_gold(rows, settings)
    number_of = text_rows.numbers_of(rows)
    every = [jnp.concatenate(both) for both in zip(rows.train, rows.heldout, strict=True)]
    marks = typical(rows)

    def some(key: Array, n: int) -> text_rows.Table:
        table = rows.now()
        return jax.tree.map(lambda x: x[jax.random.randint(key, (n,), 0, table.prompts.shape[0], jnp.int32)], table)

    def gold_reward(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, " N"]:
        return gold(prompts, responses)

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

    def draw_pairs(key: Array, n: int, *, flip_rate: float = 0.0, cycle: float = 0.0) -> Any:
        found = some(jax.random.fold_in(key, 0), n)
        extra = max(0.0, flip_rate - BASE_NOISE)
        turned = jax.random.bernoulli(jax.random.fold_in(key, 1), extra, (n, 1))
        chosen, rejected = (jnp.where(turned, b, a) for a, b in ((found[1], found[2]), (found[2], found[1])))
        return text_rows.Table(found.prompts, chosen, rejected)

    def is_rude(responses: Int[Array, "N T"]) -> Bool[Array, "N T"]:
        return marks.rejected[responses]

    def draw_politeness(key: Array, prompts: Int[Array, "N P"], rude: Bool[Array, " N"]) -> Int[Array, "N T"]:
        number = number_of(prompts)
        return jnp.where(rude[:, None], every[2][number], every[1][number])

    def draw_negatives(key: Array, n: int) -> tuple[Array, Array]:
        """Half of them rejected responses, half chosen ones."""
        prompts = draw_prompts(key, n)
        return prompts, draw_politeness(key, prompts, jnp.arange(n) % 2 == 0)

    task = {
        "VOCABULARY": size - 3, "PROMPT_TOKENS": every[0].shape[1], "RESPONSE_TOKENS": every[1].shape[1],
        "FIRST": 0, "UNSEEN": size, "STYLE": end, "gold_reward": gold_reward, "uncovered": uncovered,
        "draw_prompts": draw_prompts, "draw_responses": draw_responses, "draw_behaviour": draw_behaviour,
        "chance": chance, "draw_pairs": draw_pairs, "is_rude": is_rude, "draw_politeness": draw_politeness,
        "draw_mixed_company": draw_behaviour, "polite_reward": gold_reward, "Pairs": text_rows.Table,
    }  # fmt: skip
    width = model.config.hidden_size
    world = text_rows.world_maker(rows, settings)
    alone = world(size, every[0].shape[1], every[1].shape[1])
    ask = size - 1  # the last token of the vocabulary: the question of a judge of two

    def hidden_of_two(params: Params, prompts: Array, first: Array, second: Array) -> Array:
        """The hidden state behind a prompt and two responses, what is no token left out, ``[N, D]``."""
        real = [prompts != strings.PAD, strings.counted(first, end), strings.counted(second, end)]
        asked = jnp.concatenate([prompts, first, second, jnp.full((prompts.shape[0], 1), ask, jnp.int32)], axis=1)
        there = jnp.concatenate([*real, jnp.ones((prompts.shape[0], 1), bool)], axis=1).astype(jnp.int32)
        positions = jnp.maximum(jnp.cumsum(there, axis=1) - 1, 0)
        return alone.policy.hidden(params, jnp.where(there > 0, asked, end), positions, there)[:, -1]

    of_judges = {
        "_hidden": hidden_of_two, "anchor_response": lambda prompts: every[1][number_of(prompts)], "WIDTH": width,
        "PRETRAINED": alone, "offset": lambda prompts: jnp.zeros(prompts.shape[:1], jnp.float32),
    }  # fmt: skip
    further = {
        "experiments.preference.parts.pair_judges": of_judges,
        "experiments.preference.mpo": {"labelled": draw_pairs},  # rows are labelled as they are
        "experiments.analysis.parts.input_shift": {"_seen": lambda prompts: prompts},  # all kinds of prompts train
    }
    names = {
        **{name: rebound.those_of(name, more) for name, more in further.items()},
        "experiments.parts.preference_task": task,
        "experiments.parts.strings": {"make_world": world},
        "experiments.parts.preference_strings": {"WIDTH": width, "draw_negatives": draw_negatives},
    }
    return Own(names, text_rows.finish(rows))
