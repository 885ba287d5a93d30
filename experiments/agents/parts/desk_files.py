"""The local files of tau-bench and tau2-bench. Nothing is downloaded.

A task is a ``DeskTask``, which a simulated user tells; ``tau_bench`` plays it. A file that does not hold what it should
is one ``DataError`` that names the file, the line or the place in it, and the field.
"""

import ast
import json
import pathlib
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.agent_formats import checked, field, load_json, texts
from jaxrl_llm.errors import DataError, UserError

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
