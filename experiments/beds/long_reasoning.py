"""Test bed: long composed reasoning of free length, paid by a judge that likes length (knobs: length bias, redundancy).

Paper:     none; a bed for methods about the length of reasoning: shorter responses, budgets, biases of loss and judge.
Claim:     a judge three quarters of whose reward is length costs accuracy, and one that reads the answer repairs that.
Equations: r = (1 - b) [right] + b |y| / max_new_tokens, b = length_bias; A = (r - mean) / std of the group, loss -A log
           pi. exact: b = 0 (the positive control); bias_n: b in percent. redundant: b = 0, and the base has been
           taught to write its work twice, on chains shorter than those that are asked.
Left out:  judges that are models; lengths above 64 tokens.
Expect:    eval/accuracy: exact > grpo, bias_60 < bias_50; eval/wrong_tokens: exact < grpo.
Measure:   held-out chains of six operations, where the base has read five at most: it leaves operations out and stops
           early, so that right answers are longer than its own. Floor 0.19, a guess 0.17, ceiling 1; equal rollouts and
           updates; reward/mean is what the judge pays.
Run:       python -m experiments.beds.long_reasoning; certificate: python -m jaxrl_llm.experiment certify
           experiments/beds/long_reasoning.py
"""

import dataclasses

import jax.numpy as jnp

from experiments.beds.parts import rare_answers
from experiments.parts import long_chains, long_winded
from jaxrl_llm import experiment
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes

SHORTER = (2, 3, 4)  # operations of the chains on which a redundant base is taught


@dataclasses.dataclass(frozen=True)
class Settings(rare_answers.Settings):
    """Values of the bed for a model of your own; see EMBEDDED for the small ones."""

    length_bias: float = 0.75  # share of the reward that is length
    redundancy: int = 1  # times that the base writes its work; 1: the model as it is
    warm_steps: int = 80  # supervised steps that teach it, where it is more


EMBEDDED = long_chains.EMBEDDED
SMOKE = rare_answers.SMOKE | {"warm_steps": 2}
ARMS = {
    "grpo": {},
    "exact": {"length_bias": 0.0},
    "bias_50": {"length_bias": 0.5},
    "bias_60": {"length_bias": 0.6},
    "redundant": {"length_bias": 0.0, "redundancy": 2},
}
METRICS = ("eval/accuracy", "eval/pass@4", "eval/tokens", "eval/right_tokens", "eval/wrong_tokens")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "policy/entropy")
BED = experiment.Bed(metric="eval/accuracy", chance=0.17, baseline="grpo", positive="exact", knob="length_bias")


def build(settings: Settings) -> experiment.Plan:
    """Plain group advantages; the judge mixes the answer with the length, and the base may repeat itself."""
    if not 0 <= settings.length_bias <= 1:
        raise UserError(f"--length-bias {settings.length_bias} is a share of the reward; choose one in [0, 1]")
    if settings.redundancy > 1 and settings.data != "chain":
        raise UserError(f"--redundancy {settings.redundancy} writes the work of chains over: leave --data chain")
    bench, bias = recipes.bench(settings), settings.length_bias

    def score(answers, rows):
        rewards = rare_answers.judge(bench)(answers, rows)
        length = jnp.sum(rows.mask.astype(jnp.float32), axis=1) / settings.max_new_tokens
        return rewards._replace(value=(1.0 - bias) * rewards.value + bias * length)

    plan = rare_answers.build(settings, score=score if bias else None)
    if settings.redundancy == 1:
        return plan
    shorter = recipes.solved_problems(dataclasses.replace(settings, levels=SHORTER))
    base = long_winded.warm_base(bench, shorter, steps=settings.warm_steps, times=settings.redundancy)
    return plan._replace(init=base)


def claim(results: experiment.Results) -> experiment.Claim:
    """A judge that reads the answer beats one three quarters of whose reward is length."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "exact", "grpo"),
        experiment.smaller(results, "eval/accuracy", "bias_60", "bias_50"),
        experiment.smaller(results, "eval/wrong_tokens", "exact", "grpo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
