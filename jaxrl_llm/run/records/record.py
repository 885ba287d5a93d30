"""The run folder: settings, versions, metrics, samples, results, curve; readable without this library."""

import contextlib
import errno
import json
import math
import os
import pathlib
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError


def versions() -> dict[str, str]:
    """Versions that a number depends on."""
    import importlib.metadata

    import jax

    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return found | {"python": platform.python_version(), "device": jax.devices()[0].device_kind}


def open_run(folder: str | pathlib.Path, *, resume: bool) -> pathlib.Path:
    """Makes (or reopens) a run folder.

    Raises:
      UserError: when it cannot be written, holds another run, or there is nothing to resume.
    """
    folder = pathlib.Path(folder)
    if resume:
        if not (folder / "settings.json").is_file():
            raise UserError(f"--resume {folder}: no settings.json there; give the folder of an earlier run")
        return folder
    if (folder / "settings.json").exists():
        raise UserError(f"--out {folder} already holds a run; choose another folder or --resume {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written ({error.strerror}); choose a folder you own") from error
    return folder


def how_to_resume(run: pathlib.Path) -> str:
    """The command that continues a run."""
    return f"continue with: python -m jaxrl_llm --resume {run}"


@contextlib.contextmanager
def resumable(run: pathlib.Path, how: str = "") -> Iterator[None]:
    """A full or unwritable disk is one clear line that says how to go on; what was written stays.

    Args:
      how: to go on, of a run that has no ``--resume``.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO):
            raise
        what = f"cannot write {error.filename or run}: {error.strerror}"
        raise UserError(f"{what}; free space or fix the folder, then {how or how_to_resume(run)}") from error


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes aside and renames, so that a reader never sees half a file."""
    scratch = path.with_suffix(path.suffix + ".tmp")
    scratch.write_text(text)
    os.replace(scratch, path)


def read_json(path: pathlib.Path) -> Any:
    """The value of a file of ``write_json``; None where there is none, or it is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_json(path: pathlib.Path, value: Any) -> None:
    """One value as indented JSON, all at once."""
    write_whole(path, json.dumps(_finite(value), indent=1, default=str) + "\n")


def write_lines(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line, all at once; replaces what an earlier try left."""
    write_whole(path, "".join(json.dumps(_finite(row)) + "\n" for row in rows))


def append_line(path: pathlib.Path, value: dict[str, Any]) -> None:
    """Appends one JSON line and flushes it to the disk."""
    with path.open("a") as file:
        file.write(json.dumps(_finite(value)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: pathlib.Path, *, needs: str = "") -> list[dict[str, Any]]:
    """The complete JSON objects of a file of lines, in order.

    A last line cut by a crash is left out; so is any damaged line, with a message on standard error that names it.

    Args:
      needs: a whole number that every line has; one without it is damaged.
    """
    if not path.is_file():
        return []
    rows, lines = [], path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):  # also of bytes that are no UTF-8
            row = None
        if isinstance(row, dict) and (not needs or isinstance(row.get(needs), int)):
            rows.append(row)
        elif number < len(lines) or row is not None:
            print(f"{path}:{number} is damaged; that line is left out", file=sys.stderr)
    return rows


def rewind(path: pathlib.Path, step: int) -> None:
    """Drops lines of steps after ``step``: a resumed run writes them again; damaged lines go too, with a message."""
    write_lines(path, [row for row in read_lines(path, needs="step") if row["step"] <= step])


def running_mean(values: Sequence[float], width: int) -> np.ndarray:
    """Mean of the last ``width`` values at each index, holes (NaN) left out.

    >>> running_mean([1.0, math.nan, 3.0, 5.0], 2).tolist()
    [1.0, 1.0, 3.0, 4.0]
    """
    array = np.asarray(values, float)
    windows = [array[max(0, i - width + 1) : i + 1] for i in range(len(array))]
    return np.asarray([np.nanmean(w) if np.isfinite(w).any() else math.nan for w in windows])


def pyplot() -> Any:
    """matplotlib for files alone, loaded where something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot_curves(path: pathlib.Path, rows: list[dict[str, Any]], title: str, points: dict[int, tuple]) -> None:
    """Learning curve: training reward per step, held-out pass@1 with its interval, length and entropy below.

    Args:
      points: step -> (mean, low, high) of held-out pass@1.
    """
    plt = pyplot()

    def column(name: str) -> list[float]:
        return [math.nan if r.get(name) is None else r[name] for r in rows]

    def draw(axis, name: str, color: str, label: str = "") -> None:
        """The values of the steps, faint, under their running mean."""
        values, width = column(name), max(1, len(rows) // 30) + 1
        axis.plot(steps, values, lw=1, color=color, alpha=0.3)
        label = label and f"{label}, mean of {width} steps"
        axis.plot(steps, running_mean(values, width), lw=2, color=color, label=label)

    steps = [r["step"] for r in rows]
    figure, axes = plt.subplots(3, 1, figsize=(7, 7), sharex=True, height_ratios=(2, 1, 1), layout="constrained")
    draw(axes[0], "reward/mean", "tab:blue", "training reward")
    if points:
        x, centre = list(points), [p[0] for p in points.values()]
        low = [max(0.0, p[0] - p[1]) for p in points.values()]
        high = [max(0.0, p[2] - p[0]) for p in points.values()]
        axes[0].errorbar(x, centre, (low, high), fmt="o", color="tab:red", capsize=4, label="held-out pass@1, 95 %")
    if any(x < 0 or x > 1 for x in column("reward/mean")):  # rewards of one's own are no shares of right responses
        axes[0].set(ylabel="reward, fraction right", title=title)
    else:
        axes[0].set(ylabel="fraction right", title=title, ylim=(0, 1))
    axes[0].legend(loc="lower right")
    draw(axes[1], "length/mean_tokens", "tab:green")
    axes[1].set(ylabel="tokens")
    draw(axes[2], "policy/entropy", "tab:purple")
    axes[2].set(ylabel="entropy (nats)", xlabel="step")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
