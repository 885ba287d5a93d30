"""Composed functions on strings as text, and the task that they and rows of one's own are opened as."""

import importlib
import json
import types

import jax
import numpy as np
import pytest

from experiments.analysis.parts import skills, text_functions, text_skills
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from jaxrl_llm.experiment.own_rows import tasks
from jaxrl_llm.run import parts
from jaxrl_llm.verifiers import answers
from tests.models_for_tests import byte_model

RNG = np.random.default_rng(0)
MODULE = "experiments.analysis.compose_skills"


def test_functions_are_what_their_definitions_say():
    for function in text_functions.FUNCTIONS:
        for _ in range(20):
            word, n = "".join(RNG.choice(list("abcxyz"), size=int(RNG.integers(1, 9)))), int(RNG.integers(1, 4))
            said = eval(f"lambda s, n: {function.shown}")(word, n)  # a constant of this repository
            assert function.apply(word, n) == said != ""
    assert len(text_functions.FUNCTIONS) == 25
    assert not set(text_functions.TRAIN) & set(text_functions.HELD_OUT)
    assert {*text_functions.TRAIN, *text_functions.HELD_OUT} == set(range(25))


@pytest.mark.parametrize("level", [1, 2, 8])
def test_work_is_one_call_a_line_and_ends_with_what_the_expression_returns(level):
    names = {f"func_{k}": f.apply for k, f in enumerate(text_functions.FUNCTIONS)}
    known = {name: lambda s, n=0, f=f: f(s, n) for name, f in names.items()} | text_functions.BINARY
    for _ in range(20):
        made = text_functions.composed(RNG, level, text_functions.HELD_OUT, define=False, unseen=True)
        expression, word = made.prompt.split("return ")[1].split("\n")[0], made.prompt.split('"')[-2]
        assert eval(expression, known, {"x": word}) == made.answer, "text of this repository's own generator"
        *lines, last = made.solution.split("\n")
        assert len(lines) == level == made.level and last == f"\\boxed{{{made.answer}}}"
        for line in lines:
            call, said = line.rsplit(" = ", 1)
            assert eval(call, known) == eval(said)
        numbers = {int(part.split("(")[0]) for part in expression.split("func_")[1:]}
        assert numbers <= set(text_functions.HELD_OUT)
        assert "def func" not in made.prompt and made.unseen
        assert answers.verify_exact({"value": made.answer}, made.solution).value == 1.0


def test_single_functions_are_shown_with_definitions_every_second_time():
    found = text_functions.make_problems((2,), 40)
    assert [p.level for p in found] == [1] * 40 + [2] * 80 and len({p.prompt for p in found}) == 120
    assert [p.unseen for p in found] == [False] * 80 + [True] * 40
    assert all("def func" not in p.prompt for p in found[40:])
    defined = [p for p in found[:40:2] if "func_" in p.prompt]
    assert defined and all("def func" in p.prompt for p in defined)
    assert text_functions.make_problems((2,), 40) == found != text_functions.make_problems((2,), 40, seed=1)


def test_sums():
    for problem in text_functions.sums(8):
        start, *more = problem.prompt.rstrip(".\n").split(". What")[0].split(", then ")
        value = int(start.split()[-1]) + sum(int(x.split()[1]) * (1 if "add" in x else -1) for x in more)
        assert str(value) == problem.answer and len(more) == problem.level and problem.sums
        assert answers.verify_exact({"value": problem.answer}, problem.solution).value == 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=900)
    return folder


WORDS = ["--smoke", "--seeds", "1", "--max-prompt-tokens", "300", "--max-new-tokens"]


@pytest.mark.slow
def test_two_steps_over_generated_text(model, tmp_path):
    words = [*WORDS, "330", "--model", str(model), "--data", "strings", "--problems", "640", "--out", str(tmp_path)]
    module = importlib.import_module(MODULE)
    found = cli.run(module, [*words, "--arm", "none", "rl_12", "rft_2"])
    for arm in found.arms.values():
        assert {key for key in arm.metrics if key in module.METRICS} == set(module.METRICS)
        assert np.isfinite(arm.metrics.get("loss/total", [0.0])).all()


def _opened(model, *words, room=330):
    module = importlib.import_module(MODULE)
    _, base, given = cli.parse(tasks.with_rows(module), [*WORDS, str(room), "--model", str(model), *words])
    tasks.over_rows(module, base, given)
    return text_skills.open_task(base)


def test_tasks_of_text(model, tmp_path):
    """What is asked has the level and the set that was asked for, and the stored work is right."""
    task = _opened(model, "--data", "strings", "--problems", "640").task
    assert isinstance(task, skills.Skills)
    sources = {row.prompt: row for row in text_skills.read(_settings(640))}
    decode = _decoder(model)
    for levels in ((1,), (2,), (1, 2)):
        asked = task.asked(jax.random.key(1), 24, levels)
        rows = [sources[decode(row)] for row in asked]
        assert {row.level for row in rows} == set(levels) and not any(row.unseen or row.sums for row in rows)
    prompts, solutions = task.base(jax.random.key(2), 64)
    rows = [sources[decode(row)] for row in prompts]
    assert {row.level for row in rows} == {1} and {row.sums for row in rows} == {True, False}
    assert task.right(prompts, solutions).all()
    assert not task.right(prompts, solutions[::-1]).all()
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"What is {k} + 1?", "answer": f"{k}+1\n#### {k + 1}"} for k in range(200)]
    path.write_text("\n".join(map(json.dumps, rows)))
    own = _opened(model, "--data", str(path), "--format", "gsm8k", "--problems", "640").task
    assert decode(own.asked(jax.random.key(3), 1, (2,))[0]).startswith("What is ")


def _settings(problems):
    return types.SimpleNamespace(data="strings", problems=problems)


def _decoder(model):
    tokenizer = parts.load_model(str(model)).tokenizer
    return lambda row: tokenizer.decode([int(t) for t in row if t >= 0])


def test_wrong_input(model):
    with pytest.raises(UserError, match="--problems 50 must be at least 160"):
        _opened(model, "--data", "strings", "--problems", "50")
    with pytest.raises(UserError, match="no problem that fits is .* raise --max-new-tokens"):
        _opened(model, "--data", "strings", "--problems", "640", room=40)
