"""Agents' experiments at real scale: a model from its files, and the world of a benchmark over its local files.

An experiment whose settings extend ``Settings`` takes ``--data webshop:FOLDER``, ``alfworld:FOLDER`` or
``textworld:FOLDER`` with ``--model DIR``; the same method then trains in the host loop (``rollout.host_episodes``) in
place of the embedded arena. What lies in the folders: see ``open_place``. With ``--tools`` the tasks are rows of
``--data``, as the main job takes them, and the agent calls tools before it answers (``host_tools``).
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm import recipes
from jaxrl_llm.data import agent_formats, webshop
from jaxrl_llm.data.chat import make_reply_encoder
from jaxrl_llm.data.problems import hash_split
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.host_episodes import make_host_episodes, only_on_host
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.tools import boxes
from jaxrl_llm.train import job
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan, Stage, no_extras
from jaxrl_llm.types import Key, Params
from jaxrl_llm.verifiers.verdict import Verdict
from jaxrl_llm.worlds import arenas, host_games, host_shop, host_tools
from jaxrl_llm.worlds.host_texts import Given, given

PLACES = "webshop:FOLDER, alfworld:FOLDER or textworld:FOLDER"
ENOUGH = 0.999  # of the most that can be had: what counts as success
HOUSE = (
    "You live in a house of text. Each turn, write one command, and nothing else, until the task is done; you are "
    "shown what can be done.\n\n"
)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """What an experiment takes beside its own settings to leave its embedded world; ``model`` is read then only."""

    # webshop:FOLDER, alfworld:FOLDER or textworld:FOLDER; with ``tools`` rows of problems; empty: the embedded world
    data: str = ""
    tools: str = ""  # of python, calculator, search=CORPUS.jsonl, database=FILE.sqlite, with commas between them
    format: job.Format = "plain"  # of rows, and how their answers are judged
    verifier: job.VerifierName = ""
    max_turns: int = 15  # of an episode
    action_tokens: int = 512  # of one action
    observation_tokens: int = 1024  # of one observation
    max_new_tokens: int = 8192  # of an episode, observations included
    slots: int = 64  # episodes under way at once
    eval_problems: int = 128
    eval_samples: int = 1


def _only(folder: pathlib.Path, pattern: str) -> pathlib.Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise UserError(f"--data: {folder} has {len(found)} files {pattern}; it should have one")
    return found[0]


def _parts(rows: Sequence[Any], identity: Callable[[Any], str], most: int, data: str) -> tuple[list[Any], list[Any]]:
    """Tasks to train on, and at most so many that are held out."""
    train, held = hash_split(rows, identity, data, rows_are="tasks", give="tasks")
    return train, held[:most]


def _shop(folder: pathlib.Path, settings: Settings, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    notes = _only(folder, "items_ins_v2*.json")
    products = webshop.products(_only(folder, "items_shuffle*.json"), notes)
    written = folder / "items_human_ins.json"
    if written.is_file():
        goals = webshop.human_goals(written, products)
    else:
        goals = webshop.made_goals(notes, products)
    shop = host_shop.Shop(products, host_shop.bm25_search(products))
    both = _parts(goals, lambda goal: goal.asin, settings.eval_problems, settings.data)
    return [host_shop.shop_texts(shop, part, tokenizer, **sizes) for part in both]


def _house(folder: pathlib.Path, settings: Settings, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    if not (folder / "train").is_dir() or not (folder / "valid_unseen").is_dir():
        raise UserError(f"--data {settings.data}: give json_2.1.1, which holds train and valid_unseen")
    world, write = host_games.alfworld_world(), host_games.with_commands
    train, held = agent_formats.alfworld(folder / "train"), agent_formats.alfworld(folder / "valid_unseen")
    both = ([task.answer["game"] for task in part] for part in (train, held[: settings.eval_problems]))
    return [host_games.game_texts(world, part, tokenizer, write=write, prompt=HOUSE.__add__, **sizes) for part in both]


def _games(folder: pathlib.Path, settings: Settings, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    paths = sorted(str(path) for kind in ("z8", "ulx") for path in folder.rglob(f"*.{kind}"))
    if not paths:
        raise UserError(f"--data {settings.data}: no .z8 or .ulx file below the folder; make games with tw-make")
    write = host_games.with_commands
    world = host_games.textworld_world(write=write)
    both = _parts(paths, lambda path: pathlib.Path(path).name, settings.eval_problems, settings.data)
    return [host_games.game_texts(world, part, tokenizer, write=write, prompt=HOUSE.__add__, **sizes) for part in both]


def _asked(settings: Settings, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    box = boxes.opened(settings.tools)
    *both, verifier = job.load_problems(
        settings.data, train=8192, heldout=settings.eval_problems, seed=0, verifier=settings.verifier,
        layout=settings.format,
    )  # fmt: skip
    pool = job.make_pool(verifier)  # where it runs code of others

    def judged(answer: Any, text: str) -> Verdict:
        return verifier(answer, text) if pool is None else pool.judge(verifier, [answer], [text]).verdicts[0]

    world = host_tools.tool_world(box, judged)
    rows = ([host_tools.asked(problem, box) for problem in part] for part in both)
    return [given(world, part, [problem.answer for problem in part], tokenizer, **sizes) for part in rows]


def open_place(settings: Settings, tokenizer: Tokenizer) -> list[Given]:
    """What is trained on and what is held out.

    * ``webshop``: ``items_shuffle*.json``, ``items_ins_v2*.json`` and, if there, ``items_human_ins.json``; a tenth of
      the products is held out with their instructions.
    * ``alfworld``: ``json_2.1.1``, of which ``train`` trains and ``valid_unseen`` is held out.
    * ``textworld``: games of ``tw-make`` somewhere below the folder, a tenth of which is held out.
    * with ``tools``: any source of rows of the main job, a tenth of which is held out.

    Where the tokenizer has a chat template, prompts and observations are a user's messages.

    Raises:
      UserError: for another world, or a folder that does not hold one; DataError for a malformed file.
    """
    kind, _, where = settings.data.partition(":")
    chat = tokenizer.chat_template is not None
    sizes = {
        "action_tokens": settings.action_tokens, "observation_tokens": settings.observation_tokens, "chat": chat,
        "encode": make_reply_encoder(tokenizer) if chat else None,
    }  # fmt: skip
    if settings.tools:
        return _asked(settings, sizes, tokenizer)
    openers = {"webshop": _shop, "alfworld": _house, "textworld": _games}
    if kind not in openers or not pathlib.Path(where).is_dir():
        raise UserError(f"--data {settings.data}: give {PLACES}, where FOLDER is there")
    return openers[kind](pathlib.Path(where), settings, sizes, tokenizer)


def make_plan(
    settings: Settings,
    method: Callable[..., Online],
    *,
    extras: Callable[[Params, Key], dict[str, Any]] = no_extras,
) -> Plan:
    """One online stage in the world of ``settings.data``, from the weights of ``settings.model``.

    Args:
      method: ``(place, rollout=...) -> Online``: ``arenas.make_grpo`` or ``make_online`` with all but the place bound.
      extras: of the stage.

    Raises:
      UserError: as ``open_place``, or where an episode does not fit the model.
    """
    model = job.load_model(settings.model)
    train, held = open_place(settings, model.tokenizer)
    columns = max(part.problems.tokens.shape[1] for part in (train, held)) + settings.max_new_tokens
    if columns > model.config.max_positions:
        raise UserError(
            f"prompts and --max-new-tokens {settings.max_new_tokens} need {columns} columns, the model's context has "
            f"{model.config.max_positions}; lower it"
        )
    player = partial(
        make_host_episodes, model.policy, max_turns=settings.max_turns, max_new_tokens=settings.max_new_tokens,
        end_ids=model.tokenizer.eos_ids, slots=settings.slots, pad_id=model.tokenizer.pad_id,
    )  # fmt: skip
    world = player(train.env, train.tasks, group_size=settings.group_size)
    tested = player(held.env, held.tasks, group_size=settings.eval_samples)

    def measure(params: Params, key: Key) -> dict[str, Array]:
        ids = jnp.arange(len(held.tasks), dtype=jnp.int32)
        keys = sample_keys(key, 0, ids, settings.eval_samples)
        rows = tested.play(params, held.problems.tokens, held.problems.valid, keys, ids).trajectories
        return arenas.figures(rows, enough=ENOUGH)

    online = method(arenas.Place(model.policy, train.problems), rollout=only_on_host)
    stage = Stage(online, settings.steps, extras)
    return Plan(lambda key: model.params, (stage,), measure, on_host=True, world=world)
