"""Test bed: a reward model learned from judged pairs, with a known truth behind it (knob: wrong labels).

Paper:     none; a bed for methods about preferences, reward models and judges.
Claim:     labels of which three of ten are wrong give a reward model that is over-optimised, and four times as many
           of them repair a part of that.
Equations: r of Bradley-Terry pairs, P(first chosen) = (1 - 2 f) sigmoid(gold gap) + f, f = flip_rate; policy gradient
           on r(x, y) - beta log(pi / ref) with a leave-one-out baseline. gold: the truth in the place of r (the
           positive control); flips_n: f in percent; more_labels: four times the pairs;
           few_labels: an eighth of them.
Left out:  judges that are language models: with rows of one's own, see the files of ``reward_models``.
Expect:    eval/gold: gold > learned, more_labels > learned, flips_40 < flips_0.
Measure:   true reward of 512 fresh prompts x 4 samples; guessing earns 0, the ceiling is 12; rm/accuracy and
           rm/correlation say what the reward model knows, eval/proxy what it believes, eval/kl how far the policy went.
           In the certificate flips_0 has a reward model of 0.93 and 0.7, learned one of 0.7 and 0.2. Equal rollouts and
           updates.
Run:       python -m experiments.beds.judged_pairs; certificate: python -m jaxrl_llm.experiment certify
           experiments/beds/judged_pairs.py
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Values for the small decoder; see ``build`` for rows of one's own."""

    steps: int = 200
    eval_every: int = 20
    learning_rate: float = 3e-4
    reference_steps: int = 200
    reward_steps: int = 600
    labels: int = 4096
    flip_rate: float = 0.3
    beta: float = 0.02
    paid: str = "learned"  # or gold
    prompts_per_step: int = 16
    group_size: int = 4


SMOKE = {
    "steps": 2, "eval_every": 2, "reference_steps": 2, "reward_steps": 2, "labels": 16, "prompts_per_step": 2,
    "group_size": 2,
}  # fmt: skip
ARMS = {
    "learned": {},
    "gold": {"paid": "gold", "flip_rate": 0.0},
    "flips_0": {"flip_rate": 0.0},
    "flips_20": {"flip_rate": 0.2},
    "flips_40": {"flip_rate": 0.4},
    "more_labels": {"labels": 16384},
    "few_labels": {"labels": 512},
}
METRICS = ("eval/gold", "eval/kl", "eval/proxy", "rm/accuracy", "rm/correlation")
CURVES = (*METRICS, "reward/mean", "policy/entropy")
BED = experiment.Bed(
    metric="eval/gold", chance=0.0, ceiling=12.0, baseline="learned", positive="gold", knob="flip_rate",
    judges=(("flips_0", "rm/accuracy", 0.85), ("flips_0", "rm/correlation", 0.5)),
)  # fmt: skip


def measure(task: Preferences, params, key):
    """The true reward of 512 x 4 samples in the place of that of 64 x 4."""
    prompts = task.draw_prompts(jax.random.fold_in(key, 30), 512)
    drawn = strings.sample(task.world, params["policy"], prompts, jax.random.fold_in(key, 31), samples=4)
    gold = task.gold_reward(jnp.repeat(prompts, 4, axis=0), drawn)
    return preference_strings.measure_parts(task, params, key) | {"eval/gold": gold.mean()}


def build(settings: Settings, task: Preferences = toy.STRINGS) -> experiment.Plan:
    """One policy gradient on the reward model, or on the truth that the world pays."""
    start = preference_strings.make_start(
        task, reference_steps=settings.reference_steps, reward_steps=settings.reward_steps, labels=settings.labels,
        draw_pairs=partial(task.draw_pairs, flip_rate=settings.flip_rate),
    )  # fmt: skip
    reward = None if settings.paid == "gold" else partial(preference_strings.proxy, task)
    stage = preference_strings.reward_stage(
        task, reward, steps=settings.steps, beta=settings.beta, learning_rate=settings.learning_rate,
        prompts_per_step=settings.prompts_per_step, group_size=settings.group_size,
    )  # fmt: skip
    return experiment.Plan(start, (stage,), strings.bound(measure, task))


def claim(results: experiment.Results) -> experiment.Claim:
    """With three labels of ten wrong, four times as many labels give a policy that is truly better."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "more_labels", "learned"),
        experiment.smaller(results, "eval/gold", "flips_40", "flips_0"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
