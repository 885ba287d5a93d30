"""Countdown judged exactly, on right, wrong, malformed and hostile answers."""

import random
import time

import numpy as np
import pytest

from jaxrl_llm.data.tasks import countdown as task
from jaxrl_llm.verifiers.countdown import MAX_CHARACTERS, verify

ANSWER = {"numbers": [3, 5, 7], "target": 26}

RIGHT = [
    "7*3=21,21+5=26",
    "  7*3=21,21+5=26\n",
    "7*3+5",
    "7 * 3 + 5",
    "(7*3)+5",
    "((((7))*3)+(5))",
    "5+7*3=26",
    "<answer>7*3+5</answer>",
    "<answer> 7*3=21,21+5=26 </answer>",
    "I try 7+3. <answer>7+3+5</answer> No: <answer>(7*3)+5</answer> good",
]

WRONG = {
    "7*3=21": "number 5 not used",
    "7*3": "number 5 not used",
    "7*3+5+5": "number 5 used too often",
    "7*3+5+1-1": "number 1 used too often",
    "26": "number 3 not used",
    "7*3=20,20+5=25": "wrong arithmetic",
    "7+3=10,10+5=15": "ends at 15",
    "7+3+5": "is 15, not 26",
    "7*3+5=27": "claims '27'",
    "7*3+5=26=26": "claims",
    "7*7=49": "7 is not on the table",
    "7*3=21,5+21=26,": "not a step",
    "7*3=21;21+5=26": "not a step",
    "7*3=21,21+5=26 well": "not a step",
    "7/(5-5)+3": "division by zero",
    "7/0=0": "0 is not on the table",
    "": "not an expression",
    " ": "not an expression",
    "=": "claims",
    "<answer></answer>": "not an expression",
    "<answer>7*3+5": "not an expression",
    "(7*3+5": "SyntaxError",
    "7**3+5": "more than whole numbers",
    "9**9**9**9": "more than whole numbers",
    "7//3+5": "more than whole numbers",
    "-7*3+5": "more than whole numbers",
    "7(3)+5": "more than whole numbers",
    "()": "more than whole numbers",
    "007*3+5": "SyntaxError",
    "99999*3+5": "more than 4 digits",
    "7.0*3+5": "not an expression",
    "7*3+5j": "not an expression",
    "7e3*3+5": "not an expression",
    "__import__('os').system('true')": "not an expression",
    "٧*٣+٥": "not an expression",
    "７*３+５": "not an expression",
    "7×3+5": "not an expression",
    "7*3\n+5": "not an expression",
    "7*3+5\x00": "not an expression",
    "\ud800": "not an expression",
    "(" * 150 + "7*3+5" + ")" * 40: "SyntaxError",
    "-" * 150 + "7": "more than whole numbers",
    "1+" * 99 + "1": "number 3 not used",
    "7*3+5" + " " * MAX_CHARACTERS + "x": "longer than",
}


@pytest.mark.parametrize("response", RIGHT)
def test_right(response):
    assert verify(ANSWER, response) == (1.0, True, "right")


@pytest.mark.parametrize("response", WRONG, ids=range(len(WRONG)))
def test_wrong_with_the_reason(response):
    verdict = verify(ANSWER, response)
    assert verdict.value == 0.0 and verdict.valid
    assert WRONG[response] in verdict.reason


def test_fractions_are_exact():
    assert verify({"numbers": [1, 3, 3], "target": 1}, "1/3*3").value == 1.0
    assert verify({"numbers": [8, 3, 8, 3], "target": 24}, "8/(3-8/3)").value == 1.0
    assert verify({"numbers": [2, 6], "target": 3}, "6/2=3").value == 1.0
    assert verify({"numbers": [2, 7], "target": 3}, "7/2=3").reason == "wrong arithmetic: 7/2=3"


def test_equal_numbers_count_by_their_number():
    answer = {"numbers": [4, 4], "target": 8}
    assert verify(answer, "4+4").value == 1.0
    assert verify(answer, "4+4=8").value == 1.0
    assert verify({"numbers": [4, 2], "target": 8}, "4+4").reason == "number 2 not used"


def test_solutions_of_the_task_are_right():
    rng = np.random.default_rng(0)
    for level in task.LEVELS:
        for _ in range(50):
            problem = task.make(rng, level)
            assert verify(problem.answer, problem.solution).value == 1.0, problem


def test_any_text_gives_a_verdict_and_none_takes_long():
    draw = random.Random(0)
    pieces = list("0123456789+-*/()=,<>. #\n") + ["<answer>", "</answer>", "**", "é", "\u0663", "7*3", "=26"]
    start = time.monotonic()
    for _ in range(3000):
        verdict = verify(ANSWER, "".join(draw.choices(pieces, k=draw.randrange(40))))
        assert verdict.valid and verdict.value in (0.0, 1.0) and verdict.reason
    for text in ("<answer>" * 200_000, "<answer>" * 100_000 + "</answer>" * 100_000, "(" * 10**6, "1" * 10**6):
        assert verify(ANSWER, text).value == 0.0
    assert time.monotonic() - start < 10
