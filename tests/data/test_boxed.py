import time

import pytest

from jaxrl_llm.data.boxed import last_boxed, last_boxes


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{3}", "3"),
        (r"\boxed{3} or \boxed {4}", "4"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\frac{\sqrt{16}}{\sqrt{4}}}", r"\frac{\sqrt{16}}{\sqrt{4}}"),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"{ \boxed{3} }} \boxed{}", ""),
        (r"\begin{a} 1 \\\boxed{3}", "3"),
        (r"\\boxed{3}", "3"),
        (r"\boxed{3", None),
        (r"\boxed 2", None),
        ("{}", None),
        ("", None),
    ],
)
def test_the_last_box_that_is_closed(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "inside", "rest"),
    [
        (r"\boxed{3} wait \boxed{5}", ["5"], ""),
        (r"\boxed{3}\boxed{5}", ["5"], ""),
        (r"\boxed{7}. So $\boxed{3}$ and $\boxed{5}$%", ["3", "5"], "$%"),
        (r"\(\boxed{3}\), \(\boxed{5}\), and **\boxed{\frac{1}{2}}**", ["3", "5", r"\frac{1}{2}"], "**"),
        (r"\boxed{x=1}\quad\text{or}\quad\fbox{x=2}", ["x=1", "x=2"], ""),
        (r"\boxed{\boxed{3}}, \boxed{5}", ["3", "5"], ""),
        (r"3 and \boxed{5", [], r"3 and \boxed{5"),
    ],
)
def test_boxes_that_are_one_answer(text, inside, rest):
    assert last_boxes(text) == (inside, rest)


def test_boxes_without_braces():
    assert last_boxed(r"so $\boxed 2$", bare=True) == "2" and last_boxed(r"it is \boxed 23.", bare=True) == "23"
    assert last_boxed(r"\boxed 2 and \boxed{3}", bare=True) == "3" and last_boxed(r"\boxed", bare=True) is None


@pytest.mark.parametrize("text", ["\\boxed{" * 100_000, "\\" * 500_000, "{" * 500_000, "\\boxed" + " " * 500_000])
def test_long_texts_are_read_once(text):
    start = time.process_time()
    assert last_boxed(text, bare=True) is None
    assert time.process_time() - start < 5.0
