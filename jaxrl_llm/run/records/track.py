"""Figures of a run for TensorBoard and Weights & Biases, beside ``metrics.jsonl``, which has them all."""

import html
import pathlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError, extra_module

KNOWN = ("tensorboard", "wandb")
WANDB_ID = "wandb_id"  # file of a run's folder


class Tracker(NamedTuple):
    """``write(step, values)``: numbers by name, others are left out; ``text(step, name, text)``; ``close()``."""

    write: Callable[[int, dict[str, Any]], None]
    text: Callable[[int, str, str], None]
    close: Callable[[], None]


nothing = Tracker(lambda step, values: None, lambda step, name, text: None, lambda: None)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in values.items() if isinstance(x, int | float) and x == x}


def samples(lines: Sequence[dict[str, Any]]) -> str:
    """Lines of a transcript as one text to read: what each was worth, and all of its tokens.

    >>> print(samples([{"problem": 3, "reward": 1.0, "truncated": False, "tokens": ["1+1=", "2"]}]))
    problem 3, reward 1
    1+1=2
    """
    heads = (
        f"problem {x['problem']}, reward {x['reward']:g}{', truncated' if x.get('truncated') else ''}" for x in lines
    )
    return "\n\n".join(f"{head}\n{''.join(x['tokens'])}" for head, x in zip(heads, lines, strict=True))


def check(names: Sequence[str]) -> None:
    """Refuses an unknown tracker, and one whose package is missing or cannot be imported.

    Raises:
      UserError: with the remedy.
    """
    for name in names:
        if name not in KNOWN:
            raise UserError(f"--track {name}: the trackers are {', '.join(KNOWN)}")
        extra_module("tensorboardX" if name == "tensorboard" else "wandb", f"--track {name} needs", "track")


def _tensorboard(folder: pathlib.Path, begin: int) -> Tracker:
    from tensorboardX import SummaryWriter

    # at step 0 too: a try that ended before its first checkpoint has left its steps there
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=begin + 1)

    def write(step: int, values: dict[str, Any]) -> None:
        for name, value in _numbers(values).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(write, lambda step, name, text: writer.add_text(name, text, step), writer.close)


def _wandb(folder: pathlib.Path, begin: int) -> Tracker:
    import wandb

    # the folder holds the identity of its run, so that one that goes on is the same one there, and another one of a
    # folder of the same name is another; WANDB_MODE=offline sends nothing
    known = folder / WANDB_ID
    if not known.is_file():
        known.write_text(secrets.token_hex(8))
    name = "-".join(folder.resolve().parts[-3:])[-120:]
    run = wandb.init(
        project="jaxrl_llm", id=known.read_text().strip(), name=name, dir=str(folder), resume="allow",
        reinit="create_new",
    )  # fmt: skip

    def write(step: int, values: dict[str, Any]) -> None:
        run.log(_numbers(values), step=step)

    def text(step: int, name: str, said: str) -> None:
        run.log({name: wandb.Html(f"<pre>{html.escape(said)}</pre>")}, step=step)

    return Tracker(write, text, run.finish)


def open_trackers(names: Sequence[str], folder: pathlib.Path, *, begin: int = 0) -> Tracker:
    """One tracker that writes to all of ``names``.

    Args:
      folder: of the run; TensorBoard's files lie in it.
      begin: the step that is done: of later ones an earlier try may have written, which TensorBoard forgets.
    """
    if not names:
        return nothing
    check(names)
    opened = [(_tensorboard if name == "tensorboard" else _wandb)(folder, begin) for name in names]

    def write(step: int, values: dict[str, Any]) -> None:
        for one in opened:
            one.write(step, values)

    def text(step: int, name: str, said: str) -> None:
        for one in opened:
            one.text(step, name, said)

    def close() -> None:
        for one in opened:
            one.close()

    return Tracker(write, text, close)
