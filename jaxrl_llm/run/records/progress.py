"""Progress: a live bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxrl_llm.distributed import hosts


class Progress:
    """Told of every step with a few figures."""

    def __init__(self, total: int, show):
        self._total, self._show, self._started = total, show, time.monotonic()

    def step(self, done: int, figures: dict[str, float]) -> None:
        """Shows step ``done`` of the total."""
        text = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self._show(done, self._total, text, time.monotonic() - self._started)


@contextmanager
def progress(total: int, *, start: int = 0, every: int = 10) -> Iterator[Progress]:
    """A ``Progress``: rich's live bar where standard output is a terminal, else a line every ``every`` steps."""
    if not hosts.is_first():
        yield Progress(total, lambda *_: None)
        return
    if not sys.stdout.isatty():

        def line(done, total, text, seconds):
            if done % every == 0 or done in (start + 1, total):
                print(f"step {done}/{total}  {text}  {seconds:.0f} s", flush=True)

        yield Progress(total, line)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns) as bar:
        task = bar.add_task("", total=total, completed=start)
        yield Progress(total, lambda done, total, text, seconds: bar.update(task, completed=done, description=text))
