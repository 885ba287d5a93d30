"""One, two or four worked answers to a small sum, in the place of the pairs of ``judge_pairs``; all pure JAX.

A prompt has room for four answers; a place without one is filled with ``ABSENT``, and comes after all answers. A single
answer is rated 1 if it deserves the whole 10 points of its question's principle, else 0; several get their points. A
report checks the steps of the answers that are there, and gives as many scores.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from experiments.reward_models.parts import judge_pairs as pairs

COUNTS, PLACES = (1, 2, 4), 4
ABSENT = pairs.VOCABULARY
PROMPT_TOKENS, REPORT_TOKENS = 4 + 4 * PLACES, 4 + 5 * PLACES  # open, principle, checks, close, scores, end


def answers(prompts: Int[Array, "N 20"]) -> Int[Array, "N 4 4"]:
    """The four places: three steps and the surface of each."""
    return prompts[:, 4:].reshape(-1, PLACES, 4)


def present(prompts: Int[Array, "N 20"]) -> Bool[Array, "N 4"]:
    """Which places have an answer."""
    return answers(prompts)[:, :, 0] != ABSENT


def twos(prompts: Int[Array, "N 20"]) -> tuple[Int[Array, "N 12"], Int[Array, "N 12"]]:
    """The question with its first two places, and with its last two."""
    return prompts[:, :12], jnp.concatenate([prompts[:, :4], prompts[:, 12:]], axis=1)


def right_steps(prompts: Int[Array, "N 20"]) -> Bool[Array, "N 4 3"]:
    """Which steps follow from what stands before them; of no answer none that is read."""
    return jnp.concatenate([pairs.right_steps(two) for two in twos(prompts)], axis=1)


def flawed(prompts: Int[Array, "N 20"]) -> Bool[Array, "N 4"]:
    """Which answers have a visible flaw."""
    return jnp.concatenate([pairs.flawed(two) for two in twos(prompts)], axis=1)


def rated(prompts: Int[Array, "N 20"], scores: Int[Array, "N 4"]) -> Int[Array, "N 4"]:
    """Of a single answer whether it has all points, of several their points, -1 where there is none.

    >>> import jax.numpy as jnp
    >>> nobody = [ABSENT] * 4
    >>> one = [1, 2, 3, 0, 3, 2, 2, pairs.CLEAN, *nobody, *nobody, *nobody]
    >>> two = [1, 2, 3, 0, 3, 2, 2, pairs.CLEAN, 3, 1, 1, pairs.FLAW, *nobody, *nobody]
    >>> rated(jnp.array([one, one, two]), jnp.array([[10, 0, 0, 0], [8, 0, 0, 0], [10, 3, 0, 0]])).tolist()
    [[1, -1, -1, -1], [0, -1, -1, -1], [10, 3, -1, -1]]
    """
    there = present(prompts)
    single = jnp.sum(there.astype(jnp.int32), axis=1, keepdims=True) == 1
    return jnp.where(there, jnp.where(single, (scores == 10).astype(jnp.int32), scores), -1).astype(jnp.int32)


def draw_prompts(key: Array, n: int) -> Int[Array, "N 20"]:
    """Questions with one, two or four answers, equally often; each answer as in ``judge_pairs``."""
    first, second = (pairs.draw_prompts(jax.random.fold_in(key, k), n) for k in range(2))
    # the second two answers are of another question: its sums are brought to the first one's, errors and all
    gap = (pairs.truth(first[:, :4]) - pairs.truth(second[:, :4]))[:, None, :]
    more = second[:, 4:].reshape(n, 2, 4)
    more = jnp.concatenate([(more[:, :, :3] + gap) % pairs.BASE, more[:, :, 3:]], axis=2).reshape(n, 8)
    every = jnp.concatenate([first, more], axis=1)
    count = jnp.asarray(COUNTS, jnp.int32)[jax.random.randint(jax.random.fold_in(key, 2), (n,), 0, len(COUNTS))]
    gone = jnp.arange(PLACES, dtype=jnp.int32)[None, :] >= count[:, None]
    return jnp.concatenate([every[:, :4], jnp.where(jnp.repeat(gone, 4, axis=1), ABSENT, every[:, 4:])], axis=1)


def draw_order(key: Array, prompts: Int[Array, "N 20"]) -> Int[Array, "N 4"]:
    """A random order of the answers that are there: ``order[b, i]`` comes to place i; the empty places stay last."""
    late = jnp.where(present(prompts), 0.0, 2.0)
    return jnp.argsort(jax.random.uniform(key, late.shape) + late, axis=1).astype(jnp.int32)


def reordered(prompts: Int[Array, "N 20"], order: Int[Array, "N 4"]) -> Int[Array, "N 20"]:
    """The same with the answers in that order.

    >>> import jax.numpy as jnp
    >>> asked = jnp.arange(20)[None, :]
    >>> reordered(asked, jnp.array([[2, 0, 1, 3]]))[0, 4:].tolist()
    [12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19]
    """
    moved = jnp.take_along_axis(answers(prompts), order[:, :, None], axis=1)
    return jnp.concatenate([prompts[:, :4], moved.reshape(-1, 4 * PLACES)], axis=1)


def shuffled(key: Array, prompts: Int[Array, "N 20"]) -> tuple[Int[Array, "N 20"], Int[Array, "N 4"]]:
    """``(prompts, order)``: the same with the answers in a random order, and which."""
    order = draw_order(key, prompts)
    return reordered(prompts, order), order


def swapped(prompts: Int[Array, "N 20"]) -> Int[Array, "N 20"]:
    """The same with the answers in the opposite order."""
    here = jnp.arange(PLACES, dtype=jnp.int32)[None, :]
    count = jnp.sum(present(prompts).astype(jnp.int32), axis=1, keepdims=True)
    return reordered(prompts, jnp.where(here < count, count - 1 - here, here).astype(jnp.int32))


def reasoned(prompts: Int[Array, "N 20"]) -> Bool[Array, " N"]:
    """Whether the answers look alike on the surface, so that only their steps tell them apart."""
    there, flaw = present(prompts), flawed(prompts)
    return jnp.all(~there | flaw, axis=1) | jnp.all(~there | ~flaw, axis=1)


def hinted(prompts: Int[Array, "N 20"], best: Int[Array, " N"]) -> Int[Array, "N 20"]:
    """The same with a hint, which of several answers is the best; of a single one there is none to name."""
    several = jnp.sum(present(prompts).astype(jnp.int32), axis=1, keepdims=True) > 1
    here = (jnp.arange(prompts.shape[1], dtype=jnp.int32)[None, :] == 7 + 4 * best[:, None]) & several
    return jnp.where(here, pairs.HINTED + (prompts == pairs.FLAW).astype(jnp.int32), prompts)


def gold_scores(prompts: Int[Array, "N 20"]) -> Float[Array, "N 4"]:
    """The true scores where reasoning counts in all questions."""
    return rated(prompts, pairs.scores_of(PANELS, right_steps(prompts), prompts)).astype(jnp.float32)


WORLD = strings.make_world(ABSENT + 1, PROMPT_TOKENS, REPORT_TOKENS, end=pairs.END, width=48, layers=2, heads=3)
PANELS = pairs.SUMS._replace(
    world=WORLD, long=WORLD, draw_prompts=draw_prompts, right_steps=right_steps, flawed=flawed,
    gold_scores=gold_scores, swapped=swapped, reasoned=reasoned, hinted=hinted, counts=COUNTS, rated=rated,
    shuffled=shuffled,
)  # fmt: skip


def of_task(task: pairs.Reports) -> pairs.Reports:
    """Panels of one, two and four answers in the place of the pairs of sums; of rows of one's own, one and two."""
    return PANELS if task.panels is None else task.panels()
