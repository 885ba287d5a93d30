"""What an agent left behind: its database against the gold one, and what it had to tell the user."""

import hashlib
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.verifiers.verdict import Verdict


def state_digest(state: Any) -> str:
    """A hash of nested dictionaries, sequences, sets and scalars, whatever the order of keys and of members of sets.

    A list and a tuple of equal members are equal; ``1``, ``1.0``, ``True`` and ``"1"`` are four different things.

    From "MUA-RL: Multi-turn User-interacting Agent Reinforcement Learning for Agentic Tool Use", arXiv:2508.18669.

    Raises:
      ValueError: for anything else, whose text may change from run to run.

    >>> state_digest({"a": {1, 2}, "b": [3]}) == state_digest({"b": (3,), "a": {2, 1}})
    True
    """
    return hashlib.sha256(_canonical(state).encode()).hexdigest()


def _canonical(value: Any) -> str:
    if isinstance(value, dict):
        rows = sorted((_canonical(key), _canonical(member)) for key, member in value.items())
        return "{" + ",".join(f"{key}:{member}" for key, member in rows) + "}"
    if isinstance(value, set | frozenset):
        return "<" + ",".join(sorted(map(_canonical, value))) + ">"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if value is None or isinstance(value, bool | int | float | str):
        return f"{type(value).__name__}{value!r}"
    raise ValueError(f"a {type(value).__name__} in the state; use dictionaries, lists, sets, numbers and strings")


def _plain(text: str) -> str:
    return text.lower().replace(",", "")


def says_all(outputs: Sequence[str], messages: Sequence[str]) -> bool:
    """Every output occurs in one of the messages; case and commas count nowhere.

    >>> says_all(["1,234"], ["Your refund is 1,234 dollars."]), says_all(["yes", "no"], ["Yes."])
    (True, False)
    """
    told = [_plain(message) for message in messages]
    return all(any(_plain(output) in message for message in told) for output in outputs)


def judge_end(state: Any, gold: Any, messages: Sequence[str], outputs: Sequence[str] = ()) -> Verdict:
    """1 where the database is the gold one and the user was told every output, else 0.

    Args:
      gold: the database after the right actions.
      messages: what the agent said to the user; tool calls are none of them.

    From "MUA-RL: Multi-turn User-interacting Agent Reinforcement Learning for Agentic Tool Use", arXiv:2508.18669.
    Differs from its code, which drops the commas of messages only, so that an output with a comma is never found.
    """
    if state_digest(state) != state_digest(gold):
        return Verdict(0.0, True, "the database differs from the gold one")
    if not says_all(outputs, messages):
        return Verdict(0.0, True, "the user was not told everything")
    return Verdict(1.0)
