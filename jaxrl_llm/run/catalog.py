"""What ``--data`` of agents' experiments may be: ``open(settings, sizes, tokenizer) -> (trained on, held out)``.

``sizes`` are the keyword arguments of ``text.given``. A place that lacks what it should hold is one ``UserError``
or ``DataError``.
"""

import pathlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm import reduce
from jaxrl_llm.data import agent_formats, webshop
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.problems import evenly, hash_split
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.envs import openenv, processes, retry_question, text_games, tool_question
from jaxrl_llm.envs import text as text_envs
from jaxrl_llm.envs import webshop as host_shop
from jaxrl_llm.envs.text import Given, given
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.host.env import TextEnv, single_turn
from jaxrl_llm.rollout.turns.multi_turn import turns_of
from jaxrl_llm.run import parts
from jaxrl_llm.tools import boxes, endpoints, pages
from jaxrl_llm.tools.calls import Toolbox
from jaxrl_llm.train.methods import answer_probability
from jaxrl_llm.types import Problems, Rewards, Trajectories
from jaxrl_llm.verifiers.verdict import Verdict, Verifier

FOLDERS = (
    "webshop:FOLDER, alfworld:FOLDER, textworld:FOLDER, textarena:GAME, gymnasium:NAME, openenv:ADDRESS, "
    "reasoning_gym:FAMILY or MODULE:CLASS of your own"
)
OF_FOLDERS = ("webshop", "alfworld", "textworld")
OF_PACKAGES = ("textarena", "gymnasium", "openenv", "reasoning_gym")
NO_MODULES = (*OF_FOLDERS, *OF_PACKAGES, "tfds", "appworld", "retail", "airline", "telecom")
SEEDS = 1024  # of a game that makes its tasks from seeds, to train on
HOUSE = (
    "You live in a house of text. Each turn, write one command, and nothing else, until the task is done; you are "
    "shown what can be done.\n\n"
)
APPS = (
    "You help a supervisor through the apps of the object apis. Each turn, write one block of Python between ```python "
    "and ```; you are shown what it prints. apis.api_docs tells what the apps can do. When the task is done, call "
    "apis.supervisor.complete_task, with answer= where a question was asked.\n\n"
)


def _only(folder: pathlib.Path, pattern: str) -> pathlib.Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise UserError(f"--data: {folder} has {len(found)} files {pattern}; it should have one")
    return found[0]


def split(rows: Sequence[Any], identity: Callable[[Any], str], most: int, data: str) -> tuple[list[Any], list[Any]]:
    """Tasks to train on, and at most so many that are held out."""
    train, held = hash_split(rows, identity, data, rows_are="tasks", give="tasks")
    return train, evenly(held, most)


