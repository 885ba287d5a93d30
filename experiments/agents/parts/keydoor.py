"""The key-door world turn by turn: one action, one look; corridors of ``data.tasks.keydoor`` and square grids.

The prompt ``kd ..K.A..D=>`` shows the first state; after every action the world shows the next one, ``;..KA...D=>``.
Whoever holds the key is an ``H``. An action is one token: ``l r u d`` walk (against a wall or the door nothing
happens), ``p`` picks the key up, ``o`` opens the door from beside it: reward 1, the end. An end token gives up; any
other token is answered like a useless action.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.agents.parts.keydoor_grid import MOVES, parse
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env

_CELLS = ".AHKD"


class Place(NamedTuple):
    """Cells by number, row by row."""

    agent: Int[Array, ""]
    key: Int[Array, ""]
    door: Int[Array, ""]
    held: Bool[Array, ""]


def tasks(problems: Sequence[Problem]) -> dict[str, np.ndarray]:
    """``agent``, ``key`` and ``door`` ``[N]``: the ``answers`` of ``data.problems.encode_problems``."""
    found = [parse(p.answer["world"])[2] for p in problems]
    return {
        name: np.array([f[c] for f in found], np.int32) for name, c in (("agent", "A"), ("key", "K"), ("door", "D"))
    }


def _id_of(encode: Callable[[str], list[int]], character: str) -> int:
    ids = encode(character)
    if len(ids) != 1:
        raise ValueError(f"{character!r} is {len(ids)} tokens; the key-door world needs one token a character")
    return ids[0]


def make_env(
    encode: Callable[[str], list[int]], eos_ids: Sequence[int], *, height: int, width: int, step_cost: float = 0.0,
    key_share: float = 0.0,
) -> Env:  # fmt: skip
    """The world of one size; a corridor has ``height=1``.

    Args:
      encode: of a tokenizer in which every character is one token.
      eos_ids: tokens that give up.
      step_cost: taken off for every action.
      key_share: of the reward, earned where the key is picked up; the rest is earned at the door.
    """
    if height < 1 or width < 2 or height * width < 4:
        raise ValueError(f"height={height}, width={width}: a world has 4 cells at least, and 2 in a row")
    ids = {c: _id_of(encode, c) for c in (*_CELLS, *MOVES, "p", "o", "/", ";", "=", ">")}
    cell_ids = jnp.asarray([ids[c] for c in _CELLS], jnp.int32)
    shifts = jnp.asarray(list(MOVES.values()), jnp.int32)
    move_ids = jnp.asarray([ids[c] for c in MOVES], jnp.int32)
    give_up = jnp.asarray(list(eos_ids), jnp.int32)

    def beside(left: Array, right: Array) -> Array:
        return jnp.abs(left // width - right // width) + jnp.abs(left % width - right % width) == 1

    def show(place: Place) -> Array:
        cells = jnp.zeros((height * width,), jnp.int32)
        cells = cells.at[place.door].set(4).at[place.key].set(jnp.where(place.held, cells[place.key], 3))
        cells = cells.at[place.agent].set(jnp.where(place.held, 2, 1))
        grid = cell_ids[cells].reshape(height, width)
        rows = jnp.concatenate([grid, jnp.full((height, 1), ids["/"], jnp.int32)], axis=1).reshape(-1)[:-1]
        return jnp.concatenate([jnp.asarray([ids[";"]], jnp.int32), rows, jnp.asarray([ids["="], ids[">"]], jnp.int32)])

    def paid(opened: Array, picked: Array) -> Array:
        reward = opened.astype(jnp.float32)
        return (1.0 - key_share) * reward + key_share * picked.astype(jnp.float32) if key_share else reward

    def step(place: Place, action: Array, count: Array) -> Answered:
        token = action[0]
        move = token == move_ids
        shift = jnp.sum(jnp.where(move[:, None], shifts, 0), axis=0)
        row, column = place.agent // width + shift[0], place.agent % width + shift[1]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        target = row * width + column
        agent = jnp.where(inside & (target != place.door), target, place.agent).astype(jnp.int32)
        held = place.held | ((token == ids["p"]) & (place.agent == place.key))
        opened = (token == ids["o"]) & place.held & beside(place.agent, place.door)
        after = Place(agent, place.key, place.door, held)
        look = show(after)
        return Answered(
            state=after,
            tokens=look,
            count=jnp.asarray(look.shape[0], jnp.int32),
            reward=paid(opened, held & ~place.held) - step_cost,
            done=opened | jnp.any(token == give_up),
            valid=jnp.ones((), bool),
        )

    def identity(place: Place) -> Array:
        size = height * width
        key = jnp.where(place.held, size, place.key)
        return ((place.agent * (size + 1) + key) * size + place.door).astype(jnp.int32)

    return Env(
        reset=lambda key, task: Place(task["agent"], task["key"], task["door"], jnp.zeros((), bool)),
        step=step,
        identity=identity,
        action_tokens=1,
        observation_tokens=height * (width + 1) + 2,
    )
