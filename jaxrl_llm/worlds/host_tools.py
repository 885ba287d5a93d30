"""A question, tools to call, an answer that is judged: the world of agents that search, calculate or run programs.

Rows come from ``--data`` with a verifier, tools (``tools.boxes``) are called as ``tools.calls`` reads them. A response
that calls nothing is the answer.
"""

from typing import Any, NamedTuple

from jaxrl_llm.data.formats import with_tools
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.rollout.host_worlds import Said, SpokenWorld, text_identity
from jaxrl_llm.tools import schema
from jaxrl_llm.tools.calls import Toolbox, take_turn
from jaxrl_llm.verifiers.verdict import Verifier


class Place(NamedTuple):
    """Of an episode: what its answer is judged by, and what has been called and heard."""

    answer: Any
    heard: tuple[str, ...] = ()


def tool_world(box: Toolbox, verify: Verifier) -> SpokenWorld:
    """Calls are made and answered, a response without one is judged and ends the episode.

    A tool that could not be asked, or a verdict that says nothing, makes the episode invalid. Situations are the same
    where the same was heard on the same task.
    """

    def step(place: Place, text: str) -> Said:
        turn = take_turn(box, text)
        if not turn.valid:
            return Said(place, "", 0.0, False, False, reason=next(a.text for a in turn.answers if not a.valid))
        if not turn.answers:
            found = verify(place.answer, text)
            return Said(place, "", found.value, True, found.valid, reason="" if found.valid else found.reason)
        shown = "\n".join(f"<tool_response>\n{answer.text}\n</tool_response>" for answer in turn.answers)
        return Said(place._replace(heard=(*place.heard, shown)), shown, 0.0, False)

    return SpokenWorld(lambda seed, task: Place(task), step, lambda place: text_identity(repr(place)))


def asked(problem: Problem, box: Toolbox) -> Problem:
    """The same problem with the tools, and how they are called, in front of its prompt."""
    said = with_tools("", [schema.declared(item) for item in box.tools]) + "\nA response without a call is your answer."
    if isinstance(problem.prompt, str):
        return problem._replace(prompt=f"{said}\n\n{problem.prompt}")
    return problem._replace(prompt=[{"role": "system", "content": said}, *problem.prompt])
