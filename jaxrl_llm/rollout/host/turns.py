"""An episode of a Python world as its slot knows it, and what its world and its context do at a turn."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rollout.host.env import HostEnv, StepResult
from jaxrl_llm.rollout.turns.contexts import Context

UNBEGUN = object()  # the state before the world has begun


class Rules(NamedTuple):
    """What ends an action, an episode and what is seen of it."""

    context: Context
    end_ids: tuple[int, ...]
    turn_s: float | None
    episode_s: float | None
    clock: Callable[[], float]


@dataclasses.dataclass
class Episode:
    """What is going on in a slot."""

    row: int
    begun: float
    asked: float = 0.0  # when the world was asked, where it has not answered yet
    ticket: int = 0  # of that call; 0: it is the policy's turn
    state: Any = UNBEGUN
    opened: list[Any] = dataclasses.field(default_factory=list)  # its state, by the thread that began it, also too late
    columns: int = 0  # behind the prompt
    turn: int = 0
    action: list[int] = dataclasses.field(default_factory=list)  # or the summary that is being written
    part: int = 1  # sub-trajectory that goes on
    place: int = 0  # tokens behind the prompt that it sees
    read: int = 0  # of them those that the device has computed, or will have when its slot is asked again
    writing: bool = False  # a summary


def most_tokens(env: HostEnv, context: Context) -> int:
    """Tokens of the longest that is written in one go, an action or a summary."""
    return max(env.action_tokens, context.summary_tokens if context.summaries else 0)


def _in_32_bits(number: int) -> int:
    return (int(number) + 2**31) % 2**32 - 2**31


def take_turn(env: HostEnv, state: Any, action: list[int], vocabulary: int) -> tuple[int, StepResult]:
    """In the world's thread: an answer that makes no sense fails here, as an exception does."""
    identity = _in_32_bits(env.identity(state))
    heard = env.step(state, action)
    tokens, reward = [int(token) for token in heard.tokens], float(heard.reward)
    if heard.valid and not math.isfinite(reward):
        raise ValueError(f"reward={reward} is not finite")
    if tokens and not (0 <= min(tokens) and max(tokens) < vocabulary):
        raise ValueError(f"an observation has tokens outside the vocabulary of {vocabulary}")
    return identity, heard._replace(tokens=tokens, reward=reward, mark=_in_32_bits(heard.mark))


def ruled(context: Context, tokens: list[int], most: int) -> list[int]:
    """The summary that a rule makes of an observation of up to ``most`` tokens."""
    line = np.zeros((max(most, context.summary_tokens),), np.int32)
    line[: len(tokens)] = tokens
    summary, count = context.rule(line, np.int32(len(tokens)))
    return [int(token) for token in np.asarray(summary)[: min(max(int(count), 0), context.summary_tokens)]]


def begin_env(opened: list[Any], reset: Callable[..., Any], *given: Any) -> Any:
    """In the world's thread: a state, which is noted there, so that it is let go of where nobody waits for it."""
    opened.append(reset(*given))
    return opened[0]


def close_env(close: Callable[[Any], None], opened: list[Any]) -> None:
    """In the world's thread: lets go of a state that has begun; what fails there is a warning."""
    try:
        for state in opened:
            close(state)
    except Exception as error:  # the episode is over, and whatever it was worth
        warnings.warn(f"a world did not close: {type(error).__name__}: {error}", stacklevel=1)
