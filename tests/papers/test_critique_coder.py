"""Critique-Coder: labels by comparison of answers, exact shares, one judge for both kinds of questions."""

import dataclasses

import numpy as np
import pytest

from experiments.policy_gradient.parts import critique_task
from jaxrl_llm.data.tasks import chain, countdown
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.train.methods import builders
from tests import close
from tests.verifiers.test_labels import _rows

SETTINGS = recipes.OnlineSettings(levels=(2,), train_problems=50, eval_problems=8, max_new_tokens=16)


def test_labels_compare_answers():
    problems = curricula.train_problems(SETTINGS)
    asked = critique_task.critique_problems(problems, chain.flawed, right_share=0.5)
    for problem, question in zip(problems, asked, strict=True):
        assert question.prompt.startswith(problem.prompt) and question.prompt.endswith("?")
        candidate = question.prompt[len(problem.prompt) : -1]
        assert question.answer["label"] == (candidate.split("#")[-1] == str(problem.answer["value"]))
        assert question.solution[-1] == ("T" if question.answer["label"] else "F")
    # a policy that always says T earns the share of right candidates
    shares = [
        np.mean(
            [q.answer["label"] for q in critique_task.critique_problems(problems * 10, chain.flawed, right_share=x)]
        )
        for x in (0.5, 0.9)
    ]
    # a wrong candidate may be right by luck: guesses and slips that cancel
    assert 0.45 < shares[0] < 0.65 and shares[1] > 0.85


def test_slips_are_of_chains_only():
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match="not of countdown: --data chain"):
        chain.flawed(rng, countdown.make(rng, 3))


def test_shares_are_exact_and_the_same_every_time():
    problems = curricula.train_problems(SETTINGS)
    asked = critique_task.critique_problems(problems, chain.flawed)
    for share, count in ((0.0, 0), (0.2, 10), (0.5, 25), (1.0, 50)):
        table = critique_task.mixed(problems, asked, share=share)
        assert len(table) == 50 and sum("label" in p.answer for p in table) == count
        assert table == critique_task.mixed(problems, asked, share=share)
    with pytest.raises(ValueError, match="share=2"):
        critique_task.mixed(problems, asked, share=2.0)


def test_each_row_is_judged_by_what_it_asks():
    bench = recipes.bench(SETTINGS)
    problem = curricula.train_problems(SETTINGS)[0]
    right, wrong = (problem._replace(prompt="?", answer=problem.answer | {"label": label}) for label in (True, False))
    answers = critique_task.table(bench, [problem, right, wrong, problem]).answers
    _, rows = _rows([problem.solution, "#T", "#T", "#T"])
    assert critique_task.score_by_kind(bench)(answers, rows).value.tolist() == [1, 1, 0, 0]
    _, rows = _rows(["#F", problem.solution, "2+2=4#F", f"#{problem.answer['value']}"])
    assert critique_task.score_by_kind(bench)(answers, rows).value.tolist() == [0, 0, 1, 1]


def test_fine_tuning_imitates_right_critiques_alone():
    """The loss is minus the mean log-probability of what follows the question: the work and the label as it is."""
    bench, problems = recipes.bench(SETTINGS), curricula.train_problems(SETTINGS)[:6]
    judging = critique_task.critique_problems(problems, chain.flawed)
    settings = dataclasses.replace(SETTINGS, prompts_per_step=2, group_size=3, learning_rate=1e-3)
    method = critique_task.fine_tuning(settings, bench, judging)
    rows, tokenizer = method.rows({}), bench.model.tokenizer
    assert method.rows_per_step == 6 and rows.tokens.shape[0] == 6
    for k, problem in enumerate(judging):
        trained = np.asarray(rows.tokens[k])[np.asarray(rows.mask[k])].tolist()
        assert trained == [*tokenizer.encode(problem.solution), tokenizer.eos_ids[0]]
        assert problem.solution[-1] == ("T" if problem.answer["label"] else "F")
    logp, _ = builders.score_tokens(bench.model.policy, bench.model.params, rows)
    value, _ = method.loss(bench.model.params, {}, rows, method.whole(rows))
    mask = np.asarray(rows.mask)
    close.assert_near(value, -np.asarray(logp)[mask].mean(), terms=int(mask.sum()), magnitude=10.0)
