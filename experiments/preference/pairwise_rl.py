"""One pairwise judge for reward modelling and reinforcement learning (Pairwise-RL).

Paper:     Xu et al., "A Unified Pairwise Framework for RLHF: Bridging Generative Reward Modeling and Policy
           Optimization", arXiv:2504.04950.
Claim:     a generative judge of two responses, compared with a fixed anchor answer in reinforcement learning, beats a
           Bradley-Terry reward model.
Equations: score s_ab = logit(first) - logit(second) of the verdict token; loss -1/2 [log p_wl + log(1 - p_lw)] + c
           (p_wl + p_lw - 1)^2; P(y > z) = (p_yz + 1 - p_zy) / 2; reward: its logit against the anchor (probability:
           itself), PPO with critic, GAE and clip on it less beta log(pi / pi_ref). discriminative: s from a linear
           head. no_consistency: c = 0. bt: a scalar Bradley-Terry reward, to which a constant of each prompt is added
           that such labels cannot determine; bt_anchored: its difference to the anchor's, in which that cancels.
           generative_group: four responses a prompt and their mean in the critic's place.
Left out:  a rationale before the verdict. Differs from the paper in the weights of the loss, a reconstruction.
Expect:    judge/accuracy and eval/gold: generative > bt; judge/inconsistency: generative < no_consistency; eval/gold:
           bt_anchored > bt, which is the part of the gain that the anchor explains.
Measure:   true reward on fresh prompts at eval/kl 4, and how often samples beat the anchor in it. All judges start from
           one model that was trained on the behaviour and read the same 8192 labels, 10 % flipped; one that orders
           less than 0.75 of fresh pairs rightly makes the bed invalid. Equal rollouts, 512
           prompts x 4 samples an evaluation; generative_group makes one update of a rollout, the others two, after 20
           more rollouts of 64 on which their critic learns alone.
Run:       python -m experiments.preference.pairwise_rl
"""

import dataclasses
from collections.abc import Callable

from experiments.parts import preference_strings, strings
from experiments.parts.preference_task import Preferences
from experiments.preference.parts import pair_judges
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import ranking

UPDATES = 2  # a rollout, of the arms with a critic


def with_critic(task: Preferences, reward, settings):
    """PPO: critic, GAE, clip."""
    return preference_strings.ppo_stages(
        task, reward, steps=settings.steps, beta=settings.beta, learning_rate=settings.learning_rate,
        rollouts_per_step=64, updates_per_rollout=UPDATES, critic_steps=settings.critic_steps,
    )  # fmt: skip


def with_group(task: Preferences, reward, settings):
    """Four responses a prompt, compared with each other."""
    return (
        preference_strings.reward_stage(
            task, reward, steps=settings.steps, beta=settings.beta, learning_rate=settings.learning_rate
        ),
    )


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Sizes for the small model."""

    steps: int = 120
    eval_every: int = 30
    learning_rate: float = 1e-3
    reference_steps: int = 200
    judge_steps: int = 800
    judge: str = "generative"
    worth: Callable | None = ranking.win_logit  # None: the scalar itself, with what its labels leave open
    learn: Callable = with_critic  # the stages, of a reward and the settings
    critic_steps: int = preference_strings.CRITIC_STEPS
    beta: float = 0.05


SMOKE = {"steps": 1, "eval_every": 1, "reference_steps": 2, "judge_steps": 2, "critic_steps": 1}
ARMS = {
    "bt": {"judge": "bt", "worth": None},
    "generative": {},
    "bt_anchored": {"judge": "bt"},
    "discriminative": {"judge": "discriminative"},
    "no_consistency": {"judge": "no_consistency"},
    "probability": {"worth": ranking.win_probability},
    "generative_group": {"learn": with_group},
}
METRICS = ("eval/gold", "eval/beats_anchor", "judge/accuracy", "judge/inconsistency", "eval/kl")
CURVES = ("eval/gold", "eval/beats_anchor", "eval/kl", "reward/mean", "policy/entropy")
# bt is sick by design, with a constant of each prompt in its reward: what learns here is the same judge anchored
BED = experiment.Bed(
    baseline="bt_anchored", judges=(("generative", "judge/accuracy", 0.75), ("bt", "judge/accuracy", 0.75))
)


def build(settings: Settings, task: Preferences = pair_judges.STRINGS) -> experiment.Plan:
    """Online stages whose reward is the judge's opinion of a response against the anchor."""
    score = pair_judges.KINDS[settings.judge][0]

    def reward(params, prompts, responses):
        if settings.worth is None:
            return pair_judges.scalar(task, params["judge"], prompts, responses) + task.judging.offset(prompts)
        anchor = task.judging.anchor_response(prompts)
        both = [score(task, params["judge"], prompts, *x) for x in ((responses, anchor), (anchor, responses))]
        return settings.worth(*both)

    stages = settings.learn(task, reward, settings)
    start = pair_judges.make_start(task, settings.judge, settings.reference_steps, settings.judge_steps)
    return experiment.Plan(start, stages, strings.bound(pair_judges.measure, task, settings.judge))


def claim(results: experiment.Results) -> experiment.Claim:
    """The generative pairwise judge is more accurate than a scalar one, earns more, and is consistent if trained so."""
    fixed = experiment.at("eval/kl", 4.0)
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "generative", "bt", step=fixed),
        experiment.greater(results, "judge/accuracy", "generative", "bt"),
        experiment.smaller(results, "judge/inconsistency", "generative", "no_consistency"),
        experiment.greater(results, "eval/gold", "bt_anchored", "bt", step=fixed),
        experiment.greater(results, "eval/gold", "generative", "bt_anchored", step=fixed),
    )


if __name__ == "__main__":
    experiment.main(__name__)
