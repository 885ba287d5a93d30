"""Environments behind an OpenEnv server: ``--data openenv:ADDRESS``, as text.

OpenEnv (github.com/meta-pytorch/OpenEnv) serves an environment over a WebSocket: a connection is an episode, ``reset``
takes the task as its ``seed``, ``step`` an action of the schema that the server shows under ``/schema``. What a model
writes is the one field of that action (``openenv:ADDRESS#FIELD`` where there are several), or a JSON object of all.
"""

import contextlib
import json
import math
import re
import urllib.error
import urllib.request
from functools import partial
from typing import Any, NamedTuple

from jaxrl_llm.envs.text import env_of_class
from jaxrl_llm.errors import UserError, extra_module
from jaxrl_llm.rollout.host.env import TextEnv
from jaxrl_llm.tools import schema

WAIT_S = 60.0  # for an answer
CALL_S = 2 * WAIT_S + 10.0  # of a call, which may connect first: a late answer is known before its process is ended
MOST_BYTES = 100 * 2**20  # of one
NONE = "That is no action: "
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class Served(NamedTuple):
    """What a server says of its environment, which a process of episodes is told."""

    address: str  # http://HOST:PORT
    about: str  # what opens every episode
    field: str  # of an action, which a text is; empty: a text is a JSON object of all fields
    kind: str  # of that field, as JSON Schema has it


def served(data: str) -> Served:
    """Asks the server of ``openenv:ADDRESS[#FIELD]``.

    Raises:
      UserError: for a server that does not answer, or an action without such a field.
    """
    address, _, wanted = data.removeprefix("openenv:").partition("#")
    address = address.rstrip("/")
    if not re.match(r"https?://[^/]", address):
        raise UserError(f"--data {data}: give openenv:http://HOST:PORT, or openenv:https://...")
    extra_module("websockets", f"--data {data} needs", "openenv")
    fields = _asked(f"{address}/schema", data).get("action", {}).get("properties", {})
    fields = {name: x for name, x in fields.items() if name != "metadata"}
    if wanted and wanted not in fields:
        raise UserError(f"--data {data}: its actions have the fields {', '.join(fields) or 'of none'}, not {wanted}")
    field = wanted or (next(iter(fields)) if len(fields) == 1 else "")
    about = [str(_asked(f"{address}/metadata", data).get("description") or "").strip()]
    if field:
        about.append(str(fields[field].get("description") or "").strip())
    else:
        shown = {name: x.get("description") or x.get("type") or "any" for name, x in fields.items()}
        about.append(f"Each turn, write one JSON object with these fields: {json.dumps(shown)}")
    kind = str(fields.get(field, {}).get("type", "string"))
    return Served(address, "\n".join(filter(None, about)), field, kind)


def _asked(address: str, data: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(address, timeout=WAIT_S) as reply:
            found = json.loads(reply.read(MOST_BYTES))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise UserError(f"--data {data}: {address} gives no JSON ({error}); is it the address of an OpenEnv server?"
                        ) from error  # fmt: skip
    return found if isinstance(found, dict) else {}


def shown(observation: Any) -> str:
    """An observation as text: its one text as it is, of several fields a line each.

    >>> shown({"message": "Hello", "left": None}), shown({"board": "x.o", "legal": [1, 2]})
    ('Hello', 'board: x.o\\nlegal: [1, 2]')
    """
    if not isinstance(observation, dict):
        return observation if isinstance(observation, str) else json.dumps(observation)
    there = {name: x for name, x in observation.items() if x not in (None, "", [], {})}
    if len(there) == 1 and isinstance(found := next(iter(there.values())), str):
        return found
    return "\n".join(f"{name}: {x if isinstance(x, str) else json.dumps(x)}" for name, x in there.items())


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no number that JSON has")
    return value


def action_of(place: Served, text: str) -> dict[str, Any] | None:
    """What a model wrote as an action; None where it is none, or holds a number beyond what a float holds.

    >>> place = Served("", "", "move", "integer")
    >>> action_of(place, "I take 3."), action_of(place, "none"), action_of(place._replace(kind="string"), "up")
    ({'move': 3}, None, {'move': 'up'})
    >>> action_of(place._replace(field=""), 'So: {"x": 1}')
    {'x': 1}
    """
    if place.field and place.kind == "string":
        return {place.field: text}
    if place.field and place.kind in ("integer", "number"):
        found = _NUMBER.search(text)
        if found is None or not math.isfinite(value := float(found[0])):
            return None
        # not by the float: it has whole numbers up to 2**53 only
        return {place.field: value if place.kind == "number" else int(found[0].partition(".")[0])}
    first, last = text.find("{"), text.rfind("}")
    try:
        written = text if place.field else text[first : last + 1]
        found = json.loads(written, parse_float=_finite, parse_constant=_finite)
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair comes back as what no tokenizer takes
    except (ValueError, RecursionError):
        return None
    if schema.deep(found):
        return None
    if place.field:
        return {place.field: found}
    return found if isinstance(found, dict) else None


class Episode:
    """One connection, as ``envs.text.own_env`` plays a class."""

    def __init__(self, place: Served):
        """Connects."""
        self.place = place
        self.client = extra_module("websockets.sync.client", "OpenEnv needs", "openenv")
        self.link = self.client.connect(
            f"ws{place.address.removeprefix('http')}/ws", open_timeout=WAIT_S, max_size=MOST_BYTES, proxy=None
        )

    def reset(self, task: int) -> str:
        """The text that opens the episode of a seed."""
        found = self._ask("reset", {"seed": task})
        if found is None:
            raise UserError(f"{self.place.address} refuses to reset with a seed")
        return "\n".join(filter(None, (self.place.about, shown(found.get("observation"))))) + "\n"

    def step(self, text: str) -> tuple[str, float, bool]:
        """What the environment shows of a text, its reward, and whether the episode is over."""
        action = action_of(self.place, text)
        found = None if action is None else self._ask("step", action)
        if found is None:
            return f"{NONE}{text[:80]}\n", 0.0, False
        return f"{shown(found.get('observation'))}\n", float(found.get("reward") or 0.0), bool(found.get("done"))

    def close(self) -> None:
        """Ends the episode on the server."""
        with contextlib.suppress(Exception):  # who has left cannot be told
            self.link.send(json.dumps({"type": "close"}))
        self.link.close()

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None for an action that the environment does not take."""
        self.link.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self.link.recv(timeout=WAIT_S))
        found = reply.get("data") or {}
        if reply.get("type") != "error":
            return found
        code, said = str(found.get("code")), str(found.get("message"))[:300]
        if code == "VALIDATION_ERROR":
            return None
        if code == "CAPACITY_REACHED":
            said += "; its server plays no more episodes at once (max_concurrent_envs): lower --slots"
        raise UserError(f"{self.place.address}: {code}: {said}")


def openenv_env(place: Served) -> TextEnv:
    """Episodes of a server, one connection each."""
    return env_of_class(partial(Episode, place), f"openenv:{place.address}")


def check(place: Served) -> None:
    """Raises UserError where a seed does not make the same episode again: prompts would show another one."""
    begun = []
    for _ in range(2):
        episode = Episode(place)
        begun.append(episode.reset(0))
        episode.close()
    if begun[0] != begun[1]:
        raise UserError(f"{place.address} shows another beginning at the second reset with seed 0; an episode must "
                        "depend on its seed: give the environment one")  # fmt: skip
