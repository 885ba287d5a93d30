"""Pairs of one's own for judges that write reports, in the place of the worked sums of ``judge_pairs``.

A prompt is the row's prompt and both responses, each behind a mark; which comes first is a coin. The last tokens of the
vocabulary, which texts hardly have, are the language of reports, as the strings' own are there. The preferred response
is worth 10 and the other 4: its steps count as wrong from the first. ``reasoned`` are pairs whose surface, their
length, does not give away the better one: it is not the longer. ``Reports.panels`` are the same rows with one answer,
rated 1 if it is the preferred one and 0 if not, as often as with both.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings, text_rows
from experiments.reward_models.parts.judge_pairs import LONG_REPORT, REPORT_TOKENS, Reports, Words
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment.own_rows.tasks import Opened
from jaxrl_llm.rollout import given_responses

Settings = text_rows.Settings
WORDS = ("ok", "bad", "open", "close", "answer", "wait", "strict", "lenient")  # two names of principles at the end
SCORES, STEPS = 11, 3
BOTH, ALONE = ((1, 2), (2, 1)), ((1,), (2,))  # what is shown of a row: the preferred one is 1


def _asked(rows: text_rows.Rows, table: text_rows.Table, shown: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    """Every pair as left-padded rows ``[N, W]``, for each way in which it is shown."""
    tokenizer, end = rows.model.tokenizer, rows.model.tokenizer.eos_ids[0]
    marks = [tokenizer.encode(text) for text in ("\n\nFirst response:\n", "\n\nSecond response:\n", "\n\nReport:\n")]
    width = sum(x.shape[1] for x in table) + sum(map(len, marks))
    made = []
    for order in shown:
        found = np.full((table.prompts.shape[0], width), strings.PAD, np.int32)
        for n, row in enumerate(zip(*map(np.asarray, table), strict=True)):
            whole = row[0][row[0] != strings.PAD].tolist()
            for mark, k in zip(marks, order, strict=False):
                whole += [*mark, *row[k][row[k] != end].tolist()]
            whole += marks[-1]
            found[n, width - len(whole) :] = whole
        made.append(found)
    return made


def open_task(settings: Any) -> Opened:
    """The ``Reports`` on the rows of the settings."""
    rows = text_rows.opened(settings)
    return Opened(reports(rows, settings), text_rows.finish(rows))


def reports(rows: text_rows.Rows, settings: Any, *, shown: tuple[tuple[int, ...], ...] = BOTH) -> Reports:
    """Pairs of one's own in both orders, or also each answer alone, and the words of reports on them."""
    tables = [_asked(rows, part, shown) for part in (rows.train, rows.heldout)]
    task = of_tables(rows, settings, tables, shown)
    return task._replace(panels=lambda: reports(rows, settings, shown=(*BOTH, *ALONE)))


