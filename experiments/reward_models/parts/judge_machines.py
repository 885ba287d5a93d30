"""Two runs of a small machine and a judge's report on them, a second world beside the sums of ``judge_pairs``.

A question is the state a machine starts in and three inputs; every input is a permutation of the four states, and their
order counts. An answer writes the states behind the inputs, and the machine goes on from a state that is written wrong.
Answers err and have flaws as often as those to a sum. What a report is, and how it is scored, stands in
``judge_pairs``.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.reward_models.parts import judge_pairs as pairs
from experiments.reward_models.parts.judge_pairs import BASE, STEPS, SUMS

MOVES = ((1, 0, 2, 3), (1, 2, 3, 0), (0, 3, 2, 1), (3, 2, 1, 0))  # of an input, from every state


def moved(state: Int[Array, "*B"], given: Int[Array, "*G"]) -> Int[Array, "*B"]:
    """The state behind an input.

    >>> moved(jnp.array([0, 3, 1, 0]), jnp.array([0, 1, 2, 3])).tolist()
    [1, 0, 3, 3]
    """
    return jnp.asarray(MOVES, jnp.int32)[jnp.broadcast_to(given, state.shape), state]


right_steps = partial(pairs.right_steps, moved=moved)


def gold_scores(prompts: Int[Array, "N 12"]) -> Float[Array, "N 2"]:
    """The true scores.

    >>> swap, turn, flip = 0, 1, 2
    >>> asked = [0, swap, turn, flip, 1, 2, 2, pairs.CLEAN, 1, 3, 1, pairs.FLAW]  # the second errs at step 2
    >>> gold_scores(jnp.array([asked])).tolist()
    [[10.0, 3.0]]
    """
    return pairs.scores_of(MACHINES, right_steps(prompts), prompts).astype(jnp.float32)


def worked_runs(
    question: Int[Array, "N 4"], errs: Bool[Array, "N 2"], place: Int[Array, "N 2"], slip: Int[Array, "N 2"]
) -> Int[Array, "N 2 3"]:
    """The states of two answers; those that err are off by ``slip`` at the step ``place``, and go on from there."""
    state, steps = jnp.broadcast_to(question[:, :1], place.shape), []
    for step in range(STEPS):
        state = moved(state, question[:, 1 + step, None])
        state = jnp.where(errs & (place == step), (state + slip) % BASE, state)
        steps.append(state)
    return jnp.stack(steps, axis=2)


MACHINES = SUMS._replace(
    draw_prompts=partial(pairs.draw_prompts, worked=worked_runs), right_steps=right_steps, gold_scores=gold_scores
)
