"""math-verify inside the pool: equal values in other forms, and answers that never finish."""

import sys
import time
import types
from fractions import Fraction

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.sandbox.records import Called
from jaxrl_llm.verifiers import math
from jaxrl_llm.verifiers.pool import VerifierPool


@pytest.fixture(scope="module")
def judge():
    with VerifierPool(workers=1, timeout_s=math.TIMEOUT_S) as pool:
        yield lambda pairs: pool.judge(math.verify, [{"value": v} for v, _ in pairs], [r for _, r in pairs]).verdicts


CASES = [
    (r"\frac{1}{2}", "So it is $0.5$.", 1.0),
    ("1/2", r"\boxed{\frac{2}{4}}", 1.0),
    (r"$x^2+2x+1$", r"we find $(x+1)^2$", 1.0),
    ("42", "The answer is 42", 1.0),
    (r"\sqrt{8}", r"$2\sqrt{2}$", 1.0),
    (r"\{1,2\}", r"$\{2,1\}$", 1.0),
    (r"\$18.90", r"\boxed{18.90}", 1.0),
    (r"\$18.90", r"\boxed{\$18.90}", 1.0),
    (r"\$18.90", r"\boxed{18}", 0.0),
    ("1/2", "<answer>1/2</answer>", 1.0),
    ("1/2", "<answer>2/1</answer>", 0.0),
    ("4", "so <answer>4</answer>", 1.0),
    ("4", "<answer>five</answer>", 0.0),
    ("4", "<answer> </answer>", 0.0),
    ("5", r"\boxed{5} or <answer>five</answer>", 1.0),
    ("1234_5", r"\boxed{1234_6}", 0.0),
    ("1234_5", r"\boxed{1234_{5}}", 1.0),
    ("1234_5", "so $1234_7$", 0.0),
    ("1234_5", r"\boxed{1234}", 1.0),
    ("1234", r"\boxed{1234_{10}}", 1.0),
    ("1234", r"\boxed{1234_5}", 0.0),
    ("a_1", r"\boxed{a_1}", 1.0),
    ("2", r"\boxed{\sin^2 x+\cos^2 x+1}", 1.0),
    ("x+1", r"\boxed{\frac{x^2-1}{x-1}}", 1.0),
    ("x+2", r"\boxed{\frac{x^2-1}{x-1}}", 0.0),
    (r"\frac{2x}{x^2-1}", r"\boxed{\frac1{x-1}+\frac1{x+1}}", 1.0),
    (r"\tan x", r"\boxed{\frac{\sin x}{\cos x}}", 1.0),
    (r"\tan x", r"\boxed{\frac{\cos x}{\sin x}}", 0.0),
    (r"\cos 2x", r"$2\cos^2x-1$", 1.0),
    ("5", r"Final answer is $3$. I hope it is correct. \boxed{5}", 1.0),
    ("3", r"Final answer is $3$. I hope it is correct. \boxed{5}", 0.0),
    ("5", r"\boxed{3} wait \boxed{5}", 1.0),
    ("3", r"\boxed{3} wait \boxed{5}", 0.0),
    ("5", r"$\boxed{3}$ or $\boxed{5}$", 0.0),
    ("3, 5", r"$\boxed{3}$ and $\boxed{5}$", 1.0),
    ("5", "\\boxed{\n5\n} The final answer is 7", 1.0),
    ("5", "The answer is 5. \\boxed{}", 1.0),
    ("0.5", r"$\boxed{50}$%", 1.0),
    ("1234", r"\boxed{1\,234}", 1.0),
    ("235", r"\boxed{1\,234}", 0.0),
    ("0", r"\boxed{1\,000}", 0.0),
    (r"12\,345.5", r"\boxed{12345.5}", 1.0),
    ("1000", r"\boxed{1 000}", 1.0),
    ("1, 234", r"\boxed{1, 234}", 1.0),
    (r"\begin{pmatrix}1\\ 234\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\ 234\end{pmatrix}}", 1.0),
    (r"\begin{pmatrix}1\\ 234\end{pmatrix}", r"\boxed{\begin{pmatrix}1234\end{pmatrix}}", 0.0),
    ("3.5", r"\boxed{3 1/2}", 1.0),
    ("2", r"\boxed{3 1/2}", 0.0),
    ("3 1/2", r"\boxed{\frac{7}{2}}", 1.0),
    ("-3.5", "The answer is -3 1/2.", 1.0),
    ("3½", r"\boxed{3.5}", 1.0),
    ("0.5", "So it is ½.", 1.0),
    ("2", "So it is ½.", 0.0),
    ("100000", r"\boxed{1e5}", 1.0),
    (1e-05, r"\boxed{0.00001}", 1.0),
    ("2e-3", r"\boxed{2e - 3}", 1.0),
    ("0.002", r"\boxed{2e-3}", 0.0),
    ("5", r"\boxed{5.}", 1.0),
    ("x = 5.", r"\boxed{5}", 1.0),
    ("5", r"\boxed{5~\mathrm{cm}}", 1.0),
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


@pytest.fixture(scope="module")
def impatient():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math, "LIMITS", math.LIMITS._replace(cpu_s=1.0))
        math._sandbox.cache_clear()
        math._with_itself.cache_clear()
        math.prepare()
        yield
    math._sandbox.cache_clear()
    math._with_itself.cache_clear()


