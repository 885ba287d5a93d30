"""Chains of responses and tools outside of training, and what mends them: Tool-Star's debugger, backtracer and refiner.

A chain is what follows a prompt: responses with calls and what was answered to them, in the messages that
``envs.tool_question`` plays, up to a response without a call. Who writes is a function ``(messages, draw) -> text``:
a model behind an address, one that is loaded here, or a script.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.envs.text_games import code_of
from jaxrl_llm.tools.calls import OPEN, Answer, Call, Toolbox, take_turn

Message = dict[str, Any]
Write = Callable[..., str]  # (messages, draw) -> response
DRAWS = 1000  # between two samples of a question: what is written anew is another draw of the same sample
FIX = (
    "A program failed. Write it again without the mistake: one whole program between ```python and ```, and nothing "
    "else. It has to print its result.\n\nThe program:\n```python\n{}\n```\n\nWhat came of it:\n{}"
)
SHORTEN = (
    "A problem and the work on it so far stand below. Write the work again, shorter: leave out what repeats, what led "
    "nowhere and what the problem does not need, and keep every fact and number that it does. Do not go on with the "
    "work.\n\nThe problem:\n{}\n\nThe work so far:\n{}"
)
GO_ON = "That is your work so far. Go on with the problem."


class Chain(NamedTuple):
    """What follows a prompt, and what happened on the way."""

    messages: tuple[Message, ...] = ()
    calls: tuple[Call, ...] = ()  # that stand in it
    failed: int = 0  # of these, the ones that were malformed or refused
    ended: bool = False  # by a response without a call
    debugged: int = 0  # programs that the debugger wrote anew
    back: int = 0  # responses that were dropped and written anew
    refined: int = 0  # times that the chain was made shorter

    @property
    def answer(self) -> str:
        """The last response."""
        return next((str(m["content"]) for m in reversed(self.messages) if m["role"] == "assistant"), "")


class Aids(NamedTuple):
    """What mends a chain; the numbers are those of the released code, once each.

    From "Tool-Star: Empowering LLM-Brained Multi-Tool Reasoner via Reinforcement Learning", arXiv:2505.16410, section
    3.1 (inference-time tools).
    """

    debug: Callable[[str, str], str] | None = None  # (program, error) -> program
    refine: Callable[[str, str], str] | None = None  # (problem, chain) -> shorter chain
    debugs: int = 1  # of a chain
    backs: int = 0
    refines: int = 1
    longest: int = 24_000  # characters of a chain, above which it is refined


NO_AIDS = Aids()


def opened(problem: Problem) -> list[Message]:
    """The prompt of a problem as messages."""
    return [{"role": "user", "content": problem.prompt}] if isinstance(problem.prompt, str) else list(problem.prompt)


def make_debugger(write: Write) -> Callable[[str, str], str]:
    """``(program, error) -> program`` of a model that is shown both."""

    def debug(program: str, error: str) -> str:
        return code_of(write([{"role": "user", "content": FIX.format(program, error)}], 0))

    return debug


def make_refiner(write: Write) -> Callable[[str, str], str]:
    """``(problem, chain) -> shorter chain`` of a model that is shown both."""

    def refine(problem: str, chain: str) -> str:
        return write([{"role": "user", "content": SHORTEN.format(problem, chain)}], 0).strip()

    return refine


def told(messages: Sequence[Message]) -> str:
    """Messages as one text."""
    return "\n\n".join(str(m["content"]) for m in messages)


def _debugged(box: Toolbox, call: Call, answer: Answer, debug: Callable[[str, str], str]) -> Answer:
    return box.run(call.name, call.arguments | {"code": debug(call.arguments["code"], answer.text)})


def _shown(answers: Sequence[Answer]) -> str:
    return "\n".join(f"<tool_response>\n{answer.text}\n</tool_response>" for answer in answers)


def _refined(chain: Chain, prompt: Sequence[Message], aids: Aids) -> Chain:
    """The chain, made shorter where it is too long and may be."""
    if aids.refine is None or chain.refined >= aids.refines or len(told(chain.messages)) <= aids.longest:
        return chain
    shorter = aids.refine(told(prompt), told(chain.messages))
    messages = ({"role": "assistant", "content": shorter}, {"role": "user", "content": GO_ON})
    return chain._replace(messages=messages, refined=chain.refined + 1)


def solve(
    write: Write, box: Toolbox, prompt: Sequence[Message], *, calls: int, aids: Aids = NO_AIDS, draw: int = 0
) -> Chain:  # fmt: skip
    """Asks, makes the calls of the response, shows what was answered and asks again, until nothing is called.

    Of a turn in which a call fails: a program that ends with an error is written anew by the debugger and run, and what
    that gives is shown in its place, whatever it is. Where there is no debugger, or it has done all that it may, the
    turn is dropped and written anew from what stands before it. Else the error is shown.

    Args:
      prompt: messages that hold the tools already (``tool_question.asked``).
      calls: responses whose calls are made, at most; the one after them is the answer, whatever it holds, and the chain
        is not ended where it calls.
      draw: of the writer; a dropped turn is another draw, so that a writer at temperature 0 repeats itself.

    From "Tool-Star", arXiv:2505.16410, section 3.1, with its code (``evaluation/run.py``). Differs from the code in
    dropping the whole response with the call, where that goes back to the last line before it, in going back from a
    failed search as well, and in counting characters, not tokens, before it refines.

    Raises:
      RuntimeError: where a tool cannot be asked: that says nothing about the writer.
    """
    chain, rounds = Chain(), 0
    while True:
        text = write([*prompt, *chain.messages], draw + chain.back)
        turn = take_turn(box, text) if rounds < calls else None
        said = {"role": "assistant", "content": text}
        if turn is None or not turn.answers:
            return chain._replace(messages=(*chain.messages, said), ended=turn is not None or OPEN not in text)
        answers, debugged = list(turn.answers), chain.debugged
        for k, (call, answer) in enumerate(zip(turn.reply.calls, turn.answers, strict=True)):
            mends = aids.debug is not None and debugged < aids.debugs and not call.problem and answer.valid
            if mends and answer.error and call.name == "python":
                answers[k], debugged = _debugged(box, call, answer, aids.debug), debugged + 1
        lost = next((a.text for a in answers if not a.valid), None)
        if lost is not None:
            raise RuntimeError(lost)
        failed, mended = sum(a.error for a in answers), debugged > chain.debugged
        if failed and not mended and chain.back < aids.backs:
            chain = chain._replace(back=chain.back + 1)
            continue
        rounds += 1
        heard = {"role": "user", "content": _shown(answers)}
        chain = chain._replace(
            messages=(*chain.messages, said, heard), calls=(*chain.calls, *turn.reply.calls),
            failed=chain.failed + failed, debugged=debugged,
        )  # fmt: skip
        chain = _refined(chain, prompt, aids)
