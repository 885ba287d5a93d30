"""What ``rollout.host.driver`` writes while episodes go on, and the ``Trajectories`` that come of it."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_llm.models.cache import EXPERTS
from jaxrl_llm.rollout.host.slots import Layout
from jaxrl_llm.types import Trajectories


@dataclasses.dataclass
class Record:
    """What is written of each row; the names are those of ``Trajectories`` and ``Turns``."""

    vocabulary: int
    tokens: np.ndarray  # [B, N]
    logp: np.ndarray
    mask: np.ndarray
    part: np.ndarray  # sub-trajectory, from 1; 0 is padding
    place: np.ndarray  # position in it
    wrote: np.ndarray  # a summary
    turn_of: np.ndarray
    end: np.ndarray  # [B, K], columns behind the prompt
    taken: np.ndarray
    reward: np.ndarray
    identity: np.ndarray
    mark: np.ndarray
    done: np.ndarray  # [B]
    valid: np.ndarray
    failures: dict[int, str]
    experts: np.ndarray | None = None  # [B, L + N, E], of a mixture; -1: not read

    @classmethod
    def of(cls, rows: int, layout: Layout, turns: int, vocabulary: int) -> "Record":
        """Nothing written yet."""
        grid, table = (rows, layout.max_new_tokens), (rows, turns)
        return cls(
            vocabulary, np.full(grid, layout.pad_id, np.int32), np.zeros(grid, np.float32), np.zeros(grid, bool),
            np.zeros(grid, np.int32), np.zeros(grid, np.int32), np.zeros(grid, bool), np.full(grid, -1, np.int32),
            np.zeros(table, np.int32), np.zeros(table, bool), np.zeros(table, np.float32), np.zeros(table, np.int32),
            np.zeros(table, np.int32), np.zeros(rows, bool), np.ones(rows, bool), {},
        )  # fmt: skip

    def append(
        self, row: int, at: int, turn: int, tokens: Sequence[int], logp: np.ndarray | None, *, part: int, place: int
    ) -> None:
        """Tokens that were chosen (with ``logp``) or forced, from position ``place`` of their sub-trajectory."""
        here = slice(at, at + len(tokens))
        self.tokens[row, here], self.part[row, here], self.turn_of[row, here] = tokens, part, turn
        self.place[row, here] = np.arange(place, place + len(tokens))
        if logp is not None:
            self.logp[row, here], self.mask[row, here] = logp, True

    def remove(self, row: int, start: int, end: int) -> None:
        """These columns are padding again; their tokens can still be read."""
        here = slice(start, end)
        self.part[row, here], self.place[row, here], self.turn_of[row, here] = 0, 0, -1
        self.logp[row, here], self.mask[row, here] = 0.0, False

    def computed(self, row: int, part: int, prompt: int, width: int, read: int, experts: np.ndarray | None) -> None:
        """Which experts computed a sub-trajectory, column by column of its cache ``[C, E]``.

        Args:
          prompt, width: tokens of the prompt, and the columns that they stand in, on the right.
          read: tokens behind the prompt that the cache holds.
        """
        if experts is None:
            return
        if self.experts is None:
            shape = (self.tokens.shape[0], width + self.tokens.shape[1], experts.shape[1])
            self.experts = np.full(shape, -1, experts.dtype)
        # what comes behind the end of a cache, padding of a slot that waits included, is written over its last column
        read = min(read, experts.shape[0] - width - (width + read >= experts.shape[0]))
        columns = np.flatnonzero((self.part[row] == part) & (self.place[row] < prompt + read))
        self.experts[row, width + columns] = experts[width - prompt + self.place[row, columns]]
        if part == 1:
            self.experts[row, width - prompt : width] = experts[width - prompt : width]


def written_of(record: Record, prompts: Array) -> Array:
    """Which columns are tokens of summaries, behind prompts ``[P, L]``."""
    return jnp.asarray(np.pad(record.wrote, ((0, 0), (prompts.shape[1], 0))))


def trajectories_of(record: Record, prompts: Array, valid: Array, ids: np.ndarray, layout: Layout) -> Trajectories:
    """The record beside its prompts ``[P, L]``; ``ids`` are the problems of the rows."""
    there, width, group = np.asarray(valid), prompts.shape[1], layout.group_size
    index = np.maximum(np.cumsum(there, axis=1) - 1, 0).astype(np.int32)

    def beside(left: np.ndarray, right: np.ndarray) -> Array:
        return jnp.asarray(np.concatenate([np.repeat(left.astype(right.dtype), group, axis=0), right], axis=1))

    nothing = np.zeros(there.shape, bool)
    turns = {
        "turn": beside(np.where(there, 0, -1), record.turn_of),
        "end": np.where(record.taken, record.end + width, 0).astype(np.int32),
        **{name: getattr(record, name) for name in ("taken", "reward", "identity", "mark", "done", "valid")},
    }
    computed = {} if record.experts is None else {EXPERTS: jnp.asarray(record.experts)}
    return Trajectories(
        tokens=beside(np.where(there, np.asarray(prompts), layout.pad_id), record.tokens),
        segment_ids=beside(there, record.part),
        positions=beside(index, record.place),
        mask=beside(nothing, record.mask),
        sampler_logp=beside(nothing, record.logp),
        truncated=jnp.asarray(~record.done & record.valid),
        group_ids=jnp.repeat(jnp.arange(there.shape[0], dtype=jnp.int32), group),
        problem_ids=jnp.asarray(ids),
        extras={f"turns/{name}": jnp.asarray(value) for name, value in turns.items()} | computed,
    )
