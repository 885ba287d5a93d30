"""Files that are not given their task yet: executed a second time over rows of one's own (see ``tasks``).

Such a file is written against the names of a module, which says in ``OWN_ROWS`` which module makes the same names from
a model and rows of one's own: ``make(settings, smoke) -> Own``. The list of these files only shrinks.
"""

import ast
import builtins
import importlib
import importlib.util
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

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
