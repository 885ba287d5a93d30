"""Short reasoning by a large model that a small model can still finish (HAWKEYE).

Paper:     She et al., "HAWKEYE: Model Collaboration for Efficient Reasoning", arXiv:2504.00424.
Claim:     most of a large model's chain of thought is redundant for a small model that writes the answer; RL with a
           penalty on length makes the large one write about a third of it at comparable quality, for less than half
           the cost.
Equations: c ~ large(x), y = small(x, c) greedy and frozen; R = 1[y right] - lambda max(0, |c| / |c_ref| - tau)^2 with
           tau = 0.3; GRPO on the tokens of c alone. full: lambda = 0. two_sided: (|c| / |c_ref| - tau)^2. mild:
           lambda = 0.3. eval/alone: y without any c. eval/cut: y after the first 0.35 |c_ref| tokens of c at most.
Left out:  the form of the reward is a reconstruction (the paper's text was not at hand); the small model may only
           answer: it is handed the reasoning and the answer mark; free-text judges, and with them rows of one's own:
           the mark and the length of work that is written over are known of chains alone, for any two models of one
           vocabulary (--model DIR --answerer DIR; without --answerer the large one before training).
Expect:    hawkeye against full: eval/accuracy at least 0.95 times, eval/share at most 0.4 times, eval/cost lower;
           eval/cut higher: reasoning that was trained to be short against a long one that is cut off there.
Measure:   held-out chains of 2 and 3 operations; the large model (tiny, 1.0 million parameters; nano, which answers,
           has 0.15) is first taught to write its work thrice (share 1,
           once is a third); 8 seeds, equal rollouts in every arm; eval/cost: 10 for its tokens, 1 for the other's. A
           constant answer is right for 0.16, ceiling 1.
Run:       python -m experiments.efficiency.hawkeye
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from jaxtyping import Array

from experiments.efficiency.parts import two_model_relay
from experiments.parts import long_winded
from jaxrl_llm import experiment
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.rewards import shaping
from jaxrl_llm.run.parts import ModelName


def two_sided(tokens: Array, reference: Array, *, target_share: float, weight: float) -> Array:
    """The penalty of the ablation: shorter than the target costs, too."""
    return -weight * (tokens / reference - target_share) ** 2


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where they are known; see EMBEDDED for the small model."""

    model: ModelName = "tiny"  # the large model, which reasons
    answerer: str = ""  # the small frozen model: tiny, nano, or a folder; empty: the large one before training
    steps: int = 200
    penalty: Callable[..., Array] = shaping.excess_length_penalty
    weight: float = 1.0  # lambda
    target_share: float = 0.3  # tau
    read_share: float = 0.35  # of the long-winded reasoning, what the small model reads at most for eval/cut
    times: int = 3  # that the long-winded reasoning has the work
    warm_steps: int = 0  # supervised steps on work that is written so often


EMBEDDED = {
    "answerer": "nano", "levels": (2, 3), "steps": 120, "eval_every": 40, "warm_steps": 80, "prompts_per_step": 8,
    "group_size": 8, "max_new_tokens": 64, "learning_rate": 2e-4, "train_problems": 1024, "eval_problems": 96,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "warm_steps": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 10,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 2,
}  # fmt: skip
ARMS = {
    "full": {"weight": 0.0},
    "hawkeye": {},
    "two_sided": {"penalty": two_sided},
    "mild": {"weight": 0.3},
}
METHOD = "hawkeye"
BED = experiment.Bed(chance=0.16)
METRICS = ("eval/accuracy", "eval/share", "eval/cut", "eval/tokens", "eval/alone", "eval/cost")
CURVES = ("eval/accuracy", "eval/share", "eval/cost", "reward/mean", "policy/entropy")


def build(settings: Settings) -> experiment.Plan:
    """A supervised stage that makes the large model long-winded, then GRPO on what the small one makes of it."""
    found, problems = recipes.bench(settings), curricula.train_problems(settings)
    both = two_model_relay.make_relay(settings, settings.answerer)
    rollout = two_model_relay.make_reasoner(
        both, group_size=settings.group_size, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature
    )
    penalty = partial(settings.penalty, target_share=settings.target_share, weight=settings.weight)
    score = two_model_relay.score_by_answerer(
        both, two_model_relay.reasoning_tokens(found.model, problems, settings.times), penalty
    )
    online = curricula.make_single_turn_grpo(settings, found, rollout=rollout, score=score)
    warm = long_winded.warm_stage(found, problems, steps=settings.warm_steps, times=settings.times)
    stages = [warm, experiment.Stage(online, settings.steps)]
    shares = {"times": settings.times, "read_share": settings.read_share}
    measure = two_model_relay.measure_of_pair(settings, answerer=settings.answerer, **shares)
    return curricula.make_single_turn_plan(settings, found, stages)._replace(measure=measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """The penalty cuts the reasoning to 40 % at 95 % of the accuracy, and the first 35 % are worth more than of any."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.smaller_than_share(results, "eval/share", "hawkeye", "full", share=0.4),
        experiment.greater_than_share(results, "eval/accuracy", "hawkeye", "full", share=0.95),
        experiment.greater(results, "eval/cut", "hawkeye", "full"),
        experiment.smaller(results, "eval/cost", "hawkeye", "full"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
