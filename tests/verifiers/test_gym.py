"""Every reasoning-gym family: problems as plain data, the same for a seed, judged by the family's own scorer."""

import json
import pathlib
import pickle
import runpy
import sys

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.verifiers import gym
from jaxrl_llm.verifiers.pool import VerifierPool

# Puzzles without a stored solution, or scored below 1 on the one that is stored.
UNSOLVED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def test_there_are_many_families():
    assert len(gym.families()) >= 100 and "countdown" in gym.families()


@pytest.mark.slow
def test_every_family_draws_and_judges():
    for family in gym.families():
        first, again = (gym.problems(family, 2, 5, unsound=True) for _ in range(2))
        assert first.prompts == again.prompts and len(first.prompts) == 2, family
        assert pickle.loads(pickle.dumps(first)) == first, family
        for answer, solution in zip(first.answers, first.solutions, strict=True):
            if family not in UNSOLVED:
                assert gym.verify(answer, f"So: <answer>{solution}</answer>").value == 1.0, family
        for response in ("", "((((", "1/0", "\u0663", "<answer>", "{}", "[[1]]", "null", "9" * 400):
            verdict = gym.verify(first.answers[0], response)
            assert verdict.valid and 0.0 <= verdict.value <= 1.0 and verdict.reason, (family, response, verdict)


def test_settings_reach_the_family_and_the_pool_judges():
    made = gym.problems("chain_sum", 3, 0, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    assert json.loads(made.answers[0]["settings"])["max_terms"] == 2
    with VerifierPool(workers=1) as pool:
        judged = pool.judge(gym.verify, made.answers, made.solutions)
    assert [v.value for v in judged.verdicts] == [1.0] * 3


def test_mistakes_are_named():
    with pytest.raises(UserError, match="no reasoning-gym family 'nothing'"):
        gym.problems("nothing", 1, 0)
    with pytest.raises(UserError, match="refuses the settings"):
        gym.problems("chain_sum", 1, 0, no_such_setting=3)
    with pytest.raises(ValueError, match="n=0"):
        gym.problems("chain_sum", 0, 0)


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"jaxrl_llm\[tasks\]"):
        gym.families()


def test_families_that_pay_for_junk_are_refused_by_name():
    with pytest.raises(UserError, match="'coin_flip' pays for answers that are not right: '0' earns 0.93") as refused:
        gym.problems("coin_flip", 2, 0)
    assert "unsound=True" in str(refused.value) and "verify_solved" not in str(refused.value)
    with pytest.raises(UserError, match="'time_intervals' pays .* judge by gym.verify_solved"):
        gym.problems("time_intervals", 2, 0)
    made = gym.problems("coin_flip", 8, 0, unsound=True)
    assert sum(gym.verify(answer, "0").value for answer in made.answers) >= 6.0  # as it is in the package


def test_full_marks_alone():
    made = gym.problems("time_intervals", 8, 0, unsound=True)
    wrong = list(zip(made.answers, [*made.solutions[1:], made.solutions[0]], strict=True))
    assert 0.0 < max(gym.verify(*pair).value for pair in wrong) < 1.0
    assert {gym.verify_solved(*pair).value for pair in wrong} == {0.0}
    assert gym.verify_solved(made.answers[0], made.solutions[0]) == (1.0, True, "right")


def test_an_audit_finds_what_pays_for_junk():
    junk, sound = gym.audit("game_of_life_halting", 6), gym.audit("chain_sum", 6)
    assert junk.worst(junk.full) == ("the prompt", 1.0) and junk.pays_in_full() and "earns 1.00" in junk.unsound()
    assert sound.solved == 1.0 and sound.unsound() == "" and not sound.pays_in_full()
    assert sound.paid["'0'"] == 0.0 and "the answer of another problem" in sound.paid


def test_an_audit_finds_what_is_paid_for_not_choosing_and_for_a_number_of_the_prompt():
    both, copied = gym.audit("course_schedule", 8), gym.audit("prime_factorization", 8)
    assert " or " in both.unsound() and not both.pays_in_full()
    assert "the first number of the prompt earns" in copied.unsound() and not copied.pays_in_full()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_audit_of_all_families_is_the_list_and_the_page():
    docs = pathlib.Path(__file__).parents[2] / "docs"
    page = runpy.run_path(str(docs / "make_reasoning_gym.py"))["page"]
    audits = [gym.audit(family) for family in gym.families()]
    assert {a.family: a.unsound() for a in audits if a.unsound()} == gym.UNSOUND
    assert tuple(a.family for a in audits if a.unsound() and a.pays_in_full()) == gym.PAID_IN_FULL
    assert page(audits, 40) == (docs / "reasoning-gym.md").read_text(), "run: python docs/make_reasoning_gym.py"
