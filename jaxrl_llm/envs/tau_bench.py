"""A service desk over a local database: an agent with tools, a user who wants something, and the state in the end.

The shape is tau-bench's: the agent either calls tools or speaks to the user; the talk ends when the user says the stop
word or is handed to a human agent, and pays 1 where the database is the one that the task's actions leave, and the user
was told what the task asks for. The user is a ``endpoints.Chat``: a model behind an address, or ``plain_user``.

From "tau-bench: A Benchmark for Tool-Agent-User Interaction in Real-World Domains", arXiv:2406.12045.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.agent_formats import DeskTask
from jaxrl_llm.data.formats import with_tools
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.envs.tau_bench_tools import RETAIL, Tables, changed, fresh, toolbox
from jaxrl_llm.envs.text import Given, given
from jaxrl_llm.errors import DataError
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult, text_identity
from jaxrl_llm.tools import calls
from jaxrl_llm.tools import schema as schemas
from jaxrl_llm.tools.endpoints import Chat, Unanswered, draw_of
from jaxrl_llm.tools.schema import Tool, declared
from jaxrl_llm.verifiers.end_state import judge_end
from jaxrl_llm.verifiers.verdict import Verdict

STOP = "###STOP###"
LAST = "transfer_to_human_agents"  # ends the talk
RESPOND = "respond"  # an action of a task that only says something
GREETING = "Hi! How can I help you today?"
WANTS = "What you want: "
USER = (
    "You play a customer who writes to a service desk. Write one short message at a time, in your own words, and say "
    "only what the desk needs to know next. What is not given below you do not know: say so and invent nothing. Keep "
    f"to the manner that is described. When you have got what you want, write {STOP} and nothing else.\n\n{WANTS}"
)


class Desk(NamedTuple):
    """A database, as it is before every episode, what can be done with it, and the rules that the agent is told.

    ``tools`` are functions of the tables and of what is declared; what they change they take by
    ``tau_bench_tools.row``.
    """

    start: Tables
    policy: str  # tau-bench: wiki.md; tau2-bench: policy.md
    tools: Sequence[tuple[Tool, Callable[..., Any]]] = RETAIL


class Client(NamedTuple):
    """A task and the first thing its user says."""

    task: DeskTask
    opening: str


class Talk(NamedTuple):
    """An episode: its own database, which changes, and what was said."""

    client: Client
    tables: Tables
    draw: int  # which sample of its user this is
    heard: tuple[dict[str, str], ...]  # as the user's model sees it
    told: tuple[str, ...]  # to the user


def plain_user(messages: Sequence[dict[str, str]], draw: int = 0) -> str:
    """A stand-in for a simulated user: says everything at once, agrees to every question, leaves when none is asked."""
    if len(messages) == 2:
        return messages[0]["content"].partition(WANTS)[2]
    return "Yes." if "?" in messages[-1]["content"] else STOP


def check_task(desk: Desk, task: DeskTask) -> None:
    """Whether the desk can take the actions of a task.

    Raises:
      DataError: for an action that is no tool of the desk, or does not fit its declaration.
    """
    known = {item.name: item for item, _ in desk.tools}
    for k, (name, arguments) in enumerate(task.actions):
        where = f"{task.where}: actions[{k}]"
        if name not in known and name != RESPOND:
            raise DataError(f"{where}: name: {name!r} is no tool of the desk; there are {', '.join(known)}")
        wrong = schemas.problem(arguments, known[name].parameters, at=name) if name in known else ""
        if wrong:
            raise DataError(f"{where}: {wrong}")


def gold_tables(desk: Desk, task: DeskTask) -> Tables:
    """The database that the actions of a task leave; what the tools refuse is left undone, as in tau-bench.

    Raises:
      DataError: as ``check_task``, or where the database lacks what a tool needs.
    """
    check_task(desk, task)
    tables = fresh(desk.start)
    box = toolbox(tables, desk.tools)
    for k, (name, arguments) in enumerate(task.actions):
        if name == RESPOND:
            continue
        answer = box.run(name, arguments)
        if not answer.valid:
            raise DataError(f"{task.where}: actions[{k}]: {answer.text}")
    return tables


def judge(desk: Desk, talk: Talk) -> Verdict:
    """What a talk was worth."""
    gold = gold_tables(desk, talk.client.task)
    ends = (changed(tables, desk.start) for tables in (talk.tables, gold))
    return judge_end(*ends, talk.told, talk.client.task.outputs)


def open_talk(task: DeskTask, user: Chat) -> Client:
    """Has the user of a task say the first thing.

    Raises:
      Unanswered: where the model that plays the user does not reply.
    """
    return Client(task, user(_opening(task)))


def _opening(task: DeskTask) -> list[dict[str, str]]:
    return [{"role": "system", "content": USER + task.instruction}, {"role": "user", "content": GREETING}]


def desk_env(desk: Desk, user: Chat = plain_user) -> TextEnv:
    """The desk; a task is a ``Client``. A reply with calls goes to the tools, one without to the user.

    As in tau-bench every talk samples its user anew, but for the first words, which are part of the prompt. A question
    that the user's model refuses makes the episode invalid. Several calls of one reply are made in their order; the
    turn's mark is how many of them a tool could answer.
    """

    def reset(seed: Any, client: Client) -> Talk:
        heard = (*_opening(client.task), {"role": "assistant", "content": client.opening})
        return Talk(client, fresh(desk.start), draw_of(seed), heard, ())

    def ended(talk: Talk) -> TextStepResult:
        verdict = judge(desk, talk)
        return TextStepResult(talk, "", verdict.value, True, verdict.valid, reason=verdict.reason)

    def step(talk: Talk, text: str) -> TextStepResult:
        turn = calls.take_turn(toolbox(talk.tables, desk.tools), text)
        if turn.reply.calls:
            if not turn.valid:
                return TextStepResult(
                    talk, "", 0.0, False, False, reason="; ".join(a.text for a in turn.answers if not a.valid)
                )
            if any(call.name == LAST and not call.problem for call in turn.reply.calls):
                return ended(talk)
            shown = "\n".join(f"<tool_response>\n{answer.text}\n</tool_response>" for answer in turn.answers)
            return TextStepResult(talk, shown, 0.0, False, mark=sum(not answer.error for answer in turn.answers))
        heard = (*talk.heard, {"role": "user", "content": turn.reply.text})
        try:
            said = user(heard, talk.draw)
        except Unanswered as error:
            return TextStepResult(talk, "", 0.0, False, False, reason=f"the user: {error}")
        after = talk._replace(
            heard=(*heard, {"role": "assistant", "content": said}), told=(*talk.told, turn.reply.text)
        )
        return ended(after) if STOP in said else TextStepResult(after, said, 0.0, False)

    def identity(talk: Talk) -> int:
        return text_identity(json.dumps([changed(talk.tables, desk.start), talk.heard], sort_keys=True))

    return TextEnv(reset, step, identity)


def desk_texts(
    desk: Desk,
    tasks: Sequence[DeskTask],
    tokenizer: Tokenizer,
    *,
    user: Chat = plain_user,
    action_tokens: int,
    observation_tokens: int,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> Given:
    """One problem a task: the rules and tools as the system's message, then what the user says first.

    Args:
      encode: of later observations, see ``data.chat.make_reply_encoder``.

    Raises:
      DataError: for a task whose actions do not fit the desk; UserError: where the tokenizer has no chat template.
    """
    clients = []
    for task in tasks:
        check_task(desk, task)
        clients.append(open_talk(task, user))
    rules = with_tools(desk.policy, [declared(item) for item, _ in desk.tools])
    rows = [
        Problem("desk", [{"role": "system", "content": rules}, {"role": "user", "content": client.opening}], "", {}, 0,
                f"{client.task.identity} {client.task.instruction}")
        for client in clients
    ]  # fmt: skip
    return given(
        desk_env(desk, user), rows, clients, tokenizer, action_tokens=action_tokens,
        observation_tokens=observation_tokens, encode=encode,
    )  # fmt: skip
