"""Settings of arms: presets, flags and overrides, every one checked; and which fields a method really reads."""

import dataclasses
import difflib
import pathlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.io import weights
from jaxrl_llm.train import offline, online
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train.plan import Plan
from jaxrl_llm.types import Rewards, Trajectories

SLOTS = ("Settings", "ARMS", "SMOKE", "METRICS", "build", "claim")


def check_slots(module: ModuleType) -> None:
    """Raises ValueError where a module lacks what an experiment needs."""
    missing = [name for name in SLOTS if not hasattr(module, name)]
    if missing:
        raise ValueError(f"{module.__name__} has no {', '.join(missing)}; compare experiments/_template.py")


@dataclasses.dataclass(frozen=True)
class Times:
    """In the place of an arm's number: so many times that of the settings, on the embedded model and on one's own."""

    factor: int | float

    def of(self, number: int | float) -> int | float:
        """The number of the arm, of the kind of the given one; without what multiplying leaves in its last digits.

        >>> Times(4).of(320), Times(0.1).of(0.1)
        (1280, 0.01)
        """
        return type(number)(float(f"{self.factor * number:.12g}"))

    def __str__(self) -> str:
        return f"{self.factor:g} times that of the settings"


def changed(settings: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of an arm, with the numbers that ``Times`` gives of these settings."""
    return {
        name: value.of(getattr(settings, name)) if isinstance(value, Times) else value
        for name, value in changes.items()
    }


def override(settings: Any, changes: Mapping[str, Any], where: str) -> Any:
    """``dataclasses.replace`` that names the nearest field where one does not exist, of ``changed``."""
    known = [f.name for f in dataclasses.fields(settings)]
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(known)}"
            raise UserError(f"{where} sets {name!r}, which is no setting; {hint}")
    return dataclasses.replace(settings, **changed(settings, changes))


def bundled(model: str) -> bool:
    """Whether a name is one of the base models inside the package."""
    try:
        weights.bundled(model)
    except (ValueError, OSError):
        return False
    return True


def preset(module: ModuleType, *, smoke: bool, model: str) -> Any:
    """The paper's values for a model of your own; the embedded ones for a bundled one; fewer still for a smoke run."""
    settings = module.Settings()
    if bundled(model):
        settings = override(settings, getattr(module, "EMBEDDED", {}), "EMBEDDED")
    return override(settings, module.SMOKE, "SMOKE") if smoke else settings


def resolve(module: ModuleType, settings: Any, chosen: tuple[str, ...]) -> dict[str, Any]:
    """The settings of every chosen arm (none chosen: all), in the order of ``ARMS``."""
    for name in chosen:
        if name not in module.ARMS:
            raise UserError(f"--arm {name}: the arms are {', '.join(module.ARMS)}")
    return {
        name: override(settings, changes, f"arm {name!r}")
        for name, changes in module.ARMS.items()
        if not chosen or name in chosen
    }


def watched(settings: Any) -> tuple[Any, set[str]]:
    """The same settings, and the set of fields that anybody has read of them since."""
    kind, reads = type(settings), set()

    class Watched(kind):
        def __getattribute__(self, name):
            reads.add(name)
            return super().__getattribute__(name)

    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    Watched.__name__, Watched.__qualname__ = kind.__name__, kind.__qualname__
    copy = Watched(**values)
    reads.clear()
    return copy, reads


def unscored(answers: Any, trajectories: Trajectories) -> Rewards:
    """In the place of rewards that come from Python."""
    rows = trajectories.tokens.shape[0]
    return Rewards(jnp.zeros((rows,), jnp.float32), jnp.ones((rows,), bool))


def record_path(module: ModuleType) -> pathlib.Path:
    """Where the committed record of an experiment file lies, whether or not it is there."""
    file = pathlib.Path(module.__file__ or "").resolve()
    return file.parents[2] / "results" / file.parent.name / f"{file.stem}.json"


def _traced(plan: Plan) -> tuple[Any, list[tuple[plans.Stage, Any, Any]], Any]:
    """The jaxpr of the start; each stage with that of one iteration and its metrics; the last parameters.

    All from shapes alone. Rewards of the host are left out, and of a world the stages, which need its episodes.
    """
    key, found = jax.eval_shape(lambda: jax.random.key(0)), []
    first, params = jax.make_jaxpr(plan.init, return_shape=True)(key)
    for stage in plan.stages if plan.world is None else ():
        module = online if isinstance(stage.method, online.Online) else offline
        if plan.on_host and plan.host_score and module is online:
            stage = stage._replace(method=stage.method._replace(score=unscored))

        def one(params, key, stage=stage, module=module):
            return module.iterate(stage.method, plans.start(stage, params, key))

        traced, (state, metrics) = jax.make_jaxpr(one, return_shape=True)(params, key)
        found.append((stage, traced, metrics))
        params = state.params
    return first, found, params


def figure_names(plan: Plan) -> list[set[str]]:
    """The names of the metrics of every online stage; none of a world, which needs episodes."""
    return [set(metrics) for stage, _, metrics in _traced(plan)[1] if isinstance(stage.method, online.Online)]


def trace(plan: Plan) -> list[Any]:
    """The jaxprs of the start, of one iteration of every stage and of the measurement, without running anything.

    On the host the measurement is Python, and so are the rewards and a world: they are left out, and with a world the
    stages, which need its episodes.
    """
    first, found, params = _traced(plan)
    traced = [first, *(one for _, one, _ in found)]
    if plan.on_host:
        return traced
    return [*traced, jax.make_jaxpr(plans.measured(plan))(params, jax.eval_shape(lambda: jax.random.key(0)))]
