"""Exact match, numbers, chains and multiple choice on right, wrong, malformed and hostile text."""

import random
import time
from fractions import Fraction

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
        ("Red Cat", "**Red Cat**", True),
        ("Red Cat", "<answer>`red cat`.</answer>", True),
        ("x^2", "$x^2$", True),
        ("**kwargs", "kwargs", False),
        ("a*b", "*a*b", False),
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
        (10, "1e1", True),
        (1, "1e1", False),
    ],
)
def test_number(value, response, right):
    verdict = answers.verify_number({"value": value}, response)
    assert (verdict.value == 1.0) == right and verdict.valid and verdict.reason


NUMBERS = {  # what each response says; None: no number that can be read
    r"\boxed{.5}": "0.5",
    "it is .5": "0.5",
    "No.5": "5",
    "\\boxed{\u22125}": "-5",
    r"\boxed{- 5}": "-5",
    "10 - 5": "5",
    "- 5 apples": "5",
    "-$5": "-5",
    r"$-\$5$": "-5",
    "$5$-$3$": "3",
    "$1$,$234$": "234",
    r"\boxed{\frac{1}{18}}": "1/18",
    r"\boxed{-\dfrac{1}{4}}": "-1/4",
    r"\boxed{\frac{-1}{4}}": "-1/4",
    r"\boxed{\frac12}": "1/2",
    r"\boxed{3\frac{1}{2}}": "7/2",
    "<answer>3 1/2</answer>": "7/2",
    r"\boxed{7/73}": "7/73",
    "The answer is 7/73.": "7/73",
    r"\boxed{1/0}": None,
    r"\boxed{2^{18}}": "262144",
    r"\boxed{2^{-2}}": "1/4",
    r"\boxed{0^{-2}}": None,
    r"\boxed{9^{999}}": str(9**999),
    r"\boxed{9^{9^9}}": None,
    r"\boxed{99999999^{999}}": None,
    r"\boxed{50\text{ cm}^2}": "50",
    r"\boxed{50\,\mathrm{m}^{2}}": "50",
    "The area is 50 cm^2": "50",
    "The area is 50 cm²": "50",
    r"\boxed{\text{18}}": "18",
    r"\boxed{\text{18 eggs}}": "18",
    r"\boxed{90^\circ}": "90",
    r"\boxed{5\%}": "5",
    r"\boxed{1{,}000}": "1000",
    r"\boxed{1,\!000}": "1000",
    r"\boxed{1\,000}": "1000",
    r"\boxed{\$1,000.50}": "1000.5",
    "1 234 567": "1234567",
    "The answer is 1 234 567.": "1234567",
    "1\u2009234\u2009567": "1234567",
    "1\u202f234.5": "1234.5",
    "3 of 100 200": "200",
    "1 2345": "2345",
    r"\boxed{1.5 \times 10^6}": "1500000",
    r"\boxed{1.5\cdot10^{-2}}": "0.015",
    "1.5×10⁶": "1500000",
    "1.5e3": "1500",
    "1.5e3a": "3",
    r"\boxed{x = \frac{1}{2}}": "1/2",
    r"\boxed{\sqrt{16} = 4}": "4",
    "<answer>3*4=12</answer>": "12",
    "<answer>3*4</answer>": None,
    r"\boxed{3 + 4}": None,
    r"\boxed{\sqrt{16}}": None,
    r"\boxed{\frac{\pi}{2}}": None,
    r"\boxed{1234_5}": None,
    r"\boxed{1234_{10}}": None,
    r"\boxed{x_{3}}": None,
    r"\boxed{\cfrac{1}{2}}": "1/2",
    r"\boxed{\pm 2}": None,
    "<answer>±2</answer>": None,
    r"\boxed{|-5|}": None,
    r"\boxed{\left|-5\right|}": None,
    r"\boxed{(3,4)}": None,
    r"\boxed{\left[3, 5\right)}": None,
    r"\boxed{\{2, 3, 5\}}": None,
    r"\boxed{(-\infty, 3]}": None,
    r"\boxed{3 \pmod{10}}": None,
    r"\boxed{17 \bmod 10}": None,
    r"\boxed{10!}": None,
    "<answer>It is 10!</answer>": "10",
    r"\boxed{0.\overline{3}}": None,
    r"\boxed{\lfloor 3.7 \rfloor}": None,
    r"\boxed{3½}": "7/2",
    "<answer>3 ½</answer>": "7/2",
    r"\boxed{-½}": "-1/2",
    "It takes ¾ of an hour": "3/4",
    r"\boxed{(5)}": "5",
    r"\boxed{{5}}": "5",
    "<answer>about 4 or 5</answer>": "5",
    "it is \u20135": "-5",
    "pages 3\u20135": "5",
    r"\boxed{5} so \boxed{\frac{\sqrt{16}}{\sqrt{4}}}": None,
    r"\boxed{5} so \boxed{\frac{\left(16\right)}{": "5",
    r"<answer>It is \boxed{6}, not 7</answer>": "6",
    r"\boxed{\boxed{42}}": "42",
    r"\boxed {42}": "42",
    r"\fbox{42} 7": "42",
    r"\\boxed{42} 7": "42",
    "1" * 5000: None,
}


