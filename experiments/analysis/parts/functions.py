"""Composition of functions on words of four letters, worked one function at a time; all pure JAX.

A prompt is a slot of four tokens for each function, innermost first (``f . . .``; ``STOP`` in unused slots), then the
word. A response is the word after every function, four letters each, then ``END``. So what a step has to look at always
lies equally far back, and a model that knows single functions could go on to any depth.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

LETTERS, WIDTH = 4, 4
MAX_LEVEL = 4
FUNCTIONS = {
    "reverse": lambda w: w[::-1],
    "rotate": lambda w: w[1:] + w[:1],
    "shift": lambda w: tuple((c + 1) % LETTERS for c in w),
    "halves": lambda w: w[2:] + w[:2],
    "sort": lambda w: tuple(sorted(w)),
    "ends": lambda w: (w[3], w[1], w[2], w[0]),
    "double": lambda w: w[:2] + w[:2],
    "complement": lambda w: tuple(LETTERS - 1 - c for c in w),
}
TRAIN, HELD_OUT = (0, 2, 4, 5, 6), (1, 3, 7)  # which are composed in training, and which never
FIRST = LETTERS  # token of the first function
STOP, FILL, END = FIRST + len(FUNCTIONS), FIRST + len(FUNCTIONS) + 1, FIRST + len(FUNCTIONS) + 2
VOCABULARY = END + 1
PROMPT_TOKENS, RESPONSE_TOKENS = MAX_LEVEL * WIDTH + WIDTH, MAX_LEVEL * WIDTH + 1

_WORDS = list(itertools.product(range(LETTERS), repeat=WIDTH))
_POWERS = LETTERS ** np.arange(WIDTH - 1, -1, -1)
TABLE = np.array([[int(np.dot(f(w), _POWERS)) for w in _WORDS] for f in FUNCTIONS.values()], np.int32)


def _letters(words: Array) -> Array:
    return (words[:, None] // jnp.asarray(_POWERS, jnp.int32)[None, :]) % LETTERS


def make_prompts(functions: Int[Array, "N L"], levels: Int[Array, " N"], words: Int[Array, " N"]) -> Int[Array, "N P"]:
    """``levels`` of the ``functions`` (numbers, innermost first) on words (their numbers below 256)."""
    used = jnp.arange(MAX_LEVEL)[None, :] < levels[:, None]
    slots = jnp.where(used, functions + FIRST, STOP)
    filled = jnp.pad(slots[:, :, None], ((0, 0), (0, 0), (0, WIDTH - 1)), constant_values=FILL)
    return jnp.concatenate([filled.reshape(slots.shape[0], -1), _letters(words)], axis=1).astype(jnp.int32)


def solution(prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """The word after every function.

    >>> import jax.numpy as jnp
    >>> asked = make_prompts(jnp.array([[0, 2, 0, 0]]), jnp.array([2]), jnp.array([27]))  # reverse, shift; 0123
    >>> solution(asked)[0, :9].tolist()
    [3, 2, 1, 0, 0, 3, 2, 1, 14]
    """
    slots = prompts[:, : MAX_LEVEL * WIDTH : WIDTH]
    word = prompts[:, MAX_LEVEL * WIDTH :] @ jnp.asarray(_POWERS, jnp.int32)
    table, blocks = jnp.asarray(TABLE), []
    for k in range(MAX_LEVEL):
        used = slots[:, k] != STOP
        word = jnp.where(used, table[jnp.where(used, slots[:, k] - FIRST, 0), word], word)
        blocks.append(jnp.where(used[:, None], _letters(word), END))
    end = jnp.full((prompts.shape[0], 1), END, jnp.int32)
    return jnp.concatenate([*blocks, end], axis=1).astype(jnp.int32)


def right(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
    """The last word before the end is right, whatever came before; a response may be cut to fewer tokens."""
    ended = responses == END
    length = jnp.where(jnp.any(ended, axis=1), jnp.argmax(ended, axis=1), 0)
    place = length[:, None] - WIDTH + jnp.arange(WIDTH)[None, :]
    given = jnp.take_along_axis(responses, jnp.maximum(place, 0), axis=1)
    wanted = solution(prompts)
    last = jnp.argmax(wanted == END, axis=1)
    answer = jnp.take_along_axis(wanted, last[:, None] - WIDTH + jnp.arange(WIDTH)[None, :], axis=1)
    return (length >= WIDTH) & (length % WIDTH == 0) & jnp.all(given == answer, axis=1)


def draw_prompts(key: Array, n: int, *, levels: tuple[int, ...], functions: tuple[int, ...]) -> Int[Array, "N P"]:
    """Random compositions of these functions at these levels."""
    keys = jax.random.split(key, 3)
    chosen = jax.random.randint(keys[0], (n, MAX_LEVEL), 0, len(functions), jnp.int32)
    level = jax.random.randint(keys[1], (n,), 0, len(levels), jnp.int32)
    words = jax.random.randint(keys[2], (n,), 0, len(_WORDS), jnp.int32)
    return make_prompts(jnp.asarray(functions, jnp.int32)[chosen], jnp.asarray(levels, jnp.int32)[level], words)


def draw_skills(key: Array, n: int, *, composed: float = 0.1) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """What a base has read: single functions, all eight; a share composes two of the training ones and may go wrong.

    A flawed composition (half of them) stops after its first function.
    """
    keys = jax.random.split(key, 4)
    single = draw_prompts(keys[0], n, levels=(1,), functions=(*TRAIN, *HELD_OUT))
    double = draw_prompts(keys[1], n, levels=(2,), functions=TRAIN)
    pick = jax.random.uniform(keys[2], (n, 1)) < composed
    prompts = jnp.where(pick, double, single)
    flawed = pick & (jax.random.uniform(keys[3], (n, 1)) < 0.5)
    answers = solution(prompts)
    cut = flawed & (jnp.arange(answers.shape[1])[None, :] >= WIDTH)
    return prompts, jnp.where(cut, END, answers)


def word_similarity(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """Share of the tokens of the worked solution that the response has in their places."""
    wanted = solution(prompts)[:, : responses.shape[1]]
    return jnp.mean((wanted == responses).astype(jnp.float32), axis=1)
