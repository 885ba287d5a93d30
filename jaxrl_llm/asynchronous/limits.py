"""What an asynchronous run is given and gives: how many work, how long anything may take, what came of it."""

from typing import Any, NamedTuple

from jaxrl_llm.distributed.weight_transfer import Transfer
from jaxrl_llm.train.skipped import MOST


class Sizes(NamedTuple):
    """How many work, and how far they may run ahead."""

    rollers: int = 2
    judges: int = 1
    references: int = 1  # only where the program has a reference
    parts: int = 1  # rows of a step: its prompts are rolled out and scored in so many parts
    staleness: int = 1
    capacity: int | None = None  # rows ordered and not trained yet; None: what the staleness allows
    piece_bytes: int = 2**22  # weights travel in pieces of at most so much, four at a time
    units: int = 0  # storage units, workers that hold the rows; 0: the conductor's process holds them
    # rollout workers that fetch weights at the same time, beside what they generate; 0: each where it begins a row
    swaps: int = 0


class Limit(NamedTuple):
    """Seconds until another worker may do a row as well, and until its worker is replaced."""

    lease_s: float = 300.0
    hang_s: float = 900.0


class Limits(NamedTuple):
    """What is waited for, and how long."""

    roll: Limit = Limit()
    score: Limit = Limit(120.0, 120.0)
    refer: Limit = Limit()
    learn: Limit = Limit(3600.0, 3600.0)
    start_s: float = 600.0  # of a worker
    first_s: float = 600.0  # on top for the first row of a worker at a task, which compiles
    fetch_s: float = 60.0  # a batch of pieces
    tries: int = 3  # of a row at a task; scores are invalid after that, anything else ends the run
    restarts: int = 8  # of workers, all together
    skipped: int = MOST  # updates in a row that are not finite, see ``train.skipped``; 0: any number


def longer(limits: Limits, times: float) -> Limits:
    """All that is waited for, so many times as long.

    >>> longer(Limits(), 2.0).score, longer(Limits(), 2.0).tries
    (Limit(lease_s=240.0, hang_s=240.0), 3)
    """

    def scaled(name: str, value: Any) -> Any:
        if isinstance(value, Limit):
            return Limit(*(times * seconds for seconds in value))
        return times * value if name.endswith("_s") else value

    return Limits(*(scaled(name, value) for name, value in limits._asdict().items()))


class Event(NamedTuple):
    """Something that went wrong or was put right."""

    seconds: float
    kind: str  # lost, late, failed, cut, missing, invalid, resumed, repeated
    who: str
    cause: str


class Report(NamedTuple):
    """The metrics of every update in order, and what it took."""

    history: list[dict[str, float]]
    rows: list[int]  # that trained the final state, in order
    events: list[Event]
    waits: dict[str, float]  # seconds by who waited for what
    transfers: list[Transfer]
    seconds: float
    loads: dict[str, dict[str, float]]  # by task: the tokens that each of its workers had
    lesson: Any  # ``roles.Lesson`` of the last update; None where the learner was lost behind it


class Stuck(RuntimeError):
    """The run cannot go on; the message names the cause. Its checkpoints are intact: start it again to resume."""


def check(sizes: Sizes, prompts: int, checkpoint_every: int) -> None:
    """Raises ValueError for sizes that do not fit a step of so many prompts."""
    for name, value in (*sizes._asdict().items(), ("checkpoint_every", checkpoint_every)):
        least = 0 if name in ("staleness", "units", "swaps") else 1
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if prompts % sizes.parts:
        raise ValueError(f"parts={sizes.parts} does not divide the {prompts} prompts of a step")
    if sizes.capacity is not None and sizes.capacity < sizes.parts:
        raise ValueError(f"capacity={sizes.capacity} is less than the parts={sizes.parts} of one step")
