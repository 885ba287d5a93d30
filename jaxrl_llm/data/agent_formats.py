"""The local files of agents' benchmarks: ALFWorld, AppWorld, tau-bench and tau2-bench. Nothing is downloaded.

A task becomes a ``Problem`` (what the agent is told; ``answer`` holds what its world needs) or, where a simulated user
tells it, a ``DeskTask``. ``envs.text_games`` and ``envs.tau_bench`` play them. A file that does not hold what it
should is one ``DataError`` that names the file, the line or the place in it, and the field. WebShop: ``data.webshop``.
"""

import ast
import json
import pathlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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


# --- tau-bench and tau2-bench

# what may count of a talk: the database is that of the actions; the user was told the outputs; the checks hold; the
# actions were taken
BASIS, BASES = ("DB", "COMMUNICATE"), ("DB", "COMMUNICATE", "ENV_ASSERTION", "ACTION")
SIDES = ("assistant", "user")


class SideCall(NamedTuple):
    """A call on one side of a desk: the ``assistant``'s, with the database, or the ``user``'s, with a device."""

    side: str
    name: str
    arguments: dict[str, Any]


class DeskTask(NamedTuple):
    """What a simulated user wants of a service desk, and what must have happened in the end."""

    identity: str
    instruction: str  # for the user; the agent does not see it
    actions: tuple[tuple[str, dict[str, Any]], ...]  # calls whose database is the right one
    outputs: tuple[str, ...]  # that the user must be told
    where: str  # place in the file, for messages
    by_user: tuple[int, ...] = ()  # which of the actions are the user's own
    begin: tuple[SideCall, ...] = ()  # what changes both sides before the talk
    checks: tuple[tuple[SideCall, bool], ...] = ()  # what must hold of both sides in the end, or must not
    basis: tuple[str, ...] = BASIS  # what counts
    compared: tuple[tuple[str, ...] | None, ...] = ()  # arguments of each action that count; None, or nothing here: all


class DeskCriteria(NamedTuple):
    """The parts of a task that say what counts."""

    checks: tuple[tuple[SideCall, bool], ...] = ()
    basis: tuple[str, ...] = BASIS


def _python_value(node: ast.expr, path: pathlib.Path) -> Any:
    """A literal in which ``Task(...)`` and ``Action(...)`` are objects; nothing is run."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Task", "Action"):
        if node.args or any(k.arg is None for k in node.keywords):
            raise DataError(f"{path}:{node.lineno}: {node.func.id} takes keywords only")
        return {k.arg: _python_value(k.value, path) for k in node.keywords}
    if isinstance(node, ast.List):
        return [_python_value(x, path) for x in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) for k in node.keys):
        return {k.value: _python_value(x, path) for k, x in zip(node.keys, node.values, strict=True)}
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise DataError(f"{path}:{node.lineno}: {ast.unparse(node)[:60]} is no literal, Task or Action") from error


def _python_tasks(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give a file of tasks") from error
    except SyntaxError as error:
        raise DataError(f"{path}:{error.lineno}: no Python ({error.msg})") from error
    lists = [n.value for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) and isinstance(n.value, ast.List)]
    if len(lists) != 1:
        raise DataError(f"{path} assigns {len(lists)} lists; a file of tasks holds one")
    for node in lists[0].elts:
        yield f"{path}:{node.lineno}", _python_value(node, path)


def _action(record: Any, where: str) -> SideCall:
    given = "kwargs" if "kwargs" in checked(record, dict, where) else "arguments"
    call = field(record, "name", str, where), field(record, given, dict, where)
    return SideCall(_side(record.get("requestor", "assistant"), f"{where}: requestor"), *call)


def _side(value: Any, where: str) -> str:
    if value not in SIDES:
        raise DataError(f"{where}: {json.dumps(value)[:60]} is none of {', '.join(SIDES)}")
    return value


def _env_call(record: Any, where: str) -> SideCall:
    """A call of tau2's ``env_type`` and ``func_name``."""
    side = _side(field(record, "env_type", str, where), f"{where}: env_type")
    return SideCall(side, field(record, "func_name", str, where), field(record, "arguments", dict, where))


def _begin(state: Any, where: str) -> tuple[SideCall, ...]:
    """What tau2's ``initial_state`` does to both sides."""
    for name, value in checked(state, dict, where).items():
        if name != "initialization_actions" and value:
            raise DataError(f"{where}: tasks that change the database by {name} are not read")
    listed = checked(state.get("initialization_actions") or [], list, f"{where}: initialization_actions")
    return tuple(_env_call(call, f"{where}: initialization_actions[{k}]") for k, call in enumerate(listed))


def _criteria(judged: dict[str, Any], where: str) -> DeskCriteria:
    """What counts of a tau2 task; one without assertions counts by database and by what the user was told."""
    listed = checked(judged.get("env_assertions") or [], list, f"{where}: env_assertions")
    if not listed:
        return DeskCriteria()
    found = []
    for k, record in enumerate(listed):
        at = f"{where}: env_assertions[{k}]"
        found.append((_env_call(record, at), checked(record.get("assert_value", True), bool, f"{at}: assert_value")))
    basis = texts({"reward_basis": ["ENV_ASSERTION"]} | judged, "reward_basis", where)
    if unknown := [name for name in basis if name not in BASES]:
        raise DataError(f"{where}: reward_basis: {unknown[0]} cannot be judged here; only {', '.join(BASES)} can")
    return DeskCriteria(tuple(found), basis)


