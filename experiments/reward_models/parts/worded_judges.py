"""Judges of pairs of one's own that write in free words: principles, critiques and scores, read off their last line.

The loaded model is asked in words, for the principles that responses to this prompt are to be judged by, then for a
critique of each response, then for ``SCORES:`` and a whole number for each. A report counts as read where it ended and
its last line of that form holds 0 to 10 for each of one or two responses; any other is wrong, as in the paper. Without
``--report words`` reports are tokens, as ``text_judges`` has them.

A model behind ``--writer`` may write the first reports: the right ones are what the judge begins with.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.parts import named_lines, strings, text_rows
from experiments.parts.messages import asked_text
from experiments.reward_models.parts import text_judges
from experiments.reward_models.parts.judge_pairs import Reports
from jaxrl_llm.data import problems as problem_tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment.own_rows.tasks import Opened
from jaxrl_llm.run import flags
from jaxrl_llm.tools import endpoints

STEPS = {
    "principles": "First state, in your own words, by which principles responses to this prompt should be judged and "
    "how much each weighs. Then write a critique that holds each response against them. ",
    "critique": "Write a critique of each response. ",
    "scores": "Write nothing else: ",
}
SCALE = {
    1: "1 if the response is what a reader of this prompt prefers, else 0",
    2: "a whole number from 1 (poor) to 10 (excellent) for each response, in their order, with a comma between them",
}
HINT = "You are told that the {} response is the better one. Judge for yourself all the same, and do not mention it. "
ASK = (
    "A prompt and {count} to it stand below. {told}{steps}End with a line of its own that begins with SCORES: and "
    "holds {scale}.\n\nPrompt:\n<<<\n{prompt}\n>>>\n{shown}"
)
_SCORES = re.compile(  # no two neighbours take the same letters: what a judge writes is read in one go
    named_lines.FRONT + r"SCORES[*_]*+\s*+:[*_\s]*+\[?+\s*+(\d++(?:\s*+,\s*+\d++)*+)[^\S\n]*+\]?+(?:[*_.]|[^\S\n])*+$",
    re.MULTILINE | re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Settings(text_judges.Settings):
    """Flags of judges of one's own rows that may write in words."""

    report: Literal["tokens", "words"] = "tokens"  # words: free text of the loaded model, its principles with it
    report_tokens: int = 512  # of a report in words, at most
    writer: str = (
        ""  # address of a model whose right reports the judge begins with, https://HOST/v1; with --report words
    )
    writer_model: str = ""  # its name there


def scores(report: str) -> list[int] | None:
    """The numbers of the last line ``SCORES:`` of a report; None without one, or where a number is beyond 10.

    >>> [scores(x) for x in ("Kind.\\n**SCORES: 8, 6**", "SCORES: [7, 10]", "scores: 1", "SCORES: 8/10", "SCORES: 11")]
    [[8, 6], [7, 10], [1], None, None]
    """
    found = _SCORES.findall(report)
    parts = [part.strip() for part in found[-1].split(",")] if found else []
    if not parts or not all(len(part) < 5 and int(part) <= 10 for part in parts):
        return None
    return [int(part) for part in parts]


def question(prompt: str, responses: Sequence[str], kind: str, *, told: int | None = None) -> str:
    """What a judge is asked about one response or two; ``kind`` of ``STEPS``; ``told``: the place of the better one."""
    places = ("first", "second") if len(responses) > 1 else ("",)
    shown = "".join(f"\n{f'{place} response'.strip().capitalize()}:\n<<<\n{response}\n>>>\n"
                    for place, response in zip(places, responses, strict=True))  # fmt: skip
    hint = "" if told is None or len(responses) < 2 else HINT.format(places[told])
    count = "a response" if len(responses) == 1 else "two responses"
    return ASK.format(count=count, told=hint, steps=STEPS[kind], scale=SCALE[len(responses)], prompt=prompt,
                      shown=shown)  # fmt: skip


