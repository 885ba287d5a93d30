"""Envs in Python, in the shape of ``turns.multi_turn.Env``: of token ids, or of text with a tokenizer around it.

``rollout.host.driver`` plays them. A world is asked from a thread, one call at a time for each episode, several
episodes at once: what episodes share must bear that. States may be new values or one object that changes.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxrl_llm.rollout.turns.multi_turn import Env
from jaxrl_llm.verifiers.verdict import Verifier

State = Any


class StepResult(NamedTuple):
    """What a world says to an action."""

    state: State
    tokens: Sequence[int]  # the observation
    reward: float
    done: bool  # the episode is over; its observation is not shown
    valid: bool = True  # False: the world failed, which says nothing about the policy
    cut: bool = False  # the episode stops here without being over: a limit of the world's own
    reason: str = ""  # of a failure
    mark: int = 0  # what the method shall know of the turn, in 32 bits: ``multi_turn.marks_of``


class HostEnv(NamedTuple):
    """A world as functions of one episode.

    * ``reset(seed, task) -> state``: ``seed`` is an array of 32-bit numbers, for ``numpy.random.default_rng``; ``task``
      belongs to the row of the ``Problems`` table whose prompt shows what can be seen in this state.
    * ``step(state, ids) -> StepResult``: the tokens of an action, its end token included. Any tokens must be taken; a
      useless action is answered. An exception is a failure of the world: the episode is invalid.
    * ``identity(state) -> int``: equal for states that are the same situation; asked before each step. Of text:
      ``text_identity`` (Python's own ``hash`` differs from process to process).
    * ``close(state)``: lets go of what the last state of an episode holds, however it ended.

    All calls of an episode come from one thread.
    """

    reset: Callable[[np.ndarray, Any], State]
    step: Callable[[State, list[int]], StepResult]
    identity: Callable[[State], int]
    action_tokens: int  # the longest action
    observation_tokens: int  # what is longer is cut
    close: Callable[[State], None] | None = None


class TextStepResult(NamedTuple):
    """``StepResult`` as text."""

    state: State
    text: str
    reward: float
    done: bool
    valid: bool = True
    cut: bool = False
    reason: str = ""
    mark: int = 0


class TextEnv(NamedTuple):
    """``HostEnv`` as text: ``step(state, text) -> TextStepResult``; ``first(state)`` is what a fresh state shows."""

    reset: Callable[[np.ndarray, Any], State]
    step: Callable[[State, str], TextStepResult]
    identity: Callable[[State], int]
    close: Callable[[State], None] | None = None
    first: Callable[[State], str] | None = None


def text_identity(text: str) -> int:
    """The same number for the same text, in every process.

    >>> text_identity("a door") == text_identity("a " + "door"), text_identity("a key") == text_identity("a door")
    (True, False)
    """
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def on_host(env: Env, *, pad_id: int = 0) -> HostEnv:
    """A compiled world for the host: the same episodes, a call a turn. Tasks are ``task_rows`` of its answers."""
    reset, step, identity = (jax.jit(f) for f in (env.reset, env.step, env.identity))

    def begin(seed: np.ndarray, task: Any) -> State:
        return reset(jax.random.wrap_key_data(jnp.asarray(seed)), task)

    def turn(state: State, ids: list[int]) -> StepResult:
        action = np.full((env.action_tokens,), pad_id, np.int32)
        action[: len(ids)] = ids
        answer = jax.device_get(step(state, jnp.asarray(action), jnp.int32(len(ids))))
        count = int(np.clip(answer.count, 0, env.observation_tokens))
        return StepResult(
            answer.state, answer.tokens[:count], float(answer.reward), bool(answer.done), bool(answer.valid)
        )

    return HostEnv(begin, turn, lambda state: int(identity(state)), env.action_tokens, env.observation_tokens)


def task_rows(answers: PyTree) -> list[PyTree]:
    """The rows of a ``Problems`` table's ``answers`` one by one."""
    leaves, treedef = jax.tree.flatten(jax.device_get(answers))
    return [treedef.unflatten(row) for row in zip(*leaves, strict=True)]


LETTERS = 64  # for a token, of as much of a text as is looked at first


def fitting(text: str, encode: Callable[[str], Sequence[int]], most: int) -> Sequence[int]:
    """The ids of a text, or of as much of its beginning as gives at most so many.

    Raises:
      ValueError: where what ``encode`` puts around a text is more than that by itself.

    >>> fitting("abcdef", lambda text: [0, *map(ord, text), 1], 5)
    [0, 97, 98, 99, 1]
    """
    size = LETTERS * max(most, 1)
    while size < len(text) and len(encode(text[:size])) <= most:
        size *= 2
    text = text[:size]  # a text of megabytes is not encoded as a whole, and not again and again
    ids = encode(text)
    if len(ids) <= most:
        return ids
    found, low, high = encode(""), 0, len(text)
    if len(found) > most:
        raise ValueError(f"observation_tokens={most} are less than the {len(found)} that the format puts around one")
    while high - low > 1:
        middle = (low + high) // 2
        ids = encode(text[:middle])
        found, low, high = (ids, middle, high) if len(ids) <= most else (found, low, middle)
    return found


def spoken(
    world: TextEnv,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[list[int]], str],
    *,
    action_tokens: int,
    observation_tokens: int,
    unended: Callable[[list[int]], Sequence[int]] = lambda ids: (),
) -> HostEnv:
    """A world of text for a policy of tokens.

    An action is decoded for the world to read; the sequence keeps the ids that were chosen. Only new text is encoded,
    of one that is too long the beginning: what the format puts behind it is there in any case.

    Args:
      encode: an observation with all that the format puts between two actions (the end of the user's turn, the
        beginning of the assistant's), special tokens included.
      decode: the text of an action; special tokens should give none.
      unended: what is read behind an action before an observation: the end of a turn that the policy did not end.
    """

    def step(state: State, ids: list[int]) -> StepResult:
        said = world.step(state, decode(ids))
        if said.done or said.cut or not said.valid:
            return StepResult(said.state, (), *said[2:])
        end = [*unended(ids)]
        shown = [*end, *fitting(said.text, encode, observation_tokens - len(end))]
        return StepResult(said.state, shown, *said[2:])

    return HostEnv(world.reset, step, world.identity, action_tokens, observation_tokens, world.close)


def single_turn(verify: Verifier) -> TextEnv:
    """One question, one answer: the task is what the verifier judges by, its verdict the reward.

    Every reasoning-gym family is such a world: ``single_turn(verifiers.gym.verify)``. What may hang or eat memory is
    judged in a process: ``single_turn(lambda answer, text: pool.judge(verify, [answer], [text]).verdicts[0])``.
    """

    def step(task: Any, text: str) -> TextStepResult:
        verdict = verify(task, text)
        return TextStepResult(task, "", verdict.value, True, verdict.valid, reason=verdict.reason)

    return TextEnv(lambda seed, task: task, step, lambda task: text_identity(repr(task)))
