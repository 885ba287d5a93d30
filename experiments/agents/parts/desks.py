"""The desks of tau-bench and tau2-bench as ``--data``: ``desk(settings, sizes, tokenizer) -> (trained on, held out)``.

``sizes`` are the keyword arguments of ``text.given``. A place that lacks what it should hold is one ``UserError``
or ``DataError``.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from experiments.agents.parts import (
    desk_files,
    tau_bench,
    tau_bench_airline,
    tau_bench_phone,
    tau_bench_telecom,
    tau_bench_tools,
)
from jaxrl_llm import reduce
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.envs.text import Given
from jaxrl_llm.errors import UserError
from jaxrl_llm.metrics import intervals
from jaxrl_llm.rollout.turns.multi_turn import episode_rewards, marks_of, turns_of
from jaxrl_llm.run import catalog
from jaxrl_llm.tools import endpoints
from jaxrl_llm.types import Problems, Rewards, Trajectories

DESK_TOOLS = {
    "retail": tau_bench_tools.RETAIL,
    "airline": tau_bench_airline.AIRLINE,
    "telecom": tau_bench_telecom.TELECOM,
}
DESKS = "retail:FOLDER, airline:FOLDER or telecom:FOLDER"
# files of rules, of which a desk has the first that is there and what belongs to it
RULES = (("wiki.md",), ("policy.md",), ("main_policy.md", "tech_support_manual.md"))


def _desk_tasks(folder: pathlib.Path, settings: Any) -> tuple[list[Any], list[Any]]:
    train, test, split = (folder / name for name in ("tasks_train.py", "tasks_test.py", "split_tasks.json"))
    if train.is_file() and test.is_file():
        return desk_files.desk_tasks(train), desk_files.desk_tasks(test)[: settings.eval_problems]
    tasks = desk_files.desk_tasks(test if test.is_file() else folder / "tasks.json")
    if split.is_file() and not test.is_file():
        fit, held = desk_files.desk_split(split, tasks)
        return fit, held[: settings.eval_problems]
    return catalog.split(tasks, lambda task: task.instruction, settings.eval_problems, settings.data)


def _user(settings: Any) -> endpoints.Chat:
    if not settings.user or not settings.user_model:
        raise UserError(
            f"--data {settings.data}: needs --user ADDRESS and --user-model NAME: a model plays the users who hold back"
        )
    cache = endpoints.replies_of("user", settings.user, settings.user_model)
    return endpoints.from_settings(settings, settings.user, settings.user_model, cache=cache)


def _opened_desk(place: str) -> tuple[str, pathlib.Path, tau_bench.Desk]:
    """The kind, folder and desk of ``telecom:FOLDER`` and the like."""
    kind, _, where = place.partition(":")
    folder = pathlib.Path(where)
    if kind not in DESK_TOOLS or not folder.is_dir():
        raise UserError(f"--data {place}: give {DESKS}, where FOLDER is there")
    files = next((names for names in RULES if (folder / names[0]).is_file()), None)
    if files is None:
        raise UserError(
            f"--data {place}: the folder has no {' and no '.join(names[0] for names in RULES)}; give the one that does"
        )
    rules = "\n\n".join((folder / x).read_text(encoding="utf-8") for x in files if (folder / x).is_file())
    tables, device = desk_files.desk_database(folder / "data" if (folder / "data").is_dir() else folder, kind), None
    if kind == "telecom":
        own, device = folder / "user_db.toml", tau_bench_phone.IN_HAND
        tables[device.table] = tau_bench_phone.phone(desk_files.load_toml(own) if own.is_file() else None)
    return kind, folder, tau_bench.Desk(tables, rules, DESK_TOOLS[kind], device)


def desk(settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer, *, openly: bool = False) -> list[Given]:
    """Desks of folders of tau-bench's ``envs`` or tau2-bench's ``domains``, as ``DESKS`` spell them.

    A folder holds the tables (``data``, ``db.json`` or ``db.toml``), the rules (``RULES``), and ``tasks_train.py`` with
    ``tasks_test.py``, which is held out; or ``tasks.json`` with ``split_tasks.json``, whose ``test`` is held out; or
    one file of tasks alone, of which a tenth is. Users are played by the model ``settings.user_model`` behind the
    address ``settings.user``; those of ``telecom`` have a phone (``user_db.toml``) with tools of their own. Several
    desks, with commas between them, train together and are measured one by one, too.

    Args:
      openly: users of training say everything in their first message (``tau_bench.plain_user``), and those with a phone
        do on it what a message names.
    """
    opened = [_opened_desk(place) for place in settings.data.split(",")]
    kinds = [kind for kind, _, _ in opened]
    if len(set(kinds)) < len(kinds):
        raise UserError(f"--data {settings.data}: a kind of desk stands twice; give each once")
    tasks = [_desk_tasks(folder, settings) for _, folder, _ in opened]
    shape = {name: size for name, size in sizes.items() if name != "chat"}  # talks are messages anyway
    user, found = _user(settings), []
    try:
        for part, who in enumerate((tau_bench.plain_user if openly else user, user)):
            pairs = [(service, both[part]) for (_, _, service), both in zip(opened, tasks, strict=True)]
            found.append(tau_bench.desks_texts(pairs, tokenizer, user=who, **shape))
    except endpoints.Unanswered as error:
        raise UserError(f"--user {settings.user}: a user did not say its first words: {error}") from error
    return found


def served(answers: Any, rows: Trajectories, *, bonus: float = 0.0) -> Rewards:
    """The ``score`` of talks of ``desk``: what the talk was worth, and ``bonus`` for every call a tool could answer."""
    found = episode_rewards(answers, rows)
    return found._replace(value=found.value + bonus * jnp.sum(marks_of(rows), axis=1).astype(jnp.float32))


def passed(settings: Any) -> Callable[[Trajectories, Rewards, Problems], dict[str, Array]]:
    """Of measured talks of ``desk``: pass^1 and pass^4 over ``settings.eval_samples`` trials, and turns.

    Of several desks also pass^1 and pass^4 of each, for example ``eval/pass1_telecom``.

    Raises:
      UserError: for fewer than four trials.
    """
    trials, kinds = settings.eval_samples, [place.partition(":")[0] for place in settings.data.split(",")]
    if trials < 4:
        raise UserError(f"--eval-samples {trials}: pass^4 needs 4 trials of a request at least")

    def figures(rows: Trajectories, rewards: Rewards, problems: Problems) -> dict[str, Array]:
        right = jnp.sum((rewards.valid & (rewards.value > 0.5)).astype(jnp.float32).reshape(-1, trials), axis=1)
        taken = jnp.sum(turns_of(rows).taken.astype(jnp.float32), axis=1)
        passes = {f"eval/pass{k}": intervals.pass_hat_k(right, trials, k) for k in (1, 4)}
        shown = {name: reduce.scalars(values) for name, values in passes.items()}
        for k, kind in enumerate(kinds if len(kinds) > 1 else ()):
            mine = problems.answers["desk"] == k
            shown |= {f"{name}_{kind}": reduce.scalars(values, mine) for name, values in passes.items()}
        return shown | {"eval/turns": reduce.scalars(taken)}

    return figures
