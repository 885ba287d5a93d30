"""How much of an episode is seen at once, and the training rows of episodes that were seen in several parts.

An episode that outgrows its context becomes several sub-trajectories: the first ends with a summary, the next begins
with the prompt and that summary, the last ends with the answer. They lie behind one another in one row as packed
segments, with positions of their own, so that none sees another. ``summaries`` plays such episodes in compiled
worlds, ``rollout.host.driver`` in Python ones.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrl_llm.types import Trajectories


class Context(NamedTuple):
    """How much of an episode is seen at once, and what takes the place of the rest; ``Context()`` is all of it.

    After a turn the context is full where it has more than ``tokens`` tokens. Then the instruction is shown, the policy
    writes a summary, which ends as an action does or after ``summary_tokens``, and sees the prompt and the summary. A
    full context without a summary left ends the episode as truncated.
    """

    tokens: int | None = None  # L; None: no limit
    summaries: int = 0  # S: at most, in one episode
    summary_tokens: int = 1  # of the longest summary
    instruction: tuple[int, ...] = ()  # v_sum, what asks for a summary
    # ``(observation, count) -> (summary [summary_tokens], count)`` of the last observation, in place of the policy
    rule: Callable[[Array, Array], tuple[Array, Array]] | None = None
    # the turn that made the context too long is taken out again before the summary; the world does not take it back
    drop: bool = False
    resume: tuple[int, ...] = ()  # what stands behind a summary before the policy goes on: a chat's next user turn


WRITTEN = "summaries/written"  # tokens of summaries, in the extras of a rollout with a context


@lru_cache(maxsize=16)
def beginning(tokens: int) -> Callable[[Array, Array], tuple[Array, Array]]:
    """The ``rule`` that keeps the first tokens of the last observation.

    >>> [x.tolist() for x in beginning(2)(jnp.array([5, 3, 1]), jnp.int32(3))]
    [[5, 3], 2]
    """
    return lambda shown, count: (shown[:tokens], jnp.minimum(count, tokens))


def widest(context: Context, env: Any, *, prompt_tokens: int, turns: int) -> int:
    """Tokens of the longest sub-trajectory there can be in ``env``, an ``Env`` or a ``HostEnv``.

    >>> from jaxrl_llm.rollout.turns.multi_turn import Env
    >>> env = Env(None, None, None, action_tokens=1, observation_tokens=2)
    >>> widest(Context(10, 2, 2, (7,)), env, prompt_tokens=1, turns=14)
    16
    """
    turn = env.action_tokens + env.observation_tokens
    if context.tokens is None:
        return prompt_tokens + turns * turn
    return context.tokens + turn + (len(context.instruction) + context.summary_tokens if context.summaries else 0)


def new_tokens(context: Context, env: Any, *, prompt_tokens: int, turns: int) -> int:
    """Columns after the prompt that always suffice."""
    again = len(context.instruction) + 2 * context.summary_tokens + len(context.resume) + prompt_tokens
    most = turns * (env.action_tokens + env.observation_tokens) + context.summaries * again
    whole = widest(context, env, prompt_tokens=prompt_tokens, turns=turns)
    return min(most, (context.summaries + 1) * whole - prompt_tokens)


def check(context: Context, prompt_tokens: int) -> None:
    """Whether prompts of so many tokens leave room to go on.

    Raises:
      ValueError: where they do not, or two settings contradict each other.
    """
    if context.tokens is None:
        if context.summaries:
            raise ValueError(f"summaries={context.summaries} of a context without a limit; set tokens")
        return
    if context.summaries < 0 or context.summary_tokens < 1:
        raise ValueError(f"summaries={context.summaries}, summary_tokens={context.summary_tokens}: at least 0 and 1")
    if context.rule is not None and context.drop:
        raise ValueError("rule and drop: a rule reads the observation that drop takes out; leave one")
    if context.drop and context.summaries and not context.instruction:
        raise ValueError("drop takes the last turn out and then asks for a summary: it needs an instruction")
    least = prompt_tokens + (context.summary_tokens + len(context.resume) if context.summaries else 0)
    if context.tokens < least:
        raise ValueError(f"tokens={context.tokens} of context are less than the {least} of prompt and summary")


def sub_trajectories(rows: Trajectories, *, most: int, width: int) -> Trajectories:
    """Every sub-trajectory as a row: ``B * most`` rows of ``width`` columns, those of a rollout side by side.

    Rows of sub-trajectories that there are not are padding. ``group_ids``, ``problem_ids`` and ``truncated`` are those
    of the rollout; ``extras``, whose columns are the rollout's, are left out.

    Args:
      most: at most in one rollout: the summaries and one.
      width: see ``widest``; what is longer would be cut.
    """
    width = min(width, rows.tokens.shape[1])

    def part(number: Array) -> tuple[Array, ...]:
        keep = rows.segment_ids == number
        order = jnp.argsort(~keep, axis=1, stable=True)[:, :width]
        there = jnp.take_along_axis(keep, order, axis=1)

        def gather(x: Array) -> Array:
            return jnp.where(there, jnp.take_along_axis(x, order, axis=1), jnp.zeros((), x.dtype))

        picked = (rows.tokens, rows.positions, rows.mask, rows.sampler_logp)
        return (*(gather(x) for x in picked), there.astype(jnp.int32))

    def side_by_side(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(-1, width)

    found = jax.vmap(part)(jnp.arange(1, most + 1, dtype=jnp.int32))
    tokens, positions, mask, logp, segments = (side_by_side(x) for x in found)
    owners = {name: jnp.repeat(getattr(rows, name), most) for name in ("truncated", "group_ids", "problem_ids")}
    return Trajectories(tokens, segments, positions, mask, logp, **owners)


def present(parts: Trajectories, *, most: int) -> Bool[Array, "B K"]:
    """Which sub-trajectories of each rollout there are: the policy chose something in them."""
    return jnp.any(parts.mask, axis=1).reshape(-1, most)


def summaries_of(rows: Trajectories) -> Int[Array, " B"]:
    """How many summaries each rollout went on from."""
    return jnp.maximum(jnp.max(rows.segment_ids, axis=1) - 1, 0)


def context_sizes(rows: Trajectories) -> Int[Array, " B"]:
    """Tokens of the longest context of each rollout."""
    return jnp.max(jnp.where(rows.segment_ids > 0, rows.positions + 1, 0), axis=1)
