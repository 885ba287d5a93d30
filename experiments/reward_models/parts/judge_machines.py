"""Two runs of a small machine and a judge's report on them, a second world beside the sums of ``judge_pairs``.

A question is the state a machine starts in and three inputs; every input is a permutation of the four states, and their
order counts. An answer writes the states behind the inputs, and the machine goes on from a state that is written wrong.
Answers err and have flaws as often as those to a sum. What a report is, and how it is scored, stands in
``judge_pairs``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.reward_models.parts import judge_pairs as pairs
from experiments.reward_models.parts.judge_pairs import BASE, CLEAN, FLAW, STEPS, SUMS

MOVES = ((1, 0, 2, 3), (1, 2, 3, 0), (0, 3, 2, 1), (3, 2, 1, 0))  # of an input, from every state


def moved(state: Int[Array, "*B"], given: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """The state behind an input.

    >>> moved(jnp.array([0, 3, 1, 0]), jnp.array([0, 1, 2, 3])).tolist()
    [1, 0, 3, 3]
    """
    return jnp.asarray(MOVES, jnp.int32)[given, state]


def right_steps(prompts: Int[Array, "N 12"]) -> Bool[Array, "N 2 3"]:
    """Which states follow from what stands before them, whether or not that is right."""
    question, steps, _ = pairs.parts(prompts)
    before = jnp.concatenate([jnp.broadcast_to(question[:, None, :1], steps[:, :, :1].shape), steps[:, :, :-1]], axis=2)
    return steps == moved(before, jnp.broadcast_to(question[:, None, 1:], before.shape))


def gold_scores(prompts: Int[Array, "N 12"]) -> Float[Array, "N 2"]:
    """The true scores.

    >>> swap, turn, flip = 0, 1, 2
    >>> asked = [0, swap, turn, flip, 1, 2, 2, CLEAN, 1, 3, 1, FLAW]  # the second errs at step 2
    >>> gold_scores(jnp.array([asked])).tolist()
    [[10.0, 3.0]]
    """
    return pairs.scores_of(MACHINES, right_steps(prompts), prompts).astype(jnp.float32)


def draw_prompts(key: Array, n: int) -> Int[Array, "N 12"]:
    """Questions with two answers; half of the answers err at one step, a quarter have a flaw."""
    keys = jax.random.split(key, 5)
    question = jax.random.randint(keys[0], (n, 4), 0, BASE, jnp.int32)
    errs = jax.random.uniform(keys[1], (n, 2)) < 0.5
    place = jax.random.randint(keys[2], (n, 2), 0, STEPS, jnp.int32)
    slip = jax.random.randint(keys[3], (n, 2), 1, BASE, jnp.int32)
    state, steps = jnp.broadcast_to(question[:, :1], (n, 2)), []
    for step in range(STEPS):
        state = moved(state, jnp.broadcast_to(question[:, 1 + step, None], (n, 2)))
        state = jnp.where(errs & (place == step), (state + slip) % BASE, state)
        steps.append(state)
    flaw = jnp.where(jax.random.uniform(keys[4], (n, 2)) < 0.25, FLAW, CLEAN).astype(jnp.int32)
    return jnp.concatenate([question, jnp.stack([*steps, flaw], axis=2).reshape(n, 8)], axis=1)


MACHINES = SUMS._replace(draw_prompts=draw_prompts, right_steps=right_steps, gold_scores=gold_scores)