@pytest.mark.parametrize("response", NUMBERS, ids=lambda x: x[:40])
def test_forms_of_numbers(response):
    wanted = NUMBERS[response]
    for value in ("5", "10", "18", "0.5", "73", "-5", "3", "2", "4", wanted or "1"):
        verdict = answers.verify_number({"value": value}, response)
        assert verdict.valid
        assert (verdict.value == 1.0) == (wanted is not None and Fraction(value) == Fraction(wanted)), (value, verdict)
    assert wanted is not None or verdict == (0.0, True, "no number in the answer")


def test_a_reference_without_a_number_is_invalid():
    verdict = answers.verify_number({"value": "ten"}, "10")
    assert verdict == (0.0, False, "reference answer 'ten' holds no number")


@pytest.mark.parametrize(
    ("value", "response", "right"),
    [
        ("C#", "C#", True),
        ("C#", "I think\n<answer>C#</answer>", True),
        ("C#", "C", False),
        ("#ff0000", "#FF0000", True),
        ("10", "3+5=8#10", True),
        ("Paris", "so #Paris", True),
        ("Paris", r"<answer>\boxed{Paris}</answer>", True),
        ("Paris", r"\boxed{\text{Paris}}", True),
        (r"\text{Paris}", r"\boxed{Paris}", True),
        ("-5", "\u22125", True),
        (1e-05, "-5", False),
        (1e-05, "0.00001", True),
        ("3/4", r"\boxed{3/4}", True),
        ("3/4", "3/5", False),
        ("", "", False),
        ("", "# ", False),
        (".", "", False),
        (" ", r"\boxed{}", False),
    ],
)
def test_any(value, response, right):
    verdict = answers.verify_any({"value": value}, response)
    assert verdict.valid and (verdict.value == 1.0) == right and verdict.reason


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
        ("The correct answer is **B**.", "B"),
        ("Answer: **B**", "B"),
        ("The answer is: `B`", "B"),
        ("**B**", "B"),
        ("`B`", "B"),
        ("#B", "B"),
        (r"<answer>\boxed{B}</answer>", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{\textbf{(B) } 12}", "B"),
        (r"$\textbf{B}$", "B"),
        (r"The correct option is $\textbf{B}$", "B"),
        ("A) is wrong since x. The answer is **B) Paris**", "B"),
        ("The answer I got is (B).", "B"),
        ("The answer is B. The other option I considered was worse.", "B"),
        ("Option A is too small and option C is too large, so I choose (B).", "B"),
        ("(A) is too small. So it is option B.", "B"),
        ("(A) is too small. The answer is option B because of that.", "B"),
        ("Answer: A. No, the answer is B", "B"),
        ("The answer is B\n\nBecause choice A has a mistake.", "B"),
        ("The answer is I", "I"),
        ("The answer is (I).", "I"),
        ("I have no answer I like", None),
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


@pytest.mark.parametrize("value", ["B", "b", "(B)", "B.", "B) Paris", "(B) Paris", r"\text{(B)}", "**B**"])
def test_a_choice_is_read_of_the_reference_as_of_a_response(value):
    assert answers.verify_choice({"value": value}, "The answer is (B).") == (1.0, True, "right")
    assert answers.verify_choice({"value": value}, "The answer is (A).") == (0.0, True, "A is not B")


@pytest.mark.parametrize("value", [1, "Paris", "AB", "A, B", ""])
def test_a_reference_without_a_letter_is_invalid(value):
    found = answers.verify_choice({"value": value}, "The answer is (B).")
    assert found == (0.0, False, f"reference answer {str(value)!r} names no letter from A to J")


LONG = [  # what a careless pattern reads again and again
    "1" + " " * 19_990 + "/", "1," * 9_000 + "1", "1 " * 9_999, ",123" * 5_000, "\\frac{" * 3_000, "\\frac{1}{" * 2_000,
    "\\text{" * 3_000, "{" * 20_000, "\\" * 20_000, "\\boxed{" * 1_200 + "}" * 1_200, "1^{" * 6_000, "1/" * 9_999,
    "1e" * 9_999, "$" * 20_000, "answer is " * 2_000, "answer:" + " " * 19_000, "option I" + " " * 19_000 + "x",
    "answer is" + " " * 6_000 + "x", "Option: the choice" + " \t" * 3_000 + "x",
    "\\boxed{" + "1" * 9_000 + "/" + "1" * 9_000 + "}", "\\boxed{" + "1^999/" * 3_000 + "1}", "*" * 20_000,
]  # fmt: skip


@pytest.mark.parametrize("verify", [getattr(answers, n) for n in dir(answers) if n.startswith("verify_")])
def test_any_text_gives_a_verdict_and_none_takes_long(verify):
    draw = random.Random(0)
    pieces = list("0123456789+-*/()=,<>. #ABC{}\\\n") + ["<answer>", "</answer>", r"\boxed{", "answer is ", "1,234"]
    start, answer = time.monotonic(), {"value": "B" if verify is answers.verify_choice else "10"}
    for _ in range(1000):
        verdict = verify(answer, "".join(draw.choices(pieces, k=draw.randrange(40))))
        assert verdict.valid and verdict.value in (0.0, 1.0)
    for text in (
        "<answer>" * 100_000,
        r"\boxed{" * 100_000,
        "1," * 300_000,
        "1" * 10**6,
        "(A " * 10**5,
        "\ud800",
        *LONG,
    ):
        assert verify(answer, text).valid
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("text", LONG, ids=lambda x: x[:12])
def test_long_texts_are_read_once(text):
    start = time.process_time()
    for verify in (answers.verify_number, answers.verify_exact, answers.verify_choice):
        verify({"value": "10"}, text)
    assert time.process_time() - start < 1.0
