r"""Free answers of rows of one's own: references are the answers of worked solutions, compared by the rows' verifier.

An answer is what stands behind ``####``, in ``\boxed{}`` or in ``<answer>``; other responses give none. The rule wants
the same tokens, the soft rule shared ones (Jaccard). A generative judge starts as the loaded model, reads an answer and
its reference, and writes one of three verdicts, the last tokens of the vocabulary; its work is both once more. The log
that it imitates has references of the same problem and of others, judged by the verifier.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from experiments.parts.text_problems import with_answer
from experiments.reward_models.parts import free_answers
from experiments.reward_models.parts.answer_judges import Log
from experiments.reward_models.parts.free_answers import FreeBench
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.run import parts
from jaxrl_llm.types import Key
from jaxrl_llm.verifiers import answers as answer_verifiers

MOST_TOKENS = 16  # of an answer; longer ones are cut
MARK = "\\boxed{"
_CLOSED = re.compile(r"<answer>|\\\\?(?:boxed|fbox)[ \t\n]*\{")  # marks that say where an answer begins and ends


def make_free(settings: OnlineSettings) -> FreeBench:
    """A bench of free answers: of chains, or of rows of one's own; equal settings share one.

    Raises:
      UserError: for another generated task, and for rows without a worked solution.
    """
    if settings.data == "chain" or settings.data in parts.TASKS:
        return free_answers.make_free(settings)
    return _free(recipes.bench_identity(settings), settings.learning_rate)


def answer_of(text: str) -> str:
    r"""The answer that a text gives, empty where it marks none.

    >>> [answer_of(text) for text in ("so 3\n#### 3", r"\boxed{4}", "it is 5")]
    ['3', '4', '']
    """
    found = answer_verifiers.final_part(text)
    return "" if found == text.strip() else found


def answer_start(text: str) -> int:
    r"""Where the mark of the answer begins that ``answer_of`` finds; the length of a text that marks none.

    Of several boxes it is the first: a later one may say the same. A hash may be a heading as well: it is the last.

    >>> [text[: answer_start(text)] for text in ("so 3\n#### 3", r"it is $\boxed{4}$", "<answer>4</answer>", "it is 5")]
    ['so 3\n', 'it is $', '', 'it is 5']
    """
    if closed := _CLOSED.search(text):
        return closed.start()
    return next((text.rindex(mark) for mark in ("####", "#") if mark in text), len(text))


def in_answers(
    decode: Callable[[Sequence[int]], str], tokens: Int[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]
) -> Bool[np.ndarray, "B T"]:
    """The tokens of responses from the mark of the answer on, also where the mark begins in the midst of a token.

    A mark has many spellings in tokens, which depend on what stands before it: it is looked for in the text.
    """
    found = np.zeros(tokens.shape, bool)
    for row, kept in enumerate(mask):
        columns = np.flatnonzero(kept)
        said = tokens[row, columns].tolist()
        start, lengths = answer_start(decode(said)), range(len(said) + 1)
        before = bisect_right(lengths, start, key=lambda k, said=said: len(decode(said[:k]))) - 1
        found[row, columns[before:]] = True
    return found


@lru_cache(maxsize=4)
def _free(identity: tuple, rate: float) -> FreeBench:
    settings = OnlineSettings(**dict(identity))
    found, problems = recipes.bench(settings), recipes.solved_problems(settings)
    tokenizer, verify = found.model.tokenizer, parts.verifier_of(settings.format, settings.verifier)
    given = [answer_of(with_answer(p.solution, p.answer)) for p in problems]
    if not all(given):
        raise UserError(f"--data {settings.data}: {sum(not x for x in given)} of {len(given)} worked solutions mark no "
                        "answer (#### or \\boxed), which this method compares")  # fmt: skip
    table = jnp.asarray([_padded(tokenizer, x) for x in given])
    pool = parts.make_pool(verify)

    def text_of(tokens: np.ndarray) -> str:
        return tokenizer.decode([int(t) for t in tokens if t != strings.PAD])

    def read(rows) -> tuple[Int[Array, "B A"], Bool[Array, " B"]]:
        def said(tokens, mask):
            texts = [tokenizer.decode(np.asarray(t)[np.asarray(m)].tolist()) for t, m in zip(tokens, mask, strict=True)]
            return np.asarray([_padded(tokenizer, answer_of(text)) for text in texts], np.int32)

        shape = jax.ShapeDtypeStruct((rows.tokens.shape[0], MOST_TOKENS), jnp.int32)
        value = jax.pure_callback(said, shape, rows.tokens, rows.mask, vmap_method="sequential")
        return value, jnp.any(value != strings.PAD, axis=1)

    def answering(rows) -> Bool[Array, "B T"]:
        def said(tokens, mask):
            return in_answers(tokenizer.decode, np.asarray(tokens), np.asarray(mask))

        shape = jax.ShapeDtypeStruct(rows.tokens.shape, jnp.bool_)
        return jax.pure_callback(said, shape, rows.tokens, rows.mask, vmap_method="sequential")

    def equivalent(value, answered, answers) -> Bool[Array, " B"]:
        def judged(tokens, numbers):
            known = [problems[int(k)].answer for k in np.asarray(numbers)]
            texts = [text_of(row) for row in np.asarray(tokens)]
            if pool is None:
                verdicts = [verify(answer, text) for answer, text in zip(known, texts, strict=True)]
            else:
                verdicts = pool.judge(verify, known, texts).verdicts
            return np.asarray([v.valid and v.value > 0.5 for v in verdicts], bool)

        shape = jax.ShapeDtypeStruct((value.shape[0],), jnp.bool_)
        right = jax.pure_callback(judged, shape, value, answers["row"], vmap_method="sequential")
        return answered & right

    def words(value: np.ndarray, numbers: np.ndarray) -> list[tuple[str, str, str]]:
        return [
            (_in_words(problems[int(k)].prompt), given[int(k)], text_of(tokens))
            for k, tokens in zip(numbers, value, strict=True)
        ]

    def rows_of(split):
        count = split.tokens.shape[0]
        shown = table[:count] if split is found.train else jnp.full((count, MOST_TOKENS), strings.PAD, jnp.int32)
        return {"reference": shown, "row": jnp.arange(count, dtype=jnp.int32)}

    return FreeBench(
        bench=found._replace(
            train=found.train._replace(answers=rows_of(found.train)),
            heldout=found.heldout._replace(answers=rows_of(found.heldout)),
        ),
        read=read,
        reference_tokens=jnp.where(table == strings.PAD, tokenizer.pad_id, table),
        reference_valid=table != strings.PAD,
        mark=tuple(tokenizer.encode(MARK)),
        equivalent=equivalent,
        exact=exact,
        shared=shared_tokens,
        size=lambda value: jnp.sum((value != strings.PAD).astype(jnp.float32), axis=1),
        marked=marked,
        log=_log(found.model, rate, table, equivalent),
        logged=partial(_log, found.model, rate, table),
        words=words,
        answering=answering,
    )


def _in_words(prompt: str | list[dict[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(str(message["content"]) for message in prompt)


def _padded(tokenizer: Tokenizer, text: str) -> np.ndarray:
    tokens = tokenizer.encode(text)[:MOST_TOKENS] if text else []
    return np.asarray([*tokens, *[strings.PAD] * (MOST_TOKENS - len(tokens))], np.int32)


def _number(value: Int[Array, "B A"]) -> Int[Array, " B"]:
    weights = jax.random.randint(jax.random.key(2), (value.shape[1],), 1, 2**30, jnp.int32) * 2 + 1
    return jnp.sum((value + 7) * weights[None, :], axis=1)  # wraps around, as a hash does


def marked(value: Int[Array, "B A"], answers: dict[str, Array]) -> Int[Array, " B"]:
    """A number of the answer and its reference."""
    return _number(value) + 104729 * _number(answers["reference"])


def exact(value: Int[Array, "B A"], answered: Bool[Array, " B"], answers: dict[str, Array]) -> Bool[Array, " B"]:
    """The rule: the same tokens as the reference."""
    return answered & jnp.all(value == answers["reference"], axis=1)


def shared_tokens(
    value: Int[Array, "B A"], answered: Bool[Array, " B"], answers: dict[str, Array]
) -> Float[Array, " B"]:
    """The soft rule: tokens that answer and reference share, over all their different tokens (Jaccard).

    >>> value, reference = jnp.array([[5, 6, 6, -1]]), jnp.array([[6, 7, -1, -1]])
    >>> round(float(shared_tokens(value, jnp.array([True]), {"reference": reference})[0]), 4)  # 6 of 5, 6, 7
    0.3333
    """

    def different(x):
        earlier = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool), -1)
        again = jnp.any((x[:, :, None] == x[:, None, :]) & earlier[None], axis=2)
        return (x != strings.PAD) & ~again

    reference = answers["reference"]
    mine, theirs = different(value), different(reference)
    both = mine & jnp.any((value[:, :, None] == reference[:, None, :]) & theirs[:, None, :], axis=2)
    count = jnp.sum(both.astype(jnp.float32), axis=1)
    every = jnp.sum(mine.astype(jnp.float32), axis=1) + jnp.sum(theirs.astype(jnp.float32), axis=1) - count
    return jnp.where(answered, count / jnp.maximum(every, 1.0), 0.0)


def _log(model: parts.Model, rate: float, table: Int[Array, "N A"], equivalent: Any) -> Log:
    size, end = model.config.padded_vocab_size, model.tokenizer.eos_ids[0]
    words = [jnp.asarray(model.tokenizer.encode(text), jnp.int32)
             for text in ("Answer: ", "\nReference: ", "\nThe same? ")]  # fmt: skip
    width = 2 * MOST_TOKENS + sum(len(x) for x in words)
    longest = width + 2 * MOST_TOKENS + 1
    if longest > model.config.max_positions:
        raise UserError(
            f"a judge of answers reads and writes {longest} tokens, the model's context has "
            f"{model.config.max_positions}; take another --model"
        )
    start = model.policy._replace(init=lambda key: jax.tree.map(jnp.copy, model.params))
    worked = strings.World(
        start,
        width,
        2 * MOST_TOKENS + 1,
        end,
        start=lambda: model.params,
        rate=rate,
        ends=tuple(model.tokenizer.eos_ids),
    )

    def question(pairs):
        def shown(tokens):
            return jnp.broadcast_to(tokens[None, :], (pairs.shape[0], tokens.shape[0]))

        sides = jnp.split(pairs, 2, axis=1)
        whole = jnp.concatenate([shown(words[0]), sides[0], shown(words[1]), sides[1], shown(words[2])], axis=1)
        return given_responses.left_padded(whole, whole != strings.PAD, pad_id=strings.PAD)[0]

    def work(pairs):
        return jnp.where(pairs == strings.PAD, size - 4, pairs)

    def draw(key: Key, n: int, *, error_rate: float):
        keys = jax.random.split(key, 2)
        row, other = jax.random.randint(keys[0], (2, n), 0, table.shape[0], jnp.int32)
        value = table[jnp.where(jax.random.bernoulli(keys[1], 0.5, (n,)), row, other)]
        truth = equivalent(value, jnp.ones((n,), bool), {"row": row})
        wrong = free_answers.mistaken(marked(value, {"reference": table[row]}), error_rate)
        return jnp.concatenate([value, table[row]], axis=1), truth ^ wrong

    return Log(
        worked, worked._replace(response_tokens=1), (size - 3, size - 2, size - 1),
        lambda value, answers: jnp.concatenate([value, answers["reference"]], axis=1), question, work, draw,
    )  # fmt: skip
