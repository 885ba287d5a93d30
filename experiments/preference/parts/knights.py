"""Knights and knaves as token strings: who tells the truth, by what each of two to four people says; with levels.

A prompt is the number of people and for each of four places a statement of three tokens, ``IS_KNIGHT j j``,
``IS_KNAVE j j``, ``SAME j k`` or ``DIFFERENT j k``; a place without a person has ``BLANK``. A response is ``MARK``, a
role for each person, ``END``. Every puzzle has one solution. A fifth of the puzzles of each size is held out: no text
that a base reads has them, and no training asks them.
"""

import zlib
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.parts import strings

OWN_ROWS = "experiments.preference.parts.text_rules"  # opens ``Puzzles`` of problems of one's own
MOST = 4
KNIGHT, KNAVE, PERSON, COUNT = 0, 1, 2, 6  # people are 2 .. 5, counts of people 6 .. 10
IS_KNIGHT, IS_KNAVE, SAME, DIFFERENT, MARK, BLANK, END = range(11, 18)
VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS = END + 1, 1 + 3 * MOST, MOST + 2
POOL = {2: 400, 3: 4000, 4: 600}  # puzzles of each size, a fifth of them held out


def holds(kind: int, first: int, second: int, roles: tuple[int, ...]) -> bool:
    """Whether a statement about people is true under an assignment of roles.

    >>> holds(SAME, 0, 1, (KNIGHT, KNIGHT)), holds(IS_KNAVE, 1, 1, (KNIGHT, KNIGHT))
    (True, False)
    """
    if kind in (IS_KNIGHT, IS_KNAVE):
        return roles[first] == (KNIGHT if kind == IS_KNIGHT else KNAVE)
    return (roles[first] == roles[second]) == (kind == SAME)


