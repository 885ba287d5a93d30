"""Rollout in slots: a response that ends frees its slot, and the next of the queue takes it inside the compiled loop.

Lock-step decoding runs every row until the longest one has ended. Here ``slots`` rows decode and all other responses
wait; prompts are prefilled when the queue reaches them, some at a time, and the cache is as large as the slots, not as
the batch. All slots write the same column of a ring: ``L`` columns of the prompt, then as many as a response can need,
which a new tenant finds emptied. A response depends on its prompt and key alone, so the order of the slots shows in
nothing but the time, and ``rollout.generate.generate`` samples the same tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.cache import experts_of
from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.rollout import stop as stops
from jaxrl_llm.rollout.decode import Written, rows_axis, take_rows, unrecorded
from jaxrl_llm.rollout.generate import _assemble, check_columns, check_keys, prefill
from jaxrl_llm.rollout.next_token import Choice, Reading, choose, make_choice, unread
from jaxrl_llm.types import Cache, Key, Params, Policy, Trajectories


class Queue(NamedTuple):
    """What is asked: ``Q = P * group_size`` responses, those of a prompt beside each other."""

    tokens: Int[Array, "P L"]
    valid: Bool[Array, "P L"]
    keys: Key  # [Q]
    temperature: Float[Array, " Q"] | None  # None: that of the engine, for all
    top_p: Float[Array, " Q"] | None


class Waiting(NamedTuple):
    """Prompts that are prefilled: ``C`` from ``first`` on, for the responses before ``until``."""

    cache: Cache
    logits: Float[Array, "C V"]
    first: Int[Array, ""]
    until: Int[Array, ""]


class Slots(NamedTuple):
    """The responses that are being written."""

    cache: Cache  # [S, L + R] in the policy's own layout
    logits: Float[Array, "S V"]  # of the next token
    request: Int[Array, " S"]  # row of the queue
    following: Int[Array, " S"]  # length of its prompt
    count: Int[Array, " S"]  # tokens so far
    alive: Bool[Array, " S"]
    reading: Reading


class Progress(NamedTuple):
    """A rollout between two steps: only arrays, so it can be kept, and resumed bit for bit."""

    queue: Queue
    waiting: Waiting
    slots: Slots
    tokens: Int[Array, "Q N"]
    logp: Float[Array, "Q N"]
    length: Int[Array, " Q"]
    ended: Bool[Array, " Q"]  # by an end id or a stop string
    next: Int[Array, ""]  # first response that has no slot yet
    step: Int[Array, ""]  # decode steps so far
    work: Int[Array, ""]  # slots in all of these steps; tokens / work is the occupancy
    experts: Int[Array, "Q N E"] | None = None  # of a mixture: those that computed each token, -1: it was not read
    asked: Int[Array, "P L E"] | None = None  # the same of the prompts


class Engine(NamedTuple):
    """The parts of a rollout in slots, pure functions all.

    * ``start(tokens, valid, keys, temperature=None, top_p=None) -> progress``: nothing prefilled yet; a response may
      have its own temperature and its own ``top_p [Q]`` in the place of the engine's.
    * ``run(params, progress, leave=0, steps=None) -> progress``: until nobody waits and at most ``leave`` responses are
      unfinished, or for so many decode steps.
    * ``result(progress, problem_ids) -> Trajectories``: unfinished responses count as truncated, one without a token
      has an empty mask; ``finished`` tells which are whole.
    """

    start: Callable[..., Progress]
    run: Callable[..., Progress]
    result: Callable[..., Trajectories]


def generate_in_slots(
    policy: Policy,
    params: Params,
    prompt_tokens: Int[Array, "P L"],
    prompt_valid: Bool[Array, "P L"],
    keys: Key,
    *,
    slots: int,
    problem_ids: Int[Array, " P"] | None = None,
    halvings: int = 2,
    temperature: float | Float[Array, " Q"] = 1.0,
    top_p: float | Float[Array, " Q"] | None = None,
    **settings,
) -> Trajectories:
    """``rollout.generate.generate`` with the same arguments and samples, ``slots`` responses at a time.

    Args:
      slots: rows that decode at once; more than there are responses count as that many.
      halvings: how often the last responses move into half as many slots, when nobody waits any more. Each is a
        further loop to compile.
      settings: those of ``make_engine``.
    """
    slots = min(slots, keys.shape[0])
    asked = {"temperature": temperature, "top_p": top_p}
    own = {name: value for name, value in asked.items() if isinstance(value, Array)}
    common = {name: value for name, value in asked.items() if name not in own}
    engine = make_engine(policy, slots=slots, **common, **settings)
    progress = engine.start(prompt_tokens, prompt_valid, keys, **own)
    for _ in range(halvings):
        if slots > 1:
            slots //= 2
            progress = shrunk(policy, engine.run(params, progress, leave=slots), slots)
    return engine.result(engine.run(params, progress), problem_ids)


def make_engine(
    policy: Policy,
    *,
    slots: int,
    group_size: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    pad_id: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: stops.StopStrings | None = None,
    grammar: grammars.Grammar | None = None,
    prefill_prompts: int = 0,
    prefill_columns: int = 0,
) -> Engine:
    """A rollout that can be stopped and resumed between any two steps; the settings of ``rollout.generate.generate``.

    Args:
      slots: rows that decode at once.
      prefill_prompts: prompts that are prefilled together when the queue reaches them; 0: as many as fill the slots.
      prefill_columns: of these at a time, for the memory of long ones; 0: all.
    """
    how = make_choice(max_new_tokens, eos_ids, pad_id, temperature, top_k, top_p, min_p, stop, grammar)
    for name, value in (("slots", slots), ("group_size", group_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if prefill_prompts < 0:
        raise ValueError(f"prefill_prompts={prefill_prompts} must not be negative")
    check_columns(prefill_columns)
    together = prefill_prompts or -(-slots // group_size)
    prefill = partial(_prefilled, policy, group_size, prefill_columns)
    admit = partial(_admit, policy, group_size, prefill)

    def result(progress: Progress, problem_ids: Array | None = None) -> Trajectories:
        return _result(progress, problem_ids, group_size, pad_id)

    def run(params: Params, progress: Progress, leave: int = 0, steps: Array | int | None = None) -> Progress:
        last = None if steps is None else progress.step + steps

        def goes_on(p: Progress) -> Array:
            waiting = p.next < p.length.shape[0]
            more = waiting | (jnp.sum(p.slots.alive.astype(jnp.int32)) > leave)
            return more if last is None else more & (p.step < last)

        params = policy.for_steps(params)
        return jax.lax.while_loop(goes_on, lambda p: _step(policy, how, params, admit(params, p)), progress)

    return Engine(partial(_start, policy, how, group_size, slots, together, max_new_tokens), run, result)


def finished(progress: Progress) -> Bool[Array, " Q"]:
    """Which responses are whole: ended, or out of tokens."""
    return progress.ended | (progress.length >= progress.tokens.shape[1])


def shrunk(policy: Policy, progress: Progress, slots: int) -> Progress:
    """The same in fewer slots; at most so many responses may be unfinished, the others would be lost."""
    now = progress.slots
    if slots > now.alive.shape[0]:
        raise ValueError(f"slots={slots} are more than the {now.alive.shape[0]} there are")
    kept = jnp.argsort(~now.alive, stable=True)[:slots]
    cache = take_rows(policy, now.cache, kept)
    others = jax.tree.map(lambda x: x[kept], now._replace(cache=()))
    return progress._replace(slots=others._replace(cache=cache))


def _start(
    policy: Policy,
    how: Choice,
    group_size: int,
    slots: int,
    together: int,
    new: int,
    tokens: Int[Array, "P L"],
    valid: Bool[Array, "P L"],
    keys: Key,
    temperature: Float[Array, " Q"] | None = None,
    top_p: Float[Array, " Q"] | None = None,
) -> Progress:
    prompts, width = tokens.shape
    rows, none = prompts * group_size, jnp.int32(0)
    check_keys(keys, rows)
    line = jnp.zeros((slots,), jnp.int32)
    logits = jnp.zeros((max(slots, together), policy.vocab_size), jnp.float32)
    ring = policy.init_cache(slots, width + max(new - 1, 1))  # the last token needs no forward pass
    return Progress(
        queue=Queue(tokens, valid, keys, temperature, top_p),
        waiting=Waiting(policy.init_cache(together, width), logits[:together], none, none),
        slots=Slots(
            cache=ring,
            logits=logits[:slots],
            request=line,
            following=line,
            count=line,
            alive=line > 0,
            reading=unread(slots),
        ),
        tokens=jnp.full((rows, new), how.pad_id, jnp.int32),
        logp=jnp.zeros((rows, new), jnp.float32),
        length=jnp.zeros((rows,), jnp.int32),
        ended=jnp.zeros((rows,), bool),
        next=none,
        step=none,
        work=none,
        experts=unrecorded(experts_of(ring), rows, new),
        asked=unrecorded(experts_of(ring), prompts, width),
    )


def _admit(policy: Policy, group_size: int, prefill: Callable, params: Params, progress: Progress) -> Progress:
    """Free slots take the next of the queue; a loop that mostly runs zero times, so that no cache is copied."""

    def wanted(p: Progress) -> Array:
        return (p.next < p.length.shape[0]) & ~jnp.all(p.slots.alive)

    def one(p: Progress) -> Progress:
        # a condition and no loop: what a loop computes from what it does not change is moved before it
        behind = p.next >= p.waiting.until
        waiting = jax.lax.cond(behind, partial(prefill, params, p.queue), lambda _, old: old, p.next, p.waiting)
        return _enter(policy, group_size, p._replace(waiting=waiting))

    return jax.lax.while_loop(wanted, one, progress)


def _prefilled(
    policy: Policy, group_size: int, columns: int, params: Params, queue: Queue, request: Array, old: Waiting
) -> Waiting:
    """The prompts of a response and of those behind it, in the place of prompts that all have entered."""
    (prompts, width), together = queue.tokens.shape, old.logits.shape[0]
    first = request // group_size
    ids = jnp.minimum(first + jnp.arange(together, dtype=jnp.int32), prompts - 1)
    cache, logits, *_ = prefill(policy, params, queue.tokens[ids], queue.valid[ids], 1, width, columns)
    return Waiting(cache, logits, first, jnp.minimum((first + together) * group_size, queue.keys.shape[0]))


def _enter(policy: Policy, group_size: int, progress: Progress) -> Progress:
    """A free slot takes the next response; its prompt is prefilled.

    One at a time: slices are written in place, where a scatter to several slots may copy the cache.
    """
    now, waiting, request = progress.slots, progress.waiting, progress.next
    slot, prompt = jnp.argmin(now.alive), request // group_size

    def put(old: Array, new: Array | int | bool) -> Array:
        return jax.lax.dynamic_update_index_in_dim(old, jnp.asarray(new, old.dtype), slot, 0)

    stop_state, grammar_state = now.reading
    return progress._replace(
        slots=Slots(
            cache=_filled(policy, now.cache, slot, waiting.cache, prompt - waiting.first),
            logits=put(now.logits, waiting.logits[prompt - waiting.first]),
            request=put(now.request, request),
            following=put(now.following, jnp.sum(progress.queue.valid[prompt].astype(jnp.int32))),
            count=put(now.count, 0),
            alive=put(now.alive, True),
            reading=(put(stop_state, 0), put(grammar_state, 0)),
        ),
        next=request + 1,
        asked=progress.asked if progress.asked is None else _asked(progress, prompt),
    )


def _asked(progress: Progress, prompt: Array) -> Array:
    """The experts of a prompt that waits, written down beside those of the others."""
    waiting, asked = progress.waiting, progress.asked
    read = jax.lax.dynamic_index_in_dim(experts_of(waiting.cache), prompt - waiting.first, 0)
    return jax.lax.dynamic_update_slice_in_dim(asked, read[:, : asked.shape[1]], prompt, 0)


def _filled(policy: Policy, cache: Cache, slot: Array, prompts: Cache, prompt: Array) -> Cache:
    """The first columns of a row become those of a prompt, and its other columns empty.

    Only ``segment_ids`` says what is empty, so of all else just the prompt's columns are written.
    """
    rows = rows_axis(policy)
    gap = cache["segment_ids"].shape[1] - prompts["segment_ids"].shape[1]
    prompts = prompts | {"segment_ids": jnp.pad(prompts["segment_ids"], ((0, 0), (0, gap)))}

    def put(old: Array, new: Array, row: int) -> Array:
        one = jax.lax.dynamic_slice_in_dim(new, prompt, 1, row)
        start = [jnp.int32(0)] * old.ndim
        start[row] = slot.astype(jnp.int32)
        return jax.lax.dynamic_update_slice(old, one, start)

    return jax.tree.map(put, cache, prompts, rows)


def _step(policy: Policy, how: Choice, params: Params, progress: Progress) -> Progress:
    """One token of every slot."""
    now, (rows, new) = progress.slots, progress.tokens.shape
    queue = progress.queue
    own = {name: getattr(queue, name) for name in ("temperature", "top_p")}
    how = how._replace(**{name: value[now.request] for name, value in own.items() if value is not None})
    step_keys = jax.vmap(jax.random.fold_in)(queue.keys[now.request], now.count)
    token, logp, ended, reading = choose(how, step_keys, now.logits, now.alive, now.reading)
    row = jnp.where(now.alive, now.request, rows)  # beyond the last: dropped
    count = now.count + 1
    alive = now.alive & ~ended & (count < new)
    width = queue.tokens.shape[1]
    column = width + progress.step % (now.cache["segment_ids"].shape[1] - width)
    hidden, cache = policy.extend(
        params,
        now.cache,
        token[:, None],
        (now.following + now.count)[:, None],
        alive.astype(jnp.int32)[:, None],
        column,
    )
    experts = progress.experts
    if experts is not None:
        new_ones = jax.lax.dynamic_index_in_dim(experts_of(cache), column, 1, keepdims=False)
        experts = experts.at[row, now.count].set(new_ones, mode="drop")
    return progress._replace(
        experts=experts,
        slots=now._replace(
            cache=cache, logits=policy.unembed(params, hidden[:, 0]), count=count, alive=alive, reading=reading
        ),
        tokens=progress.tokens.at[row, now.count].set(token, mode="drop"),
        logp=progress.logp.at[row, now.count].set(logp, mode="drop"),
        length=progress.length.at[row].set(count, mode="drop"),
        ended=progress.ended.at[row].set(ended, mode="drop"),
        step=progress.step + 1,
        work=progress.work + now.alive.shape[0],
    )


def _result(progress: Progress, problem_ids: Array | None, group_size: int, pad_id: int) -> Trajectories:
    segments = progress.queue.valid.astype(jnp.int32)
    mask = jnp.arange(progress.tokens.shape[1], dtype=jnp.int32)[None, :] < progress.length[:, None]
    return _assemble(
        progress.queue.tokens,
        jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0),
        segments,
        jnp.repeat(jnp.sum(segments, axis=1), group_size),
        Written(progress.tokens, progress.logp, mask, progress.experts),
        ~progress.ended,
        group_size,
        pad_id,
        problem_ids,
        None if progress.asked is None else jnp.repeat(progress.asked, group_size, axis=0),
    )
