"""Envs as text for ``rollout.host.driver``: one's own classes, Gymnasium environments, reasoning-gym families."""

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.own import own
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.problems import encode_problems
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError, extra_module
from jaxrl_llm.rollout.host.env import HostEnv, TextEnv, TextStepResult, single_turn, spoken, text_identity
from jaxrl_llm.types import Problems
from jaxrl_llm.verifiers import gym
from jaxrl_llm.verifiers.verdict import Verifier


class Given(NamedTuple):
    """What ``make_host_episodes`` and an ``Online`` need of a world."""

    problems: Problems
    tasks: list[Any]
    env: HostEnv


def given(
    world: TextEnv,
    rows: Sequence[Problem],
    tasks: Sequence[Any],
    tokenizer: Tokenizer,
    *,
    action_tokens: int,
    observation_tokens: int,
    encode: Callable[[str], Sequence[int]] | None = None,
    chat: bool = False,
) -> Given:
    """A world of text, the rows whose prompts open its episodes and the tasks of these rows.

    Args:
      encode: of observations, with what the format puts around them (``data.chat.make_reply_encoder``); by default just
        the text.
      chat: prompts are conversations; an action that was cut off then has the end of a turn before ``encode``.
    """
    more = {}
    if chat and encode is not None:
        end = tokenizer.eos_ids[0]
        more["unended"] = lambda ids: () if ids[-1] in tokenizer.eos_ids else (end,)
    env = spoken(
        world, tokenizer.encode if encode is None else encode, tokenizer.decode, action_tokens=action_tokens,
        observation_tokens=observation_tokens, **more,
    )  # fmt: skip
    return Given(encode_problems(tokenizer, rows, chat=chat), list(tasks), env)


def as_begun(
    world: TextEnv,
    source: str,
    tasks: Sequence[Any],
    tokenizer: Tokenizer,
    *,
    prompt: Callable[[str], Any] = str,
    **how: Any,
) -> Given:
    """One problem a task, whose prompt shows how its episode begins; ``how`` as for ``given``.

    Args:
      world: with ``first``.
      prompt: what that is put into: the rules, the names of the actions; a text, or the messages of a conversation.
    """
    rows = []
    for task in tasks:
        state = world.reset(np.zeros((2,), np.uint32), task)
        rows.append(Problem(source, prompt(world.first(state)), "", {}, 0, str(task)))
        if world.close is not None:
            world.close(state)
    return given(world, rows, tasks, tokenizer, **how)


def reasoning(
    family: str,
    n: int,
    seed: int,
    tokenizer: Tokenizer,
    *,
    action_tokens: int,
    chat: bool = False,
    verify: Verifier = gym.verify,
    unsound: bool = False,
    **settings: Any,
) -> Given:
    """Problems of a reasoning-gym family as episodes of one turn; ``settings`` are the family's own.

    Args:
      verify: ``gym.verify`` (the family's score) or ``gym.verify_solved`` (full marks alone); both ask in the sandbox.
      unsound: take a family although its scorer pays for answers that are not right (``gym.UNSOUND``).

    Raises:
      UserError: for an unknown family or setting, one of ``gym.UNSOUND``, or without the extra ``tasks``.
    """
    drawn = gym.problems(family, n, seed, unsound=unsound, **settings)
    rows = [
        Problem(family, prompt, solution or "", answer, 0, prompt)
        for prompt, solution, answer in zip(drawn.prompts, drawn.solutions, drawn.answers, strict=True)
    ]
    return given(
        single_turn(verify),
        rows,
        drawn.answers,
        tokenizer,
        action_tokens=action_tokens,
        observation_tokens=1,
        chat=chat,
    )


def gymnasium_maker(name: str, **settings: Any) -> Callable[[], Any]:
    """``() -> environment`` of a registered name.

    Raises:
      UserError: without the package, or for a name that it does not know.
    """
    gymnasium = extra_module("gymnasium", "Gymnasium environments need", "envs")
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise UserError(f"no Gymnasium environment {name!r}: {error}") from error
    return lambda: gymnasium.make(name, **settings)


def named_actions(names: Sequence[str]) -> Callable[[str], int | None]:
    """Reads a discrete action by its name, whatever the case and the space around it; None for anything else.

    >>> read = named_actions(["left", "right"])
    >>> read(" Right\\n"), read("up")
    (1, None)
    """
    numbers = {name.strip().lower(): i for i, name in enumerate(names)}
    return lambda text: numbers.get(text.strip().lower())


class _Live(NamedTuple):
    """An episode of one's own class, which changes, and what was shown and said in it."""

    episode: Any
    told: list[str]


def own_tasks(name: str, default: int) -> list[Any]:
    """The ``tasks`` of one's own class: a number of them, or a sequence of what ``reset`` takes; else ``default``.

    Raises:
      UserError: for objects without ``reset`` and ``step``, or tasks that are neither.
    """
    make = own(name, "--data", "class")
    made = make if isinstance(make, type) else make()
    if wrong := [x for x in ("reset", "step") if not callable(getattr(made, x, None))]:
        raise UserError(f"--data {name} has no {' and no '.join(wrong)}; write reset(task) -> text and "
                        "step(text) -> (text, reward, done)")  # fmt: skip
    tasks = getattr(made, "tasks", default)
    if isinstance(tasks, int) and tasks > 0:
        return list(range(tasks))
    if isinstance(tasks, int | str) or not hasattr(tasks, "__len__") or not len(tasks):
        raise UserError(f"--data {name} has tasks={tasks!r}; give a number above 0, or a list of what reset takes")
    return list(tasks)


