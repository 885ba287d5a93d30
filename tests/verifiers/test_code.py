"""Programs judged by tests: what a response means, right and wrong ones, hostile ones, in a pool."""

import time

import numpy as np
import pytest

from jaxrl_llm.data.tasks import programs
from jaxrl_llm.verifiers import code
from jaxrl_llm.verifiers.pool import VerifierPool

HEAD = 'import math\n\n\ndef area(r):\n    """Area of a circle."""\n'
ANSWER = {
    "checks": ["assert abs(area(1.0) - math.pi) < 1e-9", "assert area(0) == 0"],
    "entries": ["area"],
    "setup": "import math",
    "start": HEAD,
}
BODY = "    return math.pi * r * r\n"

RIGHT = {
    "completion": BODY,
    "completion_that_goes_on": BODY + "\n\nprint(area(2))\nraise SystemExit",
    "whole_function": "import math\ndef area(r):\n" + BODY,
    "fenced": f"The area.\n```python\ndef area(r):\n{BODY}```\nIt uses pi.",
    "fenced_in_an_open_block": f"```py\ndef area(r):\n{BODY}",
    "last_block_that_defines_it": (
        f"```python\ndef area(r):\n    return 0\n```\nNo:\n```python\ndef area(r):\n{BODY}```\n```\narea(1)\n```"
    ),
    "imports_of_the_prompt": f"```python\ndef area(r):\n{BODY}```",
    "lambda": "```python\narea = lambda r: math.pi * r ** 2\n```",
    "helper": "```python\ndef square(r):\n    return r * r\n\ndef area(r):\n    return math.pi * square(r)\n```",
}
WRONG = {
    "empty": "",
    "prose": "I cannot do that.",
    "wrong": "    return 3.14 * r * r",
    "raises": "    raise ValueError",
    "not_python": "```python\ndef area(r) return 1\n```",
    "exit": "```python\nimport sys\ndef area(r):\n    sys.exit(0)\n```",
    "equal_to_all": "```python\nclass A(float):\n    __eq__ = __lt__ = lambda *a: True\ndef area(r): return A()\n```",
    "rewrites_the_tests": "```python\nimport builtins\nbuiltins.abs = lambda x: 0\ndef area(r): return 0\n```",
    "forks": "    import os\n    os.fork()\n    return 0",
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    verdict = code.verify(ANSWER, RIGHT[name])
    assert verdict == (1.0, True, "right")


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    verdict = code.verify(ANSWER, WRONG[name])
    assert verdict.value == 0.0 and verdict.valid and verdict.reason


def test_shares():
    assert code.verify_share(ANSWER, "    return 0 * r").value == 0.5
    assert code.verify_share(ANSWER, BODY) == (1.0, True, "2 of 2 checks.")


WHOLE = "def area(r):\n" + BODY
HEADS = {
    "two_blanks": 'import math\n\n\ndef area(r):\n  """Area."""\n',
    "a_tab": 'import math\n\n\ndef area(r):\n\t"""Area."""\n',
    "no_body": "import math\n\n\ndef area(r):\n",
    "no_end_of_line": "import math\n\n\n@staticmethod\ndef area(\n    r,\n):",
    "an_assignment": "import math\narea = lambda r: ",
}


@pytest.mark.parametrize("name", HEADS)
def test_a_whole_function_needs_no_head(name):
    answer = ANSWER | {"start": HEADS[name]}
    for response in (WHOLE, f"```python\n{WHOLE}```", "area = lambda r: math.pi * r * r"):
        assert code.verify(answer, response) == (1.0, True, "right")
    assert code.verify(answer, "def area(r):\n    return 0\n").value == 0.0


def test_what_is_imported_of_the_future_stays_in_front():
    for line in ("from __future__ import annotations\n", "from __future__ import (\n    annotations,\n)\n"):
        assert code.verify(ANSWER, f"```python\n{line}\n{WHOLE}```") == (1.0, True, "right")


def test_the_helpers_of_a_head_are_there_and_a_body_goes_on_from_it():
    answer = ANSWER | {"start": "import math\n\ndef square(r):\n  return r * r\n\ndef area(r):\n"}
    assert code.verify(answer, "def area(r):\n    return math.pi * square(r)\n").value == 1.0
    inner = "    def area(r):\n        return math.pi * r * r\n    return area(r)\n"
    assert code.verify(ANSWER, inner).value == 1.0
    assert code.verify(ANSWER, BODY + "\n\ndef area(r):\n    return 0\n").value == 1.0


def test_small_programs_may_repeat_how_they_begin():
    problem = programs.make(np.random.default_rng(0), 2)
    for response in (
        problem.solution,
        programs.START + problem.solution,
        f"```\n{programs.START}{problem.solution}\n```",
    ):
        assert code.verify(problem.answer, response) == (1.0, True, "right")
    assert code.verify(problem.answer, f"{programs.START}{problem.solution}+1").value == 0.0


@pytest.mark.parametrize("error", ["EOFError", "KeyError"])
def test_an_error_of_the_program_ends_its_own_check_alone(error):
    answer = {"checks": ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"], "entries": ["f"]}
    raising = f"def f(x):\n    if x == 1:\n        raise {error}('x')\n    return x"
    assert code.verify_share(answer, raising).value == 2 / 3
    expected = f"try:\n    f(0)\n    raise AssertionError\nexcept {error}:\n    pass"
    assert code.verify({"checks": [expected], "entries": ["f"]}, f"def f(x): raise {error}").value == 1.0


def test_a_program_that_asks_for_input_fails_where_it_asks():
    answer = {"checks": ["assert f(1) == 1", "assert f(2) == 2"], "entries": ["f"]}
    assert code.verify_share(answer, "def f(x):\n    return x if x > 1 else int(input())").value == 0.5


def test_without_a_start():
    answer = {"checks": ["assert f(2) == 3"], "entries": ["f"]}
    assert code.verify(answer, "def f(x):\n    return x + 1").value == 1.0
    assert code.verify(answer, "def g(x):\n    return x + 1").value == 0.0


def test_in_a_pool():
    replies = [BODY, "    return 1", "    while True: pass", BODY]
    with VerifierPool(workers=2, timeout_s=code.TIMEOUT_S) as pool:
        judged = pool.judge(code.verify, [ANSWER] * 4, replies)
    assert [v.value for v in judged.verdicts] == [1.0, 0.0, 0.0, 1.0]
    assert all(v.valid for v in judged.verdicts) and "timed out" in judged.verdicts[2].reason


FULL = "def f(x):\n    return x + 1\n"
AMONG_OTHERS = {
    "shell_before": f"Install:\n```bash\npip install x\n```\nThen:\n```python\n{FULL}```\nDone.",
    "text_before": f"Example:\n```text\nf(1) -> 2\n```\n```python\n{FULL}```",
    "output_behind": f"```python\n{FULL}```\nIt prints\n```\n2\n```",
    "python3": f"```python3\n{FULL}```\nThat is it.",
    "capitals": f"```PYTHON\n{FULL}```\nok",
    "title": f'```python title="a.py"\n{FULL}```\nx',
    "braces": f"```{{.python}}\n{FULL}```\nx",
    "carriage_returns": f"```python\n{FULL}```\nDone.\n".replace("\n", "\r\n"),
    "in_a_list": "1. Code:\n   ```python\n   def f(x):\n       return x + 1\n   ```\n2. Done.",
    "as_an_item": "- ```python\n  def f(x):\n      return x + 1\n  ```\n",
    "behind_words": f"Here: ```python\n{FULL}```",
    "less_indented_than_its_fence": f"   ```python\n{FULL}   ```",
    "indented_by_itself": "```python\n    def f(x):\n        return x + 1\n```",
    "closed_behind_its_last_line": f"```python\n{FULL[:-1]}```\nDone.",
    "closed_by_talk": f"```python\n{FULL}``` Done.",
    "never_closed": f"```python\n{FULL[:-1]}",
    "closed_by_the_next": f"```python\nf(1)\n```python\n{FULL}```",
    "inline_before": f"Call ```f(1)``` so:\n```python\n{FULL}```",
}


@pytest.mark.parametrize("name", AMONG_OTHERS)
def test_the_program_among_other_blocks(name):
    assert code.extract(AMONG_OTHERS[name], ["f"]) == FULL


def test_blocks_that_define_nothing():
    assert code.extract("```bash\nls\n```\n```py\n    return 1\n```\n```\n2\n```", ["f"]) == "    return 1\n"
    assert code.extract("```bash\nls\n```\n```\n    return 1\n```", ["f"]) == "    return 1\n"
    assert code.extract("```text\nls\n```", ["f"]) == "ls\n"
    assert code.extract(f"{BODY}```", ["f"]) == f"{BODY}```"  # the prompt opened it
    assert code.extract("Say ```f``` twice", ["f"]) == "Say ```f``` twice"


def test_an_example_in_a_docstring_ends_no_block():
    shown = 'def f(x):\n    """Adds.\n\n    ```\n    f(1)\n    ```\n    """\n    return x + 1\n'
    assert code.extract(f"```python\n{shown}```\nDone.", ["f"]) == shown


@pytest.mark.parametrize(
    "text",
    [
        "```" + " " * 59_000 + "x",
        "```python" + " " * 59_000 + "x",
        "```\n" * 15_000,
        "```a\n" * 15_000,
        "`" * 60_000,
        "x```y\n" * 10_000,
        "```\n" + " \n" * 30_000,
    ],
)
def test_a_fence_that_never_ends_is_read_in_no_time(text):
    start = time.process_time()
    code.extract(text, ["area"])
    assert time.process_time() - start < 1.0
