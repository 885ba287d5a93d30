"""Questions about named values, some with a premise taken out: ``b=a+4 a=3 ?b``; all pure JAX.

A prompt is three definitions of three tokens (name, source or ``NONE``, number modulo 7) in any order, then ``ASK`` and
a name. In an ill-posed question one premise that the answer needs is not there; its text is as long and has the same
tokens. A response is values along the chain, ``WAIT`` before each time they are worked again, then ``MARK`` and the
last of them or ``ABSTAIN``, then ``END``. Whoever works a chain again is more careful: a slip becomes rarer with every
round, so that thinking longer pays.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MODULUS, NAMES = 7, 4
FIRST_NAME = MODULUS
NONE, ASK, BLANK, WAIT, MARK, ABSTAIN, END = range(MODULUS + NAMES, MODULUS + NAMES + 7)
VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS, STEPS = 18, 11, 16, 3
ROUNDS, SLIPS_LEFT = 3, 0.1  # times that a chain is worked at most; what each leaves of the chance of a slip


def draw_questions(key: Array, n: int) -> Int[Array, "N P"]:
    """Well-posed chains of three definitions; the last value is asked for."""
    keys = jax.random.split(key, 3)
    names = jax.vmap(lambda k: jax.random.permutation(k, NAMES))(jax.random.split(keys[0], n))[:, :STEPS]
    numbers = jax.random.randint(keys[1], (n, STEPS), 0, MODULUS, jnp.int32)
    names = (names + FIRST_NAME).astype(jnp.int32)
    sources = jnp.concatenate([jnp.full((n, 1), NONE, jnp.int32), names[:, :-1]], axis=1)
    definitions = jnp.stack([names, sources, numbers], axis=2)
    order = jax.vmap(lambda k: jax.random.permutation(k, STEPS))(jax.random.split(keys[2], n))
    told = jnp.take_along_axis(definitions, order[:, :, None], axis=1).reshape(n, -1)
    return jnp.concatenate([told, jnp.full((n, 1), ASK, jnp.int32), names[:, -1:]], axis=1)


# Constructors ``(key, prompts) -> prompts``: ways to take out a premise. None of them marks the gap with a token that
# well-posed questions lack, and all keep the length of the text.


def without_definition(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N P"]:
    """One definition that the answer needs is replaced by a copy of another one (``delete``)."""
    keys = jax.random.split(key)
    lost = jax.random.randint(keys[0], prompts.shape[:1], 0, STEPS, jnp.int32)
    other = (lost + jax.random.randint(keys[1], prompts.shape[:1], 1, STEPS, jnp.int32)) % STEPS
    return _replaced(prompts, lost, jnp.take_along_axis(_told(prompts), other[:, None, None], axis=1)[:, 0])


def with_free_name(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N P"]:
    """The definition that rests on nothing rests on a name that is never defined (``formula``)."""
    told = _told(prompts)
    row = jnp.argmax(told[:, :, 1] == NONE, axis=1)
    used = jnp.any(told[:, :, 0][:, :, None] == FIRST_NAME + jnp.arange(NAMES)[None, None, :], axis=1)
    free = FIRST_NAME + jnp.argmin(used, axis=1).astype(jnp.int32)
    own = jnp.take_along_axis(told, row[:, None, None], axis=1)[:, 0]
    return _replaced(prompts, row.astype(jnp.int32), own.at[:, 1].set(free))


def with_other_question(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N P"]:
    """The text of one question and the question of another: it asks for a name that nothing defines (``swap``)."""
    told = _told(prompts)
    used = jnp.any(told[:, :, 0][:, :, None] == FIRST_NAME + jnp.arange(NAMES)[None, None, :], axis=1)
    free = FIRST_NAME + jnp.argmin(used, axis=1).astype(jnp.int32)
    return jnp.concatenate([prompts[:, :-1], free[:, None]], axis=1)


CONSTRUCTORS = {"delete": without_definition, "formula": with_free_name, "swap": with_other_question}


def without_premise(key: Array, prompts: Int[Array, "N P"]) -> Int[Array, "N P"]:
    """One of the constructors for each question, equally often."""
    keys = jax.random.split(key, 2)
    made = jnp.stack([make(jax.random.fold_in(keys[0], k), prompts) for k, make in enumerate(CONSTRUCTORS.values())])
    chosen = jax.random.randint(keys[1], prompts.shape[:1], 0, len(CONSTRUCTORS), jnp.int32)
    return made[chosen, jnp.arange(prompts.shape[0])]


def _told(prompts: Array) -> Array:
    return prompts[:, : 3 * STEPS].reshape(-1, STEPS, 3)


def _replaced(prompts: Array, row: Array, definition: Array) -> Array:
    here = jnp.arange(STEPS)[None, :, None] == row[:, None, None]
    told = jnp.where(here, definition[:, None, :], _told(prompts)).reshape(prompts.shape[0], -1)
    return jnp.concatenate([told, prompts[:, 3 * STEPS :]], axis=1)


def _chain(prompts: Array) -> tuple[Array, Array]:
    """``(values [N, 3] along the chain, posed [N])``: a step whose definition is gone adds nothing."""
    told = _told(prompts)
    wanted, numbers, posed = prompts[:, -1], [], jnp.ones(prompts.shape[:1], bool)
    for _ in range(STEPS):
        here = told[:, :, 0] == wanted[:, None]
        posed &= jnp.any(here, axis=1) | (wanted == NONE)
        row = jnp.argmax(here, axis=1)[:, None]
        number = jnp.take_along_axis(told[:, :, 2], row, axis=1)[:, 0]
        numbers.append(jnp.where(jnp.any(here, axis=1), number, 0))
        wanted = jnp.where(jnp.any(here, axis=1), jnp.take_along_axis(told[:, :, 1], row, axis=1)[:, 0], NONE)
    values = jnp.cumsum(jnp.stack(numbers[::-1], axis=1), axis=1) % MODULUS
    return values, posed & (wanted == NONE)


def well_posed(prompts: Int[Array, "N P"]) -> Bool[Array, " N"]:
    """Whether every premise of the answer is there.

    >>> import jax.numpy as jnp
    >>> a, b, c = 7, 8, 9
    >>> asked = jnp.array([[b, a, 4, a, NONE, 3, c, b, 1, ASK, c], [b, a, 4, c, b, 1, c, b, 1, ASK, c]])
    >>> well_posed(asked).tolist(), truth(asked).tolist()[0]
    ([True, False], 1)
    """
    return _chain(prompts)[1]


def truth(prompts: Int[Array, "N P"]) -> Int[Array, " N"]:
    """The value asked for, of well-posed questions."""
    return _chain(prompts)[0][:, -1]


def write(
    prompts: Int[Array, "N P"], rounds: Int[Array, " N"], abstains: Bool[Array, " N"], slips: Int[Array, "N R S"]
) -> Int[Array, "N T"]:
    """The chain worked ``1 + rounds`` times (at most three), then the last value, or ``ABSTAIN``.

    Each of the ``slips`` makes a value of its round too high, and those after it.
    """
    values, _ = _chain(prompts)
    n, last = prompts.shape[0], jnp.minimum(rounds, ROUNDS - 1)
    worked = (values[:, None, :] + jnp.cumsum(slips, axis=2)) % MODULUS
    waits = jnp.full((n, ROUNDS, 1), WAIT, jnp.int32)
    working = jnp.concatenate([worked, waits], axis=2).reshape(n, -1)
    column = jnp.arange(RESPONSE_TOKENS, dtype=jnp.int32)[None, :]
    after = column - ((STEPS + 1) * last + STEPS)[:, None]
    said = jnp.where(abstains, ABSTAIN, worked[jnp.arange(n), last, -1])[:, None]
    tail = jnp.where(after == 0, MARK, jnp.where(after == 1, said, END))
    return jnp.where(after < 0, jnp.pad(working, ((0, 0), (0, RESPONSE_TOKENS - working.shape[1]))), tail)


def draw_text(key: Array, n: int, *, ill: float, wrong: float, abstain: float, again: float):
    """Questions, a share ``ill`` ill-posed, and responses: wrong, abstaining (if ill-posed) or worked again by chance.

    ``wrong`` is the chance of a slip in the first round; every further one leaves ``SLIPS_LEFT`` of it.

    Returns ``(prompts [N, P], responses [N, T])``.
    """
    keys = jax.random.split(key, 8)
    plain = draw_questions(keys[0], n)
    posed = ~jax.random.bernoulli(keys[1], ill, (n,))
    prompts = jnp.where(posed[:, None], plain, without_premise(keys[2], plain))
    chance = wrong * SLIPS_LEFT ** jnp.arange(ROUNDS, dtype=jnp.float32)
    errs = jax.random.bernoulli(keys[3], jnp.broadcast_to(chance, (n, ROUNDS)))
    place = jax.random.randint(keys[7], (n, ROUNDS, 1), 0, STEPS, jnp.int32)
    here = errs[:, :, None] & (place == jnp.arange(STEPS, dtype=jnp.int32)[None, None, :])
    slips = jnp.where(here, jax.random.randint(keys[4], (n, ROUNDS, 1), 1, MODULUS, jnp.int32), 0)
    stops = ~posed & jax.random.bernoulli(keys[5], abstain, (n,))
    rounds = jnp.sum(jax.random.bernoulli(keys[6], again, (n, ROUNDS - 1)).astype(jnp.int32), axis=1)
    return prompts, write(prompts, rounds, stops, slips)


def read(responses: Int[Array, "N T"]) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """``(answer, abstains)`` behind the first ``MARK``; -1 where no number is given."""
    marks = responses == MARK
    place = jnp.argmax(marks, axis=1)[:, None] + 1
    said = jnp.take_along_axis(jnp.pad(responses, ((0, 0), (0, 1)), constant_values=END), place, axis=1)[:, 0]
    there = jnp.any(marks, axis=1)
    return jnp.where(there & (said < MODULUS), said, -1), there & (said == ABSTAIN)


def lengths(responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """Tokens before the end."""
    return jnp.sum((jnp.cumsum((responses == END).astype(jnp.int32), axis=1) == 0).astype(jnp.float32), axis=1)


def first_round(responses: Int[Array, "N T"]) -> Int[Array, " N"]:
    """Tokens before the first ``WAIT``; all that are spoken where there is none."""
    waits = responses == WAIT
    spoken = lengths(responses).astype(jnp.int32)
    return jnp.where(jnp.any(waits, axis=1), jnp.minimum(jnp.argmax(waits, axis=1).astype(jnp.int32), spoken), spoken)


def repeated_steps(responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """How alike the rounds of one response are: the mean, over pairs of rounds, of the share of equal values.

    Rounds are what stands between ``WAIT`` tokens, before ``MARK``; 0 for a response of a single round.

    >>> import jax.numpy as jnp
    >>> row = [1, 2, 3, WAIT, 1, 2, 4, WAIT, 1, 2, 3, MARK, 3, END, END, END]
    >>> round(float(repeated_steps(jnp.array([row]))[0]), 4)  # two thirds, one, two thirds
    0.7778
    """
    rounds = (RESPONSE_TOKENS - 1) // (STEPS + 1)
    ends = jnp.cumsum(((responses == MARK) | (responses == END)).astype(jnp.int32), axis=1) > 0
    number = jnp.cumsum(((responses == WAIT) & ~ends).astype(jnp.int32), axis=1)
    inside = (responses != WAIT) & ~ends
    starts = jnp.argmax((number[:, None, :] == jnp.arange(rounds)[None, :, None]) & inside[:, None, :], axis=2)
    place = starts[:, :, None] + jnp.arange(STEPS)[None, None, :]
    padded = jnp.pad(responses, ((0, 0), (0, STEPS)), constant_values=END)
    values = jnp.take_along_axis(padded[:, None, :], place, axis=2)
    there = jnp.any((number[:, None, :] == jnp.arange(rounds)[None, :, None]) & inside[:, None, :], axis=2)
    same = jnp.sum((values[:, :, None, :] == values[:, None, :, :]).astype(jnp.float32), axis=3) / STEPS
    pairs = there[:, :, None] & there[:, None, :] & (jnp.arange(rounds)[:, None] < jnp.arange(rounds)[None, :])[None]
    count = jnp.sum(pairs.astype(jnp.float32), axis=(1, 2))
    return jnp.sum(jnp.where(pairs, same, 0.0), axis=(1, 2)) / jnp.maximum(count, 1.0)
