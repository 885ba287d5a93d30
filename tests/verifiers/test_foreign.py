"""Answers that would run as code in a scorer of another package: they reach nothing and earn nothing."""

import ast
import os
import pathlib
import sys
import threading
import time

import pytest

from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.sandbox.records import Called
from jaxrl_llm.verifiers import foreign, gym, math
from jaxrl_llm.verifiers.pool import VerifierPool

# every family whose scorer calls eval or SymPy's parser on the answer
EXECUTING = (
    "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "number_sorting", "puzzle24", "countdown",
    "simple_integration", "intermediate_integration", "polynomial_multiplication", "bitwise_arithmetic",
    "decimal_arithmetic",
)  # fmt: skip
OWN_READERS = {"propositional_logic"}  # a parser of its own that bears the name of SymPy's
FORMS = ("{}", "${}$", "\\boxed{{{}}}", "the answer is {}")
JUNK = 0.05  # what some of them give to any text


def _attacks(marker):
    frames = "[f for f in [__import__('sys')._getframe(k) for k in range(8)] if 'entry' in f.f_locals][0].f_locals"
    return [
        f"__import__('os').system('touch {marker}')",
        f"[__import__('os').system('touch {marker}')]",
        f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', {str(marker)!r}])",
        f"exec(\"open('{marker}', 'w').write('x')\")",
        f"open({str(marker)!r}, 'w').write('x')",
        f"lambdify((), \"__import__('os').system('touch {marker}')\")()",
        f"sin(\"__import__('os').system('touch {marker}')\")",
        f"{frames}['entry']['answer']",  # would pay: the reference itself
        f"list({frames}['entry']['answer'])",
        "__import__('os')._exit(0)",
        "9**9**9**9", "factorial(10**8)", "(" * 3000, "[" * 3000 + "]" * 3000, "-" * 3000 + "1", "1/0", "nan", "inf",
        "1e999", "[1]*10**10", "'a'*10**10", "\x00", "\ud800", "{}", "[[[]]]", "x" * 200_000, "1 << 10**10",
    ]  # fmt: skip


