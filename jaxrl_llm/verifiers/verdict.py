"""The judgement of one response."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Verdict(NamedTuple):
    """``value`` is the reward; ``valid=False`` marks an infrastructure failure: it trains nothing, counts nowhere."""

    value: float
    valid: bool = True
    reason: str = ""


Verifier = Callable[[dict[str, Any], str], Verdict]