def _shop(folder: pathlib.Path, settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    notes = _only(folder, "items_ins_v2*.json")
    products = webshop.products(_only(folder, "items_shuffle*.json"), notes)
    written = folder / "items_human_ins.json"
    if written.is_file():
        goals = webshop.human_goals(written, products)
    else:
        goals = webshop.made_goals(notes, products)
    shop = host_shop.Shop(products, host_shop.bm25_search(products))
    if len(goals) > webshop.SPLITS["train"][0]:  # a whole catalogue: the benchmark's own parts
        both = webshop.split_goals(goals, "train"), webshop.split_goals(goals, "test")[: settings.eval_problems]
    else:
        both = split(goals, lambda goal: goal.asin, settings.eval_problems, settings.data)
    lost = _penalties(settings)
    return [host_shop.shop_texts(shop, part, tokenizer, penalty=x, **sizes) for part, x in zip(both, lost, strict=True)]


def _penalties(settings: Any) -> tuple[float, float]:
    """What a turn that is no action costs in training, and when measured; of settings that have such a flag."""
    return getattr(settings, "invalid_penalty", 0.0), 0.0


def _played(make: Callable[..., TextEnv], settings: Any) -> list[TextEnv]:
    """Games in processes of their own, in training and when measured: the same ones where nothing is penalised."""
    made = {x: processes.in_processes(partial(make, penalty=x), processes=settings.env_processes)
            for x in set(_penalties(settings))}  # fmt: skip
    return [made[x] for x in _penalties(settings)]


def _house(folder: pathlib.Path, settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    if not (folder / "train").is_dir() or not (folder / "valid_unseen").is_dir():
        raise UserError(f"--data {settings.data}: give json_2.1.1, which holds train and valid_unseen")
    worlds = _played(text_games.alfworld_env, settings)
    train, held = agent_formats.alfworld(folder / "train"), agent_formats.alfworld(folder / "valid_unseen")
    both = ([task.answer["game"] for task in part] for part in (train, evenly(held, settings.eval_problems)))
    return _games_of(worlds, both, tokenizer, sizes)


def _games(folder: pathlib.Path, settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    paths = sorted(str(path) for kind in ("z8", "ulx") for path in folder.rglob(f"*.{kind}"))
    if not paths:
        raise UserError(f"--data {settings.data}: no .z8 or .ulx file below the folder; make games with tw-make")
    make = partial(text_games.textworld_env, write=text_games.with_commands)
    both = split(paths, lambda path: pathlib.Path(path).name, settings.eval_problems, settings.data)
    return _games_of(_played(make, settings), both, tokenizer, sizes)


def _games_of(
    worlds: list[TextEnv], parts_of: Iterable[list[str]], tokenizer: Tokenizer, sizes: dict[str, Any]
) -> list[Given]:
    how = {"prompt": HOUSE.__add__, **sizes}
    return [text_games.game_texts(world, part, tokenizer, **how) for world, part in zip(worlds, parts_of, strict=True)]


def _arena(name: str, settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    make = partial(text_games.textarena_env, name)
    world = processes.in_processes(make, processes=settings.env_processes)
    both = range(SEEDS), range(SEEDS, SEEDS + settings.eval_problems)
    return [text_games.textarena_texts(world, part, tokenizer, **sizes) for part in both]


def is_own(data: str) -> bool:
    """Whether ``--data`` names a class of one's own, ``module:Class``, and no file, folder or known kind."""
    module, colon, name = data.partition(":")
    return bool(
        colon and name.isidentifier() and module not in NO_MODULES and not pathlib.Path(module).exists()
        and all(part.isidentifier() for part in module.split("."))
    )  # fmt: skip


def is_env(data: str) -> bool:
    """Whether ``--data`` is an env that every agent can play, whatever else its experiment opens."""
    return data.partition(":")[0] in (*OF_FOLDERS, *OF_PACKAGES) or is_own(data)


def _own(settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    tasks = text_envs.own_tasks(settings.data, SEEDS + settings.eval_problems)
    both = split(tasks, repr, settings.eval_problems, settings.data)
    world = processes.in_processes(partial(text_envs.own_env, settings.data), processes=settings.env_processes)
    return [text_envs.as_begun(world, "own", part, tokenizer, **sizes) for part in both]


def _gymnasium(settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    name = settings.data.partition(":")[2]
    world = processes.in_processes(partial(text_envs.plain_gymnasium, name), processes=settings.env_processes)
    both = range(SEEDS), range(SEEDS, SEEDS + settings.eval_problems)
    return [text_envs.gymnasium_texts(world, part, tokenizer, **sizes) for part in both]


def _openenv(settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    place = openenv.served(settings.data)
    openenv.check(place)
    make = partial(openenv.openenv_env, place)
    world = processes.in_processes(make, processes=settings.env_processes, call_s=openenv.CALL_S)
    both = range(SEEDS), range(SEEDS, SEEDS + settings.eval_problems)
    return [text_envs.as_begun(world, "openenv", part, tokenizer, **sizes) for part in both]


def _reasoning(settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    train, held, judged = rows_of(settings)
    world = single_turn(judged)
    return [given(world, part, [p.answer for p in part], tokenizer, **sizes) for part in (train, held)]


def folders(settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    """Worlds of text in the folder of a benchmark.

    * ``webshop``: ``items_shuffle*.json``, ``items_ins_v2*.json`` and, if there, ``items_human_ins.json``; a tenth of
      the products is held out with their instructions.
    * ``alfworld``: ``json_2.1.1``, of which ``train`` trains and ``valid_unseen`` is held out.
    * ``textworld``: games of ``tw-make`` somewhere below the folder, a tenth of which is held out.
    * ``textarena``: not a folder but a game for one player, as TextArena registers it; seeds 0 to 1023 train.
    * ``gymnasium``: an environment by its registered name, whose actions are texts or numbers; seeds likewise.
    * ``openenv``: an environment behind the address of its server; seeds likewise.
    * ``reasoning_gym``: a family of problems, each an episode of one turn.
    * ``module:Class``: a class of one's own (``envs.text.own_env``), a tenth of whose tasks is held out.

    Games of packages, and one's own, play in ``settings.env_processes`` processes of their own.
    """
    kind = settings.data.partition(":")[0]
    if kind == "textarena":
        return _arena(settings.data.partition(":")[2], settings, sizes, tokenizer)
    if kind in OF_PACKAGES or is_own(settings.data):
        make = {"gymnasium": _gymnasium, "openenv": _openenv, "reasoning_gym": _reasoning}.get(kind, _own)
        return make(settings, sizes, tokenizer)
    openers = {"webshop": _shop, "alfworld": _house, "textworld": _games}
    kind, folder = _place(settings, FOLDERS, tuple(openers))
    return openers[kind](folder, settings, sizes, tokenizer)


def _place(settings: Any, wanted: str, kinds: tuple[str, ...]) -> tuple[str, pathlib.Path]:
    kind, _, where = settings.data.partition(":")
    if kind not in kinds or not pathlib.Path(where).is_dir():
        raise UserError(f"--data {settings.data}: give {wanted}, where FOLDER is there")
    return kind, pathlib.Path(where)


def rows_of(settings: Any) -> tuple[list[Problem], list[Problem], Verifier]:
    """Rows of the main job, and a judge that may be asked from several threads.

    Raises:
      UserError: as ``parts.load_problems`` and ``parts.check_compared``.
    """
    train, held, verifier = parts.load_problems(
        settings.data, train=8192, heldout=settings.eval_problems, seed=0, verifier=settings.verifier,
        layout=settings.format,
    )  # fmt: skip
    parts.check_compared(verifier, [*train, *held])
    pool = parts.make_pool(verifier)  # where it runs code of others

    def judged(answer: Any, text: str) -> Verdict:
        return verifier(answer, text) if pool is None else pool.judge(verifier, [answer], [text]).verdicts[0]

    return train, held, judged


def page_reader(settings: Any) -> pages.Reader:
    """The model that ``reading_chat`` opens; without one the rule ``pages.by_words``."""
    chat = reading_chat(settings)
    return pages.by_words if chat is None else pages.make_reader(chat)


def reading_chat(settings: Any) -> endpoints.Chat | None:
    """The model ``settings.reader_model`` behind ``settings.reader``; None where the settings name none.

    Raises:
      UserError: where one of the two is missing.
    """
    address, name = getattr(settings, "reader", ""), getattr(settings, "reader_model", "")
    if bool(address) != bool(name):
        raise UserError("--reader ADDRESS and --reader-model NAME belong together: give both, or none for a rule")
    cache = endpoints.replies_of("reader", address, name)
    return endpoints.from_settings(settings, address, name, cache=cache) if address else None


def questions(
    settings: Any,
    sizes: dict[str, Any],
    tokenizer: Tokenizer,
    *,
    calls: int | None = None,
    ask: Callable[[Problem, Toolbox], Problem] = tool_question.asked,
    golds: bool = False,
    luck: tuple[tool_question.Luck | None, tool_question.Luck | None] = (None, None),
    reader: pages.Reader | None = None,
    change: Callable[[list[Problem], Toolbox, Verifier], list[Problem]] | None = None,
) -> list[Given]:
    """Rows of the main job, a tenth of them held out, whose answers ``settings.tools`` help to find.

    Args:
      calls: as ``tool_question.tool_env``; with 0 nobody is told of tools.
      ask: what a problem becomes where there are tools.
      golds: right answers as tokens among the problems' answers, see ``answer_chances``.
      luck: as ``tool_question.tool_env``, in training and when measured.
      reader: of the pages of ``pages=CORPUS.jsonl``; None: the one that the settings name.
      change: of the problems that train, with the tools and the judge.
    """
    if not settings.tools:
        known = "python, calculator, search=CORPUS.jsonl, pages=CORPUS.jsonl, database=FILE.sqlite, mcp=COMMAND"
        raise UserError(f"--data {settings.data} needs --tools: any of {known}, with commas between them")
    box = boxes.opened(settings.tools, reader=reader or page_reader(settings))
    train, held, judged = rows_of(settings)
    train = train if change is None else change(train, box, judged)
    ask = tool_question.told_nothing if calls == 0 and ask is tool_question.asked else ask

    def part(problems: list[Problem], luck: tool_question.Luck | None) -> Given:
        world = tool_question.tool_env(box, judged, calls=calls, luck=luck)
        found = given(world, [ask(p, box) for p in problems], [p.answer for p in problems], tokenizer, **sizes)
        gold = answer_probability.golds(tokenizer, problems) if golds else {}
        return found._replace(problems=found.problems._replace(answers={k: jnp.asarray(x) for k, x in gold.items()}))

    return [part(train, luck[0]), part(held, luck[1])]


def retries(settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    """Rows of the main job, a tenth of them held out, asked again after every wrong answer."""
    train, held, judged = rows_of(settings)
    world = retry_question.retry_env(judged)
    return [given(world, rows, [p.answer for p in rows], tokenizer, **sizes) for rows in (train, held)]


def apps(settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer) -> list[Given]:
    """``appworld:FOLDER``, the root that ``appworld download data`` filled: ``train`` trains, ``dev`` is held out.

    ``settings.servers``: addresses of environments, see ``text_games.appworld_env``. The answers of the problems hold
    the number of their ``scenario``, whose variants are one task in other words.
    """
    _, root = _place(settings, "appworld:FOLDER", ("appworld",))
    train, held = (agent_formats.appworld(root, split) for split in ("train", "dev"))
    world = text_games.appworld_env(addresses=settings.servers)

    def part(problems: list[Problem]) -> Given:
        shown = [p._replace(prompt=APPS + str(p.prompt)) for p in problems]
        found = given(world, shown, [p.answer["task_id"] for p in problems], tokenizer, **sizes)
        names = {name: k for k, name in enumerate(dict.fromkeys(p.identity for p in problems))}
        scenario = jnp.asarray([names[p.identity] for p in problems], jnp.int32)
        return found._replace(problems=found.problems._replace(answers={"scenario": scenario}))

    return [part(train), part(held[: settings.eval_problems])]


def completed(rows: Trajectories, rewards: Rewards, problems: Problems) -> dict[str, Array]:
    """Of measured episodes of ``apps``: tasks completed, scenarios of which all variants are, reward and turns."""
    whole, number = rewards.value > 0.999, problems.answers["scenario"][rows.problem_ids]
    scenarios = jnp.arange(problems.answers["scenario"].shape[0], dtype=jnp.int32)
    mine = number[None, :] == scenarios[:, None]
    together = jnp.all(whole[None, :] | ~mine, axis=1).astype(jnp.float32)
    taken = jnp.sum(turns_of(rows).taken.astype(jnp.float32), axis=1)
    return {
        "eval/completed": reduce.scalars(whole.astype(jnp.float32)),
        "eval/scenarios": reduce.scalars(together, jnp.any(mine, axis=1)),
        "eval/return": reduce.scalars(rewards.value, rewards.valid),
        "eval/turns": reduce.scalars(taken),
    }


APPWORLD: dict[str, Callable[..., Any]] = {"opened": apps, "more": completed}  # of ``multi_turn_plan.hosted``
