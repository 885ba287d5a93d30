"""Confidence stated in text: a field that a prompt asks for, read back."""

import re

ASK = "\nEnd with a line 'Confidence: N %' where N from 0 to 100 is the chance that your answer is right."
_FIELD = re.compile(r"confidence(?:\s+is)?\W{0,8}([0-9]{1,3}(?:\.[0-9]+)?)(?![0-9.]*\s*/)", re.IGNORECASE)
MAX_CHARACTERS = 20_000


def read_confidence(response: str) -> float | None:
    """The last stated confidence as a share in [0, 1]; None where none can be read.

    A number is read as percent; above 100 it is none.

    >>> read_confidence("#12\\nConfidence: 85 %"), read_confidence("**Confidence:** 7%"), read_confidence("sure")
    (0.85, 0.07, None)
    """
    found = _FIELD.findall(response[-MAX_CHARACTERS:])
    if not found:
        return None
    value = float(found[-1])
    return value / 100.0 if value <= 100.0 else None
