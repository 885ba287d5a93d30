"""Test bed: samples from older weights, or from weights in few bits (knobs: lag and precision).

Paper:     none; a bed for asynchronous training and for corrections of a sampler that is not the policy.
Claim:     a policy gradient that takes samples of eight updates ago for its own loses accuracy to fresh samples.
Equations: responses come from pi_{k - lag}; A = (r - mean) / std of the group, loss -A log pi as if they were the
           policy's own. fresh: lag 0 (the positive control); lag_n: n updates; int8, int4: fresh samples from weights
           rounded to as many bits (needs the extra quant).
Left out:  servers apart; lags that vary.
Expect:    eval/accuracy: fresh > grpo, lag_16 < lag_2; what few bits do is shown and not judged.
Measure:   held-out Countdown with three numbers; floor 0.15, ceiling 1; equal rollouts and updates; kl/sampler_mean:
           how far the sampler is from the policy.
Run:       python -m experiments.beds.stale_sampler; certificate: python -m jaxrl_llm.experiment certify
           experiments/beds/stale_sampler.py --arm fresh grpo lag_2 lag_4 lag_16
"""

import dataclasses

from experiments.beds.parts import rare_answers, staleness_map
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes


@dataclasses.dataclass(frozen=True)
class Settings(rare_answers.Settings):
    """Values of the bed for a model of your own; see EMBEDDED for the small ones."""

    lag: int = 8  # updates between every sample and its use


EMBEDDED = rare_answers.EMBEDDED
SMOKE = rare_answers.SMOKE
ARMS = {
    "grpo": {},
    "fresh": {"lag": 0},
    "lag_2": {"lag": 2},
    "lag_4": {"lag": 4},
    "lag_16": {"lag": 16},
    "int8": {"lag": 0, "rollout_weights": "int8"},
    "int4": {"lag": 0, "rollout_weights": "int4"},
}
METRICS = ("eval/accuracy", "eval/pass@4", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "kl/sampler_mean", "policy/entropy")
BED = experiment.Bed(metric="eval/accuracy", chance=0.12, baseline="grpo", positive="fresh", knob="lag")
MAP = staleness_map  # of the atlas: corrections by lag and base model


def build(settings: Settings) -> experiment.Plan:
    """Plain group advantages on samples of the policy of ``lag`` updates ago."""
    return rare_answers.build(
        settings, extras=recipes.lagged_extras(settings.lag), **recipes.lagged_actor(settings.lag)
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """Fresh samples beat samples of eight updates ago that are taken for the policy's own."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "fresh", "grpo"),
        experiment.smaller(results, "eval/accuracy", "lag_16", "lag_2"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