def is_right(given: Sequence[int] | None, gold: Sequence[float]) -> bool:
    """``judgements.picks_best`` of one report on one response or on a pair with a best one; gold below 0: none there.

    >>> [is_right(x, (10.0, 4.0)) for x in ([7, 6], [7, 7], [7], None)], is_right([1], (1.0, -1.0))
    ([True, False, False, False], True)
    """
    true = [x for x in gold if x >= 0]
    if given is None or len(given) != len(true):
        return False
    return given[0] == true[0] if len(true) == 1 else (given[0] - given[1]) * (true[0] - true[1]) > 0


def open_task(settings: Any) -> Opened:
    """The ``Reports`` on the rows of the settings, in words with ``--report words``.

    Raises:
      UserError: for a writer without words, and as ``text_rows.opened``.
    """
    if settings.report == "tokens":
        for name in ("writer", "writer_model", "report_tokens"):
            if (value := getattr(settings, name)) != getattr(Settings, name):
                raise UserError(f"{flags.spell(name)} {value} is of reports in words: give --report words, too")
        return text_judges.open_task(settings)
    if settings.writer_model and not settings.writer:
        raise UserError(f"--writer-model {settings.writer_model} needs --writer ADDRESS, where that model is served")
    if settings.report_tokens < 2:
        raise UserError(f"--report-tokens {settings.report_tokens} must be at least 2")
    rows = text_rows.opened(settings)
    ask = open_writer(settings) if settings.writer else None
    return Opened(reports(rows, settings, ask), text_rows.finish(rows))


def open_writer(settings: Any) -> Callable[[Sequence[str]], list[str | None]]:
    """``questions -> reports`` of the model behind ``--writer``, which has judged one pair.

    Raises:
      UserError: without a name, and where the model gives no scores; RunStopped: where nothing answers.
    """
    chat = endpoints.open_judge(
        endpoints.settings_of(settings),
        "--writer", settings.writer, settings.writer_model, read=scores, wants="a line SCORES: with two numbers",
        question=question("Say hello.", ("Hello!", "No."), "principles"),
    )  # fmt: skip

    def ask(questions: Sequence[str]) -> list[str | None]:
        different = list(dict.fromkeys(questions))
        said = endpoints.ask_all(
            chat, [[{"role": "user", "content": text}] for text in different], workers=settings.endpoint_concurrency
        )
        known = dict(zip(different, said, strict=True))
        return [known[text] for text in questions]

    return ask


def reports(rows: text_rows.Rows, settings: Any, ask: Callable[[Sequence[str]], list[str | None]] | None) -> Reports:
    """Pairs in both orders and reports on them in words; what is asked for, and panels of one and two, are made once.

    Args:
      ask: who writes the first reports; None: nobody.
    """
    read, sources = make_reader(rows, settings), list(rows.sources)
    train = rows.train.prompts.shape[0]

    def encoded(asked: Sequence[str]) -> np.ndarray:
        given = [Problem("rows", text, "", {}, 0, str(k)) for k, text in enumerate(asked)]
        table = problem_tables.encode_problems(
            rows.model.tokenizer, given, answers=problem_tables.no_answers, chat=settings.chat
        )
        return np.where(np.asarray(table.valid), np.asarray(table.tokens), strings.PAD).astype(np.int32)

    @lru_cache(maxsize=8)
    def made(kind: str, shown: tuple[tuple[int, ...], ...]) -> Reports:
        def texts(told: int | None = None) -> list[str]:
            whole = [(asked_text(x.prompt), x.chosen, x.rejected) for x in sources]
            return [question(x[0], [x[k] for k in order], kind, told=told) for order in shown for x in whole]

        plain = encoded(texts())
        ways = np.split(plain, len(shown))
        task = text_judges.of_tables(
            rows, settings, [[way[:train] for way in ways], [way[train:] for way in ways]], shown,
            lengths=(settings.report_tokens,) * 2, told=np.split(encoded([*texts(0), *texts(1)]), 2),
        )  # fmt: skip
        task = task._replace(
            read=partial(read, max(task.counts), task.counts), asking=lambda kind: made(kind, shown),
            panels=lambda: made(kind, (*text_judges.BOTH, *text_judges.ALONE)),
        )  # fmt: skip
        return task if ask is None else task._replace(first=make_first(task, rows, texts(), ask, settings))

    return made("principles", text_judges.BOTH)


