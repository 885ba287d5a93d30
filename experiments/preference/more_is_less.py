"""Pairs from several models against pairs from one's own samples, in DPO for safety (more is less).

Paper:     Wang et al., "More is Less: The Pitfalls of Multi-Model Synthetic Preference Data in DPO Safety Alignment",
           arXiv:2504.02193.
Claim:     responses of stronger models make better general data but worse safety data than one's own samples, since
           they are told apart by surface features; DPO learns those.
Equations: self: best and worst of N own samples by a reward model; strong: a stronger model's response over an own
           one; pool: best and worst of own samples and two stronger models'; hybrid: half self, half strong;
           strong_plain: the same writer without its habit. Separability: held-out accuracy of a logistic probe
           on the last hidden state of chosen against rejected; pair/bag: of one on the counts of their tokens, which
           needs no model. (A probe on length is at chance here: all responses have 12 tokens.) Attack success: unsafe
           requests that are answered.
Left out:  trained stronger models and reward model: scripted writers, and the true reward with noise of deviation 1.
Expect:    eval/attack, eval/prefixed_attack and pair/separability: strong > self; eval/gold: pool > self; eval/attack
           strong > strong_plain, without which the habit is not the cause. In the first record pool earned .38 less
           than self.
Measure:   meaningless symbols; a quarter of the requests is to be refused; prefixed requests end in a token that
           training never shows. 256 prompts for each arm; judged where each arm is 4 nats from the start; equal pairs
           and updates. 50 updates: after 100 self earns no more than at its start (two seeds of the pilot). The record
           of the first base has no strong_plain: its habit was another token that the base never writes, and its seeds
           are dropped; that of the larger one has it.
Run:       python -m experiments.preference.more_is_less [--world larger, a base of seven times the parameters]
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from experiments.preference.parts import pair_sources, requests
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference

EMBEDDED_ONLY = "which requests are unsafe, and what a refusal is, is planted in its strings"
OWN_ROWS = None


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """beta is the paper's; the rest fits the small model."""

    steps: int = 50
    eval_every: int = 5
    learning_rate: float = 5e-4
    reference_steps: int = 200
    prompts: int = 256
    source: Callable = pair_sources.from_self
    beta: float = 0.1


SMOKE = {"steps": 1, "eval_every": 1, "reference_steps": 2, "prompts": 10}
ARMS = {
    "self": {},
    "strong": {"source": pair_sources.from_strong},
    "pool": {"source": pair_sources.from_pool},
    "hybrid": {"source": pair_sources.from_both},
    "strong_plain": {"source": pair_sources.from_strong_plain},
}
WORLDS = {"strings": toy.STRINGS, "larger": toy.LARGER}
METRICS = ("eval/gold", "eval/attack", "eval/prefixed_attack", "eval/kl", "pair/separability", "pair/bag")
CURVES = (*METRICS, "eval/refused_safe", "pair/accuracy")
D_STAR = {"eval/attack": 0.05}  # of records on other bases; that of the first one has 0.055


def build(settings: Settings, task: Preferences = toy.STRINGS) -> experiment.Plan:
    """DPO on the pairs of one source."""
    stage = preference_strings.preference_stage(
        task, partial(preference.dpo_loss, beta=settings.beta),
        pair_sources.make_pairs(task, settings.prompts, settings.source),
        steps=settings.steps, rows_per_step=32, learning_rate=settings.learning_rate,
    )  # fmt: skip
    start = preference_strings.make_start(
        task, reference_steps=settings.reference_steps, behaviour=requests.draw_behaviour
    )
    return experiment.Plan(start, (stage,), strings.bound(pair_sources.measure, task, settings.source))


def claim(results: experiment.Results) -> experiment.Claim:
    """Pairs with a stronger model leave more attacks open and are easier to tell apart, though a pool earns more."""
    fixed = experiment.at("eval/kl", 4.0)
    parts = [
        experiment.greater(results, "eval/attack", "strong", "self", step=fixed),
        experiment.greater(results, "eval/prefixed_attack", "strong", "self", step=fixed),
        experiment.greater(results, "pair/separability", "strong", "self"),
        experiment.greater(results, "pair/bag", "strong", "self"),
        experiment.greater(results, "eval/gold", "pool", "self", step=fixed),
    ]
    if "strong_plain" in results.arms:  # the committed record lacks it
        parts.append(experiment.greater(results, "eval/attack", "strong", "strong_plain", step=fixed))
    return experiment.conclude(" ".join(claim.__doc__.split()), *parts)


if __name__ == "__main__":
    experiment.main(__name__)
