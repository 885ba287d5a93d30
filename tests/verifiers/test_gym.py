"""Every reasoning-gym family: problems as plain data, the same for a seed, judged by the family's own scorer."""

import json
import pickle
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
        first, again = gym.problems(family, 2, 5), gym.problems(family, 2, 5)
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
