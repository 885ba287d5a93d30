"""Tools of MCP servers (extra ``mcp``) as a ``Toolbox``: a server is a process that is spoken to over its pipes.

The server runs with the rights of the user, outside any sandbox; of the environment it sees only what the ``mcp``
package passes on and what it is given. Every call has a deadline. A server that dies, hangs or breaks the protocol
makes answers invalid; it is not started again.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from jaxrl_llm.errors import UserError, extra_module
from jaxrl_llm.tools import schema
from jaxrl_llm.tools.calls import Answer, Toolbox

INVALID_PARAMS = -32602  # of JSON-RPC: what the policy wrote is refused
GRACE_S = 5.0  # beyond the protocol's own deadlines
MOST = 1 << 18  # characters of an answer; no observation is as long


def prepare() -> Any:
    """Imports the ``mcp`` package.

    Raises:
      UserError: when the extra is not installed.
    """
    return extra_module("mcp", "MCP servers need", "mcp")


def _text(result: Any) -> str:
    """The text parts of an answer; others by their kind."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    return "\n".join(parts)[:MOST]


async def _tools(client: Any) -> tuple[schema.Tool, ...]:
    """All pages of what a server offers."""
    found, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += [schema.tool(x.name, x.description or "", x.input_schema) for x in page.tools]
        cursor = page.next_cursor
        if not cursor:
            return tuple(found)


async def _serve(client: Any, start_s: float, ready: Future) -> None:
    """Holds the connection until it is told to stop."""
    try:
        async with asyncio.timeout(start_s) as deadline, client:
            tools = await _tools(client)
            deadline.reschedule(None)
            stop = asyncio.Event()
            ready.set_result((tools, asyncio.get_running_loop(), stop))
            await stop.wait()
    except Exception as error:  # whatever the server or the package does: the one who waits is told
        if not ready.done():
            ready.set_exception(error)


def _runner(client: Any, loop: asyncio.AbstractEventLoop, call_s: float) -> Callable[[str, dict[str, Any]], Answer]:
    from mcp.shared.exceptions import MCPError

    async def ask(name: str, arguments: dict[str, Any]) -> Any:
        async with asyncio.timeout(call_s + GRACE_S):
            return await client.call_tool(name, arguments, read_timeout_seconds=call_s)

    def run(name: str, arguments: dict[str, Any]) -> Answer:
        if loop.is_closed():
            return Answer(f"{name} cannot be asked: the connection was closed", valid=False)
        try:
            # the deadlines inside are kept by the connection's thread, which may have stopped or hang itself
            result = asyncio.run_coroutine_threadsafe(ask(name, arguments), loop).result(call_s + 2 * GRACE_S)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return Answer(f"error: {error.message}"[:MOST], error=True)
            return Answer(f"{name} did not answer: {error.message}"[:MOST], valid=False)
        except Exception as error:  # a dead or broken server, in whatever way it shows
            return Answer(f"{name} did not answer: {type(error).__name__}: {error}", valid=False)
        return Answer(_text(result), error=bool(result.is_error))

    return run


@contextmanager
def connect(
    command: Sequence[str],
    *,
    call_s: float = 30.0,
    start_s: float = 30.0,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> Iterator[Toolbox]:
    """Starts a server and gives its tools while the context lasts; the process ends with it.

    Calls may come from several threads. An answer is ``error`` where the server says so or refuses the arguments, and
    invalid where none came within ``call_s`` seconds or the server is gone.

    Args:
      command: the program and its arguments.
      start_s: deadline of starting, shaking hands and listing the tools.
      environment: variables beside the few that the ``mcp`` package passes on.
      folder: to run in.

    Raises:
      UserError: without the extra, or when the server does not start or speaks no MCP.
    """
    if not command or call_s <= 0 or start_s <= 0:
        raise UserError(f"command={list(command)}, call_s={call_s}, start_s={start_s}: a command and deadlines above 0")
    mcp = prepare()
    name, *rest = command
    place = mcp.StdioServerParameters(
        command=name, args=rest, env=None if environment is None else dict(environment), cwd=folder,
        encoding_error_handler="replace",  # one byte that is no UTF-8 would end the reading of all that follows
    )  # fmt: skip
    client, ready = mcp.Client(place), Future()
    thread = threading.Thread(
        target=lambda: asyncio.run(_serve(client, start_s, ready)), name=f"mcp {name}", daemon=True
    )
    thread.start()
    try:
        tools, loop, stop = ready.result(start_s + GRACE_S)
    except UserError:
        raise
    except Exception as error:
        while isinstance(error, BaseExceptionGroup):  # of the package's tasks
            error = error.exceptions[0]
        said = f"no handshake within {start_s:g} s" if isinstance(error, TimeoutError) else str(error)
        raise UserError(f"the MCP server {' '.join(command)} did not start: {said}") from error
    try:
        yield Toolbox(tools, _runner(client, loop, call_s))
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join(2 * GRACE_S)
