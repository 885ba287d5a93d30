"""Preferences with a known truth over shopping lists, a second world beside the strings of ``preference_task``.

There a token is good by itself, however often it comes; here an item counts once, and what is bad is asked for, too. A
prompt is 4 tokens of ``0 .. 3``: the first names the class of the items that are wanted, the second that of those that
are not (none where both name one class). A response lists 16 items ``4 .. 30`` of class ``token % 4``. ``STYLE`` is
worth nothing, but in the data better lists show it more often; items ``24 .. 30`` never occur in the data.

To condition on two tokens takes a decoder longer: of four references the true reward is 0.4 to 1.4 after 600 updates
and 0.6 to 1.8 after 1500 (that of the strings is 1.9 after 200). No record was made here yet that is valid.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import preference_task as plain
from experiments.parts import strings
from experiments.parts.preference_task import FIRST, PROMPT_TOKENS, STYLE, UNSEEN, VOCABULARY, Preferences

RESPONSE_TOKENS, WIDTH = 16, 32


def items(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> tuple[Bool[Array, "N T"], Bool[Array, "N T"]]:
    """Where a wanted item stands for the first time, and where one that is not wanted stands."""
    wanted, unwanted = prompts[:, :1], prompts[:, 1:2]
    real = (responses >= FIRST) & (responses != STYLE)
    before = jnp.tril(jnp.ones((1, *(responses.shape[1],) * 2), bool), k=-1)
    new = ~jnp.any((responses[:, :, None] == responses[:, None, :]) & before, axis=2)
    return real & new & (responses % 4 == wanted), real & (responses % 4 == unwanted) & (wanted != unwanted)


def meanings(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Int[Array, "N 2"]:
    """How many different wanted items, and how many that are not."""
    return jnp.stack([jnp.sum(x.astype(jnp.int32), axis=1) for x in items(prompts, responses)], axis=1)


def gold_reward(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """The truth: +1 a wanted item that is not on the list yet, -1 an item that is not wanted.

    >>> x, y = jnp.array([[2, 3, 1, 3]]), jnp.array([[6, 6, 10, 7, 5, 31]])
    >>> float(gold_reward(x, y)[0])  # wanted, there already, wanted, not wanted, neutral, style
    1.0
    """
    good, bad = meanings(prompts, responses).astype(jnp.float32).T
    return good - bad


def draw_responses(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """The behaviour policy: each list has a skill ``s`` in [0, 1].

    An item is ``STYLE`` with chance ``0.2 s``, else wanted with chance ``0.5 s``, else any of ``4 .. 23``, and of these
    one that is not wanted gives way to another draw with chance ``s``.
    """
    keys, shape = jax.random.split(key, 6), (prompts.shape[0], RESPONSE_TOKENS)
    skill = jax.random.uniform(keys[0], (shape[0], 1))
    good = FIRST + prompts[:, :1] + 4 * jax.random.randint(keys[1], shape, 0, (UNSEEN - FIRST) // 4, jnp.int32)
    anything, other = jax.random.randint(keys[2], (2, *shape), FIRST, UNSEEN, jnp.int32)
    careful = (anything % 4 == prompts[:, 1:2]) & (jax.random.uniform(keys[3], shape) < skill)
    anything = jnp.where(careful, other, anything)
    listed = jnp.where(jax.random.uniform(keys[4], shape) < 0.5 * skill, good, anything)
    return jnp.where(jax.random.uniform(keys[5], shape) < 0.2 * skill, STYLE, listed)


def unwanted_items(key: Array, prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Int[Array, "N T"]:
    """An item that is not wanted in every place."""
    return FIRST + prompts[:, 1:2] + 4 * jax.random.randint(key, responses.shape, 0, (UNSEEN - FIRST) // 4, jnp.int32)


drawn, truth = {"draw": draw_responses}, {"gold": gold_reward}
LISTS = Preferences(
    world=strings.make_world(VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS, width=WIDTH), width=WIDTH, size=VOCABULARY,
    style=STYLE, gold_reward=gold_reward, liked=gold_reward, uncovered=plain.uncovered,
    draw_prompts=plain.draw_prompts, draw_responses=draw_responses,
    draw_behaviour=partial(plain.draw_behaviour, **drawn), draw_pairs=partial(plain.draw_pairs, **drawn, **truth),
    chance=partial(plain.chance, **truth), is_rude=plain.is_rude,
    draw_politeness=partial(plain.draw_politeness, **drawn),
    draw_mixed_company=partial(plain.draw_mixed_company, **drawn), polite_reward=partial(plain.polite_reward, **truth),
    draw_negatives=partial(plain.draw_negatives, **drawn, spoil=unwanted_items),
    seen=plain.seen, strange=plain.strange, disputed=plain.disputed, meanings=meanings, lengths=plain.lengths,
)  # fmt: skip