def make_reader(rows: text_rows.Rows, settings: Any) -> Callable[..., tuple[Array, Array, Array]]:
    """``(most, counts, responses) -> (tagged, scored, scores [N, most])`` as ``judge_pairs.read_report`` gives them."""
    tokenizer = rows.model.tokenizer

    def found(counts: tuple[int, ...], responses: Any) -> tuple[np.ndarray, np.ndarray]:
        ends, said = set(tokenizer.eos_ids), np.asarray(responses)
        out, there = np.zeros((len(said), max(counts)), np.float32), np.zeros(len(said), bool)
        for k, row in enumerate(said.tolist()):
            stop = next((at for at, token in enumerate(row) if token in ends), None)
            given = None if stop is None else scores(tokenizer.decode(row[:stop]))  # one that was cut is not read
            if given is not None and len(given) in counts:
                out[k], there[k] = -1, True
                out[k, : len(given)] = given
        return there, out

    def read(most: int, counts: tuple[int, ...], responses: Array) -> tuple[Array, Array, Array]:
        n = responses.shape[0]
        shapes = jax.ShapeDtypeStruct((n,), jnp.bool_), jax.ShapeDtypeStruct((n, most), jnp.float32)
        there, given = jax.pure_callback(partial(found, counts), shapes, responses, vmap_method="sequential")
        return there, there, given

    return read


def make_first(
    task: Reports, rows: text_rows.Rows, questions: Sequence[str], ask: Callable[[Sequence[str]], list[str | None]],
    settings: Any,
) -> Callable[[Array, int], tuple[Array, Array]]:  # fmt: skip
    """``(key, n) -> (prompts, reports)``: right reports of a model behind an address, each as often as it takes.

    Right is what picks the preferred response and fits into ``--report-tokens``.
    """
    tokenizer, width = rows.model.tokenizer, settings.report_tokens

    def written(number: Any, gold: Any) -> tuple[np.ndarray, np.ndarray]:
        replies = [said or "" for said in ask([questions[k] for k in np.asarray(number)])]
        ids = [[*tokenizer.encode(said), tokenizer.eos_ids[0]] for said in replies]
        right = [
            len(row) <= width and is_right(scores(said), true)
            for said, row, true in zip(replies, ids, np.asarray(gold).tolist(), strict=True)
        ]
        places = np.flatnonzero(right)
        print(f"--writer {settings.writer}: {len(places)} of {len(replies)} reports are right", flush=True)
        if not len(places):
            raise UserError(
                f"--writer {settings.writer}: no report of {len(replies)} is right and within --report-tokens {width}; "
                "take another model, or more tokens"
            )
        chosen = np.resize(places, len(replies)).astype(np.int32)
        table = np.full((len(replies), width), tokenizer.eos_ids[0], np.int32)
        for row, k in zip(table, chosen, strict=True):
            row[: len(ids[k])] = ids[k]
        return chosen, table

    def draw(key: Array, n: int) -> tuple[Array, Array]:
        prompts = task.draw_prompts(key, n)
        shapes = jax.ShapeDtypeStruct((n,), jnp.int32), jax.ShapeDtypeStruct((n, width), jnp.int32)
        chosen, said = jax.pure_callback(
            written, shapes, task.number_of(prompts), task.gold_scores(prompts), vmap_method="sequential"
        )
        return prompts[chosen], said

    return draw
