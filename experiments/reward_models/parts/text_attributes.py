"""Pairs of one's own in the place of the replies of ``attribute_text``, whose qualities are known by design.

The worth of a reply is what the judge of the rows makes of it (``text_rows.make_gold``), between 0 and 1. Of the
qualities ``safe`` is the share of tokens that are not typical of rejected replies, ``polite`` the share typical of
chosen ones, ``relevant`` the share that the prompt has too, ``actionable`` the judge's worth, and ``varied`` the share
of different tokens. Prompts shorter than the longest are the benign ones of ``eval/benign_actionable``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.parts import strings, text_pairs, text_rows
from jaxrl_llm.experiment.own_rows.rebound import Own

Settings = text_rows.Settings


def make(settings: Any, smoke: bool) -> Own:
    """The names of ``attribute_text`` over the rows of the settings."""
    rows = text_rows.opened(settings)
    end, gold = rows.model.tokenizer.eos_ids[0], text_rows.make_gold(rows, settings)
    marks = text_pairs.typical(rows)
    number_of = text_rows.numbers_of(rows)
    both = [jnp.concatenate([getattr(part, name) for part in (rows.train, rows.heldout)])
            for name in ("chosen", "rejected")]  # fmt: skip

    def spoken(responses: Int[Array, "N T"]) -> Array:
        return jnp.cumsum((responses == end).astype(jnp.int32), axis=1) == 0

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

    def draw_responses(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
        number = number_of(prompts)
        return jnp.where(jax.random.bernoulli(key, 0.5, (prompts.shape[0], 1)), both[0][number], both[1][number])

    def draw_pairs(key: Array, n: int, *, sharpness: float = 8.0, flip_rate: float = 0.0, length_bias: float = 0.0):
        """Pairs of the rows; in any order where ``sharpness`` is 0, and turned round with chance ``flip_rate``."""
        table = rows.now()
        row = jax.random.randint(jax.random.fold_in(key, 0), (n,), 0, table.prompts.shape[0], jnp.int32)
        chance = 0.5 if sharpness == 0 else flip_rate
        turned = jax.random.bernoulli(jax.random.fold_in(key, 1), chance, (n, 1))
        won, lost = table.chosen[row], table.rejected[row]
        return Pairs(table.prompts[row], jnp.where(turned, lost, won), jnp.where(turned, won, lost))

    Pairs = text_rows.Replies
    task = {
        "VOCABULARY": rows.model.config.padded_vocab_size, "PROMPT_TOKENS": rows.train.prompts.shape[1],
        "RESPONSE_TOKENS": rows.train.chosen.shape[1], "BENIGN": strings.PAD, "RISKY": strings.PAD - 1,
        "POLITE": 0, "TOPICAL": 0, "ACTION": 0, "UNSAFE": 0, "FILLER": 0, "END": end, "spoken": spoken,
        "utility": utility, "attributes": attributes, "draw_prompts": draw_prompts, "draw_responses": draw_responses,
        "draw_pairs": draw_pairs, "Pairs": Pairs,
    }  # fmt: skip
    names = {
        "experiments.reward_models.parts.attribute_text": task,
        "experiments.parts.strings": {"make_world": text_rows.world_maker(rows, settings)},
    }
    return Own(names, text_rows.finish(rows))
