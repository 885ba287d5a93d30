"""Exact match, numbers, chains and multiple choice on right, wrong, malformed and hostile text."""

import random
import time

import numpy as np
import pytest

from jaxrl_llm.data.tasks import chain
from jaxrl_llm.verifiers import answers


@pytest.mark.parametrize(
    ("value", "response", "right"),
    [
        ("Red Cat", "red  cat", True),
        ("Red Cat", "RED\nCAT.", True),
        ("Red Cat", "It is <answer>red cat</answer> I think", True),
        ("Red Cat", r"so \boxed{Red Cat}", True),
        (r"\frac{1}{2}", r"so \boxed{\frac{1}{2}}", True),
        ("ﬁne", "fine", True),
        ("42", "the sum #### 42", True),
        ("Red Cat", "red cat dog", False),
        ("Red Cat", "", False),
        ("Red Cat", "<answer></answer>", False),
        ("Red Cat", "<answer>red cat", False),
        ("Red Cat", "redcat", False),
    ],
)
def test_exact(value, response, right):
    verdict = answers.verify_exact({"value": value}, response)
    assert (verdict.value == 1.0) == right and verdict.valid and verdict.reason


@pytest.mark.parametrize(
    ("value", "response", "right"),
    [
        (10, "3+5=8,8*4=10#10", True),
        (8, "3+5=8", True),
        (8, "5+3=8,8", True),
        (1234, "it is 1,234", True),
        (1234567.5, "1,234,567.50", True),
        (-3, "x = -3", True),
        (3, "10-3", True),
        ("1,000", "1000", True),
        (0.1, "0.10", True),
        (10, "<answer>10</answer> or 11", True),
        (10, "#11", False),
        (88, "5+3=8,8", False),
        (10, "ten", False),
        (10, "", False),
        (10, "١٠", False),
        (10, "#", False),
        (10, "1e1", False),
    ],
)
def test_number(value, response, right):
    verdict = answers.verify_number({"value": value}, response)
    assert (verdict.value == 1.0) == right and verdict.valid and verdict.reason


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("3+5=8,8*4=10#10", "right"),
        ("#9#10", "right"),
        ("#010", "right"),
        ("#", "'' is not a whole number"),
        ("#10#", "'' is not a whole number"),
        ("10", "no #"),
        ("", "no #"),
        ("#10 ", "not a whole number"),
        ("#1 0", "not a whole number"),
        ("#-10", "not a whole number"),
        ("#10.0", "not a whole number"),
        ("#١٠", "not a whole number"),
        ("#00010", "not a whole number"),
        ("#" + "1" * 5000, "not a whole number"),
        ("#11", "11 is not 10"),
    ],
)
def test_chain(response, reason):
    verdict = answers.verify_chain({"value": 10}, response)
    assert verdict.valid and reason in verdict.reason and (verdict.value == 1.0) == (reason == "right")


def test_solutions_of_the_chain_task_are_right():
    rng = np.random.default_rng(0)
    for level in chain.LEVELS:
        problem = chain.make(rng, level)
        assert answers.verify_chain(problem.answer, problem.solution).value == 1.0, problem


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) because a dog is an animal", "B"),
        ("The answer is B", "B"),
        ("The answer is (B). I am sure.", "B"),
        ("Answer: B", "B"),
        ("A is wrong, C too. So the answer is B. A good day", "B"),
        ("I pick (C), no, (B) it is", "B"),
        ("<answer>B</answer>", "B"),
        (r"\boxed{B}", "B"),
        ("I think\nB", "B"),
        ("", None),
        ("I do not know", None),
        ("a dog", None),
        ("The answer is A", "A"),
        ("BAD", None),
        ("Ｂ", None),
    ],
)
def test_choice(response, letter):
    verdict = answers.verify_choice({"value": "B"}, response)
    assert verdict.valid
    if letter is None:
        assert verdict == (0.0, True, "no choice given")
    else:
        assert verdict.value == float(letter == "B")


@pytest.mark.parametrize("verify", [getattr(answers, n) for n in dir(answers) if n.startswith("verify_")])
def test_any_text_gives_a_verdict_and_none_takes_long(verify):
    draw = random.Random(0)
    pieces = list("0123456789+-*/()=,<>. #ABC{}\\\n") + ["<answer>", "</answer>", r"\boxed{", "answer is ", "1,234"]
    start = time.monotonic()
    for _ in range(1000):
        verdict = verify({"value": "10"}, "".join(draw.choices(pieces, k=draw.randrange(40))))
        assert verdict.valid and verdict.value in (0.0, 1.0)
    for text in ("<answer>" * 100_000, r"\boxed{" * 100_000, "1," * 300_000, "1" * 10**6, "(A " * 10**5, "\ud800"):
        assert verify({"value": "10"}, text).valid
    assert time.monotonic() - start < 20
