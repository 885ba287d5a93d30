r"""Problems of one's own in the place of the questions of ``premises``, and the same without a premise.

``delete`` leaves out the first sentence with a number that is not the question; ``formula`` puts an unknown ``n`` in
the place of the first number; ``swap`` asks the question of another problem, its last sentence. What a base has read is
the worked solution, or ``ABSTENTION`` where it gives up; none of the rows is wrong or worked again. A response abstains
where it says that something is missing (``ABSTAINS``). Doubt is a token of ``DOUBTS``; rounds are alike by the share of
tokens behind the first doubt that stand before it, too.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.analysis.parts.premises import Premises
from experiments.parts import strings, text_problems, text_rows
from jaxrl_llm.data import problems as problem_tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.experiment.own_rows.tasks import Opened

Settings = text_problems.Settings
ABSTENTION = "There is not enough information to answer."
ABSTAINS = re.compile(
    r"not enough information|cannot be (determined|answered|solved)|insufficient|is missing|not given", re.IGNORECASE
)
DOUBTS = ("wait", "hmm", "alternatively")
_SENTENCES = re.compile(r"(?<=[.!?])\s+")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def without_sentence(question: str, other: str = "") -> str:
    """``delete``; the question itself stays.

    >>> without_sentence("Tom has 3 cats. He buys 2. How many has he?")
    'He buys 2. How many has he?'
    """
    told = _SENTENCES.split(question.strip())
    lost = next((k for k, sentence in enumerate(told[:-1]) if _NUMBER.search(sentence)), None)
    return question if lost is None else " ".join(told[:lost] + told[lost + 1 :])


def with_unknown(question: str, other: str = "") -> str:
    """``formula``.

    >>> with_unknown("What is 3 + 1?")
    'What is n + 1?'
    """
    return _NUMBER.sub("n", question, count=1)


def with_other_question(question: str, other: str) -> str:
    """``swap``.

    >>> with_other_question("Tom has 3 cats. How many has he?", "Ann has 2 dogs. How many dogs are there?")
    'Tom has 3 cats. How many dogs are there?'
    """
    return " ".join([*_SENTENCES.split(question.strip())[:-1], _SENTENCES.split(other.strip())[-1]])


CONSTRUCTORS = {"delete": without_sentence, "formula": with_unknown, "swap": with_other_question}


def rewritten(prompt: Any, other: Any, make: Any) -> Any:
    """A prompt, or the last message of a conversation, changed; behind a first blank line nothing changes."""
    if not isinstance(prompt, str):
        return [*prompt[:-1], prompt[-1] | {"content": rewritten(prompt[-1]["content"], other[-1]["content"], make)}]
    question, *rest = prompt.split("\n", 1)
    return "\n".join([make(question, other.split("\n", 1)[0]), *rest])


def _ill_posed(rows: text_rows.Rows, make: Any, chat: bool) -> Int[Array, "N P"]:
    prompts, width = [row.prompt for row in rows.sources], rows.train.prompts.shape[1]
    asked = [Problem("rows", rewritten(a, b, make), "", {}, 0, str(k))
             for k, (a, b) in enumerate(zip(prompts, prompts[1:] + prompts[:1], strict=True))]  # fmt: skip
    table = problem_tables.encode_problems(rows.model.tokenizer, asked, answers=problem_tables.no_answers, chat=chat)
    tokens = jnp.where(table.valid, table.tokens, strings.PAD).astype(jnp.int32)
    tokens = jnp.pad(tokens, ((0, 0), (max(0, width - tokens.shape[1]), 0)), constant_values=strings.PAD)
    fits = jnp.sum((tokens != strings.PAD).astype(jnp.int32), axis=1, keepdims=True) <= width
    # a question that became too long stays as it was, and counts as well-posed
    plain = jnp.concatenate([rows.train.prompts, rows.heldout.prompts])
    return jnp.where(fits, tokens[:, -width:], plain)


def open_task(settings: Any) -> Opened:
    """The ``Premises`` of the rows of the settings."""
    found = text_problems.opened(settings)
    rows, tokenizer, end = found.rows, found.rows.model.tokenizer, found.world.end
    well = jnp.concatenate([rows.train.prompts, rows.heldout.prompts])
    ill = [_ill_posed(rows, make, settings.chat) for make in CONSTRUCTORS.values()]
    number_of, count = text_rows.finder(jnp.concatenate([well, *ill])), well.shape[0]
    size = rows.model.config.vocab_size
    doubts = [k for k in range(size) if tokenizer.decode([k]).strip().lower() in DOUBTS]
    doubts = jnp.asarray(doubts or [strings.PAD], jnp.int32)
    given_up = [*tokenizer.encode(ABSTENTION)[: found.world.response_tokens - 1], end]
    given_up = jnp.asarray(given_up + [end] * (found.world.response_tokens - len(given_up)), jnp.int32)

    def made_ill(kind: int):
        return lambda key, prompts: ill[kind][number_of(prompts) % count]

    makers = tuple((name, made_ill(k)) for k, name in enumerate(CONSTRUCTORS))

    def without_premise(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N P"]:
        chosen = jax.random.randint(key, prompts.shape[:1], 0, len(makers), jnp.int32)
        return jnp.stack(ill)[chosen, number_of(prompts) % count]

    def well_posed(prompts: Int[Array, "N P"]) -> Bool[Array, " N"]:
        return number_of(prompts) < count

    def correct(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, " N"]:
        return (well_posed(prompts) & found.right(prompts, responses)).astype(jnp.float32)

    def told(responses: Any) -> np.ndarray:
        texts = [tokenizer.decode([t for t in row.tolist() if t != end]) for row in np.asarray(responses)]
        return np.asarray([ABSTAINS.search(text) is not None for text in texts])

    def abstains(responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
        shape = jax.ShapeDtypeStruct((responses.shape[0],), jnp.bool_)
        return jax.pure_callback(told, shape, responses, vmap_method="sequential")

    def draw_text(key: Array, n: int, *, ill: float, wrong: float, abstain: float, again: float):
        keys = jax.random.split(key, 4)
        plain = found.draw(keys[0], n)
        posed = ~jax.random.bernoulli(keys[1], ill, (n, 1))
        stops = ~posed & jax.random.bernoulli(keys[3], abstain, (n, 1))
        prompts = jnp.where(posed, plain, without_premise(keys[2], plain))
        return prompts, jnp.where(stops, given_up[None, :], found.solution(plain))

    def spoken(responses: Int[Array, "N T"]) -> Bool[Array, "N T"]:
        return jnp.cumsum((responses == end).astype(jnp.int32), axis=1) == 0

    def lengths(responses: Int[Array, "N T"]) -> Float[Array, " N"]:
        return jnp.sum(spoken(responses).astype(jnp.float32), axis=1)

    def waits(responses: Int[Array, "N T"]) -> Bool[Array, "N T"]:
        return jnp.isin(responses, doubts) & spoken(responses)

    def first_round(responses: Int[Array, "N T"]) -> Int[Array, " N"]:
        return jnp.sum((spoken(responses) & (jnp.cumsum(waits(responses), axis=1) == 0)).astype(jnp.int32), axis=1)

    def repeated_steps(responses: Int[Array, "N T"]) -> Float[Array, " N"]:
        later = spoken(responses) & (jnp.cumsum(waits(responses), axis=1) > 0)
        before = spoken(responses) & ~later
        same = jnp.any((responses[:, :, None] == responses[:, None, :]) & before[:, None, :], axis=2) & later
        total = jnp.sum(later.astype(jnp.float32), axis=1)
        return jnp.sum(same.astype(jnp.float32), axis=1) / jnp.maximum(total, 1.0)

    task = Premises(
        world=found.world, draw_questions=found.draw, draw_text=draw_text, without_premise=without_premise,
        constructors=makers, well_posed=well_posed, correct=correct, abstains=abstains, lengths=lengths, waits=waits,
        first_round=first_round, repeated_steps=repeated_steps,
    )  # fmt: skip
    return Opened(task, text_rows.finish(rows))
