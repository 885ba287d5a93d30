"""Test bed: a verifier that errs, and errs alike on the same answer (knobs: false positives and false negatives).

Paper:     none; a bed for methods about noisy, partial or learned rewards.
Claim:     a verifier that turns a fifth of its verdicts around costs accuracy, and an exact one repairs that.
Equations: r = [right] but for a share false_negatives of right answers (0 instead) and false_positives of wrong ones (1
           instead), decided by problem and answer, so that the same answer always meets the same verdict; A = (r -
           mean) / std of the group, loss -A log pi. exact: no errors (the positive control); noise_n: both shares in
           percent.
Left out:  a learned reward model, and its number of labels.
Expect:    eval/accuracy: exact > grpo, noise_40 < noise_10.
Measure:   held-out Countdown with three numbers, judged exactly; floor 0.15, ceiling 1; equal rollouts and updates;
           reward/mean is what the erring verifier pays.
Run:       python -m experiments.beds.noisy_verifier; certificate: python -m jaxrl_llm.experiment certify
           experiments/beds/noisy_verifier.py
"""

import dataclasses

import jax.numpy as jnp

from experiments.beds.parts import rare_answers
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes


@dataclasses.dataclass(frozen=True)
class Settings(rare_answers.Settings):
    """Values of the bed for a model of your own; see EMBEDDED for the small ones."""

    false_positives: float = 0.2  # share of wrong answers that are paid
    false_negatives: float = 0.2  # share of right answers that are not


def _both(noise: float) -> dict[str, float]:
    return {"false_positives": noise, "false_negatives": noise}


EMBEDDED = rare_answers.EMBEDDED
SMOKE = rare_answers.SMOKE
ARMS = {"grpo": {}, "exact": _both(0.0), "noise_10": _both(0.1), "noise_30": _both(0.3), "noise_40": _both(0.4)}
METRICS = ("eval/accuracy", "eval/pass@4", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "policy/entropy")
BED = experiment.Bed(metric="eval/accuracy", chance=0.12, baseline="grpo", positive="exact", knob="false_positives")


def build(settings: Settings) -> experiment.Plan:
    """Plain group advantages; verdicts are turned around by a hash of problem and answer."""
    bench = recipes.bench(settings)
    if not settings.false_positives and not settings.false_negatives:
        return rare_answers.build(settings)

    def score(answers, rows):
        rewards = rare_answers.judge(bench)(answers, rows)
        luck = rare_answers.share(1, rows.problem_ids, rare_answers.text_number(rows))
        right = rewards.value > 0.5
        turned = luck < jnp.where(right, settings.false_negatives, settings.false_positives)
        return rewards._replace(value=(right ^ turned).astype(jnp.float32))

    return rare_answers.build(settings, score=score)


def claim(results: experiment.Results) -> experiment.Claim:
    """An exact verifier beats one that turns a fifth of its verdicts around."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "exact", "grpo"),
        experiment.smaller(results, "eval/accuracy", "noise_40", "noise_10"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