def _called_by_scorers():
    """Names of all functions that a family's scorer calls, through those of its own module."""
    from reasoning_gym.factory import DATASETS

    for family, (dataset, _) in DATASETS.items():
        tree = ast.parse(pathlib.Path(sys.modules[dataset.__module__].__file__).read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        todo, called = ["score_answer"], set()
        while todo:
            function = functions.pop(todo.pop(), None)
            for node in ast.walk(function) if function else ():
                if isinstance(node, ast.Call):
                    called.add(getattr(node.func, "id", getattr(node.func, "attr", "")))
                    todo.append(getattr(node.func, "id", getattr(node.func, "attr", "")))
        yield family, called


def test_every_family_that_evaluates_is_attacked_below():
    evaluating = {"eval", "exec", "parse_expr", "sympify", "__import__", "system", "Popen", "run"}
    found = {family for family, called in _called_by_scorers() if called & evaluating}
    assert found - OWN_READERS - {"composite"} <= set(EXECUTING) and len(found) >= 11


@pytest.mark.slow
def test_no_family_executes_or_dies_of_an_answer(tmp_path):
    marker = tmp_path / "reached"
    tmp_path.chmod(0o777)
    texts = [
        *_attacks(marker)[:6],
        "9**9**9**9",
        "1e9999999999",
        "(" * 500,
        '{"a": ' * 500,
        "\x00",
        "\ud800",
        "9" * 5000,
    ]
    for family in gym.families():
        answer = gym.problems(family, 1, 0, unsound=True).answers[0]
        for text in texts:
            verdict = gym.verify(answer, f"<answer>{text}</answer>")
            assert verdict.valid and 0.0 <= verdict.value <= 1.0, (family, text[:40], verdict)
            assert not marker.exists(), (family, text)


@pytest.mark.parametrize("family", EXECUTING)
def test_answers_do_not_run_as_code_and_earn_nothing(family, tmp_path):
    marker = tmp_path / "reached"
    tmp_path.chmod(0o777)
    tmp_path.parent.chmod(0o755)
    made = gym.problems(family, 2, 0, unsound=True)
    for attack in _attacks(marker):
        verdict = gym.verify(made.answers[0], f"So <answer>{attack}</answer>")
        assert not marker.exists(), attack
        assert verdict.valid and verdict.value <= JUNK, (attack[:80], verdict)
    assert gym.verify(made.answers[0], f"<answer>{made.solutions[0]}</answer>") == (1.0, True, "right")


@pytest.mark.parametrize("forms", [("{}",), pytest.param(FORMS, marks=pytest.mark.slow)], ids=["bare", "all"])
def test_mathematical_answers_do_not_run_as_code(tmp_path, forms):
    marker = tmp_path / "reached"
    tmp_path.chmod(0o777)
    for attack in _attacks(marker):
        for form in forms if len(attack) > 2000 else FORMS:
            verdict = math.verify({"value": "42"}, form.format(attack))
            assert not marker.exists() and verdict.valid and verdict.value == 0.0, (form, attack[:80], verdict)
    assert math.verify({"value": "42"}, "$42$").value == 1.0


def test_what_simplifies_is_built_beforehand_and_text_is_refused_all_the_same(tmp_path):
    """SymPy's arithmetic of monomials is text, of numbers alone; once it is there no text is executed."""
    made = gym.problems("intermediate_integration", 2, 3)
    for answer, solution in zip(made.answers, made.solutions, strict=True):
        longer = f"({solution.replace('+ C', '')})*(x**2 - 1)/((x - 1)*(x + 1))"
        assert gym.verify(answer, longer) == (1.0, True, "right")
        assert gym.verify(answer, f"{longer} + x**3").value == 0.0
    marker = tmp_path / "reached"
    tmp_path.chmod(0o777)
    for module in (math, gym):
        with Sandbox(workers=1, limits=math.LIMITS, modules=(module.__name__, "builtins", "sympy")) as sandbox:
            for text in ("1+1", f"open({str(marker)!r}, 'w')"):
                for function in ("eval", "exec"):
                    assert sandbox.call(f"builtins:{function}", text).reason == "Refused: text is not executed here"
            assert sandbox.call("sympy:lambdify", "x", "x + 1").reason.startswith("Refused")
            assert not marker.exists()


def test_lists_and_formulas_still_earn_what_the_family_gives_them():
    made = gym.problems("string_insertion", 1, 0)
    assert gym.verify(made.answers[0], f"<answer>{list(made.solutions[0])}</answer>").value == 0.1
    made = gym.problems("spiral_matrix", 1, 0)
    assert gym.verify(made.answers[0], f"<answer>{made.solutions[0].split()}</answer>").value == 0.1
    made = gym.problems("countdown", 1, 3)
    assert gym.verify(made.answers[0], f"<answer>({made.solutions[0]}) + 0*1</answer>").value == 0.05
    made = gym.problems("simple_integration", 1, 0)
    assert gym.verify(made.answers[0], f"<answer>7 + {made.solutions[0]}</answer>").value == 1.0


def test_an_answer_that_ends_its_scorer_is_wrong_and_the_next_is_judged_at_once():
    bomb = "$" + "((x+1)^{99})" * 6 + "=0$"
    made = gym.problems("simple_integration", 1, 0)
    verdict = math.verify({"value": r"\prod_{k=1}^{9} (x+k)^{80}"}, bomb)
    assert verdict.value == 0.0
    start = time.monotonic()
    assert gym.verify(made.answers[0], made.solutions[0]).value == 1.0
    assert math.verify({"value": "1"}, "1").value == 1.0
    assert time.monotonic() - start < 2.0


def test_only_failures_of_the_checker_are_invalid():
    def called(status, value=None):
        return Called(status, value, status, 0.0)

    for status in foreign.OWN_DOING:
        assert foreign.verdict(called(status), lambda: called("ok", 1.0), str)[:2] == (0.0, True)
        assert foreign.verdict(called(status), lambda: called("cpu"), str)[:2] == (0.0, False)
    for status in ("wall", "broken"):
        assert foreign.verdict(called(status), lambda: called("ok", 1.0), str)[:2] == (0.0, False)
    for value in (float("nan"), float("inf"), -1.0, 1.5):
        assert foreign.verdict(called("ok", value), lambda: called("ok", 1.0), str)[:2] == (0.0, True)
    assert foreign.verdict(called("ok", 0.25), lambda: called("ok"), lambda v: f"got {v}") == (0.25, True, "got 0.25")


def test_many_threads_are_judged_by_no_more_workers_than_cores():
    made = gym.problems("chain_sum", 40, 0)
    values = [None] * 40

    def judge(k):
        values[k] = gym.verify(made.answers[k], made.solutions[k]).value

    threads = [threading.Thread(target=judge, args=(k,)) for k in range(40)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    assert values == [1.0] * 40
    assert len(foreign.sandbox("jaxrl_llm.verifiers.gym")._workers) <= (os.cpu_count() or 1) + 1  # one waits


@pytest.mark.slow
def test_warm_verdicts_are_at_least_150_a_second_on_two_cores():
    """Right and wrong answers to problems of every third family; benchmarks/foreign_scorers.py measures all of them."""
    answers, responses = [], []
    for family in gym.families()[::3]:
        made = gym.problems(family, 6, 0, unsound=True)
        for k, answer in enumerate(made.answers):
            answers += [answer, answer]
            responses += [made.solutions[k] or "0", "42"]
    with VerifierPool(workers=2, timeout_s=gym.TIMEOUT_S) as pool:
        pool.judge(gym.verify, answers[:40], responses[:40])
        rates = [
            len(answers) / pool.judge(gym.verify, answers, responses).metrics["verifier/seconds"] for _ in range(3)
        ]
    assert max(rates) >= 150.0, rates
