"""Rollouts that stop at a deadline and go on later: with the same weights bit for bit, or with newer ones.

What waits between the two is a ``rollout.slots.Progress``: arrays alone, which a checkpoint may hold.
"""

import time
from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.rollout.slots import Progress, finished
from jaxrl_llm.types import Params, Policy


def run_until(
    run: Callable[..., Progress],
    params: Params,
    progress: Progress,
    *,
    seconds: float,
    steps: int = 16,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Decodes until everything is finished or ``seconds`` are over, asking the clock every ``steps`` steps.

    Pieces make no difference to the samples; at least one is run.

    Args:
      run: the compiled ``run`` of a ``rollout.slots.Engine``.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    end = clock() + seconds
    while True:
        progress = run(params, progress, steps=jnp.int32(steps))
        if bool(jnp.all(finished(progress))) or clock() >= end:  # waits for the piece
            return progress


def renewed(policy: Policy, params: Params, progress: Progress) -> Progress:
    """The same unfinished responses under other weights: their keys and values and next logits computed anew.

    What is written stays, with the log-probabilities of the weights that wrote it; the rest will be the new policy's.
    """
    now, queue = progress.slots, progress.queue
    width, group = queue.tokens.shape[1], progress.length.shape[0] // queue.tokens.shape[0]
    columns = now.cache["segment_ids"].shape[1]
    ring = columns - width
    # the step that wrote each column of the ring last, counted back from the next one, says which token lies there
    age = 1 + (progress.step - 1 - jnp.arange(ring, dtype=jnp.int32)) % ring
    index = now.count[:, None] - age[None, :]
    written = (index >= 0) & now.alive[:, None]
    rows = jnp.take_along_axis(progress.tokens[now.request], jnp.maximum(index, 0), axis=1)
    prompt = now.request // group
    there = queue.valid[prompt] & now.alive[:, None]
    before = jnp.maximum(jnp.cumsum(there.astype(jnp.int32), axis=1) - 1, 0)
    valid = jnp.concatenate([there, written], axis=1)
    tokens = jnp.concatenate([queue.tokens[prompt], rows], axis=1)
    positions = jnp.concatenate([before, now.following[:, None] + jnp.maximum(index, 0)], axis=1)
    cache = policy.init_cache(now.alive.shape[0], columns)
    segments = valid.astype(jnp.int32)
    hidden, cache = policy.extend(params, cache, tokens, jnp.where(valid, positions, 0), segments, 0)
    last = hidden[:, width + (progress.step - 1) % ring]  # all slots wrote their newest token there
    waiting = progress.waiting._replace(until=progress.next)  # prompts that wait are prefilled again as well
    slots = now._replace(cache=cache, logits=policy.unembed(params, last))
    return progress._replace(slots=slots, waiting=waiting)
