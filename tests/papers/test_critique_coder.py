"""Critique-Coder: labels by comparison of answers, exact shares, one judge for both kinds of questions."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.policy_gradient import critique_coder
from experiments.policy_gradient.parts import critique_task, host_judging
from jaxrl_llm.data.tasks import chain, countdown
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import Results, cli, curricula, recipes
from jaxrl_llm.experiment.evidence import beds
from jaxrl_llm.train.methods import builders
from tests import close
from tests.close import singles
from tests.experiment import made
from tests.models_for_tests import byte_model
from tests.verifiers.test_labels import _rows

SETTINGS = recipes.OnlineSettings(levels=(2,), train_problems=50, eval_problems=8, max_new_tokens=16)


def test_labels_compare_answers():
    problems = curricula.train_problems(SETTINGS)
    asked = critique_task.critique_problems(problems, right_share=0.5)
    for problem, question in zip(problems, asked, strict=True):
        assert question.prompt.startswith(problem.prompt) and question.prompt.endswith("?")
        candidate = question.prompt[len(problem.prompt) : -1]
        assert question.answer["label"] == (candidate.split("#")[-1] == str(problem.answer["value"]))
        assert question.solution[-1] == ("T" if question.answer["label"] else "F")
    # a policy that always says T earns the share of right candidates
    shares = [
        np.mean([q.answer["label"] for q in critique_task.critique_problems(problems * 10, right_share=x)])
        for x in (0.5, 0.9)
    ]
    assert shares == [0.5, 0.9]


def test_a_wrong_candidate_slips_in_the_first_step_that_counts():
    rng, first = np.random.default_rng(0), 0
    problems = curricula.train_problems(dataclasses.replace(SETTINGS, levels=(6,), max_new_tokens=64))
    for problem in problems:
        steps, wrong = problem.solution.split(","), critique_task.early_slip(rng, problem).split(",")
        assert critique_task.answer_of(wrong[-1]) != str(problem.answer["value"])
        at = [a == b for a, b in zip(steps, wrong, strict=True)].index(False)
        first += at == 0
        # no slip in an earlier step would have changed the answer: a later factor of 0 undoes it
        assert at == 0 or 0 in problem.answer["numbers"] or problem.answer["modulus"] == 10
    assert first > 40
    with pytest.raises(UserError, match="not of countdown: --data chain"):
        critique_task.early_slip(rng, countdown.make(rng, 3))


def test_candidates_that_are_right_by_luck_are_drawn_again():
    problems, drawn = curricula.train_problems(SETTINGS)[:10], []

    def lucky(rng, problem):
        drawn.append(problem.solution if len(drawn) % 2 == 0 else "#x")
        return drawn[-1]

    kind = critique_task.CHAINS._replace(attempt=lucky)
    asked = critique_task.critique_problems(problems, kind)
    assert [q.answer["label"] for q in asked].count(True) == 5 and len(drawn) == 10
    assert all(q.prompt.endswith("#x?") for q in asked if not q.answer["label"])
    always = critique_task.CHAINS._replace(attempt=lambda rng, problem: problem.solution)
    with pytest.raises(UserError, match="attempts at 'm.* are all right"):
        critique_task.critique_problems(problems, always)


@pytest.mark.parametrize(("accuracy", "faults"), [(0.71, 0), (0.53, 1)])
def test_a_judge_that_answers_true_to_everything_makes_the_bed_invalid(accuracy, faults):
    results = Results({"crl_100": made.arm([accuracy, accuracy], metric="critique/accuracy")})
    assert len(beds.judges_at_chance(results, critique_coder.BED)) == faults


def test_slips_are_of_chains_only():
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match="not of countdown: --data chain"):
        chain.flawed(rng, countdown.make(rng, 3))


def test_shares_are_exact_and_the_same_every_time():
    problems = curricula.train_problems(SETTINGS)
    asked = critique_task.critique_problems(problems)
    for share, count in ((0.0, 0), (0.2, 10), (0.5, 25), (1.0, 50)):
        table = critique_task.mixed(problems, asked, share=share)
        assert len(table) == 50 and sum("label" in p.answer for p in table) == count
        assert table == critique_task.mixed(problems, asked, share=share)
        assert sum(p.answer.get("label", False) for p in table) in (count // 2, count - count // 2)
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
    judging = critique_task.critique_problems(problems)
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


PROGRAMS = recipes.OnlineSettings(data="programs", levels=(1,), train_problems=8, eval_problems=2, max_new_tokens=16)


def test_programs_are_labelled_and_rewarded_by_their_tests():
    """In the sandbox: another text of the same function is right, the label is whether the candidate passes."""
    found, problems = recipes.bench(PROGRAMS), recipes.solved_problems(PROGRAMS)
    assert found.score is None
    asked = host_judging.questions(PROGRAMS)
    assert {q.answer["label"] for q in asked} == {True, False} and host_judging.questions(PROGRAMS) is asked
    for problem, question in zip(problems, asked, strict=True):
        candidate, scope = question.prompt[len(problem.prompt) : -1], {}
        exec(problem.answer["start"] + candidate, scope)  # the generator's own text
        expected = [check.split(" == ") for check in problem.answer["checks"]]
        passes = all(scope["f"](int(call[9:-1])) == int(value) for call, value in expected)
        assert question.answer["label"] == passes
        assert question.solution == f"{problem.solution}#{'T' if passes else 'F'}"
    mixed = host_judging.mixture(problems, asked, share=0.5)
    assert (mixed.origin < 0).sum() == 4 and len(mixed.problems) == 8
    solve, judge = int(np.flatnonzero(mixed.origin >= 0)[0]), int(np.flatnonzero(mixed.origin < 0)[0])
    label = "T" if mixed.problems[judge].answer["label"] else "F"
    _, rows = _rows([f"0+{mixed.problems[solve].solution}", "#T", f"x+1#{label}", mixed.problems[judge].solution[:-1]])
    rewards = host_judging.make_host_score(found, mixed)(
        rows._replace(problem_ids=np.asarray([solve, solve, judge, judge], np.int32))
    )
    assert rewards.value.tolist() == [1, 0, 1, 0] and rewards.valid.all()


def test_a_share_of_the_tests_pays_where_that_is_asked_for():
    settings = critique_coder.Settings(
        data="programs", levels=(1,), train_problems=8, eval_problems=2, max_new_tokens=16, share=0.0, tests="share"
    )
    found, problem = recipes.bench(settings), recipes.solved_problems(settings)[0]
    scope = {}
    exec(problem.answer["start"] + problem.solution, scope)  # the generator's own text
    text = str(scope["f"](1))  # a constant, right at one input, and wherever the function has this value again
    _, rows = _rows([problem.solution, text])
    rows = rows._replace(problem_ids=np.zeros(2, np.int32))
    rewards = critique_coder.on_host(settings, found).host_score(rows)
    assert rewards.value.tolist() == singles([1.0, 0.2])
    plain = dataclasses.replace(settings, tests="all")
    assert critique_coder.on_host(plain, found).host_score(rows).value.tolist() == [1.0, 0.0]
    with pytest.raises(UserError, match="--tests share: chains have no tests"):
        critique_coder.build(dataclasses.replace(settings, data="chain"))


def test_samples_that_are_judged_are_balanced_and_of_problems_that_are_neither_always_nor_never_solved():
    problems = [problem._replace(prompt="Add one.") for problem in recipes.solved_problems(PROGRAMS)] * 50
    kinds = [[("good", True), ("bad", False)], [("good", True)], [("bad", False)], [("bad", False), ("good", True)]]
    found = host_judging.balanced(problems, kinds * (len(problems) // 4), right_share=0.5, seed=0)
    labels = [question.answer["label"] for question in found]
    assert len(found) == len(problems) // 2
    assert sum(labels) == len(labels) // 2
    for question in found:
        assert ("good" if question.answer["label"] else "bad") in question.prompt
        assert question.prompt.startswith("Add one.") and "\\conclusion{T}" in question.prompt
    with pytest.raises(UserError, match="none has right and wrong answers"):
        host_judging.balanced(problems[:1], kinds[1:2], right_share=0.5, seed=0)


@pytest.mark.slow
def test_arms_over_rows_of_programs_of_ones_own(tmp_path, monkeypatch):
    """Rows in the format of MBPP; only the attempts are given, since a random model has none that is right."""
    byte_model(tmp_path, "qwen2", max_positions=900)
    rows = [{"text": f"Give {k}.", "code": f"def f():\n    return {k}", "test_list": [f"assert f() == {k}"]}
            for k in range(60)]  # fmt: skip
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--model", str(tmp_path), "--data", str(tmp_path / "own.jsonl"), "--format", "mbpp", "--seeds", "1"]
    words += [
        "--steps",
        "2",
        "--eval-every",
        "2",
        "--prompts-per-step",
        "2",
        "--group-size",
        "2",
        "--eval-problems",
        "2",
    ]
    words += ["--eval-samples", "2", "--max-new-tokens", "8", "--out", str(tmp_path / "out"), "--export", "never"]
    with pytest.raises(UserError, match="none has right and wrong answers"):
        cli.run(critique_coder, [*words, "--arm", "crl_50"])
    tried = [("def f(): return 1", True), ("def f(): return 0", False)]
    monkeypatch.setattr(host_judging, "_sampled", lambda found, settings, table, score: [tried] * len(table.tokens))
    found = cli.run(critique_coder, [*words, "--arm", "rl", "crl_50", "crl_100"])
    for arm in found.arms.values():
        assert arm.updates == 2 and 0 <= arm.metrics["critique/accuracy"][0] <= 1
    with pytest.raises(UserError, match="cft imitates written critiques"):
        cli.run(critique_coder, [*words, "--arm", "cft"])
