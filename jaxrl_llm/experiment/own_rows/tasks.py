"""The task that an experiment file is given: its embedded world, or rows of one's own, two values of one type.

``build(settings, task=EMBEDDED)`` of a file makes every stage and measurement from the functions that the task holds:
who draws prompts and pairs, who judges, which decoder is trained. The module that defines the type of the task says in
``OWN_ROWS`` which module opens a value of it from a model and rows: that one has ``Settings`` (a dataclass of flags,
among them ``data``) and ``open_task(settings) -> Opened``. With ``--data`` the file gets the opened task. A file with
several embedded worlds names them in ``WORLDS``, the one of ``build`` first; ``--world`` chooses.
"""

import dataclasses
import importlib
import inspect
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms
from jaxrl_llm.planning import presets
from jaxrl_llm.run import flags
from jaxrl_llm.train.plan import Plan


class Opened(NamedTuple):
    """``task``: what ``build`` is given; ``finish``: makes its plan one over these rows.

    ``arms`` keeps those of the file that differ over them.
    """

    task: Any
    finish: Callable[[Plan], Plan]
    arms: Callable[[dict[str, dict[str, Any]]], dict[str, dict[str, Any]]] = dict


def embedded(module: ModuleType) -> Any:
    """The task that a file has without rows; None for a file that is given none."""
    parameter = inspect.signature(module.build).parameters.get("task")
    return None if parameter is None else parameter.default


def opener(module: ModuleType) -> ModuleType | None:
    """What opens the task of this file from rows of one's own; None where it has none, or ``OWN_ROWS = None``.

    That of the file, where it names one, else that of the type of its task.
    """
    task = embedded(module)
    if task is None or getattr(module, "OWN_ROWS", "") is None:
        return None
    named = getattr(module, "OWN_ROWS", "") or getattr(importlib.import_module(type(task).__module__), "OWN_ROWS", "")
    return importlib.import_module(named) if named else None


def with_rows(module: ModuleType) -> ModuleType:
    """The file with the flags of rows of one's own among its settings, where it can have such rows.

    Else with that of its worlds, where it has several, or as it is.

    A file that reads rows itself says so with ``OWN_ROWS = None``. Settings that have flags of rows which their arms do
    not read get these in their place.

    Raises:
      UserError: where an arm sets what a flag of rows is called.
    """
    if (world := opener(module)) is None:
        if not getattr(module, "WORLDS", ()):
            return module
        chosen = _copy(module)
        chosen.Settings = _choosing(module)
        return chosen
    set_by = {field: arm for arm, changes in module.ARMS.items() for field in changes}
    if taken := sorted(set_by.keys() & {f.name for f in dataclasses.fields(world.Settings)}):
        raise UserError(f"{module.__name__}: arm {set_by[taken[0]]} sets {taken[0]}, which is a flag of rows of one's "
                        f"own ({flags.spell(taken[0])}) that would take its place; name it otherwise")  # fmt: skip
    shown = _copy(module)
    fields = [
        (f.name, flags.explained(world.Settings, f), dataclasses.field(default=f.default))
        for f in dataclasses.fields(world.Settings)
    ]
    shown.Settings = dataclasses.make_dataclass("Settings", fields, bases=(_choosing(module),), frozen=True)
    return shown


def _choosing(module: ModuleType) -> type:
    """The settings of a file, with the flag ``--world`` where it has several."""
    if not (names := tuple(getattr(module, "WORLDS", ()))):
        return module.Settings
    kind = Annotated[Literal[names], tyro.conf.arg(help="embedded world of the task")]
    field = ("world", kind, dataclasses.field(default=names[0]))
    return dataclasses.make_dataclass("Settings", [field], bases=(module.Settings,), frozen=True)


def with_task(module: ModuleType, name: str) -> ModuleType:
    """The file over this one of its embedded worlds; itself for no name, which is the first one.

    Raises:
      UserError: for a world that it does not have.
    """
    worlds = getattr(module, "WORLDS", {})
    if not name:
        return module
    if name not in worlds:
        raise UserError(f"--world {name} is none of {module.__name__}: {', '.join(worlds) or 'it has one'}")
    made = _copy(module)
    made.Settings = _choosing(module)
    made.build = lambda settings: module.build(settings, task=worlds[settings.world])
    return made


def over_rows(module: ModuleType, base: Any, given: set[str]) -> tuple[ModuleType, Any]:
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
    world = opener(module)
    own = set() if world is None else {f.name for f in dataclasses.fields(world.Settings)}
    if world is None or not base.data:
        if wrong := sorted(given & own):
            raise UserError(f"{flags.spell(wrong[0])} is of rows of your own: give --model and --data with it")
        made = with_task(module, base.world if "world" in given else "")
        names = {f.name for f in dataclasses.fields(made.Settings)} - own
        return made, made.Settings(**{name: getattr(base, name) for name in names})
    if "world" in given and getattr(module, "WORLDS", {}):
        raise UserError("--world is of the embedded worlds: drop it, or --data")
    if not pathlib.Path(base.model).is_dir():
        raise UserError(f"--data {base.data} needs --model FOLDER, a model that reads text")
    values, size = presets.for_model(base.model)
    if "learning_rate" not in given and values:
        base = dataclasses.replace(base, learning_rate=values["learning_rate"])
        print(f"{base.model}: {size:,} parameters; for this size --learning-rate {base.learning_rate}", flush=True)
    copy, read = arms.watched(base)
    opened: Opened = world.open_task(copy)
    of_rows = own | {f.name for f in dataclasses.fields(base) if f.name in read}
    made = _copy(module)

    def build_over(settings: Any) -> Plan:
        for name in of_rows:
            getattr(settings, name)  # they were read when the task was opened: --model, and what it is computed with
        return opened.finish(module.build(settings, task=opened.task))

    made.Settings, made.build, made.ARMS = type(base), build_over, opened.arms(module.ARMS)
    return made, base


def _copy(module: ModuleType) -> ModuleType:
    copy = ModuleType(module.__name__)
    copy.__dict__.update(vars(module))
    return copy
