"""Data with tools as Tool-Star makes them: sampled by prompts and by hints, held to a standard, parted by difficulty.

Every question is answered without tools, with tools, and with tools from a hint on that breaks into an answer without
them. What a verifier finds right, and the standard lets pass, is a candidate; what both ways solve decides whether a
question is imitated, and how, or left to reinforcement.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.agents.parts import tool_chains
from experiments.agents.parts.tool_chains import Chain, Message, Write
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.envs import tool_question
from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.calls import CLOSE, OPEN, SPOKEN, THOUGHT, Toolbox

TAGS = ((OPEN, CLOSE), (THOUGHT, SPOKEN), ("<answer>", "</answer>"))
DOUBT, CHECK, END = "doubt", "check", "end"
HINTS: Mapping[str, str] = {
    DOUBT: "Wait, I am not certain of this. Let me use a tool to find out.",
    CHECK: "Let me check this with a tool.",
    END: "Before I leave it at this answer, let me check it with a tool.",
}
BEGUN = "You began your answer like this; go on from exactly where it stops, without repeating it:\n\n{}"
_WORDS = {
    CHECK: re.compile(r"\b(check|verify|verified|double-check|confirm|make sure)\b", re.IGNORECASE),
    DOUBT: re.compile(
        r"\b(wait|hmm|maybe|perhaps|probably|possibly|not sure|not certain|uncertain|alternatively|however|i think|"
        r"i believe|might be|seems)\b",
        re.IGNORECASE,
    ),
}
_SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]*\s*")
# none reaches over the beginning of another: many that nobody closes would each be read to the end of the text
_CALL = re.compile(f"{OPEN}((?:(?!{OPEN}).)*?){CLOSE}", re.DOTALL)
Kind = Literal["easy", "direct", "tool", "hard"]


def places(text: str) -> list[tuple[int, str]]:
    """Where a hint may break in: before sentences that check or doubt, and at the end; with what kind of hint.

    >>> places("It is 4. Perhaps 5. Let me verify: 4.")
    [(9, 'doubt'), (20, 'check'), (37, 'end')]
    """
    found = []
    for match in _SENTENCE.finditer(text):
        kind = next((kind for kind, words in _WORDS.items() if words.search(match.group())), None)
        if kind is not None and match.start() > 0:
            found.append((match.start(), kind))
    return [*found, (len(text), END)]


def hinted(rng: np.random.Generator, text: str, hints: Mapping[str, str] = HINTS) -> str:
    """An answer up to one of its ``places``, drawn evenly, with the hint of that place behind it.

    From "Tool-Star", arXiv:2505.16410, section 3.2 (hint-based sampling): hints at logical checks, at words of doubt
    and behind the answer. Differs from the paper in the words of hints and of doubt, which are our own.
    """
    found = places(text)
    at, kind = found[int(rng.integers(len(found)))]
    return f"{text[:at].rstrip()}\n{hints[kind]}\n".lstrip()


def continued(write: Write, box: Toolbox, prompt: Sequence[Message], begun: str, *, calls: int, draw: int) -> Chain:
    """A chain that goes on from the beginning of a response: that is the beginning of its first response.

    Differs from the paper in that the beginning is shown to the writer in the user's message, which any model behind an
    address of chats takes; it stands in the response afterwards, as if it had been written in one go.
    """
    asked = [*prompt[:-1], prompt[-1] | {"content": f"{prompt[-1]['content']}\n\n{BEGUN.format(begun)}"}]
    found = tool_chains.solve(write, box, asked, calls=calls, draw=draw)
    first, *rest = found.messages
    return found._replace(messages=(first | {"content": begun + first["content"]}, *rest))


def fault(chain: Chain, *, most_calls: int) -> str:
    """Why a chain is not kept; empty where it is.

    From "Tool-Star", arXiv:2505.16410, section 3.2 (tool-use quality normalization): the frequency of calls, calls that
    repeat, and the format.

    >>> fault(Chain(({"role": "assistant", "content": "<think> 4"},), ended=True), most_calls=5)
    'it calls nothing'
    """
    if not chain.ended:
        return "it has no answer"
    if not chain.calls:
        return "it calls nothing"
    if any(call.problem for call in chain.calls):
        return "a call is malformed"
    if len(chain.calls) > most_calls:
        return f"it calls more than {most_calls} times"
    different = {(call.name, json.dumps(call.arguments, sort_keys=True)) for call in chain.calls}
    if len(different) < len(chain.calls):
        return "it makes a call twice"
    for message in chain.messages:
        for opening, closing in TAGS:
            begun, closed = message["content"].count(opening), message["content"].count(closing)
            told = opening == THOUGHT and closed == begun + 1  # a template may open the thought
            if message["role"] == "assistant" and begun != closed and not told:
                return f"{opening} is not closed, or not opened"
    return ""


def standard(text: str) -> str:
    """A response with every call written in one way, and no space around it.

    >>> standard(' So: <tool_call>{"arguments":{"x":1},"name":"f"}</tool_call> ')
    'So: <tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>'
    >>> len(standard("<tool_call> " * 50_000))
    599999
    """

    def rewritten(match: re.Match[str]) -> str:
        try:
            call = json.loads(match.group(1))
            said = {"name": call["name"], "arguments": call["arguments"]}
        except (ValueError, TypeError, KeyError, RecursionError):
            return match.group()
        return f"{OPEN}\n{json.dumps(said, ensure_ascii=False)}\n{CLOSE}"

    return _CALL.sub(rewritten, text).strip()


def kind_of(direct: bool, tool: bool) -> Kind:
    """The difficulty of a question: solved without tools and with, without alone, with alone, or not at all.

    From "Tool-Star", arXiv:2505.16410, section 3.2 (difficulty-aware classification).

    >>> [kind_of(*pair) for pair in ((True, True), (True, False), (False, True), (False, False))]
    ['easy', 'direct', 'tool', 'hard']
    """
    return ("easy" if tool else "direct") if direct else ("tool" if tool else "hard")


class Sampled(NamedTuple):
    """What was sampled of a question: right answers without tools, the chains kept, and why the others are not."""

    problem: Problem
    direct: tuple[str, ...]
    chains: tuple[Chain, ...]
    faults: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """``kind_of`` what is there."""
        return kind_of(bool(self.direct), bool(self.chains))


class Sizes(NamedTuple):
    """How much is sampled of a question, and what the standard is."""

    direct: int = 1  # answers without tools
    prompted: int = 1  # chains from the prompt
    hints: int = 1  # chains from a hint, each in one of the answers without tools
    calls: int = 6  # responses with calls in a chain, while it is sampled
    most_calls: int = 5  # of a chain that is kept


def sample(
    write: Write, box: Toolbox, problem: Problem, right: Callable[[str], bool], rng: np.random.Generator, sizes: Sizes
) -> Sampled:
    """Answers one question in all three ways.

    From "Tool-Star", arXiv:2505.16410, section 3.2. Differs from the paper in breaking into answers of the same writer.
    """
    plain = tool_chains.opened(problem)
    prompt = tool_chains.opened(tool_question.asked(problem, box))
    texts = [write(plain, k * tool_chains.DRAWS) for k in range(sizes.direct)]
    chains = [
        tool_chains.solve(write, box, prompt, calls=sizes.calls, draw=k * tool_chains.DRAWS)
        for k in range(sizes.prompted)
    ]
    for k in range(sizes.hints if texts else 0):
        begun = hinted(rng, texts[k % len(texts)])
        chains.append(continued(write, box, prompt, begun, calls=sizes.calls, draw=k * tool_chains.DRAWS))
    kept, faults = [], []
    for chain in chains:
        why = fault(chain, most_calls=sizes.most_calls) or ("" if right(chain.answer) else "its answer is wrong")
        faults.append(why)
        kept += [] if why else [chain]
    return Sampled(problem, tuple(t for t in texts if right(t)), tuple(kept), tuple(why for why in faults if why))


def _row(messages: Sequence[Message], said: str, kind: Kind) -> dict[str, Any]:
    return {"prompt": list(messages), "answer": said, "solution": said, "kind": kind}


def imitated_rows(found: Sampled, box: Toolbox) -> list[dict[str, Any]]:
    """Rows of ``jaxrl sft``: a question's answer without tools where there is one, else its chain; none if hard.

    Every response of a chain is a row of its own, behind all before it: what tools answer stands in prompts, so that it
    trains nothing. Prompts name the tools either way: where they are not needed, that is what is learnt.
    """
    prompt, kind = tool_chains.opened(tool_question.asked(found.problem, box)), found.kind
    if found.direct:
        return [_row(prompt, standard(found.direct[0]), kind)]
    if not found.chains:
        return []
    chain = min(found.chains, key=lambda one: len(one.calls))
    said = [m | {"content": standard(m["content"])} if m["role"] == "assistant" else m for m in chain.messages]
    return [_row([*prompt, *said[:k]], m["content"], kind) for k, m in enumerate(said) if m["role"] == "assistant"]


def reinforced_rows(found: Sampled) -> list[dict[str, Any]]:
    """The row of ``--data`` of a hard question, in the plain format; none of the others.

    Raises:
      UserError: where the plain format does not hold what a verifier needs.
    """
    if set(found.problem.answer) != {"value"}:
        raise UserError(
            "rows are written in the plain format, whose answers are one value; give --format plain, gsm8k, math, "
            "aime, hotpotqa or nq"
        )
    row = {"prompt": found.problem.prompt, "answer": found.problem.answer["value"], "level": found.problem.level}
    return [row | {"kind": found.kind}] if found.kind == "hard" else []
