"""General-Reasoner: the reward's numbers, curation, and generative verifiers with and without written work."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models import cross_domain_rlvr, general_reasoner, rlpr
from experiments.reward_models.parts import answer_judges, free_answers
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.rewards import shaping
from tests import close
from tests.close import singles
from tests.papers.test_cross_domain_rlvr import cases


def test_worked_rewards():
    def reward(passed, answered, answer, reference):
        return float(
            shaping.verified_rewards(
                jnp.array([passed]), jnp.array([answered]), jnp.array([answer]), jnp.array([reference])
            )[0]
        )

    given = [(True, True, 5.0, 3.0, 0.9), (True, True, 28.0, 3.0, 0.5), (True, True, 3.0, 3.0, 1.0),
             (False, True, 5.0, 3.0, 0.0), (False, False, 0.0, 3.0, -0.5), (True, False, 3.0, 3.0, 0.5)]  # fmt: skip
    for *row, expected in given:
        close.assert_near(reward(*row), expected)


def test_problems_with_one_outcome_stay_out():
    assert general_reasoner.mixed(np.array([0.0, 0.125, 0.875, 1.0])).tolist() == [False, True, True, False]
    assert general_reasoner.mixed(np.array([0.0, 1.0])).all()


@pytest.mark.slow
def test_written_work_generalises_from_fewer_examples():
    value, answered, answers, truth = cases()

    def accuracy(verifier):
        net = verifier.fit(jax.random.key(0))
        said = verifier.judge(net, value, answered, answers)
        assert not verifier.judge(net, value, ~answered, answers).any()
        return float(((np.asarray(said) > 0.5) == truth).mean())

    kinds = {worked: answer_judges.make_generative(300, error_rate=0.0, worked=worked, soft=False)
             for worked in (True, False)}  # fmt: skip
    assert accuracy(kinds[True]) > accuracy(kinds[False]) + 0.03 > 0.55
    nets = [kinds[False].fit(jax.random.key(seed)) for seed in (0, 1)]
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, nets), strict=True)), "each seed has its own"


def test_what_a_rule_accepts_is_right():
    value, answered, answers, truth = cases()
    rule = answer_judges.without_fitting(free_answers.exact)
    said = rule.judge(rule.fit(jax.random.key(0)), value, answered, answers) > 0.5
    found = answer_judges.agreement(said, jnp.asarray(truth))
    assert float(found["judge/false_positives"]) == 0.0
    assert found["judge/accuracy"] < 1.0  # right answers in the other form
    lenient = answer_judges.agreement(answered, jnp.asarray(truth))
    close.assert_near(lenient["judge/false_positives"], 1 - truth.mean())


def test_a_judge_that_says_yes_to_everything_is_at_chance():
    """Of nine right answers, two wrong ones and a response without any."""
    right = jnp.asarray([True] * 9 + [False] * 3)
    answered = jnp.asarray([True] * 11 + [False])

    def share(passed, of=slice(None)):
        return float(answer_judges.balanced(jnp.asarray(passed)[of], right[of], answered[of])["judge/balanced"])

    assert share([True] * 11 + [False]) == 0.5 and share([False] * 12) == 0.5
    assert share([True] * 9 + [True, False, False]) == 0.75 and share(right) == 1.0
    assert share([True] * 6 + [False] * 6) == singles(5 / 6)
    # of one kind alone its share is all there is, and of none nothing
    assert share([True] * 12, slice(0, 9)) == 1.0 and share([True] * 12, slice(9, 12)) == 0.0
    assert share([True] * 12, slice(11, 12)) == 0.0
    judges = [judge for module in (general_reasoner, cross_domain_rlvr, rlpr) for judge in module.BED.judges]
    assert judges == [(arm, "judge/balanced", 0.75) for arm in ("cot", "small_soft", "verifier")]


@pytest.mark.slow
def test_problems_are_chosen_by_what_the_taught_model_solves_in_either_form(monkeypatch):
    seen = []

    def rates(found, by, rows, *, samples, max_new_tokens):
        seen.append((found, by, samples))
        return np.full(len(rows), 0.5)

    monkeypatch.setattr(curricula, "pass_rates", rates)
    small = recipes.OnlineSettings(levels=(2,), train_problems=6, eval_problems=4, max_new_tokens=24)
    settings = general_reasoner.Settings(**dataclasses.asdict(small), warm_steps=1)
    general_reasoner._rates.cache_clear()
    assert general_reasoner.rates_once_taught(settings).tolist() == [0.5] * 6
    general_reasoner._rates.cache_clear()
    (found, by, samples), base = seen[0], recipes.bench(settings).model
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), by.params, base.params)
    assert samples == 8 and any(jax.tree.leaves(moved))
    assert set(found.train.answers) == {"value", "reference", "modulus"}  # judged by residues
