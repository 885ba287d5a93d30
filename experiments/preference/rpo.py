"""DPO with a supervised term that limits over-optimisation (RPO: regularised preference optimisation).

Paper:     Liu et al., "Provably Mitigating Overoptimization in RLHF: Your SFT Loss is Implicitly an Adversarial
           Regularizer", arXiv:2405.16436.
Claim:     where the pairs cover part of the responses, DPO's true reward peaks and falls as mass moves to responses
           nobody judged; a small supervised term on the chosen ones prevents that.
Equations: h = beta [(lp - lp_ref)(y_w) - (lp - lp_ref)(y_l)]; dpo: -log sigmoid(h); rpo: that - eta beta lp(y_w) with
           sequence sums, eta = 0.005 (weight; rpo_005, rpo_05: 0.05, 0.5); rpo_reference: lp of a sample of the
           reference in place of lp(y_w); rpo_mean: -log sigmoid(h) - 0.2 lp(y_w) / T, beta = 0.5; sft: -lp(y_w).
Left out:  a learned proxy reward; the sheet's large models. eta is a ratio of pulls, so it carries over as it is.
Expect:    eval/gold of dpo at the end below its peak by more than 0.5, that of rpo not; at the end rpo > dpo in
           eval/gold and pair/chosen_drift.
Measure:   gold reward of samples on fresh prompts, the reference trained on the data's behaviour first; pairs labelled
           by Bradley-Terry, 10 % flipped; 8 seeds, equal pairs and updates (sft sees half the tokens of a pair,
           rpo_reference a third response).
Run:       python -m experiments.preference.rpo
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from experiments.parts import preference_strings
from experiments.parts.preference_task import RESPONSE_TOKENS
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference


def dpo(logps, baseline, beta, weight):
    return preference.dpo_loss(*logps, beta=beta)


def rpo(logps, baseline, beta, weight):
    return preference.rpo_loss(*logps, beta=beta, eta=weight)


def rpo_reference(logps, baseline, beta, weight):
    return preference.rpo_loss(*logps, beta=beta, eta=weight, baseline_logp=baseline)


def rpo_mean(logps, baseline, beta, weight):
    tokens = jnp.full(baseline.shape, float(RESPONSE_TOKENS), jnp.float32)
    return preference.rpo_mean_loss(*logps, tokens, beta=beta, weight=weight)


def sft(logps, baseline, beta, weight):
    return dpo(logps, baseline, beta, weight)._replace(loss=-logps[0])


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """eta, beta and the mean-token weight are the paper's; the model is a decoder of 32 tokens made here."""

    steps: int = 400
    eval_every: int = 20
    learning_rate: float = 1e-3
    reference_steps: int = 200
    pairs: int = 512
    pairs_per_step: int = 32
    flip_rate: float = 0.1
    objective: Callable = rpo
    beta: float = 0.05
    weight: float = 0.005  # eta, or that of the mean-token term
    responses: int = 2  # of a pair, whose tokens the loss trains on


SMOKE = {"steps": 2, "eval_every": 1, "reference_steps": 2, "pairs": 16, "pairs_per_step": 4}
ARMS = {
    "dpo": {"objective": dpo},
    "rpo": {},
    "rpo_005": {"weight": 0.05},
    "rpo_05": {"weight": 0.5},
    "rpo_mean": {"objective": rpo_mean, "weight": 0.2, "beta": 0.5},
    "rpo_reference": {"objective": rpo_reference, "responses": 3},
    "sft": {"objective": sft, "responses": 1},
}
METRICS = ("eval/gold", "eval/unseen", "eval/style", "pair/chosen_drift")
CURVES = (*METRICS, "pair/rejected_drift", "pair/accuracy")
# dpo peaks and falls by the paper's own claim; whether the pairs teach anything shows on its released objective
BED = experiment.Bed(baseline="rpo_mean")


def build(settings: Settings) -> experiment.Plan:
    """One offline stage from the reference: the arm's objective on pairs."""

    def objective(*logps):
        return settings.objective(logps[:4], logps[4], settings.beta, settings.weight)

    stage = preference_strings.pair_stage(
        objective,
        steps=settings.steps,
        pairs=settings.pairs,
        flip_rate=settings.flip_rate,
        responses=settings.responses,
        rows_per_step=settings.pairs_per_step,
        learning_rate=settings.learning_rate,
    )
    return experiment.Plan(
        preference_strings.make_reference(steps=settings.reference_steps), (stage,), preference_strings.measure
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """DPO's true reward peaks and falls, RPO's stays, and RPO keeps the chosen responses more likely."""
    peak, last = {}, int(results.curve("dpo", "eval/gold")[0][-1])
    for arm in ("dpo", "rpo"):
        steps, gold = results.curve(arm, "eval/gold")
        peak[arm] = int(steps[gold.mean(0).argmax()])
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "rpo", "dpo"),
        experiment.smaller(results, "eval/gold", "dpo", "dpo", by=0.5, step=(last, peak["dpo"])),
        experiment.greater(results, "eval/gold", "rpo", "rpo", by=-0.5, step=(last, peak["rpo"])),
        experiment.greater(results, "pair/chosen_drift", "rpo", "dpo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