def of_tables(
    rows: text_rows.Rows, settings: Any, tables: list[list[np.ndarray]], shown: tuple[tuple[int, ...], ...], *,
    lengths: tuple[int, int] = (REPORT_TOKENS, LONG_REPORT), told: Sequence[np.ndarray] = (),
) -> Reports:  # fmt: skip
    """The ``Reports`` of rows that are shown so.

    Args:
      tables: of the training and of the held-out rows, for each way in which they are shown.
      lengths: tokens of a report, and of a long one.
      told: all rows in all ways with a hint that the first, and that the second answer is the better; by default a
        sentence before the prompt.
    """
    model = rows.model
    ways = [jnp.asarray(np.concatenate([part[k] for part in tables])) for k in range(len(shown))]
    every = jnp.concatenate(ways)  # the preferred one first, then second; then alone, then the other one alone
    pairs, train = ways[0].shape[0], tables[0][0].shape[0]
    least = min(np.asarray((x != strings.PAD).argmax(1)).min() for x in map(np.asarray, ways))
    every = every[:, least:]  # columns that no prompt needs
    longer = jnp.concatenate([
        jnp.sum((part.chosen != model.tokenizer.eos_ids[0]).astype(jnp.int32), axis=1)
        > jnp.sum((part.rejected != model.tokenizer.eos_ids[0]).astype(jnp.int32), axis=1)
        for part in (rows.train, rows.heldout)
    ])  # fmt: skip
    number_of = text_rows.finder(every)
    if every.shape[1] + lengths[1] > model.config.max_positions:
        if told:
            raise UserError(
                f"questions of {every.shape[1]} tokens and reports of {lengths[1]} exceed the model's context of "
                f"{model.config.max_positions}; lower --report-tokens, --max-prompt-tokens or --max-new-tokens"
            )
        raise text_rows.too_long(every.shape[1] + lengths[1], model)
    size = model.config.padded_vocab_size
    first = size - len(WORDS) - SCORES
    words = {name: first + k for k, name in enumerate(WORDS[:-1])}

    def single(prompts: Int[Array, "N P"]) -> Bool[Array, "N 1"]:
        return number_of(prompts)[:, None] >= 2 * pairs

    def right_steps(prompts: Int[Array, "N P"]) -> Bool[Array, "N 2 3"]:
        mine = number_of(prompts) // pairs % 2 == 0
        return jnp.repeat(jnp.stack([mine, ~mine], axis=1)[:, :, None], STEPS, axis=2)

    def rated(prompts: Int[Array, "N P"], scores: Int[Array, "N 2"]) -> Int[Array, "N 2"]:
        alone = jnp.where(jnp.arange(2)[None, :] == 0, (scores == 10).astype(jnp.int32), -1)
        return jnp.where(single(prompts), alone, scores).astype(jnp.int32)

    def gold_scores(prompts: Int[Array, "N P"]) -> Float[Array, "N 2"]:
        scores = jnp.where(right_steps(prompts)[:, :, 0], 10, 4).astype(jnp.int32)
        return rated(prompts, scores).astype(jnp.float32)

    def draw_prompts(key: Array, n: int) -> Int[Array, "N P"]:
        low, high = (train, pairs) if rows.now() is rows.heldout else (0, train)
        row = jax.random.randint(jax.random.fold_in(key, 0), (n,), low, high, jnp.int32)
        turned = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, (n,))
        alone = jax.random.bernoulli(jax.random.fold_in(key, 2), 0.5, (n,)) & (len(shown) > 2)
        return every[row + jnp.where(turned, pairs, 0) + jnp.where(alone, 2 * pairs, 0)]

    def swapped(prompts: Int[Array, "N P"]) -> Int[Array, "N P"]:
        number = number_of(prompts)
        return every[jnp.where(number < 2 * pairs, (number + pairs) % (2 * pairs), number)]

    def shuffled(key: Array, prompts: Int[Array, "N P"]) -> tuple[Array, Array]:
        turned = jax.random.bernoulli(key, 0.5, (prompts.shape[0], 1)) & ~single(prompts)
        order = jnp.where(turned, jnp.array([[1, 0]], jnp.int32), jnp.array([[0, 1]], jnp.int32))
        return jnp.where(turned, swapped(prompts), prompts), order

    def reasoned(prompts: Int[Array, "N P"]) -> Bool[Array, " N"]:
        return ~longer[number_of(prompts) % pairs]

    better = [model.tokenizer.encode(f"Better: {word}.\n") for word in ("first", "second")]
    widest = max(map(len, better))
    hints = jnp.asarray([[strings.PAD] * (widest - len(x)) + x for x in better], jnp.int32)
    whole_told = jnp.asarray(np.stack(told)) if told else None

    def hinted(prompts: Int[Array, "N P"], best: Int[Array, " N"]) -> Int[Array, "N Q"]:
        if whole_told is not None:
            return whole_told[jnp.where(single(prompts)[:, 0], 0, best), number_of(prompts)]
        whole = jnp.concatenate([jnp.where(single(prompts), strings.PAD, hints[best]), prompts], axis=1)
        return given_responses.left_padded(whole, whole != strings.PAD, pad_id=strings.PAD)[0]

    make_world = text_rows.world_maker(rows, settings)
    return Reports(
        world=make_world(size, every.shape[1], lengths[0]), long=make_world(size, every.shape[1], lengths[1]),
        words=Words(**words, score=first + len(WORDS), end=model.tokenizer.eos_ids[0]), draw_prompts=draw_prompts,
        right_steps=right_steps, flawed=lambda prompts: jnp.zeros((prompts.shape[0], 2), bool),
        principle=lambda prompts: jnp.zeros(prompts.shape[:1], jnp.int32), gold_scores=gold_scores, swapped=swapped,
        reasoned=reasoned, hinted=hinted, counts=tuple(sorted({len(order) for order in shown})), rated=rated,
        shuffled=shuffled, number_of=number_of,
    )  # fmt: skip
