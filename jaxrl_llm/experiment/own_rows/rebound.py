"""The same experiment file over another world: rows of one's own in the place of its embedded one.

A file with an embedded world is written against the names of a module, for example ``draw_prompts``, ``draw_pairs``
and ``gold_reward`` of ``experiments.parts.preference_task``. Such a module says in ``OWN_ROWS`` which module makes the
same names from a model and rows of one's own. With ``--data`` the experiment file and the parts that it imports are
executed a second time with these in the place of the embedded ones, so that every arm, stage and measurement is the
one that is written there and no file holds a second wiring. What others import stays as it is.

A module behind ``OWN_ROWS`` has ``Settings`` (a dataclass of flags, among them ``data``) and ``make(settings, smoke)
-> Own``.
"""

import ast
import builtins
import dataclasses
import importlib
import importlib.util
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.planning import presets
from jaxrl_llm.run import flags
from jaxrl_llm.train.plan import Plan

ROOM = "experiments"


class Own(NamedTuple):
    """``names``: by module, what takes the place of its definitions; ``finish``: makes a plan one over these rows."""

    names: dict[str, dict[str, Any]]
    finish: Callable[[Plan], Plan]


def spec_name(module: ModuleType) -> str:
    """The dotted name of an experiment file, also of one that runs as ``__main__``."""
    spec = getattr(module, "__spec__", None)
    return spec.name if spec else module.__name__


def _file(name: str) -> pathlib.Path | None:
    """The file of a module of ``experiments``; None for a package, and for what is no module."""
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):  # a name inside a module
        return None
    if spec is None or spec.origin is None or spec.submodule_search_locations is not None:
        return None
    return pathlib.Path(spec.origin)


def reached(name: str) -> list[str]:
    """An experiment file and all parts that it reaches, by name, the file first."""
    todo, seen = [name], []
    while todo:
        one = todo.pop(0)
        if one in seen or (path := _file(one)) is None:
            continue
        seen.append(one)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == ROOM:
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return seen


def own_env(module: ModuleType) -> ModuleType | None:
    """What makes the world of this file from rows of one's own; None where it has no embedded world.

    The file says so itself, or the first of its parts that does.
    """
    name = spec_name(module)
    if not name.startswith(f"{ROOM}."):
        return None
    if own := getattr(module, "OWN_ROWS", ""):
        return importlib.import_module(own)
    for part in reached(name)[1:]:
        if own := getattr(importlib.import_module(part), "OWN_ROWS", ""):
            return importlib.import_module(own)
    return None


def with_rows(module: ModuleType) -> ModuleType:
    """The file with the flags of rows of one's own among its settings, where it can have such rows; else the file.

    A file that reads rows itself says so with ``OWN_ROWS = None``. Settings that have flags of rows which their arms do
    not read get these in their place.
    """
    if getattr(module, "OWN_ROWS", "") is None or (world := own_env(module)) is None:
        return module
    shown = ModuleType(module.__name__)
    shown.__dict__.update(vars(module))
    fields = [(f.name, f.type, dataclasses.field(default=f.default)) for f in dataclasses.fields(world.Settings)]
    shown.Settings = dataclasses.make_dataclass("Settings", fields, bases=(module.Settings,), frozen=True)
    return shown


def over_rows(module: ModuleType, base: Any, given: set[str], *, smoke: bool) -> tuple[ModuleType, Any]:
    """The file and its settings over the rows of ``--data``, where that is given; else as they were.

    Args:
      module: the file itself.
      base: settings of ``with_rows(module)``.
      given: names of the settings that were given as flags.

    Raises:
      UserError: for rows or a model that do not serve, or flags of rows without rows.
    """
    if isinstance(base, module.Settings) and type(base) is module.Settings:
        return module, base
    world = own_env(module)
    own, plain = (
        {f.name for f in dataclasses.fields(world.Settings)},
        {f.name for f in dataclasses.fields(module.Settings)},
    )
    if not base.data:
        if wrong := sorted(given & own):
            raise UserError(f"{flags.spell(wrong[0])} is of rows of your own: give --model and --data with it")
        return module, module.Settings(**{name: getattr(base, name) for name in plain - own})
    if not pathlib.Path(base.model).is_dir():
        raise UserError(f"--data {base.data} needs --model FOLDER, a model that reads text")
    values, size = presets.for_model(base.model)
    if "learning_rate" not in given and values:
        base = dataclasses.replace(base, learning_rate=values["learning_rate"])
        print(f"{base.model}: {size:,} parameters; for this size --learning-rate {base.learning_rate}", flush=True)
    found: Own = world.make(base, smoke)
    made = executed(spec_name(module), found.names)
    fields = [(f.name, f.type, dataclasses.field(default=getattr(base, f.name))) for f in dataclasses.fields(type(base))
              if f.name in own]  # fmt: skip
    kind = dataclasses.make_dataclass("Settings", fields, bases=(made.Settings,), frozen=True)
    there = made.Settings(**(made.SMOKE if smoke else {}))  # its functions are those of the second execution
    functions = {
        f.name: getattr(there, f.name) for f in dataclasses.fields(there) if callable(getattr(base, f.name))
    }  # fmt: skip
    plain = {f.name: getattr(base, f.name) for f in dataclasses.fields(kind)}
    build = made.build

    def build_over(settings: Any) -> Plan:
        for name in (*own, "model"):
            getattr(settings, name)  # they were read when the world was made
        return found.finish(build(settings))

    made.Settings, made.build = kind, build_over
    return made, kind(**plain | functions)


def executed(name: str, names: dict[str, dict[str, Any]]) -> ModuleType:
    """A file, and all that it imports of ``experiments``, executed anew with other ``names`` by module.

    Raises:
      ValueError: for a name that its module does not define.
    """
    made: dict[str, ModuleType] = {}
    whole = builtins.__import__

    def bring(name, globals=None, locals=None, fromlist=(), level=0):
        if level or name.split(".")[0] != ROOM or not fromlist:
            return whole(name, globals, locals, fromlist, level)
        if _file(name):
            return load(name)
        package = ModuleType(name)
        for item in fromlist:
            setattr(package, item, load(f"{name}.{item}"))
        return package

    def load(name: str) -> ModuleType:
        if name not in made:
            path, mine = _file(name), names.get(name, {})
            module = made[name] = ModuleType(name)
            module.__dict__.update(mine, __file__=str(path), __spec__=importlib.util.find_spec(name))
            module.__dict__["__builtins__"] = vars(builtins) | {"__import__": bring}
            exec(compile(_without(path, set(mine)), str(path), "exec"), module.__dict__)  # as importing it does
        return made[name]

    return load(name)


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}


def those_of(name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Of ``names`` those that a module defines: parts differ in what they need of a world."""
    path = _file(name)
    there = set() if path is None else {x for node in ast.parse(path.read_text()).body for x in defined(node)}
    return {key: value for key, value in names.items() if key in there}


def _without(path: pathlib.Path, names: set[str]) -> ast.Module:
    """The code of a file without its definitions of these names.

    Raises:
      ValueError: for a name that it does not define.
    """
    tree, left = ast.parse(path.read_text()), set(names)

    kept = []
    for node in tree.body:
        here = defined(node)
        if here & names and not here <= names:
            raise ValueError(f"{path.name} defines {sorted(here)} together: replace all of them, or none")
        left -= here
        if not here & names:
            kept.append(node)
    if left:
        raise ValueError(f"{path.name} defines no {', '.join(sorted(left))}")
    return ast.Module(kept, tree.type_ignores)
