"""Balanced filtering: curves are read where both arms have updated as often, or one 60 % as often."""

from experiments.curriculum import balanced_filtering
from jaxrl_llm.experiment.results import ArmResult, Results


def _arm(accuracy, updated):
    """An arm of two seeds, measured every ten iterations; ``updated`` is its share of updates since the last time."""
    curves = {
        "eval/accuracy": {"step": [0, *range(10, 121, 10)], "values": [accuracy, [x + 0.01 for x in accuracy]]},
        "filter/updated": {"step": list(range(10, 121, 10)), "values": [[x - 0.1 for x in updated],
                                                                        [x + 0.1 for x in updated]]},
    }  # fmt: skip
    metrics = {"eval/accuracy": [accuracy[-1], accuracy[-1] + 0.01]}
    return ArmResult({}, [0, 1], metrics, curves, rollouts=0, tokens=0, updates=120, seconds=0.0)


def test_arms_are_compared_at_their_updates():
    """balanced updates in 0.4, then 0.2 of the iterations: 24 + 12 = 36 times; grpo has by 40 (nearest), and by 60."""
    grpo = [0.40 + 0.01 * k for k in range(13)]
    balanced = _arm([0.50] * 13, [0.4] * 6 + [0.2] * 6)
    plain, other = _arm(grpo, [1.0] * 12), _arm([0.3] * 13, [0.5] * 12)
    results = Results({"grpo": plain, "balanced": balanced, "easy": other, "hard": other})
    steps, updates = balanced_filtering.updates_of(results, "balanced")
    assert steps.tolist() == list(range(10, 121, 10)) and [round(float(x), 6) for x in updates[[0, 5, 11]]] == [
        4,
        24,
        36,
    ]
    assert [balanced_filtering.after_updates(results, "grpo", n) for n in (0, 36, 60, 999)] == [10, 40, 60, 120]
    found = balanced_filtering.claim(results)
    texts = [part.text for part in found.parts]
    assert "120 and 60" in texts[1] and "120 and 40" in texts[2], texts
    means = [round(float(part.mean), 6) for part in found.parts]
    assert means == [-0.02, 0.04, 0.06, 0.2, 0.2], "0.50 against 0.52 at the end, 0.46 at 60, 0.44 at 40"
