"""What the file is about, in one line (Template).

Paper:     Authors, "Title", arXiv:0000.00000.
Claim:     what the paper says, in words that this experiment could refute: here, that a leave-one-out baseline earns
           as much as GRPO's group mean and deviation.
Equations: A_i = r_i - mean_{j != i} r_j (arm method); A_i = (r_i - mean(r)) / std(r) (baseline; no_std: not divided);
           J = sum_t min(rho A, clip(rho, 1 +- clip) A) / tokens. Name what an arm changes.
Left out:  what of the paper is not here.
Expect:    eval/accuracy: |method - baseline| < 0.03. State it before the first run, and keep it whatever comes out.
Measure:   held-out arithmetic chains; 8 seeds, equal rollouts and updates.
Run:       python -m experiments._template
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import optax
from jaxtyping import Array

from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders


# Every field is a flag of the command line. A field that no arm reads is an error: see `check_flags`.
@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values, for a model of your own: ``--model DIR``."""

    steps: int = 400
    # a variant is a function passed in, never a string or a flag
    advantages: Callable[..., Array] = group.group_normalized_advantages
    clip: float = 0.2


# Replaces the paper's values where a bundled model trains. All arms with 8 seeds should take minutes on two cores.
EMBEDDED = {
    "levels": (3, 4, 5), "steps": 150, "eval_every": 25, "prompts_per_step": 12, "max_new_tokens": 48,
    "learning_rate": 2e-4, "eval_problems": 192,
}  # fmt: skip
# On top of that: seconds. Keep these shapes, which all experiments share, so that compiled programs are shared too.
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 2,
}  # fmt: skip
# The baseline first, then the method, then the paper's ablations. An arm names what it changes of the settings.
ARMS = {
    "baseline": {},
    "method": {"advantages": group.rloo_advantages},
    "no_std": {"advantages": group.dr_grpo_advantages},
}
METRICS = ("eval/accuracy", "eval/tokens")  # columns of the table: final values
CURVES = (*METRICS, "policy/entropy", "grad/norm")  # panels of the figure


def build(settings: Settings) -> experiment.Plan:
    """The wiring of one arm, and nothing but wiring: the mathematics is in the library, the loop in the harness."""
    bench = recipes.bench(settings)  # model, problems, judge

    def advantages(trajectories, rewards):
        values = settings.advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    online = recipes.make_online(
        settings,
        bench,
        # rewards -> what each token is worth; the only place where rewards are looked at
        estimate=builders.make_estimate(
            bench.model.policy, advantages, reduction="token_mean", temperature=settings.temperature
        ),
        # one of jaxrl_llm.losses with its numbers bound
        loss=builders.make_policy_loss(
            bench.model.policy,
            partial(clipped_policy_loss, clip_low=settings.clip, clip_high=settings.clip),
            reduction="token_mean",
            temperature=settings.temperature,
        ),
        tx=optax.adam(settings.learning_rate),
        # other slots of train.online.Online go here: sampler=, score=, rollout=, remember=, ...; a loss that ranks or
        # averages over the whole batch says so: whole_batch="why", and is not trained in parts (--microbatches)
    )
    # several stages, a reference model or another measurement: make the experiment.Plan here instead
    return recipes.one_stage(settings, bench, online)


def claim(results: experiment.Results) -> experiment.Claim:
    """A leave-one-out baseline earns what GRPO earns."""
    # `greater`, `smaller` and `close` compare arms over paired seeds; the first part of `conclude` decides alone, those
    # behind it are secondary
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.close(results, "eval/accuracy", "method", "baseline", within=0.03),
    )


if __name__ == "__main__":
    experiment.main(__name__)
