"""A service desk over a local database: an agent with tools, a user who wants something, and the state in the end.

The shape is tau-bench's: the agent either calls tools or speaks to the user; the talk ends when the user says the stop
word or is handed to a human agent, and pays 1 where the database is the one that the task's actions leave, and the user
was told what the task asks for. The user is a ``endpoints.Chat``: a model behind an address, or ``plain_user``.

A user may have a device with tools of its own (tau2-bench's telecom): what the agent cannot do there it has to ask for,
and the talk pays 1 where what the task asserts of database and device holds in the end. The user calls tools as the
agent does, and the agent is shown only what the user then says.

From "tau-bench: A Benchmark for Tool-Agent-User Interaction in Real-World Domains", arXiv:2406.12045, and
"tau2-bench: Evaluating Conversational Agents in a Dual-Control Environment", arXiv:2506.07982.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from experiments.agents.parts.desk_files import DeskTask, SideCall
from experiments.agents.parts.end_state import judge_end
from experiments.agents.parts.tau_bench_tools import RETAIL, Tables, changed, fresh, toolbox
from jaxrl_llm.data.formats import with_tools
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.envs.text import Given, given
from jaxrl_llm.errors import DataError
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult, text_identity
from jaxrl_llm.tools import calls
from jaxrl_llm.tools import schema as schemas
from jaxrl_llm.tools.calls import Answer, Toolbox
from jaxrl_llm.tools.endpoints import Chat, Unanswered, draw_of
from jaxrl_llm.tools.schema import Tool, declared
from jaxrl_llm.verifiers.verdict import Verdict

STOP = "###STOP###"
LAST = "transfer_to_human_agents"  # ends the talk
RESPOND = "respond"  # an action of a task that only says something
GREETING = "Hi! How can I help you today?"
WANTS = "What you want: "
PLAYS = (
    "You play a customer who writes to a service desk. Write one short message at a time, in your own words, and say "
    "only what the desk needs to know next. What is not given below you do not know: say so and invent nothing. Keep "
    f"to the manner that is described. When you have got what you want, write {STOP} and nothing else."
)
USER = f"{PLAYS}\n\n{WANTS}"
AT_HAND = (
    "The tools below are what you can do yourself; the desk cannot. Call one when the desk asks you to, or to answer "
    "what it asks, one at a time, and make up no result: when you have seen it, tell the desk in your own words. The "
    "desk does not see your calls. Either call a tool or write a message, never both."
)
MOST_CALLS = 8  # replies of a user that call tools, before it says something
RESPONSE = "<tool_response>\n{}\n</tool_response>"


class Device(NamedTuple):
    """What a user has at hand beside the talk, and how it hangs together with the database.

    It is one table of the episode. The user's tools are given that table alone, the agent's all others.
    """

    table: str
    tools: Sequence[tuple[Tool, Callable[..., Any]]]  # functions of tables, as those of the desk
    settle: Callable[[Tables], None]  # after every call: what one side notices of the other
    # by side, ``assistant`` and ``user``: functions of all tables by which tasks begin, beside the tools, and which say
    # whether something holds in the end
    begin: Mapping[str, Mapping[str, Callable[..., Any]]]
    checks: Mapping[str, Mapping[str, Callable[..., bool]]]


class Desk(NamedTuple):
    """A database, as it is before every episode, what can be done with it, and the rules that the agent is told.

    ``tools`` are functions of the tables and of what is declared; what they change they take by
    ``tau_bench_tools.row``.
    """

    start: Tables
    policy: str  # tau-bench: wiki.md; tau2-bench: policy.md
    tools: Sequence[tuple[Tool, Callable[..., Any]]] = RETAIL
    device: Device | None = None


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
    made: tuple[SideCall, ...] = ()  # calls of both sides


def plain_user(messages: Sequence[dict[str, str]], draw: int = 0) -> str:
    """A stand-in for a simulated user: says everything at once, agrees to every question, leaves when none is asked.

    One with a device calls the tools that a message names, with the JSON object that may follow a name, and then says
    what they showed.
    """
    system, last = messages[0]["content"], messages[-1]["content"]
    if len(messages) == 2:
        return system.partition(WANTS)[2]
    begin, end = RESPONSE.split("{}")
    if last.startswith(begin):
        return last.removeprefix(begin).removesuffix(end).replace(end + "\n" + begin, "\n")
    declared_part = system.partition(WANTS)[0].partition("<tools>")[2].partition("</tools>")[0]
    named = [found for name in _NAME.findall(declared_part) for found in re.finditer(rf"\b{name}\b", last)]
    if named:
        return "\n".join(_call_text(found, last) for found in sorted(named, key=re.Match.start))
    return "Yes." if "?" in last else STOP


_NAME = re.compile(r'"function": \{"name": "(\w+)"')


def _call_text(found: re.Match[str], text: str) -> str:
    """The call of a tool that a text names."""
    rest = text[found.end() :].lstrip(" (:`")
    try:
        arguments = json.JSONDecoder().raw_decode(rest)[0] if rest.startswith("{") else {}
    except (ValueError, RecursionError):  # also of endless numbers and brackets, which an agent may write
        arguments = {}
    return f"{calls.OPEN}{json.dumps({'name': found.group(), 'arguments': arguments})}{calls.CLOSE}"


def _owned(desk: Desk, side: str) -> Sequence[tuple[Tool, Callable[..., Any]]]:
    if side == "assistant":
        return desk.tools
    return () if desk.device is None else desk.device.tools


def side_box(desk: Desk, tables: Tables, side: str) -> Toolbox:
    """The tools of one side, which see its tables alone; after a call the other side notices what it does."""
    if desk.device is None:
        return toolbox(tables, _owned(desk, side))
    device = desk.device
    seen = {name: rows for name, rows in tables.items() if (name == device.table) == (side == "user")}
    box = toolbox(seen, device.tools if side == "user" else desk.tools)

    def run(name: str, arguments: dict[str, Any]) -> Answer:
        answer = box.run(name, arguments)
        device.settle(tables)
        return answer

    return box._replace(run=run)


def _check_call(desk: Desk, call: SideCall, functions: Mapping[str, Callable[..., Any]], where: str) -> None:
    """Raises DataError where a call is neither of a tool of its side nor of a function of these."""
    tools = {item.name: item for item, _ in _owned(desk, call.side)}
    if call.name in tools:
        wrong = schemas.problem(call.arguments, tools[call.name].parameters, at=call.name)
    elif call.name in functions:
        try:
            inspect.signature(functions[call.name]).bind({}, **call.arguments)
            wrong = ""
        except TypeError as error:
            wrong = f"{call.name}: {error}"
    else:
        there = "the desk" if call.side == "assistant" else "the user"
        names = ", ".join([*tools, *functions]) or "none"
        wrong = f"name: {call.name!r} is no tool of {there}; there are {names}"
    if wrong:
        raise DataError(f"{where}: {wrong}")


def _side_calls(task: DeskTask) -> list[SideCall]:
    """The actions of a task with the sides that take them."""
    return [SideCall("user" if k in task.by_user else "assistant", *pair) for k, pair in enumerate(task.actions)]


def check_task(desk: Desk, task: DeskTask) -> None:
    """Whether the desk, and what the user has at hand, can take the actions of a task, begin it and check its end.

    Raises:
      DataError: for an action that is no tool of its side, or does not fit its declaration.
    """
    device = desk.device
    for k, call in enumerate(_side_calls(task)):
        if call.name != RESPOND:
            _check_call(desk, call, {}, f"{task.where}: actions[{k}]")
    for k, call in enumerate(task.begin):
        functions = {} if device is None else device.begin[call.side]
        _check_call(desk, call, functions, f"{task.where}: initialization_actions[{k}]")
    for k, (call, _) in enumerate(task.checks):
        functions = {} if device is None else device.checks[call.side]
        if call.name not in functions:
            at, names = f"{task.where}: env_assertions[{k}]", ", ".join(functions) or "none"
            raise DataError(f"{at}: func_name: {call.name!r} is nothing that can be asserted; there are {names}")
        _check_call(desk._replace(tools=(), device=None), call, functions, f"{task.where}: env_assertions[{k}]")


def begun_tables(desk: Desk, task: DeskTask) -> Tables:
    """Both sides as a task finds them.

    Raises:
      DataError: where they lack what the task needs.
    """
    tables = fresh(desk.start)
    if desk.device is None and not task.begin:
        return tables
    for k, call in enumerate(task.begin):
        function = {} if desk.device is None else desk.device.begin[call.side]
        try:
            if call.name in function:
                function[call.name](tables, **call.arguments)
                refused = ""
            else:
                answer = side_box(desk, tables, call.side).run(call.name, call.arguments)
                refused = answer.text if answer.error or not answer.valid else ""
            if desk.device is not None:
                desk.device.settle(tables)
        except (KeyError, ValueError) as error:
            refused = f"{call.name}: {error}"
        if refused:
            raise DataError(f"{task.where}: initialization_actions[{k}]: {refused}")
    return tables


def gold_tables(desk: Desk, task: DeskTask) -> Tables:
    """What the actions of a task leave of both sides; what the tools refuse is left undone, as in tau-bench.

    Raises:
      DataError: as ``check_task``, or where the database lacks what a tool needs.
    """
    check_task(desk, task)
    tables = begun_tables(desk, task)
    boxes = {side: side_box(desk, tables, side) for side in ("assistant", "user")}
    for k, (side, name, arguments) in enumerate(_side_calls(task)):
        if name == RESPOND:
            continue
        answer = boxes[side].run(name, arguments)
        if not answer.valid:
            raise DataError(f"{task.where}: actions[{k}]: {answer.text}")
    return tables


def holds(desk: Desk, tables: Tables, call: SideCall) -> bool:
    """Whether an assertion holds of both sides; one about what is not there does not."""
    try:
        return desk.device is not None and desk.device.checks[call.side][call.name](tables, **call.arguments)
    except (KeyError, ValueError):
        return False


def _taken(task: DeskTask, made: Sequence[SideCall]) -> str:
    """The first action of a task that was not taken; empty where all were."""
    for k, wanted in enumerate(_side_calls(task)):
        names = task.compared[k] if k < len(task.compared) else None

        def same(call: SideCall, wanted: SideCall = wanted, names: Sequence[str] | None = names) -> bool:
            kept = [
                {n: x for n, x in c.arguments.items() if names is None or n in names} for c in (wanted, call)
            ]  # fmt: skip
            return call[:2] == wanted[:2] and schemas.same(*kept)

        if wanted.name != RESPOND and not any(map(same, made)):
            return wanted.name
    return ""


def judge(desk: Desk, talk: Talk) -> Verdict:
    """What a talk was worth, by what counts of its task: the database, what was said, assertions, actions."""
    task = talk.client.task
    if "ENV_ASSERTION" in task.basis:
        for call, wanted in task.checks:
            if holds(desk, talk.tables, call) != wanted:
                return Verdict(0.0, True, f"{call.name} is not {str(wanted).lower()}")
    if "ACTION" in task.basis and (absent := _taken(task, talk.made)):
        return Verdict(0.0, True, f"{absent} was not called")
    gold = gold_tables(desk, task) if "DB" in task.basis else talk.tables
    ends = (changed(tables, desk.start) for tables in (talk.tables, gold))
    return judge_end(*ends, talk.told, task.outputs if "COMMUNICATE" in task.basis else ())


def open_talk(task: DeskTask, user: Chat, desk: Desk | None = None) -> Client:
    """Has the user of a task say the first thing; one with a device calls no tool for that.

    Raises:
      Unanswered: where the model that plays the user does not reply.
    """
    said = user(_opening(task, desk))
    if desk is not None and desk.device is not None:
        said = calls.parse(said, [item for item, _ in desk.device.tools]).text or said
    return Client(task, said)


def _opening(task: DeskTask, desk: Desk | None = None) -> list[dict[str, str]]:
    told = USER
    if desk is not None and desk.device is not None:
        tools = with_tools(AT_HAND, [declared(item) for item, _ in desk.device.tools])
        told = f"{PLAYS}\n\n{tools}\n\n{WANTS}"
    return [{"role": "system", "content": told + task.instruction}, {"role": "user", "content": GREETING}]


def _responses(answers: Sequence[Answer]) -> str:
    return "\n".join(RESPONSE.format(answer.text) for answer in answers)


def _made(side: str, turn: calls.Turn) -> tuple[SideCall, ...]:
    return tuple(SideCall(side, call.name, call.arguments) for call in turn.reply.calls if not call.problem)


class _Replied(NamedTuple):
    """What a user said, after what it did with its device."""

    heard: tuple[dict[str, str], ...]
    said: str
    made: tuple[SideCall, ...]
    problem: str = ""  # why there is no reply


def _reply(desk: Desk, user: Chat, talk: Talk, heard: tuple[dict[str, str], ...]) -> _Replied:
    made: tuple[SideCall, ...] = ()
    for _ in range(MOST_CALLS + 1):
        said = user(heard, talk.draw)
        heard = (*heard, {"role": "assistant", "content": said})
        if desk.device is None:
            return _Replied(heard, said, made)
        turn = calls.take_turn(side_box(desk, talk.tables, "user"), said)
        if not turn.reply.calls:
            return _Replied(heard, turn.reply.text, made)
        made += _made("user", turn)
        if not turn.valid:
            return _Replied(heard, said, made, "; ".join(a.text for a in turn.answers if not a.valid))
        heard = (*heard, {"role": "user", "content": _responses(turn.answers)})
    return _Replied(heard, "", made, f"the user called tools {MOST_CALLS + 1} times and said nothing")


def desk_env(desk: Desk, user: Chat = plain_user) -> TextEnv:
    """The desk; a task is a ``Client``. A reply with calls goes to the tools, one without to the user.

    As in tau-bench every talk samples its user anew, but for the first words, which are part of the prompt. A question
    that the user's model refuses makes the episode invalid. Several calls of one reply are made in their order; the
    turn's mark is how many of them a tool could answer. A user with a device may use it before it answers; one that
    never comes to words makes the episode invalid.
    """

    def reset(seed: Any, client: Client) -> Talk:
        heard = (*_opening(client.task, desk), {"role": "assistant", "content": client.opening})
        return Talk(client, begun_tables(desk, client.task), draw_of(seed), heard, ())

    def ended(talk: Talk) -> TextStepResult:
        verdict = judge(desk, talk)
        return TextStepResult(talk, "", verdict.value, True, verdict.valid, reason=verdict.reason)

    def step(talk: Talk, text: str) -> TextStepResult:
        turn = calls.take_turn(side_box(desk, talk.tables, "assistant"), text)
        if turn.reply.calls:
            talk = talk._replace(made=talk.made + _made("assistant", turn))
            if not turn.valid:
                return TextStepResult(
                    talk, "", 0.0, False, False, reason="; ".join(a.text for a in turn.answers if not a.valid)
                )
            if any(call.name == LAST and not call.problem for call in turn.reply.calls):
                return ended(talk)
            marks = sum(not answer.error for answer in turn.answers)
            return TextStepResult(talk, _responses(turn.answers), 0.0, False, mark=marks)
        heard = (*talk.heard, {"role": "user", "content": turn.reply.text})
        try:
            reply = _reply(desk, user, talk, heard)
        except Unanswered as error:
            return TextStepResult(talk, "", 0.0, False, False, reason=f"the user: {error}")
        if reply.problem:
            return TextStepResult(talk, "", 0.0, False, False, reason=reply.problem)
        after = talk._replace(
            heard=reply.heard, told=(*talk.told, turn.reply.text), made=talk.made + reply.made
        )  # fmt: skip
        return ended(after) if STOP in reply.said else TextStepResult(after, reply.said, 0.0, False)

    def identity(talk: Talk) -> int:
        return text_identity(json.dumps([changed(talk.tables, desk.start), talk.heard], sort_keys=True))

    return TextEnv(reset, step, identity)


def desks_env(desks: Sequence[Desk], user: Chat = plain_user) -> TextEnv:
    """Several desks as one env; a task is the number of its desk and a ``Client``."""
    envs = [desk_env(desk, user) for desk in desks]

    def reset(seed: Any, task: tuple[int, Client]) -> tuple[int, Talk]:
        return task[0], envs[task[0]].reset(seed, task[1])

    def step(state: tuple[int, Talk], text: str) -> TextStepResult:
        found = envs[state[0]].step(state[1], text)
        return found._replace(state=(state[0], found.state))

    def identity(state: tuple[int, Talk]) -> int:
        return envs[state[0]].identity(state[1])

    return TextEnv(reset, step, identity)


def _clients(desk: Desk, tasks: Sequence[DeskTask], user: Chat) -> tuple[list[Problem], list[Client]]:
    """One problem a task: the rules and tools as the system's message, then what the user says first."""
    clients = []
    for task in tasks:
        check_task(desk, task)
        begun_tables(desk, task)
        clients.append(open_talk(task, user, desk))
    rules = with_tools(desk.policy, [declared(item) for item, _ in desk.tools])
    rows = [
        Problem("desk", [{"role": "system", "content": rules}, {"role": "user", "content": client.opening}], "", {}, 0,
                f"{client.task.identity} {client.task.instruction}")
        for client in clients
    ]  # fmt: skip
    return rows, clients


def desks_texts(
    pairs: Sequence[tuple[Desk, Sequence[DeskTask]]],
    tokenizer: Tokenizer,
    *,
    user: Chat = plain_user,
    action_tokens: int,
    observation_tokens: int,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> Given:
    """One desk, or several as one world in the order of ``pairs``, a problem a task.

    A problem is the rules and tools as the system's message, then what the user says first; its answers hold the number
    of its ``desk``.

    Args:
      encode: of later observations, see ``data.chat.make_reply_encoder``.

    Raises:
      DataError: for a task whose actions do not fit the desk; UserError: where the tokenizer has no chat template.
    """
    parts = [_clients(desk, tasks, user) for desk, tasks in pairs]
    tasks = [(k, client) for k, (_, clients) in enumerate(parts) for client in clients]
    rows = [problem for problems, _ in parts for problem in problems]
    found = given(
        desks_env([desk for desk, _ in pairs], user), rows, tasks, tokenizer, action_tokens=action_tokens,
        observation_tokens=observation_tokens, encode=encode,
    )  # fmt: skip
    number = jnp.asarray([k for k, _ in tasks], jnp.int32)
    return found._replace(problems=found.problems._replace(answers={"desk": number}))
