"""One pairwise judge for reward modelling and reinforcement learning (Pairwise-RL).

Paper:     Xu et al., "A Unified Pairwise Framework for RLHF: Bridging Generative Reward Modeling and Policy
           Optimization", arXiv:2504.04950.
Claim:     a generative judge of two responses, compared with a fixed anchor answer in reinforcement learning, beats a
           Bradley-Terry reward model.
Equations: score s_ab = logit(first) - logit(second) of the verdict token; loss -1/2 [log p_wl + log(1 - p_lw)] + c
           (p_wl + p_lw - 1)^2; P(y > z) = (p_yz + 1 - p_zy) / 2; reward: its logit against the anchor (probability:
           itself). discriminative: s from a linear head. no_consistency: c = 0. bt: scalar reward model.
Left out:  a rationale before the verdict, and a value model: the baseline is the mean reward of the batch, not of the
           prompt (bt_group, generative_group: of the prompt), so rewards must be comparable between prompts.
Expect:    judge/accuracy and eval/gold: generative > bt; judge/inconsistency: generative < no_consistency.
Measure:   true reward on fresh prompts, and how often samples beat the anchor in it; judges read 1024 labels, 10 %
           flipped; a length-independent toy. 8 seeds, equal rollouts and updates.
Run:       python -m experiments.preference.pairwise_rl
"""

import dataclasses
from collections.abc import Callable

from experiments.parts import preference_strings
from experiments.preference.parts import pair_judges
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import ranking


def batch_advantages(rewards, group_ids, *, valid):
    return rewards - reduce.scalars(rewards, valid)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Sizes for the small model."""

    steps: int = 120
    eval_every: int = 30
    learning_rate: float = 1e-3
    reference_steps: int = 200
    judge_steps: int = 300
    judge: str = "generative"
    worth: Callable = ranking.win_logit
    advantages: Callable = batch_advantages
    beta: float = 0.05


SMOKE = {"steps": 1, "eval_every": 1, "reference_steps": 2, "judge_steps": 2}
ARMS = {
    "bt": {"judge": "bt"},
    "generative": {},
    "discriminative": {"judge": "discriminative"},
    "no_consistency": {"judge": "no_consistency"},
    "probability": {"worth": ranking.win_probability},
    "bt_group": {"judge": "bt", "advantages": group.rloo_advantages},
    "generative_group": {"advantages": group.rloo_advantages},
}
METRICS = ("eval/gold", "eval/beats_anchor", "judge/accuracy", "judge/inconsistency", "eval/kl")
CURVES = ("eval/gold", "eval/beats_anchor", "eval/kl", "reward/mean", "policy/entropy")


def build(settings: Settings) -> experiment.Plan:
    """One online stage whose reward is the judge's opinion of a response against the anchor."""
    score = pair_judges.KINDS[settings.judge][0]

    def reward(params, prompts, responses):
        anchor = pair_judges.anchor_response(prompts)
        both = [score(params[settings.judge], prompts, *x) for x in ((responses, anchor), (anchor, responses))]
        return settings.worth(*both)

    stage = preference_strings.reward_stage(
        reward, steps=settings.steps, beta=settings.beta, learning_rate=settings.learning_rate,
        advantages=settings.advantages,
    )  # fmt: skip
    start = pair_judges.make_start(settings.reference_steps, settings.judge_steps)
    return experiment.Plan(start, (stage,), pair_judges.make_measure(settings.judge))


def claim(results: experiment.Results) -> experiment.Claim:
    """The generative pairwise judge is more accurate than a scalar one, earns more, and is consistent if trained so."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "generative", "bt"),
        experiment.greater(results, "judge/accuracy", "generative", "bt"),
        experiment.smaller(results, "judge/inconsistency", "generative", "no_consistency"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
