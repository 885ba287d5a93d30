"""A small MCP server over pipes: sums, refuses, sleeps, dies."""

import os
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def refuse() -> str:
    """Fails always."""
    raise ToolError("not today")


@server.tool()
def sleep(seconds: float) -> str:
    """Answers late."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def environment(name: str) -> str:
    """A variable of the environment."""
    return os.environ.get(name, "none")


if __name__ == "__main__":
    server.run("stdio")
