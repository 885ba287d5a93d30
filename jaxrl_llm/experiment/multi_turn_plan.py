"""Agents' experiments at real scale: a model from its files, and the world of a benchmark over its local files.

An experiment whose settings extend ``Settings`` takes ``--data``, for example ``webshop:FOLDER``, with ``--model DIR``;
the same method then trains in the host loop (``rollout.host.driver``) in place of the embedded arena. What ``--data``
may be, and what lies there, is said by ``run.catalog``.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.data.chat import make_reply_encoder
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.envs.text import Given
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes, text_contexts
from jaxrl_llm.rollout.host.driver import HostEpisodes, make_host_episodes, only_on_host
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns.contexts import Context
from jaxrl_llm.rollout.turns.multi_turn import episode_rewards
from jaxrl_llm.run import catalog
from jaxrl_llm.run import parts as job
from jaxrl_llm.run.bench import open_model
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.plan import Setup
from jaxrl_llm.types import Key, Params, Problems, Rewards, Trajectories

ENOUGH = 0.999  # of the most that can be had: what counts as success
ALL = text_contexts.Contexts(Context(), Context())  # the whole of an episode is seen


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """What an experiment takes beside its own settings to leave its embedded world; ``model`` is read then only."""

    # webshop:FOLDER, alfworld:FOLDER, textworld:FOLDER, textarena:GAME, gymnasium:NAME, openenv:ADDRESS,
    # reasoning_gym:FAMILY, MODULE:CLASS of your own, or what the experiment says; empty: the embedded world
    data: str = ""
    # of python, calculator, search=CORPUS.jsonl, pages=CORPUS.jsonl, database=FILE.sqlite, mcp=COMMAND, with commas
    # between them
    tools: str = ""
    format: job.Format = "plain"  # of rows, and how their answers are judged
    verifier: job.VerifierName = ""
    max_turns: int = 15  # of an episode
    action_tokens: int = 512  # of one action
    observation_tokens: int = 1024  # of one observation
    max_new_tokens: int = 8192  # of an episode, observations included
    slots: int = 64  # episodes under way at once
    env_processes: int = 4  # in which games of other packages play
    eval_problems: int = 128
    eval_samples: int = 1


Opener = Callable[[Any, dict[str, Any], Tokenizer], list[Given]]


def plays_env(settings: Settings) -> bool:
    """Whether ``--data`` is an env that every agent can play, and no rows to answer with tools."""
    return catalog.is_env(settings.data) and not settings.tools


def open_place(settings: Settings, tokenizer: Tokenizer, opened: Opener | None = None, only: str = "") -> list[Given]:
    """What is trained on and what is held out.

    Where the tokenizer has a chat template, prompts and observations are a user's messages.

    Args:
      opened: one of ``run.catalog``; by default ``questions`` where there are ``tools``, else ``folders``. An env that
        every agent can play (``catalog.is_env``) takes its place.
      only: why it does not, for a method that needs more than an env; a family of reasoning-gym is rows for it.

    Raises:
      UserError: for another world, or a folder that does not hold one; DataError for a malformed file.
    """
    chat = tokenizer.chat_template is not None
    encode = make_reply_encoder(tokenizer) if chat else None
    around = len(encode("")) if encode is not None else 0
    if around >= settings.observation_tokens:
        raise UserError(f"--observation-tokens {settings.observation_tokens}: the chat template alone puts {around} "
                        "tokens around an observation; raise it")  # fmt: skip
    sizes = {
        "action_tokens": settings.action_tokens, "observation_tokens": settings.observation_tokens, "chat": chat,
        "encode": encode,
    }  # fmt: skip
    if only and catalog.is_env(settings.data) and not settings.data.startswith(job.GYM):
        raise UserError(f"--data {settings.data}: {only}; give rows, or reasoning_gym:FAMILY")
    if plays_env(settings) and not only:
        opened = catalog.folders
    elif opened is None:
        opened = catalog.questions if settings.tools else catalog.folders
    return opened(settings, sizes, tokenizer)


def _check_columns(found: Sequence[Given], settings: Settings, seen: text_contexts.Contexts, most: int) -> int:
    """Columns of the longest sub-trajectory, see ``text_contexts.checked``."""
    width = text_contexts.checked(seen, found, settings.max_turns)
    prompt = max(part.problems.tokens.shape[1] for part in found)
    columns, limit = min(prompt + settings.max_new_tokens, width), seen.trained.tokens
    if columns > most:
        flag = f"--max-new-tokens {settings.max_new_tokens}" if limit is None else f"a context of {limit} tokens"
        raise UserError(f"prompts and {flag} need {columns} columns, the model's context has {most}; lower it")
    return width


def trained(settings: Any) -> Callable[[Trajectories], Trajectories]:
    """``settings.trained(rows, prompt_tokens=...)`` as ``episode_methods.make_grpo`` wants it."""
    return lambda rows: settings.trained(rows, prompt_tokens=rows.tokens.shape[1] - settings.max_new_tokens)


def as_loaded(params: Params, key: Key) -> Params:
    """The parameters of a method without further parts."""
    return params


def hosted(
    settings: Settings,
    *,
    opened: Opener | None = None,
    start: Callable[[Params, Key], Params] = as_loaded,
    part: str = "",
    turns: int | None = None,
    through: Callable[[HostEpisodes], HostEpisodes] | None = None,
    slots: dict[str, Any] | None = None,
    more: Callable[[Trajectories, Rewards, Problems], dict[str, Array]] | None = None,
    told: Callable[[episode_methods.HostTasks, Params, Trajectories], dict[str, Array]] | None = None,
    sight: text_contexts.Sight | None = None,
    only: str = "",
) -> Setup:
    """Episodes in the world of ``settings.data``, from the weights of ``settings.model``.

    Args:
      opened: as of ``open_place``.
      start: ``(the model's parameters, key) -> those of the method``, with its heads.
      part: where the policy lies in them, if they hold more.
      turns: of an episode that trains, at most; by default, and when measured, ``settings.max_turns``.
      through: the training world as the method's ``actor`` wants it, for example ``turn_limits.on_host``.
      slots: of the method here, beside its rollout.
      more: ``(episodes, rewards, held-out problems)`` to further figures of the measurement.
      told: ``(tasks, parameters, episodes)`` to what other parts of the parameters than the policy say of the episodes.
      sight: what is seen of episodes at once; the method then gets the ``width`` of the longest sub-trajectory, too,
        and the contexts of training and of more summaries are both measured (``text_contexts.figures``).
      only: as of ``open_place``.

    Raises:
      UserError: as ``open_place``, without a model's folder, or where an episode does not fit the model.
    """
    if not pathlib.Path(settings.model).is_dir():
        raise UserError(f"--data {settings.data} needs a model of text: --model {settings.model} is no folder; "
                        "give --model DIR of a Hugging Face model")  # fmt: skip
    model = open_model(settings)
    train, held = open_place(settings, model.tokenizer, opened, only)
    seen = ALL if sight is None else sight(model.tokenizer)
    width = _check_columns((train, held), settings, seen, model.config.max_positions)
    more = None if plays_env(settings) and not only else more  # figures of a place of its own
    player = partial(
        make_host_episodes, model.policy, max_new_tokens=settings.max_new_tokens, end_ids=model.tokenizer.eos_ids,
        slots=settings.slots, pad_id=model.tokenizer.pad_id,
    )  # fmt: skip
    most = settings.max_turns if turns is None else min(turns, settings.max_turns)
    groups = getattr(settings, "group_size", 1)  # a method with a critic needs none
    world = player(train.env, train.tasks, group_size=groups, max_turns=most, context=seen.trained)
    tested = [
        player(held.env, held.tasks, group_size=settings.eval_samples, max_turns=settings.max_turns, context=context)
        for context in dict.fromkeys(seen)
    ]

    def measure(params: Params, key: Key) -> dict[str, Array]:
        ids = jnp.arange(len(held.tasks), dtype=jnp.int32)
        keys = sample_keys(key, 0, ids, settings.eval_samples)
        given = params[part] if part else params, held.problems.tokens, held.problems.valid, keys, ids
        played = [world.play(*given).trajectories for world in tested]
        found = episode_methods.figures(played[0], enough=ENOUGH)
        if sight is not None:
            found |= text_contexts.figures(played[0], played[-1], enough=ENOUGH)
        if told is not None:
            found |= told(episode_methods.HostTasks(model.policy, held.problems), params, played[0])
        return found if more is None else found | more(played[0], episode_rewards({}, played[0]), held.problems)

    def table(params: Params, tokens: Array, valid: Array, keys: Key, problem_ids: Array) -> Trajectories:
        return world.play(params, tokens, valid, keys, problem_ids).trajectories

    known = {"rollout": only_on_host} | ({} if sight is None else {"width": width}) | (slots or {})
    return Setup(
        episode_methods.HostTasks(model.policy, train.problems), lambda key: start(model.params, key), measure,
        slots=known, tables={"rollout": table},
        fields={"on_host": True, "world": world if through is None else through(world), "model": model},
    )  # fmt: skip
