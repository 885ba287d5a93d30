"""General-Reasoner: the reward's numbers, and verifiers with and without written work."""

import jax.numpy as jnp
import numpy as np

from experiments.reward_models.parts import answer_judges, free_answers
from jaxrl_llm.rewards import shaping
from tests.papers.test_cross_domain_rlvr import _cases


def test_worked_rewards():
    def reward(passed, answered, answer, reference):
        return float(
            shaping.verified_rewards(
                jnp.array([passed]), jnp.array([answered]), jnp.array([answer]), jnp.array([reference])
            )[0]
        )

    cases = [(True, True, 5.0, 3.0, 0.9), (True, True, 28.0, 3.0, 0.5), (True, True, 3.0, 3.0, 1.0),
             (False, True, 5.0, 3.0, 0.0), (False, False, 0.0, 3.0, -0.5), (True, False, 3.0, 3.0, 0.5)]  # fmt: skip
    for *given, expected in cases:
        np.testing.assert_allclose(reward(*given), expected, atol=1e-6)


def test_reasoning_generalises_from_fewer_examples():
    value, answered, answers, truth = _cases()

    def accuracy(judge):
        return float(((np.asarray(judge(value, answered, answers)) > 0.5) == truth).mean())

    cot = answer_judges.make_reasoning_judge(answer_judges.distilled_reasoner(300))
    direct = answer_judges.make_small_judge(answer_judges.distilled(300, 0.0), soft=False)
    assert accuracy(cot) > 0.95 > accuracy(direct)
    assert not cot(value, ~answered, answers).any()
    figures = answer_judges.make_false_positives(free_answers.exact)(lambda rows: (value, answered), None, answers)
    assert float(figures["eval/false_positives"]) == 0.0  # what the rule accepts is right
    lenient = answer_judges.make_false_positives(lambda value, answered, answers: answered.astype(jnp.float32))
    wrong = float(lenient(lambda rows: (value, answered), None, answers)["eval/false_positives"])
    np.testing.assert_allclose(wrong, 1 - truth.mean(), atol=1e-6)
