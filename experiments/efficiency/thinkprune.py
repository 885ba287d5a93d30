"""A token limit that tightens round by round prunes reasoning (ThinkPrune).

Paper:     Hou et al., "ThinkPrune: Pruning Long Chain-of-Thought of LLMs via Reinforcement Learning", arXiv:2504.01296.
Claim:     RL under a hard generation limit, lowered in rounds, halves the length of a reasoning model at a small loss
           of accuracy; one round at the last limit is worse, and so is cutting the responses at test time only.
Equations: r = 1[right answer inside the first L tokens], 0 for a response that was cut; GRPO, the cut ones stay in the
           loss. iterative: L = 40, 32, 24, each round from the end of the one before, new optimiser. direct: L = 24.
           penalty: no limit, r - w * min(length / max, 1). unlimited: L = max. Early exit: the responses of unlimited
           judged at 24 tokens (eval/cut_accuracy).
Left out:  the sentence that tells the limit (the base model follows no instructions), embedded the KL of weight 0.001,
           the choice of the best checkpoint of a round (the last one goes on).
Expect:    eval/tokens iterative < 0.6 start at eval/accuracy no more than 0.02 below unlimited; eval/accuracy iterative
           > direct; iterative above unlimited in eval/cut_accuracy. The registered margin is 0.4 times the mean length
           of unlimited over the judged seeds, without an error of its own.
Measure:   held-out chains of 2 and 3 operations, always with the full 48 tokens; the base model is first taught to
           write its work twice (the long reasoner); 8 seeds, equal rollouts in every arm, tokens in the table.
Run:       python -m experiments.efficiency.thinkprune
"""

import dataclasses
from functools import lru_cache

import jax.numpy as jnp

from experiments.parts import long_winded
from jaxrl_llm import experiment, reduce
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.rewards import shaping
from jaxrl_llm.train.methods import episode_methods


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 60  # of each round
    max_new_tokens: int = 4000
    shares: tuple[float, ...] = (1.0, 0.75, 0.5)  # limit of each round as a share of max_new_tokens
    cut_share: float = 0.5  # limit at which cut_accuracy is measured
    length_weight: float = 0.0  # of an explicit penalty
    group_size: int = 16
    warm_steps: int = 0  # supervised steps on work that is written twice
    kl_weight: float = 0.001  # of k3 to the policy at the start of a round; 0: no reference


EMBEDDED = {
    "levels": (2, 3), "shares": (0.83, 0.67, 0.5), "steps": 40, "eval_every": 40, "warm_steps": 80,
    "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 48, "learning_rate": 2e-4, "train_problems": 1024,
    "eval_problems": 96, "kl_weight": 0.0,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "warm_steps": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 10,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 2,
}  # fmt: skip
ARMS = {
    "unlimited": {"shares": (1.0, 1.0, 1.0)},
    "direct": {"shares": (0.5, 0.5, 0.5)},
    "iterative": {},
    "penalty": {"shares": (1.0, 1.0, 1.0), "length_weight": 0.5},
}
METHOD = "iterative"
METRICS = ("eval/accuracy", "eval/tokens", "eval/cut_accuracy", "eval/right_tokens")
CURVES = (*METRICS, "reward/mean", "length/truncated_fraction", "policy/entropy")


@lru_cache(maxsize=8)  # one function a limit, so that arms share its compiled program
def cut_accuracy(limit: int):
    """Accuracy of the same responses when nothing beyond the limit is read: exit without training."""

    def more(found):
        def figures(rows, rewards):
            length = reduce.sequences(jnp.ones(rows.mask.shape, jnp.float32), rows.mask)
            right = shaping.limited_rewards(rewards.value > 0.5, length, limit_tokens=limit)
            return {"eval/cut_accuracy": reduce.scalars(right, rewards.valid)}

        return figures

    return more


def build(settings: Settings) -> experiment.Plan:
    """A supervised stage that makes the reasoner long, then one online stage for each round's limit."""
    found = recipes.bench(settings)
    stages = []
    if settings.warm_steps and settings.data == "chain":  # a model for rows of your own is long-winded already
        stages.append(long_winded.warm_stage(found, recipes.solved_problems(settings), steps=settings.warm_steps))
    for share in settings.shares:
        limited = dataclasses.replace(settings, max_new_tokens=round(share * settings.max_new_tokens))
        online = curricula.make_single_turn_grpo(limited, found, kl_weight=settings.kl_weight)
        if settings.length_weight and found.score is not None:
            online = online._replace(score=lambda answers, rows: penalised(found.score(answers, rows), rows, settings))
        stages.append(experiment.Stage(online, settings.steps, episode_methods.reference_for(settings.kl_weight)))
    host = (lambda rows: penalised(found.host_score(rows), rows, settings)) if settings.length_weight else None
    more = cut_accuracy(round(settings.cut_share * settings.max_new_tokens))
    return curricula.make_single_turn_plan(settings, found, stages, more=more, host_score=host)


def penalised(rewards, trajectories, settings):
    """The reward less an explicit price of length."""
    length = reduce.sequences(jnp.ones(trajectories.mask.shape, jnp.float32), trajectories.mask)
    price = shaping.linear_length_penalty(
        length.astype(jnp.int32), limit_tokens=settings.max_new_tokens, weight=settings.length_weight
    )
    return rewards._replace(value=rewards.value + price)


def claim(results: experiment.Results) -> experiment.Claim:
    """Rounds of tighter limits shorten by 40 % at 0.02 accuracy, better than one round and than a cut at test time."""
    length = results.values("unlimited", "eval/tokens").mean()
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.smaller(results, "eval/tokens", "iterative", "unlimited", by=0.4 * float(length)),
        experiment.greater(results, "eval/accuracy", "iterative", "unlimited", by=-0.02),
        experiment.greater(results, "eval/accuracy", "iterative", "direct"),
        experiment.greater(results, "eval/cut_accuracy", "iterative", "unlimited"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
