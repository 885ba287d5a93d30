"""The record of one problem with a checkable answer."""

from typing import Any, NamedTuple


class Problem(NamedTuple):
    """A prompt (text, or the messages of a conversation), one right response, and what a verifier needs.

    ``level`` is the difficulty within the task. ``identity`` names the problem up to presentation (for example
    Countdown numbers in another order): the train/held-out split is by its hash, so no reordered twin leaks. ``row``:
    the columns of a file's row that its format does not need.
    """

    task: str
    prompt: str | list[dict[str, Any]]
    solution: str
    answer: dict[str, Any]
    level: int
    identity: str
    row: dict[str, Any] | None = None


def all_known(problem: Problem) -> Problem:
    """The problem with all that is known of it in ``answer``, for a reward of one's own.

    ``prompt``, ``solution``, ``level``, and ``row``: see ``Problem``.

    >>> all_known(Problem("rows", "1+1=", "2", {"value": "2"}, 0, "1+1=", {"topic": "sums"})).answer
    {'value': '2', 'prompt': '1+1=', 'solution': '2', 'level': 0, 'row': {'topic': 'sums'}}
    """
    known = {"prompt": problem.prompt, "solution": problem.solution, "level": problem.level, "row": problem.row or {}}
    return problem._replace(answer=problem.answer | known)