def _told(scenario: Any, where: str) -> str:
    """The instruction of a tau2 user: a text, or its parts."""
    told = checked(scenario, dict, where).get("instructions")
    if isinstance(told, str):
        return told
    parts = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
    said = [checked(told, dict, f"{where}: instructions").get(part) for part in parts]
    if not any(said):
        raise DataError(f"{where}: instructions: lacks all of {', '.join(parts)}")
    return "\n".join(part for part in said if part)


def _desk_task(record: Any, where: str, k: int) -> DeskTask:
    if "evaluation_criteria" in checked(record, dict, where):  # tau2
        begin = _begin(record.get("initial_state") or {}, f"{where}: initial_state")
        told = _told(field(record, "user_scenario", dict, where), f"{where}: user_scenario")
        judged, at = field(record, "evaluation_criteria", dict, where), f"{where}: evaluation_criteria"
        counts = _criteria(judged, at)
        judged = {name: judged.get(name) or [] for name in ("actions", "communicate_info")}
        identity, actions, outputs = str(record.get("id", k)), judged["actions"], texts(judged, "communicate_info", at)
    else:
        told, at, identity = field(record, "instruction", str, where), where, str(k)
        begin, counts = (), DeskCriteria()
        actions, outputs = field(record, "actions", list, where), texts({"outputs": []} | record, "outputs", where)
    calls = [_action(a, f"{at}: actions[{i}]") for i, a in enumerate(checked(actions, list, f"{at}: actions"))]
    by_user = tuple(i for i, call in enumerate(calls) if call.side == "user")
    pairs = tuple((call.name, call.arguments) for call in calls)
    compared = tuple(
        None if a.get("compare_args") is None else texts(a, "compare_args", f"{at}: actions[{i}]")
        for i, a in enumerate(actions)
    )
    compared = compared if any(x is not None for x in compared) else ()
    return DeskTask(identity, told, pairs, outputs, where, by_user, begin, *counts, compared)


def desk_tasks(path: str | pathlib.Path) -> list[DeskTask]:
    """The tasks of tau-bench (``tasks_test.py``, ``tasks_train.py``, ...) or tau2-bench (``tasks.json``), in order.

    A Python file is read, never run: one list of ``Task(...)`` or of dictionaries.

    Raises:
      DataError: naming file, line or task, and field.
    """
    path = pathlib.Path(path)
    if path.suffix == ".py":
        rows = list(_python_tasks(path))
    else:
        found = checked(load_json(path), list, str(path))
        rows = [(f"{path}: task {k}", record) for k, record in enumerate(found)]
    if not rows:
        raise DataError(f"{path} holds no tasks")
    return [_desk_task(record, where, k) for k, (where, record) in enumerate(rows)]


def desk_split(path: str | pathlib.Path, tasks: Sequence[DeskTask]) -> tuple[list[DeskTask], list[DeskTask]]:
    """The tasks to train on and the held-out ones by tau2-bench's ``split_tasks.json``: lists of ids by part.

    Raises:
      DataError: for a part that is absent, names a task that is not there, or shares one with the other.
    """
    parts, known = checked(load_json(pathlib.Path(path)), dict, str(path)), {task.identity: task for task in tasks}
    train, test = (texts(parts, name, str(path)) for name in ("train", "test"))
    for name in {*train, *test}:
        if name not in known:
            raise DataError(f"{path}: there is no task {name!r}")
    if both := sorted(set(train) & set(test)):
        raise DataError(f"{path}: task {both[0]!r} is in train and in test")
    return [known[name] for name in train], [known[name] for name in test]


DESKS = {
    "retail": ("users", "orders", "products"), "airline": ("users", "reservations", "flights"),
    "telecom": ("customers", "lines", "plans", "devices", "bills"),
}  # fmt: skip


def load_toml(path: pathlib.Path) -> dict[str, Any]:
    """What a TOML file holds.

    Raises:
      DataError: naming the file, and where it is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); give the folder that holds it") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path}: not TOML ({error})") from error


def _toml_tables(path: pathlib.Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Tables whose records are listed; ``lines`` have a ``line_id``, and so on."""
    found, tables = load_toml(path), {}
    for name in names:
        key, rows = f"{name[:-1]}_id", field(found, name, list, str(path))
        named = [(field(record, key, str, f"{path}: {name}[{k}]"), record) for k, record in enumerate(rows)]
        tables[name] = dict(named)
        if len(tables[name]) < len(named):
            raise DataError(f"{path}: {name}: two records have one {key}")
    return tables


def desk_database(folder: str | pathlib.Path, desk: str) -> dict[str, dict[str, Any]]:
    """The tables of a desk by name: of tau-bench's folder ``data`` (one file a table) or tau2-bench's ``db.json``.

    Args:
      desk: ``retail``, ``airline`` or ``telecom``, whose tables are in ``db.toml``; what its users have at hand is in
        ``user_db.toml`` (``load_toml``).

    Raises:
      DataError: for a table that is absent or holds anything but records by name.
    """
    if desk not in DESKS:
        raise UserError(f"desk={desk!r} is none of {', '.join(DESKS)}")
    folder = pathlib.Path(folder)
    if desk == "telecom":
        return _toml_tables(folder / "db.toml" if folder.is_dir() else folder, DESKS[desk])
    whole = folder / "db.json" if folder.is_dir() else folder
    if whole.is_file():
        found = checked(load_json(whole), dict, str(whole))
        tables = {name: field(found, name, dict, str(whole)) for name in DESKS[desk]}
    else:
        tables = {n: checked(load_json(folder / f"{n}.json"), dict, str(folder / f"{n}.json")) for n in DESKS[desk]}
    for name, rows in tables.items():
        for key, row in rows.items():
            checked(row, dict, f"{folder}: {name}: {key}")
    return tables
