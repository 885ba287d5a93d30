"""Two worked answers to a small sum and a judge's report on them; all pure JAX.

A question is four numbers modulo 4; an answer writes the three partial sums and is ``CLEAN`` or has a ``FLAW`` that
anyone can see. A wrong step is carried on. The gold score is 10, less 2, 4 or 6 for a first error at the third, second
or first step, less 3 for a flaw. A report opens its thoughts, checks the three steps of either answer (``OK``,
``BAD``), closes them, and gives both scores, each behind ``ANSWER``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings

OWN_ROWS = "experiments.reward_models.parts.text_judges"  # opens ``Reports`` of rows of one's own
BASE, STEPS = 4, 3
FLAW, CLEAN, OK, BAD, OPEN, CLOSE, ANSWER, WAIT = 4, 5, 6, 7, 8, 9, 10, 11
SCORE, END = 12, 23  # scores 0 .. 10 are tokens 12 .. 22
STRICT = 24  # the principle that errors of reasoning weigh most; 25: that looks do
HINTED = 26  # an answer that a hint calls the best is marked so if it is clean, 27 if it has a flaw
VOCABULARY, PROMPT_TOKENS, REPORT_TOKENS = 28, 12, 23
MOST_ROUNDS = 5  # checks of everything
LONG_REPORT = 1 + 6 * MOST_ROUNDS + (MOST_ROUNDS - 1) + 1 + 4 + 1  # tokens of the longest report: none is forced beyond
WEIGHTS = ((2, 3), (1, 5))  # of a principle: a step that is not reached rightly, a visible flaw


def truth(questions: Int[Array, "N 4"]) -> Int[Array, "N 3"]:
    """The right partial sums."""
    return jnp.cumsum(questions, axis=1)[:, 1:] % BASE


def parts(prompts: Int[Array, "N 12"]) -> tuple[Int[Array, "N 4"], Int[Array, "N 2 3"], Bool[Array, "N 2"]]:
    """Question, the steps of both answers, and whether each has a visible flaw."""
    answers = prompts[:, 4:].reshape(-1, 2, 4)
    return prompts[:, :4], answers[:, :, :3], (answers[:, :, 3] == FLAW) | (answers[:, :, 3] == HINTED + 1)


def added(before: Int[Array, "*B"], given: Int[Array, "*G"]) -> Int[Array, "*B"]:
    """The next partial sum."""
    return (before + given) % BASE


def right_steps(prompts: Int[Array, "N 12"], *, moved: Callable[[Array, Array], Array] = added) -> Bool[Array, "N 2 3"]:
    """Which steps follow from what stands before them, whether or not that is right; ``moved`` is how."""
    question, steps, _ = parts(prompts)
    before = jnp.concatenate([jnp.broadcast_to(question[:, None, :1], steps[:, :, :1].shape), steps[:, :, :-1]], axis=2)
    return steps == moved(before, question[:, None, 1:])


def principle(prompts: Int[Array, "N P"]) -> Int[Array, " N"]:
    """What counts in a question that is judged by principles: 0 reasoning, 1 looks, by its first number."""
    return prompts[:, 0] % 2


def gold_scores(prompts: Int[Array, "N 12"]) -> Float[Array, "N 2"]:
    """The true scores.

    >>> import jax.numpy as jnp
    >>> gold_scores(jnp.array([[1, 2, 3, 0, 3, 2, 2, CLEAN, 3, 1, 1, FLAW]])).tolist()  # the second errs at step 2
    [[10.0, 3.0]]
    """
    checked, (_, _, flawed) = right_steps(prompts), parts(prompts)
    first = jnp.argmin(checked, axis=2)  # 0 where all are right, too
    loss = jnp.where(jnp.all(checked, axis=2), 0, 6 - 2 * first)
    return (10 - loss - 3 * flawed.astype(jnp.int32)).astype(jnp.float32)


def worked_sums(
    question: Int[Array, "N 4"], errs: Bool[Array, "N 2"], place: Int[Array, "N 2"], slip: Int[Array, "N 2"]
) -> Int[Array, "N 2 3"]:
    """The steps of two answers; those that err are off by ``slip`` from the step ``place`` on."""
    wrong = errs[:, :, None] & (jnp.arange(STEPS, dtype=jnp.int32)[None, None, :] >= place[:, :, None])
    return (truth(question)[:, None, :] + jnp.where(wrong, slip[:, :, None], 0)) % BASE


def draw_prompts(key: Array, n: int, *, worked: Callable[..., Array] = worked_sums) -> Int[Array, "N 12"]:
    """Questions with two answers; half of the answers err at one step, a quarter have a flaw."""
    keys = jax.random.split(key, 5)
    question = jax.random.randint(keys[0], (n, 4), 0, BASE, jnp.int32)
    errs = jax.random.uniform(keys[1], (n, 2)) < 0.5
    place = jax.random.randint(keys[2], (n, 2), 0, STEPS, jnp.int32)
    slip = jax.random.randint(keys[3], (n, 2), 1, BASE, jnp.int32)
    steps = worked(question, errs, place, slip)
    flaw = jnp.where(jax.random.uniform(keys[4], (n, 2)) < 0.25, FLAW, CLEAN).astype(jnp.int32)
    answers = jnp.concatenate([steps, flaw[:, :, None]], axis=2).reshape(n, 8)
    return jnp.concatenate([question, answers], axis=1)


def swapped(prompts: Int[Array, "N 12"]) -> Int[Array, "N 12"]:
    """The same with the answers in the other order."""
    return jnp.concatenate([prompts[:, :4], prompts[:, 8:], prompts[:, 4:8]], axis=1)


def hinted(prompts: Int[Array, "N 12"], best: Int[Array, " N"]) -> Int[Array, "N 12"]:
    """The same with a hint, which answer is the best.

    >>> import jax.numpy as jnp
    >>> asked = jnp.array([[1, 2, 3, 0, 3, 2, 2, CLEAN, 3, 1, 1, FLAW]])
    >>> told = hinted(asked, jnp.array([1]))
    >>> told[0, 7::4].tolist() == [CLEAN, HINTED + 1], gold_scores(told).tolist() == gold_scores(asked).tolist()
    (True, True)
    """
    place = 7 + 4 * best[:, None]
    here = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None, :] == place
    return jnp.where(here, HINTED + (prompts == FLAW).astype(jnp.int32), prompts)


def reasoned(prompts: Int[Array, "N 12"]) -> Bool[Array, " N"]:
    """Whether the answers look alike on the surface, so that only their steps tell them apart."""
    flawed = parts(prompts)[2]
    return flawed[:, 0] == flawed[:, 1]


def flawed(prompts: Int[Array, "N 12"]) -> Bool[Array, "N 2"]:
    """Which answers have a visible flaw."""
    return parts(prompts)[2]


def unrated(prompts: Int[Array, "N P"], scores: Int[Array, "N M"]) -> Int[Array, "N M"]:
    """Scores of pairs are those of the scale."""
    return scores


class Words(NamedTuple):
    """The tokens of a report; scores 0 .. 10 begin at ``score``, the names of principles at ``strict``."""

    ok: int
    bad: int
    open: int
    close: int
    answer: int
    wait: int
    score: int
    strict: int
    end: int


class Reports(NamedTuple):
    """Answers, by default pairs, and the language of reports on them: the sums of this module, or rows of one's own.

    Functions have the signatures of those of this module. Reports are written in ``world``, those of several rounds in
    ``long``.
    """

    world: strings.World
    long: strings.World
    words: Words
    draw_prompts: Callable[..., Array]
    right_steps: Callable[[Array], Array]
    flawed: Callable[[Array], Array]
    principle: Callable[[Array], Array]
    gold_scores: Callable[[Array], Array]
    swapped: Callable[[Array], Array]
    reasoned: Callable[[Array], Array]
    hinted: Callable[[Array, Array], Array]  # may be wider: its prompts are read, and never trained on
    counts: tuple[int, ...] = (2,)  # of answers in a prompt
    rated: Callable[[Array, Array], Array] = unrated  # what a report is to give of the scores; -1: no answer there
    shuffled: Callable[[Array, Array], tuple[Array, Array]] | None = None  # ``(key, prompts)``: others, and the order
    panels: Callable[[], "Reports"] | None = None  # the same with one answer, two, or more
    number_of: Callable[[Array], Array] | None = None  # the row of every prompt, of a task of rows
    # of a task whose reports are text: how they are read, in the place of ``read_report``; what they are asked to say
    # (``worded_judges.STEPS``); what a judge begins with, in the place of careless reports; None: as it was loaded
    read: Callable[[Array], tuple[Array, Array, Array]] | None = None
    asking: Callable[[str], "Reports"] | None = None
    first: Callable[[Array, int], tuple[Array, Array]] | None = None


SUMS = Reports(
    world=strings.make_world(VOCABULARY, PROMPT_TOKENS, REPORT_TOKENS, end=END, width=48, layers=2, heads=3),
    long=strings.make_world(VOCABULARY, PROMPT_TOKENS, LONG_REPORT, end=END, width=48, layers=2, heads=3),
    words=Words(OK, BAD, OPEN, CLOSE, ANSWER, WAIT, SCORE, STRICT, END), draw_prompts=draw_prompts,
    right_steps=right_steps, flawed=flawed, principle=principle, gold_scores=gold_scores, swapped=swapped,
    reasoned=reasoned, hinted=hinted,
)  # fmt: skip


# --- reports, in the words of a task


def principled_scores(task: Reports, prompts: Int[Array, "N P"]) -> Float[Array, "N M"]:
    """The true scores where what counts depends on the question; -1 in places without an answer.

    >>> import jax.numpy as jnp
    >>> answers = [3, 2, 2, CLEAN, 3, 1, 1, FLAW]  # the second errs at step 2 and has a flaw
    >>> principled_scores(SUMS, jnp.array([[1, 2, 3, 0, *answers]])).tolist()  # looks: 10 - 2 - 5
    [[10.0, 3.0]]
    """
    scores = scores_of(task, task.right_steps(prompts), prompts, task.principle(prompts))
    return task.rated(prompts, scores).astype(jnp.float32)


def scores_of(
    task: Reports, checked: Bool[Array, "N M 3"], prompts: Int[Array, "N P"], chosen: Int[Array, " N"] | None = None
) -> Int[Array, "N M"]:
    """The scores that follow from the checks of the steps under a principle, by default reasoning for all."""
    row = jnp.zeros(prompts.shape[:1], jnp.int32) if chosen is None else chosen
    step, flaw = (jnp.asarray(WEIGHTS, jnp.int32)[row, k][:, None] for k in (0, 1))
    loss = jnp.where(jnp.all(checked, axis=2), 0, step * (STEPS - jnp.argmin(checked, axis=2)))
    return (10 - loss - flaw * task.flawed(prompts).astype(jnp.int32)).astype(jnp.int32)


def report(
    task: Reports, checked: Sequence[Bool[Array, "N M 3"]], scores: Int[Array, "N M"], *, width: int | None = None,
    named: Int[Array, " N"] | None = None,
) -> Int[Array, "N T"]:  # fmt: skip
    """The tokens of a report: all rounds of checks with ``WAIT`` between them; without any the thoughts are empty.

    Where a score is below 0 there is no answer, and nothing is said of it.

    Args:
      named: the principle that the thoughts begin with; None: none is named.
    """
    (n, places), words = scores.shape, task.words
    width = task.world.response_tokens if width is None else width

    def column(token):
        return jnp.full((n, 1), token, jnp.int32)

    there = (scores >= 0)[:, :, None]
    thoughts = [] if named is None else [(words.strict + named[:, None]).astype(jnp.int32)]
    for k, one in enumerate(checked):
        found = jnp.where(there, jnp.where(one, words.ok, words.bad), -1).astype(jnp.int32)
        thoughts += ([column(words.wait)] if k else []) + [found.reshape(n, STEPS * places)]
    marks = jnp.full((n, places), words.answer, jnp.int32)
    last = jnp.where(there, jnp.stack([marks, words.score + scores], axis=2), -1).reshape(n, 2 * places)
    row = jnp.concatenate([column(words.open), *thoughts, column(words.close), last], axis=1)
    # what is not said leaves no gap: the rest moves up, in its order
    kept = jnp.take_along_axis(row, jnp.argsort(row < 0, axis=1, stable=True), axis=1)
    kept = jnp.where(kept < 0, words.end, kept)
    return jnp.pad(kept, ((0, 0), (0, width - kept.shape[1])), constant_values=words.end)


def draw_principled(
    task: Reports,
    key: Array,
    n: int,
    *,
    error_rate: float = 0.15,
    mistaken: float = 0.25,
    named: bool = True,
    reasons: bool = True,
    hints: float = 0.0,
) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """Prompts and reports of a careless judge of principles: in ``mistaken`` of them it goes by the wrong one.

    Args:
      named: whether the principle is written before the checks; the scores follow from it either way.
      hints: share of the prompts with a hint, on which the judge is right, so that it knows what a hint is; a model
        that was loaded knows by itself, and gets none.
    """
    prompts = task.draw_prompts(jax.random.fold_in(key, 0), n)
    truly = task.right_steps(prompts)
    checked = truly ^ (jax.random.uniform(jax.random.fold_in(key, 1), truly.shape) < error_rate)
    wrong = jax.random.bernoulli(jax.random.fold_in(key, 2), mistaken, (n,))
    chosen = jnp.where(wrong, 1 - task.principle(prompts), task.principle(prompts))
    shown = prompts
    if hints and task.world.start is None:
        told = jax.random.bernoulli(jax.random.fold_in(key, 3), hints, (n,))
        best = jnp.argmax(principled_scores(task, prompts), axis=1).astype(jnp.int32)
        shown = jnp.where(told[:, None], task.hinted(prompts, best), prompts)
        checked = jnp.where(told[:, None, None], truly, checked)
        chosen = jnp.where(told, task.principle(prompts), chosen)
    scores = task.rated(prompts, scores_of(task, checked, prompts, chosen))
    return shown, report(task, [checked] if reasons else [], scores, named=chosen if named else None)


def draw_reports(
    task: Reports, key: Array, n: int, *, error_rate: float = 0.15, reasons: bool = True
) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """Prompts and reports of a careless judge: each check is wrong at the given rate, the scores follow from them."""
    prompts = task.draw_prompts(jax.random.fold_in(key, 0), n)
    slips = jax.random.uniform(jax.random.fold_in(key, 1), (n, 2, STEPS)) < error_rate
    checked = task.right_steps(prompts) ^ slips
    return prompts, report(task, [checked] if reasons else [], scores_of(task, checked, prompts))


def draw_bare_reports(task: Reports, key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """``draw_reports`` with the scores alone: their thoughts are empty."""
    return draw_reports(task, key, n, reasons=False)


def draw_reflections(
    task: Reports, key: Array, n: int, *, error: float = 0.2, most: int = MOST_ROUNDS
) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """Prompts and long reports that check everything one to ``most`` times, equally often; the last round is scored.

    Every round errs at the same rate: that a later one is better is nothing that a judge could learn from them.
    """
    keys = jax.random.split(key, 3)
    prompts = task.draw_prompts(keys[0], n)
    slips = jax.random.uniform(keys[1], (most, n, 2, STEPS)) < error
    rounds = [task.right_steps(prompts) ^ slip for slip in slips]
    reports = jnp.stack(
        [
            report(task, rounds[: k + 1], scores_of(task, rounds[k], prompts), width=task.long.response_tokens)
            for k in range(most)
        ]
    )
    chosen = jax.random.randint(keys[2], (n,), 0, most, jnp.int32)
    return prompts, reports[chosen, jnp.arange(n)]


def read_report(
    task: Reports,
    responses: Int[Array, "N T"],
) -> tuple[Bool[Array, " N"], Bool[Array, " N"], Float[Array, "N M"]]:
    """``(tagged, scored, scores)``: thoughts opened and closed once, then as many answers with numbers of the scale as
    a prompt may have.

    Scores are 0 where they cannot be read, and -1 in the places after the last answer of a report that can be.
    """
    if task.read is not None:
        return task.read(responses)
    words = task.words
    ended = jnp.cumsum((responses == words.end).astype(jnp.int32), axis=1) > 0
    tokens = jnp.where(ended, words.end, responses)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]

    def only(token):
        there = tokens == token
        return jnp.sum(there.astype(jnp.int32), axis=1) == 1, there

    one_open, opened = only(words.open)
    one_close, closed = only(words.close)
    answers = tokens == words.answer
    number = jnp.cumsum(answers.astype(jnp.int32), axis=1)
    count = number[:, -1]
    order = (jnp.argmax(opened, axis=1) < jnp.argmax(closed, axis=1)) & (
        jnp.argmax(closed, axis=1) < jnp.argmax(answers, axis=1)
    )
    tagged = one_open & one_close & jnp.isin(count, jnp.asarray(task.counts)) & order & jnp.any(ended, axis=1)
    values = []
    for k in range(max(task.counts)):
        at = jnp.argmax(answers & (number == k + 1), axis=1)
        values.append(jnp.sum(jnp.where(places == at[:, None] + 1, tokens, 0), axis=1) - words.score)
    scores = jnp.stack(values, axis=1)
    given = jnp.arange(max(task.counts), dtype=jnp.int32)[None, :] < count[:, None]
    scored = tagged & jnp.all(~given | ((scores >= 0) & (scores <= 10)), axis=1)
    return tagged, scored, jnp.where(scored[:, None], jnp.where(given, scores, -1), 0).astype(jnp.float32)
