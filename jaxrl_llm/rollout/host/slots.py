"""Slots on the device: each holds one episode's cache, at a column of its own, and any number of them decode together.

Rows of a batch stand at the same column of their cache; slots do not. So a slot's cache is that of a batch of one, the
slots are a leading axis over it, and what a ``Policy`` does to a batch is mapped over them: any policy will do, though
of a mixture of experts one slot is computed after the other. Columns are those of ``rollout.turns.multi_turn``: the
left-padded prompt, then the tokens of the episode, one after the other.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.models.cache import experts_of
from jaxrl_llm.rollout.next_token import is_end
from jaxrl_llm.rollout.sample import draw
from jaxrl_llm.types import Cache, Key, Params, Policy


class Slots(NamedTuple):
    """What lies on the device of ``S`` slots."""

    cache: Cache  # leaves [S, ...]: caches of a batch of one
    logits: Float[Array, "S V"]  # of the next token
    keys: Key  # [S]


class Prompts(NamedTuple):
    """Prompts computed once for all samples of their group."""

    cache: Cache  # leaves [P, ...], as wide as the prompts
    logits: Float[Array, "P V"]
    following: Int[Array, " P"]  # position of the first new token


class Programs(NamedTuple):
    """The compiled programs; slots are donated to each of them. ``R`` rows name a slot; ``S`` names none.

    * ``prefill(params, tokens [P, L], valid [P, L]) -> Prompts``
    * ``open(prompts, slots, length, keys [B]) -> (Slots, blank)``: nothing in them; ``blank`` is an empty cache of
      ``length`` columns.
    * ``seat(slots, blank, prompts, keys [B], slot [R], prompt [R], row [R]) -> Slots``: begins episodes.
    * ``read(params, slots, slot [R], tokens [R, W], count [R], column [R], position [R]) -> Slots``: appends forced
      tokens.
    * ``decode(params, slots, step [S], column [S], position [S], length [S], active [S]) -> (Slots, tokens [S, k],
      logp [S, k], taken [S, k], steps)``: appends chosen tokens until each active slot has ended its action or has
      ``k`` more; ``length`` counts what its action has already, ``step`` the columns behind the prompt.
    """

    prefill: Callable[..., Prompts]
    open: Callable[..., tuple[Slots, Cache]]
    seat: Callable[..., Slots]
    read: Callable[..., Slots]
    decode: Callable[..., tuple[Slots, Array, Array, Array, Array]]

    def compiled(self) -> int:
        """How many programs there are by now."""
        return sum(p._cache_size() for p in (self.prefill, self.seat, self.read, self.decode))


@lru_cache(maxsize=16)
def make_programs(
    policy: Policy,
    *,
    action_tokens: int,
    max_new_tokens: int,
    decode_tokens: int,
    end_ids: tuple[int, ...],
    pad_id: int,
    temperature: float,
) -> Programs:
    """Compiles lazily, once for all worlds of a policy and these sizes; ``decode_tokens`` is ``k``."""
    ends = partial(is_end, eos_ids=end_ids)
    decode = partial(
        _decode, policy, ends, partial(draw, temperature=temperature), (action_tokens, max_new_tokens, decode_tokens),
        pad_id,
    )  # fmt: skip
    return Programs(
        prefill=jit_sampling(partial(_prefill, policy)),
        open=partial(_open, policy),
        seat=jax.jit(_seat, donate_argnums=0),
        read=jit_sampling(partial(_read, policy), donate_argnums=1),
        decode=jit_sampling(decode, donate_argnums=1),
    )


def _extend(policy: Policy, params: Params, cache: Cache, tokens, positions, segments, columns) -> tuple[Array, Cache]:
    """``policy.extend`` of ``[R, W]`` tokens, each row at its own column: hidden states ``[R, W, D]`` and cache."""

    def one(cache, tokens, positions, segments, column):
        return policy.extend(params, cache, tokens[None], positions[None], segments[None], column)

    given = (cache, tokens, positions, segments, columns)
    if policy.experts is not None:  # rows sorted by their expert: JAX has no batch of such products
        hidden, cache = jax.lax.map(lambda row: one(*row), given)
    else:
        hidden, cache = jax.vmap(one)(*given)
    return hidden[:, 0], cache


def _prefill(policy: Policy, params: Params, tokens: Array, valid: Array) -> Prompts:
    segments = valid.astype(jnp.int32)
    positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)
    blank = policy.init_cache(1, tokens.shape[1])
    cache = jax.tree.map(lambda x: jnp.broadcast_to(x, (tokens.shape[0], *x.shape)), blank)
    columns = jnp.zeros(tokens.shape[:1], jnp.int32)
    hidden, cache = _extend(policy, params, cache, tokens, positions, segments, columns)
    return Prompts(cache, policy.unembed(params, hidden[:, -1]), jnp.sum(segments, axis=1))


def _open(policy: Policy, prompts: Prompts, slots: int, length: int, keys: Key) -> tuple[Slots, Cache]:
    blank = policy.init_cache(1, length)
    cache = jax.tree.map(lambda x: jnp.repeat(x[None], slots, axis=0), blank)
    logits = jnp.zeros((slots, prompts.logits.shape[1]), prompts.logits.dtype)
    return Slots(cache, logits, keys[jnp.zeros((slots,), jnp.int32)]), blank


def _placed(slots: Slots, slot: Array, cache: Cache, logits: Array, keys: Key | None = None) -> Slots:
    """Rows written to their slots; a row that names none is dropped."""

    def put(all_of: Array, new: Array) -> Array:
        return all_of.at[slot].set(new, mode="drop")

    keys = slots.keys if keys is None else put(slots.keys, keys)
    return Slots(jax.tree.map(put, slots.cache, cache), put(slots.logits, logits), keys)


def _seat(slots: Slots, blank: Cache, prompts: Prompts, keys: Key, slot: Array, prompt: Array, row: Array) -> Slots:
    def widened(empty: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice(empty, part.astype(empty.dtype), (0,) * empty.ndim)

    cache = jax.vmap(lambda p: jax.tree.map(lambda e, c: widened(e, c[p]), blank, prompts.cache))(prompt)
    return _placed(slots, slot, cache, prompts.logits[prompt], keys[row])


def _read(policy: Policy, params: Params, slots: Slots, slot, tokens, count, column, position) -> Slots:
    here = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    there = here < count[:, None]
    rows = jax.tree.map(lambda x: jnp.take(x, slot, axis=0, mode="clip"), slots.cache)
    positions = jnp.where(there, position[:, None] + here, 0)
    hidden, rows = _extend(policy, params, rows, tokens, positions, there.astype(jnp.int32), column)
    last = jnp.maximum(count - 1, 0)[:, None, None]
    logits = policy.unembed(params, jnp.take_along_axis(hidden, last, axis=1)[:, 0])
    return _placed(slots, slot, rows, logits)


def _decode(policy, ends, sample, sizes, pad_id, params, slots, step, column, position, length, active):
    action_tokens, new, most = sizes

    def one(carry):
        i, slots, going, count, tokens, logp, taken = carry
        keys = jax.vmap(jax.random.fold_in)(slots.keys, step + count)
        token, token_logp = sample(slots.logits, keys)
        token = jnp.where(going, token, pad_id)

        def put(array: Array, value: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(array, value, i, 1)

        # A slot that does not go on writes padding where its next token will come, or, where none will, anywhere.
        segments = going.astype(jnp.int32)[:, None]
        hidden, cache = _extend(
            policy, params, slots.cache, token[:, None], (position + count)[:, None], segments, column + count
        )
        logits = jnp.where(going[:, None], policy.unembed(params, hidden[:, 0]), slots.logits)
        written = put(tokens, token), put(logp, jnp.where(going, token_logp, 0.0)), put(taken, going)
        count = count + going.astype(jnp.int32)
        going = going & ~ends(token) & (length + count < action_tokens) & (step + count < new)
        return i + 1, Slots(cache, logits, slots.keys), going, count, *written

    grid = (active.shape[0], most)
    carry = (
        jnp.int32(0), slots, active, jnp.zeros(grid[:1], jnp.int32),
        jnp.full(grid, pad_id, jnp.int32), jnp.zeros(grid, jnp.float32), jnp.zeros(grid, bool),
    )  # fmt: skip
    steps, slots, _, _, tokens, logp, taken = jax.lax.while_loop(lambda c: (c[0] < most) & jnp.any(c[2]), one, carry)
    return slots, tokens, logp, taken, steps


class Layout(NamedTuple):
    """Sizes that a rollout fixes."""

    slots: int
    group_size: int
    max_new_tokens: int
    seen_tokens: int  # behind the prompt, in a cache
    pad_id: int
    read_tokens: tuple[int, ...]  # ascending
    rows_at_once: int


class Device:
    """The slots' arrays, and calls that name slots by lists."""

    def __init__(self, layout: Layout, programs: Programs, params, prompts: Prompts, keys, width: int):
        self.layout, self.programs, self.params = layout, programs, params
        self.prompts, self.keys, self.width = prompts, keys, width
        self.following = np.asarray(prompts.following)
        # behind the last column that is ever seen there is room for the padding of the longest piece
        length = width + min(layout.max_new_tokens - 2, layout.seen_tokens) + layout.read_tokens[-1]
        self.slots, self.blank = programs.open(prompts, layout.slots, length, keys)
        for size in layout.read_tokens:  # compiled now, not when the first long observation comes
            self._read([], size)
        jax.block_until_ready(self.slots)

    def experts(self, slot: int) -> np.ndarray | None:
        """Which experts computed each column of a slot's cache ``[C, L K]``; None of a model without."""
        found = experts_of(self.slots.cache)
        return None if found is None else np.asarray(jax.lax.dynamic_index_in_dim(found, slot, keepdims=False)[0])

    def _rows(self, values: list[int], fill: int) -> Array:
        return jnp.asarray(values + [fill] * (self.layout.rows_at_once - len(values)), jnp.int32)

    def seat(self, seated: list[tuple[int, int]]) -> None:
        """Episodes ``(slot, row)`` begin."""
        for some in _pieces(seated, self.layout.rows_at_once):
            slot, row = ([x[i] for x in some] for i in (0, 1))
            prompt = [r // self.layout.group_size for r in row]
            self.slots = self.programs.seat(
                self.slots, self.blank, self.prompts, self.keys, self._rows(slot, self.layout.slots),
                self._rows(prompt, 0), self._rows(row, 0),
            )  # fmt: skip

    def read(self, observed: list[tuple[int, int, int, list[int]]]) -> None:
        """Appends tokens: ``(slot, row, how many lie between the prompt and them in the cache, tokens)``."""
        largest = self.layout.read_tokens[-1]
        while observed:
            for some in _pieces(observed, self.layout.rows_at_once):
                most = min(max(len(tokens) for *_, tokens in some), largest)
                self._read(some, next(size for size in self.layout.read_tokens if size >= most))
            observed = [(slot, row, at + largest, o[largest:]) for slot, row, at, o in observed if len(o) > largest]

    def _read(self, some: list[tuple[int, int, int, list[int]]], size: int) -> None:
        tokens = np.full((self.layout.rows_at_once, size), self.layout.pad_id, np.int32)
        for i, (*_, observation) in enumerate(some):
            piece = observation[:size]
            tokens[i, : len(piece)] = piece
        at = [at for _, _, at, _ in some]
        positions = [int(self.following[row // self.layout.group_size]) + step for _, row, step, _ in some]
        self.slots = self.programs.read(
            self.params, self.slots, self._rows([slot for slot, *_ in some], self.layout.slots), jnp.asarray(tokens),
            self._rows([min(len(o), size) for *_, o in some], 0), self._rows([self.width + a for a in at], 0),
            self._rows(positions, 0),
        )  # fmt: skip

    def decode(self, step: np.ndarray, place: np.ndarray, row: np.ndarray, length: np.ndarray, active: np.ndarray):
        """Tokens, log-probabilities, which were taken ``[S, k]``, and how many columns were decoded.

        ``step`` counts the columns of the record, ``place`` those of the cache, both behind the prompt.
        """
        position = self.following[row // self.layout.group_size] + place
        given = (jnp.asarray(x, jnp.int32) for x in (step, self.width + place, position, length))
        self.slots, *out = self.programs.decode(self.params, self.slots, *given, jnp.asarray(active))
        return jax.device_get(tuple(out))


def _pieces(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]