HOSTILE = {
    "power tower": "$9^{9^{9^{9}}}$",
    "power tower in plain text": "10^10^10",
    "factorial": "$((10^9)!)!$",
    "binomial": r"$\binom{10^9}{5*10^8}$",
    "nested fractions": "$" + r"\frac{1}{" * 60 + "2" + "}" * 60 + "$",
    "nested brackets": "$" + "(" * 5000 + "1" + ")" * 5000 + "$",
    "endless product": r"$\prod_{i=1}^{10^8} i$",
    "code": "The answer is __import__('os').abort()",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_exhausts_its_limits_is_wrong_and_the_next_is_judged_at_once(impatient, name):
    bomb = math.verify({"value": "42"}, HOSTILE[name])
    assert bomb[:2] == (0.0, True) and bomb.reason
    start = time.monotonic()
    assert math.verify({"value": "42"}, "42") == (1.0, True, "right")
    assert time.monotonic() - start < 1.0


def test_only_the_checkers_failures_are_invalid(impatient, monkeypatch):
    tower = math.verify({"value": "9^{9^{9^{9}}}"}, "42")
    assert tower == (0.0, False, "reference answer '9^{9^{9^{9}}}': computed for more than 1.0 s")
    for status in ("wall", "broken"):
        monkeypatch.setattr(math.Sandbox, "call", lambda *_, status=status: Called(status, None, "no time", 9.0))
        assert math.verify({"value": "42"}, "42") == (0.0, False, "no time")


def test_a_reference_that_found_no_time_is_asked_again(monkeypatch):
    """A machine that was busy once does not make every wrong answer to this reference invalid from then on."""
    math._with_itself.cache_clear()
    spent, right = Called("cpu", None, "too long", 2.0), Called("ok", [1.0, True, "right"], "", 0.1)
    said = [spent, Called("wall", None, "no time", 9.0), spent, right, spent]
    monkeypatch.setattr(math, "_sandbox", lambda: types.SimpleNamespace(call=lambda *_: said.pop(0)))
    assert math.verify({"value": "42"}, "9!!") == (0.0, False, "no time")
    assert math.verify({"value": "42"}, "9!!") == (0.0, True, "the answer: too long")
    assert math.verify({"value": "42"}, "9!!") == (0.0, True, "the answer: too long") and not said
    math._with_itself.cache_clear()


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    math._sandbox.cache_clear()
    with pytest.raises(UserError, match=r"jaxrl_llm\[tasks\]"):
        math.verify({"value": "1"}, "1")


@pytest.mark.parametrize(
    ("response", "given"),
    [
        (r"\boxed{x = 1/2}", Fraction(1, 2)),
        (r"\boxed{.5}", Fraction(1, 2)),
        (r"\boxed{-\$1{,}000}", Fraction(-1000)),
        (r"so $a = 3$ and \[ b = 4 \] and that is $1", Fraction(4)),
        ("we get 3, then 4.", Fraction(4)),
        (r"\boxed{\dfrac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{2x}", "2x"),
        (r"\boxed{50\%}", r"50\%"),
        (r"\boxed{\left[ 0,\, 1 \right)}", "[0,1)"),
        (r"\boxed{x^2\text{ cm}}", "x^2"),
        (r"\boxed{}", None),
        ("nobody knows", None),
    ],
)
def test_which_answer_a_response_gives(response, given):
    assert math.read({"value": "1"}, response) == given


def test_hostile_text_is_read_in_time_that_grows_with_its_length():
    began = time.process_time()
    for word in ("$", r"\(", r"\[", r"\text{", r"\boxed{", "<answer>", "1,000", "{", r"\,"):
        math.read({"value": "1"}, word * (math.MAX_CHARACTERS // len(word)))
    assert time.process_time() - began < 20.0  # a minute and more where one of them took the square of it
