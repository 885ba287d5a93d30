"""math-verify inside the pool: equal values in other forms, and answers that never finish."""

import sys

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.verifiers import math
from jaxrl_llm.verifiers.pool import VerifierPool


@pytest.fixture(scope="module")
def judge():
    with VerifierPool(workers=1, timeout_s=4.0) as pool:
        yield lambda pairs: pool.judge(math.verify, [{"value": v} for v, _ in pairs], [r for _, r in pairs]).verdicts


CASES = [
    (r"\frac{1}{2}", "So it is $0.5$.", 1.0),
    ("1/2", r"\boxed{\frac{2}{4}}", 1.0),
    (r"$x^2+2x+1$", r"we find $(x+1)^2$", 1.0),
    ("42", "The answer is 42", 1.0),
    (r"\sqrt{8}", r"$2\sqrt{2}$", 1.0),
    (r"\{1,2\}", r"$\{2,1\}$", 1.0),
    ("42", "The answer is 41", 0.0),
    ("42", "", 0.0),
    ("42", "((((((", 0.0),
    ("42", r"$\frac{1}{0}$", 0.0),
    ("42", r"\boxed{", 0.0),
    ("42", "\x00\ud800".encode("utf-8", "replace").decode(), 0.0),
    ("42", "$" * 5000, 0.0),
]


def test_values_and_malformed_answers(judge):
    for (value, response, wanted), verdict in zip(CASES, judge([c[:2] for c in CASES]), strict=True):
        assert verdict.valid and verdict.value == wanted, (value, response[:40], verdict)


def test_a_reference_that_does_not_parse_is_invalid(judge):
    verdict = judge([("", "42")])[0]
    assert not verdict.valid and "reference" in verdict.reason


def test_an_answer_that_explodes_never_counts_as_right_and_the_pool_goes_on(judge):
    bomb, after = judge([("42", "$9^{9^{9^{9}}}$"), ("42", "42")])
    assert bomb.value == 0.0 and after == (1.0, True, "right")


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"jaxrl_llm\[tasks\]"):
        math.verify({"value": "1"}, "1")
