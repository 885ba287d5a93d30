"""Results with literal numbers."""

import types

from jaxrl_llm.experiment import ArmResult, Results


def arm(values, *, metric="eval/accuracy", curve=None):
    """One arm whose final values are given per seed; ``curve``: ``{step: [seeds]}``."""
    points = curve or {}
    rows = [[points[s][k] for s in points] for k in range(len(values))]
    return ArmResult(
        settings={"steps": 4}, seeds=list(range(len(values))), metrics={metric: list(values)},
        curves={metric: {"step": list(points), "values": rows}} if points else {},
        rollouts=1000, tokens=20_000, updates=4, seconds=1.5,
    )  # fmt: skip


def results(**arms):
    """Arms by name from their values."""
    return Results({name: arm(values) for name, values in arms.items()})


def made_module(**changes):
    """The tiny experiment as a module of its own, with some of it replaced."""
    from tests.experiment import tiny

    found = types.ModuleType(tiny.__name__, tiny.__doc__)
    for name, value in vars(tiny).items():
        if not name.startswith("__") or name in ("__file__", "__spec__"):
            setattr(found, name, changes.get(name, value))
    return found
