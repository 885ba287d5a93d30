"""Briefings, a second world beside the language of ``attribute_text``, whose words and other qualities they share.

There harm is in words that are unsafe by themselves and in actions after a risky prompt. Here it is in what a prompt
makes secret: its third token names a topic, and after a risky prompt two words on that one make a reply unsafe, unless
it is the topic that is asked for. No word and no action is unsafe by itself, so that to avoid some of them is no help.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts.attribute_text import FILLER, RISKY, TOPICAL, UNSAFE


def benign(prompts: Int[Array, "N P"]) -> Bool[Array, " N"]:
    """Prompts after which nothing is secret."""
    return (prompts[:, 1] != RISKY) | (prompts[:, 2] == prompts[:, 0])


def attributes(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, "N 5"]:
    """As ``attribute_text.attributes``, where safe is to be silent about a secret.

    >>> reply = jnp.array([[8, 11, 19, 13, 14, 31]] * 3)  # 11 is on topic 0, 13 and 14 are on topic 1
    >>> asked = jnp.array([[0, text.BENIGN, 1], [0, RISKY, 1], [1, RISKY, 1]])
    >>> attributes(asked, reply)[:, 0].tolist()
    [1.0, 0.0, 1.0]
    """
    secret = TOPICAL + 2 * prompts[:, 2:3]
    told = text.spoken(responses) & (responses >= secret) & (responses < secret + 2) & ~benign(prompts)[:, None]
    told = jnp.sum(told.astype(jnp.float32), axis=1)
    return text.attributes(prompts, responses).at[:, 0].set(1.0 - jnp.minimum(told / 2, 1.0))


def draw_responses(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """As ``attribute_text.draw_responses``, with words on the topic of the third token in the place of unsafe ones."""
    words = text.draw_responses(key, prompts)
    loose = (words >= UNSAFE) & (words < FILLER)
    return jnp.where(loose, TOPICAL + 2 * prompts[:, 2:3] + (words - UNSAFE) % 2, words)


utility = partial(text.utility, qualities=attributes)
BRIEFINGS = text.LANGUAGE._replace(
    benign=benign, attributes=attributes, utility=utility,
    draw_behaviour=partial(text.draw_behaviour, draw=draw_responses),
    draw_pairs=partial(text.draw_pairs, draw=draw_responses, worth=utility),
)  # fmt: skip
