"""Trap 48, verifiers that run what they read: a scorer of another package executes no answer and reaches nothing."""

import pytest

from jaxrl_llm.verifiers import gym, math


@pytest.mark.parametrize("family", ["string_insertion", "spiral_matrix", "binary_matrix", "simple_integration"])
def test_an_answer_that_is_code_does_nothing_and_earns_nothing(family, tmp_path):
    marker = tmp_path / "reached"
    made = gym.problems(family, 1, 0)
    for answer in (f"__import__('os').system('touch {marker}')", f"[open({str(marker)!r}, 'w').write('x')]"):
        verdict = gym.verify(made.answers[0], f"<answer>{answer}</answer>")
        assert not marker.exists() and verdict[:2] == (0.0, True)
        assert math.verify({"value": "7"}, answer)[:2] == (0.0, True) and not marker.exists()
    assert gym.verify(made.answers[0], f"<answer>{made.solutions[0]}</answer>").value == 1.0


def test_an_answer_that_would_pay_itself_does_not():
    """The frames of the scorer hold the reference answer."""
    made = gym.problems("string_insertion", 1, 0)
    steal = "[f.f_locals for f in [__import__('sys')._getframe(k) for k in range(6)] if 'entry' in f.f_locals]"
    assert gym.verify(made.answers[0], f"<answer>{steal}[0]['entry']['answer']</answer>")[:2] == (0.0, True)
