"""Composition of functions on words of four letters, worked one function at a time; all pure JAX.

A prompt is a slot of four tokens for each function, innermost first (``f . . .``; ``STOP`` in unused slots), then the
word. A function of two words has the second, of three letters, in its slot (``f a b c``). A response is the word after
every function, four letters each, then ``END``. So what a step has to look at always lies equally far back, and a model
that knows single functions could go on to any depth.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

LETTERS, WIDTH = 4, 4
MAX_LEVEL = 8
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
BINARY = {  # of the word and a literal; what is beyond four letters is cut off
    "concatenate": lambda w, v: (*v, *w)[:WIDTH],
    "interlace": lambda w, v: (w[0], v[0], w[1], v[1]),
}
TRAIN, HELD_OUT = (0, 2, 4, 5, 6), (1, 3, 7)  # which are composed in training, and which never
FIRST = LETTERS  # token of the first function
SECOND = FIRST + len(FUNCTIONS)  # token of the first function of two words
STOP, FILL, END = (SECOND + len(BINARY) + k for k in range(3))
SHARE = 0.2  # of two words among the functions that are drawn, as in the paper
NUMBER, SLOTS = END + 1, 5  # token of the number 0 of the task to transfer to; the operations +0 .. +4 behind it
MODULUS = 5
VOCABULARY = NUMBER + MODULUS + SLOTS
PROMPT_TOKENS, RESPONSE_TOKENS = MAX_LEVEL * WIDTH + WIDTH, MAX_LEVEL * WIDTH + 1

_WORDS = list(itertools.product(range(LETTERS), repeat=WIDTH))
_LITERALS = list(itertools.product(range(LETTERS), repeat=WIDTH - 1))
_POWERS = LETTERS ** np.arange(WIDTH - 1, -1, -1)
_APPLIED = [*FUNCTIONS.values(), *(lambda w, f=f, v=v: f(w, v) for f in BINARY.values() for v in _LITERALS)]
TABLE = np.array([[int(np.dot(f(w), _POWERS)) for w in _WORDS] for f in _APPLIED], np.int32)


def _letters(words: Array, width: int = WIDTH) -> Array:
    return jnp.stack([words // int(power) % LETTERS for power in _POWERS[WIDTH - width :]], axis=-1)


def make_prompts(
    functions: Int[Array, "N L"], literals: Int[Array, "N L"], levels: Int[Array, " N"], words: Int[Array, " N"]
) -> Int[Array, "N P"]:
    """``levels`` of the ``functions`` on words (their numbers below 256).

    Args:
      functions: numbers, innermost first; those of two words behind the others.
      literals: numbers below 64 of their second words, which others do not read.
    """
    used = jnp.arange(MAX_LEVEL)[None, :] < levels[:, None]
    slots = jnp.where(used, functions + FIRST, STOP)
    second = jnp.where((used & (slots >= SECOND))[:, :, None], _letters(literals, WIDTH - 1), FILL)
    filled = jnp.concatenate([slots[:, :, None], second], axis=2)
    return jnp.concatenate([filled.reshape(slots.shape[0], -1), _letters(words)], axis=1).astype(jnp.int32)


def _rows_of_table(prompts: Int[Array, "N P"]) -> Int[Array, "N L"]:
    """The row of ``TABLE`` of every slot; 0 in unused ones."""
    slots = prompts[:, : MAX_LEVEL * WIDTH].reshape(-1, MAX_LEVEL, WIDTH)
    function = slots[:, :, 0] - FIRST
    literal = slots[:, :, 1:] @ jnp.asarray(_POWERS[1:], jnp.int32)
    two = len(FUNCTIONS) + (function - len(FUNCTIONS)) * len(_LITERALS) + literal
    row = jnp.where(function < len(FUNCTIONS), function, two)
    return jnp.where(slots[:, :, 0] < STOP, row, 0)


def solution(prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """The word after every function.

    >>> import jax.numpy as jnp
    >>> used = jnp.array([[0, 2, 9] + [0] * 5]), jnp.full((1, 8), 4)  # reverse, shift, interlace with 010
    >>> solution(make_prompts(*used, jnp.array([3]), jnp.array([27])))[0, :13].tolist()  # of 0123
    [3, 2, 1, 0, 0, 3, 2, 1, 0, 0, 3, 1, 16]
    """
    slots = prompts[:, : MAX_LEVEL * WIDTH : WIDTH]
    rows = _rows_of_table(prompts)
    word = prompts[:, MAX_LEVEL * WIDTH :] @ jnp.asarray(_POWERS, jnp.int32)
    table, blocks = jnp.asarray(TABLE), []
    for k in range(MAX_LEVEL):
        used = slots[:, k] != STOP
        word = jnp.where(used, table[rows[:, k], word], word)
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


def error_kinds(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> dict[str, Bool[Array, " N"]]:
    """What is wrong with wrong responses to compositions; idle words before the work, the start, are no work.

    ``ignored``: one function was worked, or none; ``partial``: several, but not all; ``atom``: as many words as
    functions, of which one is not its function of the word before; ``form``: more words, half of one, or no end.

    >>> import jax.numpy as jnp
    >>> used = jnp.array([[0, 2, 0] + [0] * 5]), jnp.full((1, 8), 4)  # reverse, shift, reverse
    >>> asked = make_prompts(*used, jnp.array([3]), jnp.array([27]))  # of 0123
    >>> a, b, c = [3, 2, 1, 0], [0, 3, 2, 1], [1, 2, 3, 0]
    >>> said = [[*a, END], [*a, *b, END], [*a, *b, *b, END], [0, 1, 2, 3, *a, END], [*a, *b, *c, END], [*a, *b, *c]]
    >>> rows = jnp.array([x + [END] * (17 - len(x)) if END in x else x + [0] * 5 for x in said])
    >>> found = error_kinds(jnp.tile(asked, (6, 1)), rows)
    >>> [[name for name, x in found.items() if x[k]] for k in range(6)]
    [['ignored'], ['partial'], ['atom'], ['ignored'], [], ['form']]
    """
    ended, wrong = responses == END, ~right(prompts, responses)
    length = jnp.where(jnp.any(ended, axis=1), jnp.argmax(ended, axis=1), -1)
    chain, start = solution(prompts), prompts[:, MAX_LEVEL * WIDTH :]
    level = jnp.argmax(chain == END, axis=1) // WIDTH

    def leading(rows: Array) -> Array:
        """How many words in front are the start."""
        words = rows[:, : rows.shape[1] // WIDTH * WIDTH].reshape(rows.shape[0], -1, WIDTH)
        same = jnp.all(words == start[:, None, :], axis=2).astype(jnp.int32)
        return jnp.sum(jnp.cumprod(same, axis=1), axis=1)

    # a function may leave the start as it is
    worked = length // WIDTH - jnp.maximum(leading(responses) - leading(chain), 0)
    whole = (length >= 0) & (length % WIDTH == 0) & (worked <= level)
    several = worked > 1
    kinds = {"ignored": ~several, "partial": several & (worked < level), "atom": several & (worked == level)}
    return {name: wrong & whole & x for name, x in kinds.items()} | {"form": wrong & ~whole}


def draw_prompts(key: Array, n: int, *, levels: tuple[int, ...], functions: tuple[int, ...]) -> Int[Array, "N P"]:
    """Random compositions of these functions at these levels, one in five (``SHARE``) with a literal."""
    keys = jax.random.split(key, 6)
    shape = (n, MAX_LEVEL)
    chosen = jax.random.randint(keys[0], shape, 0, len(functions), jnp.int32)
    level = jax.random.randint(keys[1], (n,), 0, len(levels), jnp.int32)
    words = jax.random.randint(keys[2], (n,), 0, len(_WORDS), jnp.int32)
    of_two = len(FUNCTIONS) + jax.random.randint(keys[3], shape, 0, len(BINARY), jnp.int32)
    literals = jax.random.randint(keys[4], shape, 0, len(_LITERALS), jnp.int32)
    two = jax.random.bernoulli(keys[5], SHARE, shape)
    drawn = jnp.where(two, of_two, jnp.asarray(functions, jnp.int32)[chosen])
    return make_prompts(drawn, literals, jnp.asarray(levels, jnp.int32)[level], words)


def _lengthened(key: Array, prompts: Array, answers: Array) -> tuple[Array, Array]:
    """The same problems with idle words before the answer: the start again, up to ``MAX_LEVEL`` words in all.

    So every position up to the longest answer is trained, though no long composition is ever read.
    """
    width = answers.shape[1]
    words = jnp.sum((answers[:, ::WIDTH][:, :MAX_LEVEL] != END).astype(jnp.int32), axis=1)
    idle = jax.random.randint(key, words.shape, 0, MAX_LEVEL, jnp.int32) % jnp.maximum(MAX_LEVEL - words + 1, 1)
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    moved = place - WIDTH * idle[:, None]
    shifted = jnp.take_along_axis(answers, jnp.maximum(moved, 0), axis=1)
    start = jnp.take_along_axis(prompts[:, MAX_LEVEL * WIDTH :], place % WIDTH, axis=1)
    return prompts, jnp.where(moved < 0, start, shifted)


def draw_skills(key: Array, n: int, *, composed: float = 0.1) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """What a base has read: single functions, all ten; a share composes two of the training ones and may go wrong.

    A flawed composition (half of them) stops after its first function. A quarter of the rows are single additions of
    the task to transfer to. Half of all rows begin with idle words, so that no position is untrained.
    """
    keys = jax.random.split(key, 7)
    single = draw_prompts(keys[0], n, levels=(1,), functions=(*TRAIN, *HELD_OUT))
    double = draw_prompts(keys[1], n, levels=(2,), functions=TRAIN)
    pick = jax.random.uniform(keys[2], (n, 1)) < composed
    prompts = jnp.where(pick, double, single)
    flawed = pick & (jax.random.uniform(keys[3], (n, 1)) < 0.5)
    answers = solution(prompts)
    answers = jnp.where(flawed & (jnp.arange(answers.shape[1])[None, :] >= WIDTH), END, answers)
    other = draw_sums(keys[4], n, levels=(1,))
    adds = jax.random.uniform(keys[5], (n, 1)) < 0.25
    prompts, answers = jnp.where(adds, other, prompts), jnp.where(adds, sums(other), answers)
    long = _lengthened(jax.random.fold_in(keys[6], 0), prompts, answers)[1]
    stretched = jax.random.bernoulli(jax.random.fold_in(keys[6], 1), 0.5, (n, 1))
    return prompts, jnp.where(stretched, long, answers)


# --- a task to transfer to: running sums, whose single steps are taught and whose compositions are not


def draw_sums(key: Array, n: int, *, levels: tuple[int, ...]) -> Int[Array, "N P"]:
    """As many additions modulo 5 as the level says, in the slots of functions, and the number that they start from."""
    keys = jax.random.split(key, 3)
    level = jnp.asarray(levels, jnp.int32)[jax.random.randint(keys[0], (n,), 0, len(levels), jnp.int32)]
    added = jax.random.randint(keys[1], (n, MAX_LEVEL), 0, SLOTS, jnp.int32)
    start = jax.random.randint(keys[2], (n, 1), 0, MODULUS, jnp.int32)
    used = jnp.arange(MAX_LEVEL)[None, :] < level[:, None]
    slots = jnp.where(used, NUMBER + MODULUS + added, STOP)
    filled = jnp.pad(slots[:, :, None], ((0, 0), (0, 0), (0, WIDTH - 1)), constant_values=FILL)
    word = jnp.pad(NUMBER + start, ((0, 0), (0, WIDTH - 1)), constant_values=FILL)
    return jnp.concatenate([filled.reshape(n, -1), word], axis=1).astype(jnp.int32)


def sums(prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """The number after every addition, each in a slot of four tokens as a word has.

    >>> import jax.numpy as jnp
    >>> asked = draw_sums(jax.random.key(0), 1, levels=(2,))
    >>> found, first, more = sums(asked)[0], asked[0, -WIDTH] - NUMBER, asked[0, : 2 * WIDTH : WIDTH] - NUMBER - MODULUS
    >>> [int(x) - NUMBER for x in (found[0], found[WIDTH])] == [int(first + more[0]) % 5, int(first + more.sum()) % 5]
    True
    """
    slots = prompts[:, : MAX_LEVEL * WIDTH : WIDTH]
    used = slots != STOP
    steps = jnp.cumsum(jnp.where(used, slots - NUMBER - MODULUS, 0), axis=1)
    value = NUMBER + (prompts[:, MAX_LEVEL * WIDTH, None] - NUMBER + steps) % MODULUS
    blocks = jnp.pad(value[:, :, None], ((0, 0), (0, 0), (0, WIDTH - 1)), constant_values=FILL)
    blocks = jnp.where(used[:, :, None], blocks, END).reshape(prompts.shape[0], -1)
    return jnp.concatenate([blocks, jnp.full((prompts.shape[0], 1), END, jnp.int32)], axis=1).astype(jnp.int32)


def right_sum(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
    """The last number before the end is right."""
    ended = responses == END
    length = jnp.where(jnp.any(ended, axis=1), jnp.argmax(ended, axis=1), 0)
    given = jnp.take_along_axis(responses, jnp.maximum(length - WIDTH, 0)[:, None], axis=1)[:, 0]
    wanted = sums(prompts)
    last = jnp.argmax(wanted == END, axis=1)
    answer = jnp.take_along_axis(wanted, last[:, None] - WIDTH, axis=1)[:, 0]
    return (length >= WIDTH) & (length % WIDTH == 0) & (given == answer)
