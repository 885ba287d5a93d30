"""What stands in a prompt that is text, or the messages of a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any


def asked_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """What the user asks: the prompt itself, or the last message of a user.

    >>> asked_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}])
    '1+1?'
    """
    if isinstance(prompt, str):
        return prompt
    return next((str(m["content"]) for m in reversed(prompt) if m["role"] == "user"), "")