def own_env(name: str) -> TextEnv:
    """Episodes of one's own class: ``reset(task) -> text``, ``step(text) -> (text, reward, done)``, one object each.

    Where there is ``close()`` it ends an episode. The situation of an episode is all that was shown and said in it.

    Raises:
      UserError: as ``data.own.own``.
    """
    return env_of_class(own(name, "--data", "class"), name)


def env_of_class(make: Callable[[], Any], name: str) -> TextEnv:
    """``own_env`` of what makes the object of an episode; ``name`` is what errors call it."""

    def reset(seed: np.ndarray, task: Any) -> _Live:
        episode = make()
        shown = episode.reset(task)
        if not isinstance(shown, str):
            raise UserError(f"{name}.reset returned {type(shown).__name__}; return the text that opens the episode")
        return _Live(episode, [shown])

    def step(live: _Live, text: str) -> TextStepResult:
        found = live.episode.step(text)
        if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[0], str):
            raise UserError(f"{name}.step returned {type(found).__name__}; return (text, reward, done)")
        shown, reward, done = found
        live.told.extend([text, shown])
        return TextStepResult(live, shown, float(reward), bool(done))

    return TextEnv(
        reset,
        step,
        lambda live: text_identity("\n".join(live.told)),
        close=lambda live: getattr(live.episode, "close", lambda: None)(),
        first=lambda live: live.told[0],
    )


class _Place(NamedTuple):
    """An environment, which changes, and what it showed last."""

    environment: Any
    text: str


def gymnasium_env(
    make: Callable[[], Any],
    *,
    read: Callable[[str], Any],
    write: Callable[[Any, dict[str, Any]], str],
    unread: str = "That is no action. ",
) -> TextEnv:
    """A Gymnasium environment whose actions and observations are, or can be put as, text.

    A task is the seed of ``reset``: the same seed shows the same, so that the prompt can show it. An environment that
    is ``terminated`` is done; one that is ``truncated`` is cut, and so the episode counts as truncated.

    Args:
      make: a fresh environment, for example of ``gymnasium_maker``; every episode has its own.
      read: text to an action, ``None`` where it is none: then nothing happens, and the last observation is shown
        again behind ``unread``. ``str.strip`` for a space of texts, ``named_actions`` for a discrete one.
      write: ``(observation, info) -> text``.
    """

    def reset(seed: np.ndarray, task: int) -> _Place:
        environment = make()
        return _Place(environment, write(*environment.reset(seed=int(task))))

    def step(place: _Place, text: str) -> TextStepResult:
        action = read(text)
        if action is None:
            return TextStepResult(place, unread + place.text, 0.0, False)
        observation, reward, terminated, truncated, info = place.environment.step(action)
        shown = write(observation, info)
        return TextStepResult(
            _Place(place.environment, shown), shown, float(reward), bool(terminated),
            cut=bool(truncated) and not terminated,
        )  # fmt: skip

    return TextEnv(
        reset,
        step,
        lambda place: text_identity(place.text),
        close=lambda place: place.environment.close(),
        first=lambda place: place.text,
    )


def plain_gymnasium(name: str) -> TextEnv:
    """A Gymnasium environment of texts or discrete actions, as numbers; observations as Python writes them.

    What it shows first says which numbers there are.

    Raises:
      UserError: as ``gymnasium_maker``, or for another space of actions, which needs a class of one's own around it.
    """
    gymnasium, make = extra_module("gymnasium", "Gymnasium environments need", "envs"), gymnasium_maker(name)
    with contextlib.closing(make()) as one:
        space = one.action_space
    if isinstance(space, gymnasium.spaces.Text):
        return gymnasium_env(make, read=str.strip, write=lambda seen, info: str(seen))
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise UserError(f"--data gymnasium:{name}: actions are {space}, neither texts nor numbers from a list; write a "
                        "class with reset and step around it and give --data MODULE:CLASS")  # fmt: skip
    first, last = int(space.start), int(space.start + space.n - 1)
    hint = f"\nWrite a number from {first} to {last}."

    def read(text: str) -> int | None:
        word = text.strip()
        return int(word) if re.fullmatch(r"-?[0-9]{1,9}", word) and first <= int(word) <= last else None

    return gymnasium_env(make, read=read, write=lambda seen, info: f"{seen}{hint}")


def gymnasium_texts(
    world: TextEnv,
    seeds: Sequence[int],
    tokenizer: Tokenizer,
    **how: Any,
) -> Given:
    """A ``gymnasium_env`` with one problem a seed, whose prompt shows the first observation; ``how`` as for
    ``as_begun``."""
    return as_begun(world, "gymnasium", [int(seed) for seed in seeds], tokenizer, **how)