def solutions(statements: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """All assignments under which exactly the knights say what is true.

    >>> solutions([(IS_KNAVE, 1, 1), (SAME, 0, 1)])  # the second cannot be a knight: they would have to be the same
    [(0, 1)]
    """
    people = len(statements)
    return [
        roles
        for roles in product((KNIGHT, KNAVE), repeat=people)
        if all(holds(*said, roles) == (roles[k] == KNIGHT) for k, said in enumerate(statements))
    ]


def _draw(rng: np.random.Generator, people: int) -> list[tuple[int, int, int]]:
    said = []
    for speaker in range(people):
        kind = int(rng.choice([IS_KNIGHT, IS_KNAVE, SAME, DIFFERENT]))
        others = [k for k in range(people) if k != speaker]
        first = int(rng.choice(others))
        second = first if kind in (IS_KNIGHT, IS_KNAVE) else int(rng.choice([k for k in range(people) if k != first]))
        said.append((kind, first, second))
    return said


def encode(statements: list[tuple[int, int, int]]) -> list[int]:
    """The prompt of a puzzle."""
    tokens = [COUNT + len(statements)]
    for kind, first, second in statements:
        tokens += [kind, PERSON + first, PERSON + second]
    return tokens + [BLANK] * (PROMPT_TOKENS - len(tokens))


def canonical(prompt: list[int]) -> list[int]:
    """The same puzzle with the two people of every statement in order: what is said of both has no first.

    >>> canonical(encode([(SAME, 1, 0), (IS_KNAVE, 0, 0)])) == encode([(SAME, 0, 1), (IS_KNAVE, 0, 0)])
    True
    """
    said = [prompt[k : k + 3] for k in range(1, len(prompt), 3)]
    return [prompt[0], *(token for kind, *two in said for token in (kind, *sorted(two)))]


@lru_cache(maxsize=8)
def make_pool(people: int, heldout: bool) -> tuple[np.ndarray, np.ndarray]:
    """``(prompts [N, P], roles [N, 4])`` of puzzles with one solution; the two halves share none.

    Puzzles of two people are few, so that their pool repeats them; it is split by puzzle all the same, whichever
    way round "the same as" is said.
    """
    rng, rows = np.random.default_rng([7, people]), []
    while len(rows) < POOL[people]:
        statements = _draw(rng, people)
        found = solutions(statements)
        if len(found) == 1:
            rows.append((encode(statements), [*found[0], *[KNIGHT] * (MOST - people)]))
    apart = [zlib.crc32(bytes(canonical(prompt))) % 5 == 0 for prompt, _ in rows]
    chosen = [row for row, out in zip(rows, apart, strict=True) if out == heldout]
    return np.asarray([x for x, _ in chosen], np.int32), np.asarray([y for _, y in chosen], np.int32)


def draw_puzzles(
    key: Array, n: int, *, people: tuple[int, ...], heldout: bool = False
) -> tuple[Int[Array, "N P"], Int[Array, "N 4"]]:
    """Puzzles of these sizes in equal shares, with their solutions."""
    pools = [make_pool(k, heldout) for k in people]
    prompts, roles = (jnp.asarray(np.concatenate([pool[k] for pool in pools])) for k in (0, 1))
    sizes = np.asarray([pool[0].shape[0] for pool in pools])
    weights = jnp.asarray(np.repeat(1.0 / sizes, sizes), jnp.float32)
    chosen = jax.random.categorical(key, jnp.log(weights), shape=(n,))
    return prompts[chosen], roles[chosen]


def write(prompts: Int[Array, "N P"], roles: Int[Array, "N 4"]) -> Int[Array, "N T"]:
    """``MARK``, a role for each person, ``END``.

    >>> import jax.numpy as jnp
    >>> asked = jnp.asarray([encode([(IS_KNAVE, 1, 1), (SAME, 0, 1)])])
    >>> write(asked, jnp.asarray([[0, 1, 0, 0]])).tolist() == [[MARK, KNIGHT, KNAVE, END, END, END]]
    True
    """
    place = jnp.arange(MOST)[None, :]
    said = jnp.where(place < prompts[:, :1] - COUNT, roles, END)
    ends = [jnp.full((prompts.shape[0], 1), token, jnp.int32) for token in (MARK, END)]
    return jnp.concatenate([ends[0], said.astype(jnp.int32), ends[1]], axis=1)


def read(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> tuple[Bool[Array, " N"], Bool[Array, " N"]]:
    """``(marked, readable)``: it begins with ``MARK``; so many roles as people follow, and then ``END``."""
    place = jnp.arange(RESPONSE_TOKENS)[None, :]
    people = prompts[:, :1] - COUNT
    said = (place >= 1) & (place <= people)
    roles = jnp.all(~said | (responses == KNIGHT) | (responses == KNAVE), axis=1)
    ended = jnp.all((place != people + 1) | (responses == END), axis=1)
    marked = responses[:, 0] == MARK
    return marked, marked & roles & ended


def consistent(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
    """Whether the roles of a readable response make exactly the knights' statements true: the one solution."""
    roles = responses[:, 1 : 1 + MOST]
    said = prompts[:, 1:].reshape(-1, MOST, 3)
    first, second = (jnp.take_along_axis(roles, jnp.clip(said[:, :, k] - PERSON, 0, MOST - 1), axis=1) for k in (1, 2))
    kind = said[:, :, 0]
    true = jnp.where(kind == IS_KNIGHT, first == KNIGHT, jnp.where(kind == IS_KNAVE, first == KNAVE, False))
    true = true | ((kind == SAME) & (first == second)) | ((kind == DIFFERENT) & (first != second))
    there = jnp.arange(MOST)[None, :] < prompts[:, :1] - COUNT
    return jnp.all(~there | (true == (roles == KNIGHT)), axis=1)


def rule_levels(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Int[Array, " N"]:
    """1: right; 2: readable and wrong; 3: marked but not readable; 4: without a mark."""
    marked, readable = read(prompts, responses)
    right = consistent(prompts, responses)
    return jnp.where(readable, jnp.where(right, 1, 2), jnp.where(marked, 3, 4)).astype(jnp.int32)


def draw_untidy(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """What a base has read: training puzzles of two and three people, 30 % answered at random, 10 % without a mark and
    10 % with a role blotted out."""
    keys = jax.random.split(key, 4)
    prompts, roles = draw_puzzles(keys[0], n, people=(2, 3))
    guessed = jax.random.randint(keys[1], roles.shape, KNIGHT, KNAVE + 1, jnp.int32)
    chance = jax.random.uniform(keys[2], (2, n, 1))
    responses = write(prompts, jnp.where(chance[0] < 0.3, guessed, roles))
    place = jnp.arange(RESPONSE_TOKENS)[None, :]
    blot = jnp.where(chance[1] < 0.1, place == 0, (chance[1] < 0.2) & (place == 2))
    return prompts, jnp.where(blot, BLANK, responses)


class Puzzles(NamedTuple):
    """Problems of several sizes whose answers have levels by rules: the puzzles of this module, or one's own."""

    world: strings.World
    draw_puzzles: Callable[..., tuple[Array, Array]]
    rule_levels: Callable[[Array, Array], Array]
    draw_untidy: Callable[..., tuple[Array, Array]]


PUZZLES = Puzzles(
    strings.make_world(VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS, end=END, width=64, layers=2, heads=4),
    draw_puzzles, rule_levels, draw_untidy,
)  # fmt: skip
