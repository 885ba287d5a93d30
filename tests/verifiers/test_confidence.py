"""Confidence read from text: forms that models write, and what is none."""

import pytest

from experiments.parts.read_confidence import ASK, read_confidence
from tests.close import doubles


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Confidence: 85", 0.85),
        ("confidence is 12.5 percent", 0.125),
        ("CONFIDENCE = 0%", 0.0),
        ("**Confidence**: **100%**", 1.0),
        ("Confidence: 20 %, no: confidence: 40 %", 0.4),
        ("Confidence: 8/10", None),
        ("Confidence: 850", None),
        ("Confidence: high", None),
        ("I am 90 % sure", None),
        ("", None),
        (ASK, None),
    ],
)
def test_forms(text, value):
    assert read_confidence(text) == (None if value is None else doubles(value))


def test_long_text_is_bounded():
    assert read_confidence("Confidence: 5 %" + " " * 30_000) is None
    assert read_confidence("confidence " * 20_000) is None
