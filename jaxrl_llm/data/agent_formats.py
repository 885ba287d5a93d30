"""The local files of agents' benchmarks: ALFWorld and AppWorld. Nothing is downloaded.

A task becomes a ``Problem`` (what the agent is told; ``answer`` holds what its world needs). ``envs.text_games`` plays
them. A file that does not hold what it should is one ``DataError`` that names the file, the line or the place in it,
and the field. WebShop: ``data.webshop``.
"""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import DataError, UserError

KINDS = {
    dict: "an object", list: "a list", str: "text", int: "a whole number", float: "a number", bool: "true or false",
}  # fmt: skip


def load_json(path: pathlib.Path) -> Any:
    """What a JSON file holds.

    Raises:
      DataError: naming the file, and the line where it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); give the folder that holds it") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:  # of numbers with thousands of digits, of endless brackets
        raise DataError(f"{path}: JSON that cannot be read ({str(error).partition(';')[0]})") from error


def checked(value: Any, kind: type, where: str) -> Any:
    """The value, where it is of that kind; ``where`` names its place for the message.

    Raises:
      DataError: where it is not.
    """
    right = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise DataError(f"{where}: {json.dumps(value, default=str)[:60]} is not {KINDS[kind]}")
    return value


def field(record: Any, name: str, kind: type, where: str) -> Any:
    """One field of a record.

    Raises:
      DataError: where the record is no object, or the field absent or of another kind.
    """
    record = checked(record, dict, where)
    if name not in record:
        raise DataError(f"{where}: lacks {name}; it has {', '.join(map(str, record))[:200] or 'nothing'}")
    return checked(record[name], kind, f"{where}: {name}")


def texts(record: Any, name: str, where: str) -> tuple[str, ...]:
    """A field that is a list of texts."""
    return tuple(checked(x, str, f"{where}: {name}[{k}]") for k, x in enumerate(field(record, name, list, where)))


# --- ALFWorld

HOUSEHOLD_TASKS = (
    "pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep", "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep", "pick_two_obj_and_place",
)  # fmt: skip
_STATED = re.compile(r"Your task is to: ([^\"\\]+)")


def _household_task(path: pathlib.Path) -> Problem | None:
    """The game of one ``traj_data.json``; None where ALFWorld itself leaves it out."""
    found, game_path = load_json(path), path.with_name("game.tw-pddl")
    kind, parameters = (field(found, name, of, str(path)) for name, of in (("task_type", str), ("pddl_params", dict)))
    if kind not in HOUSEHOLD_TASKS or parameters.get("object_sliced") or "movable" in str(path.parent):
        return None
    if not game_path.is_file():
        return None
    game = load_json(game_path)
    if checked(game, dict, str(game_path)).get("solvable") is not True:
        return None
    field(game, "pddl_problem", str, str(game_path))
    stated = _STATED.search(field(game, "grammar", str, str(game_path)))
    if stated is None:
        raise DataError(f"{game_path}: grammar: it does not say 'Your task is to: ...'")
    notes = field(field(found, "turk_annotations", dict, str(path)), "anns", list, f"{path}: turk_annotations")
    said = [field(note, "task_desc", str, f"{path}: turk_annotations: anns[{k}]") for k, note in enumerate(notes)]
    steps = texts(game, "walkthrough", str(game_path)) if game.get("walkthrough") else ()
    answer = {"game": str(game_path), "kind": kind, "parameters": parameters, "said": said, "steps": list(steps)}
    prompt = f"Your task is to: {stated[1].strip()}"
    # the trials of one folder are the same goal in the same room: they stay on one side of a split
    identity = path.parent.parent.name
    return Problem("alfworld", prompt, "\n".join(steps), answer, HOUSEHOLD_TASKS.index(kind) + 1, identity)


def alfworld(folder: str | pathlib.Path, *, kinds: Sequence[str] = HOUSEHOLD_TASKS) -> list[Problem]:
    """The games below a folder of ``json_2.1.1`` (``train``, ``valid_seen`` or ``valid_unseen``), by path.

    As ALFWorld does, leaves out tasks with slices or movable receptacles, and games that are missing or unsolvable. The
    prompt is the goal as the game states it; ``answer`` names the ``game`` file and has the crowd's wordings
    (``said``) and the walkthrough (``steps``); ``level`` is the kind of task, 1 to 6.

    Raises:
      DataError: for a malformed file, or a folder without a game.
    """
    unknown = [kind for kind in kinds if kind not in HOUSEHOLD_TASKS]
    if unknown:
        raise UserError(f"kinds={unknown} are none of {', '.join(HOUSEHOLD_TASKS)}")
    paths = sorted(pathlib.Path(folder).rglob("traj_data.json"))
    found = [task for task in map(_household_task, paths) if task is not None and task.answer["kind"] in kinds]
    if not found:
        raise DataError(
            f"{folder} holds no game of {len(paths)} traj_data.json; give json_2.1.1/train with its game.tw-pddl files"
        )
    return found


# --- AppWorld


def _app_task(tasks: pathlib.Path, name: str) -> Problem:
    folder = tasks / name
    where = str(folder / "specs.json")
    specs = load_json(folder / "specs.json")
    instruction, date = (field(specs, key, str, where) for key in ("instruction", "datetime"))
    person = field(specs, "supervisor", dict, where)
    who = {key: field(person, key, str, f"{where}: supervisor")
           for key in ("first_name", "last_name", "email", "phone_number")}  # fmt: skip
    truth = folder / "ground_truth"
    level = field(load_json(truth / "metadata.json"), "difficulty", int, str(truth / "metadata.json"))
    answer: dict[str, Any] = {"task_id": name, "supervisor": who, "datetime": date}
    for key in ("answer", "required_apps"):  # of the test sets neither is published
        if (truth / f"{key}.json").is_file():
            answer[key] = load_json(truth / f"{key}.json")
    solution = truth / "solution.py"
    prompt = (
        f"My name is {who['first_name']} {who['last_name']}, my e-mail is {who['email']} and my phone number is "
        f"{who['phone_number']}. It is {date}. {instruction}"
    )
    # the variants of a scenario are one task in other words: they stay on one side of a split
    return Problem("appworld", prompt, solution.read_text() if solution.is_file() else "", answer, level,
                   name.rpartition("_")[0] or name)  # fmt: skip


def appworld(root: str | pathlib.Path, split: str) -> list[Problem]:
    """The tasks of ``data/datasets/SPLIT.txt`` (``train``, ``dev``, ``test_normal`` or ``test_challenge``).

    The prompt is the supervisor's instruction with who they are and what day it is; ``answer`` holds ``task_id`` and,
    where they are published, ``answer`` and ``required_apps``; ``level`` is the difficulty, 1 to 3.

    Args:
      root: the folder that ``appworld download data`` filled, with ``data`` in it.

    Raises:
      DataError: for a split that is not there, or a malformed file.
    """
    data = pathlib.Path(root) / "data"
    path = data / "datasets" / f"{split}.txt"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.txt")))
        raise DataError(f"{path} does not exist; splits there: {there or 'none, run appworld download data'}")
    names = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not names:
        raise DataError(f"{path} names no task")
    return [_app_task(data / "tasks", name) for name in names]
