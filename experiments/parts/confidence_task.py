"""Questions answered with a stated confidence: sums to work out and facts to know; all pure JAX.

A prompt is ``SUM`` and two to six digits below 7, or ``FACT`` and a key of two digits, filled with ``BLANK``. A
response is the running sums modulo 7 (they may be left out), ``MARK``, the answer, a token for 0, 10, ... 100 %
confidence, ``END``. The 49 facts are arbitrary: 24 are common in data, 12 rare, 13 never occur. A sum of which a digit
is ``HIDDEN`` has no answer. A prompt whose last column holds a digit proposes it as the answer and asks for a verdict,
``YES`` or ``NO``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

MODULUS = 7
SUM, FACT, MARK, BLANK, END, PERCENT = 7, 8, 9, 10, 11, 12  # PERCENT: the token for 0 %
HIDDEN, YES, NO = 23, 24, 25
VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS = 26, 8, 9
OPERANDS = (2, 6)
_RNG = np.random.default_rng(0)
FACTS = _RNG.integers(0, MODULUS, (MODULUS, MODULUS))
RANK = _RNG.permutation(MODULUS * MODULUS).reshape(MODULUS, MODULUS)
COMMON, SHOWN = 24, 36  # ranks below are common; below the second, shown at all
EVERY = tuple([1.0] * MODULUS * MODULUS)
TAUGHT = tuple(0.9 / COMMON if r < COMMON else 0.1 / (SHOWN - COMMON) if r < SHOWN else 0.0 for r in RANK.ravel())


class Stated(NamedTuple):
    """What a response says; ``readable`` is False where answer or confidence is missing."""

    answer: Int[Array, " N"]
    confidence: Float[Array, " N"]
    readable: Bool[Array, " N"]


def draw_sums(key: Array, n: int) -> Int[Array, "N P"]:
    """Sums of two to six digits, every length equally often."""
    digits = jax.random.randint(jax.random.fold_in(key, 0), (n, PROMPT_TOKENS - 1), 0, MODULUS, jnp.int32)
    count = jax.random.randint(jax.random.fold_in(key, 1), (n, 1), OPERANDS[0], OPERANDS[1] + 1, jnp.int32)
    shown = jnp.where(jnp.arange(PROMPT_TOKENS - 1)[None, :] < count, digits, BLANK)
    return jnp.concatenate([jnp.full((n, 1), SUM, jnp.int32), shown], axis=1)


def draw_facts(key: Array, n: int, weights: tuple[float, ...] = TAUGHT) -> Int[Array, "N P"]:
    """Keys drawn in proportion to ``weights [49]``."""
    chosen = jax.random.categorical(key, jnp.log(jnp.asarray(weights, jnp.float32)), shape=(n,)).astype(jnp.int32)
    fill = jnp.full((n, PROMPT_TOKENS - 3), BLANK, jnp.int32)
    columns = jnp.stack([jnp.full((n,), FACT, jnp.int32), chosen // MODULUS, chosen % MODULUS], axis=1)
    return jnp.concatenate([columns, fill], axis=1)


def draw_unanswerable(key: Array, n: int) -> Int[Array, "N P"]:
    """Sums of which one digit is hidden: no answer to them can be known."""
    prompts = draw_sums(jax.random.fold_in(key, 0), n)
    count = jnp.sum((prompts[:, 1:] < MODULUS).astype(jnp.int32), axis=1)
    share = jax.random.uniform(jax.random.fold_in(key, 1), (n,)) * count.astype(jnp.float32)
    place = 1 + jnp.floor(share).astype(jnp.int32)
    column = jnp.arange(PROMPT_TOKENS, dtype=jnp.int32)[None, :]
    return jnp.where(column == jnp.minimum(place, count)[:, None], HIDDEN, prompts)


def answerable(prompts: Int[Array, "N P"]) -> Bool[Array, " N"]:
    """No digit is hidden.

    >>> import jax.numpy as jnp
    >>> answerable(jnp.array([[7, 3, 23, 5, 10, 10, 10, 10], [7, 3, 6, 5, 10, 10, 10, 10]])).tolist()
    [False, True]
    """
    return jnp.all(prompts != HIDDEN, axis=1)


def propose(prompts: Int[Array, "N P"], answers: Int[Array, " N"]) -> Int[Array, "N P"]:
    """The same questions, asked whether these answers are right."""
    return prompts.at[:, -1].set(answers)


def draw_questions(key: Array, n: int) -> Int[Array, "N P"]:
    """Half sums, half facts that data may teach."""
    keys = jax.random.split(key, 3)
    facts = jax.random.bernoulli(keys[2], 0.5, (n, 1))
    return jnp.where(facts, draw_facts(keys[0], n), draw_sums(keys[1], n))


def _running(prompts: Array) -> tuple[Array, Array]:
    """Running sums ``[N, P - 1]`` and how many digits there are."""
    digits = prompts[:, 1:].at[:, -1].set(BLANK)  # the last column proposes an answer
    real = digits < MODULUS
    return jnp.cumsum(jnp.where(real, digits, 0), axis=1) % MODULUS, jnp.sum(real.astype(jnp.int32), axis=1)


def truth(prompts: Int[Array, "N P"]) -> Int[Array, " N"]:
    """The right answers.

    >>> import jax.numpy as jnp
    >>> truth(jnp.array([[7, 3, 6, 5, 10, 10, 10, 10]])).tolist()
    [0]
    """
    sums, _ = _running(prompts)
    known = jnp.asarray(FACTS, jnp.int32)[prompts[:, 1] % MODULUS, prompts[:, 2] % MODULUS]
    return jnp.where(prompts[:, 0] == FACT, known, sums[:, -1])


def write(
    prompts: Int[Array, "N P"], worked: Bool[Array, " N"], slip: Int[Array, " N"], level: Int[Array, " N"]
) -> Int[Array, "N T"]:
    """Responses: running sums where ``worked`` (facts have none), the answer ``slip`` too high, ``10 level`` %.

    >>> import jax.numpy as jnp
    >>> question = jnp.array([[7, 3, 6, 5, 10, 10, 10, 10]])
    >>> write(question, jnp.array([True]), jnp.array([1]), jnp.array([8])).tolist()  # 3+6=2, 2+5=0, one too high
    [[2, 1, 9, 1, 20, 11, 11, 11, 11]]
    """
    sums, count = _running(prompts)
    steps = jnp.where(worked & (prompts[:, 0] == SUM), count - 1, 0)[:, None]
    answer = ((truth(prompts) + slip) % MODULUS)[:, None]
    column = jnp.arange(RESPONSE_TOKENS, dtype=jnp.int32)[None, :]
    running = jnp.pad(sums[:, 1:], ((0, 0), (0, RESPONSE_TOKENS - sums.shape[1] + 1)))
    running = jnp.where(column == steps - 1, answer, running)
    after = column - steps
    percent = PERCENT + level[:, None]
    tail = jnp.where(after == 0, MARK, jnp.where(after == 1, answer, jnp.where(after == 2, percent, END)))
    return jnp.where(after < 0, running, tail)


def _levels(key: Array, centre: Array, spread: float) -> Array:
    noisy = centre + spread * jax.random.normal(key, centre.shape)
    return jnp.round(10.0 * jnp.clip(noisy, 0.0, 1.0)).astype(jnp.int32)


def draw_behaviour(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """What a base has read: half of it worked, 30 % wrong, confidences that hardly depend on it (0.6, right 0.7).

    An eighth has a hidden digit and is answered anyhow, at 0.6; a quarter asks for verdicts, of which a fifth errs.
    """
    keys = jax.random.split(key, 7)
    kind = jax.random.uniform(keys[5], (n,))
    hidden, judged = kind < 0.125, kind > 0.75
    prompts = draw_questions(keys[0], n)
    prompts = jnp.where(hidden[:, None], draw_unanswerable(jax.random.fold_in(keys[0], 9), n), prompts)
    wrong = jax.random.bernoulli(keys[1], 0.3, (n,))
    slip = jnp.where(wrong | hidden, jax.random.randint(keys[2], (n,), 1, MODULUS, jnp.int32), 0)
    level = _levels(keys[3], jnp.where(wrong | hidden, 0.6, 0.7), 0.25)
    written = write(prompts, jax.random.bernoulli(keys[4], 0.5, (n,)), slip, level)
    asked, verdicts = draw_verdicts(keys[6], n)
    return jnp.where(judged[:, None], asked, prompts), jnp.where(judged[:, None], verdicts, written)


def draw_verdicts(key: Array, n: int, *, error_rate: float = 0.2) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """Questions with proposed answers, half of them right, and what somebody says who errs at that rate."""
    keys = jax.random.split(key, 4)
    prompts = draw_questions(keys[0], n)
    false = jax.random.bernoulli(keys[1], 0.5, (n,))
    slip = jnp.where(false, jax.random.randint(keys[2], (n,), 1, MODULUS, jnp.int32), 0)
    said = ~false ^ jax.random.bernoulli(keys[3], error_rate, (n,))
    verdicts = jnp.full((n, RESPONSE_TOKENS), END, jnp.int32).at[:, 0].set(jnp.where(said, YES, NO))
    return propose(prompts, (truth(prompts) + slip) % MODULUS), verdicts


def draw_short(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """An instructor: right answers without working, 80 % give or take."""
    prompts = draw_questions(jax.random.fold_in(key, 0), n)
    level = _levels(jax.random.fold_in(key, 1), jnp.full((n,), 0.8), 0.1)
    return prompts, write(prompts, jnp.zeros((n,), bool), jnp.zeros((n,), jnp.int32), level)


def draw_long(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """A teacher that knows everything: right answers, worked where there is something to work, always 100 %."""
    prompts = draw_questions(jax.random.fold_in(key, 0), n)
    return prompts, write(prompts, jnp.ones((n,), bool), jnp.zeros((n,), jnp.int32), jnp.full((n,), 10, jnp.int32))


def read(responses: Int[Array, "N T"]) -> Stated:
    """The two tokens after the first ``MARK``.

    >>> import jax.numpy as jnp
    >>> said = read(jnp.array([[2, 1, 9, 1, 20, 11], [9, 1, 11, 11, 11, 11], [1, 2, 3, 3, 3, 9]]))
    >>> said.answer.tolist(), [round(float(c), 2) for c in said.confidence], said.readable.tolist()
    ([1, 0, 0], [0.8, 0.0, 0.0], [True, False, False])
    """
    marks = responses == MARK
    place = jnp.argmax(marks, axis=1)
    padded = jnp.pad(responses, ((0, 0), (0, 2)), constant_values=END)
    answer, percent = (jnp.take_along_axis(padded, place[:, None] + k, axis=1)[:, 0] for k in (1, 2))
    readable = jnp.any(marks, axis=1) & (answer < MODULUS) & (percent >= PERCENT) & (percent <= PERCENT + 10)
    confidence = (percent - PERCENT).astype(jnp.float32) / 10.0
    return Stated(jnp.where(readable, answer, 0), jnp.where(readable, confidence, 0.0), readable)
