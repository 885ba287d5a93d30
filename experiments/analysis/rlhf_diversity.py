"""What RLHF does to generalisation and to diversity, against SFT and best of N.

Paper:     Kirk et al., "Understanding the Effects of RLHF on LLM Generalisation and Diversity", arXiv:2310.06452.
Claim:     RLHF generalises better than SFT where inputs shift, and its outputs are much less diverse.
Equations: per input: 16 responses to one prompt, mean over prompts; across: one response to each prompt. EAD =
           N_unique / (V (1 - ((V - 1) / V)^C)), mean over n-grams of 1 to 5 tokens; sentence: 1 - mean cosine of the
           SFT model's mean last hidden states (Sentence-BERT in the paper); meaning: 1 - the share of pairs that say
           the same, two responses whose true reward and counts of good and bad tokens agree (the paper asks a
           natural-language inference model). kept: true reward of shifted prompts over that of prompts like those of
           training. best_of_n: 16 outcomes, each the best of 16 samples of its own by the reward model. ppo: PPO
           (critic, GAE, clip) on r - beta log(pi / pi_sft), beta 0, 0.02 or 0.1.
Left out:  judgements by a language model.
Expect:    shift/kept: ppo > sft; per_input/ead: ppo < best_of_n; across/ead: ppo < sft; per_input/relative (per input
           over across) ppo < sft: more is lost per input than across.
Measure:   true reward on 512 prompts like those of training and on the same with a second token that training never
           had; shares, for what RL earns is several times what sft has. ppo counts where it is 4 nats from sft, before
           the reward model is exploited; sft and best_of_n have no updates. Reward model of 8192 labels, 10 % flipped
           (gate: rm/accuracy 0.8, rm/within 0.5). A share needs a reward with a zero: of scores of one's own without
           one read shift/drop.
Run:       python -m experiments.analysis.rlhf_diversity
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from experiments.analysis.parts import input_shift
from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """N and the coefficients of KL are the paper's."""

    steps: int = 150
    eval_every: int = 30
    learning_rate: float = 3e-4
    reference_steps: int = 250
    reward_steps: int = 600
    beta: float = 0.02
    critic_steps: int = preference_strings.CRITIC_STEPS
    stages: int = 1  # 0: not trained
    pick: Callable = input_shift.first  # which samples count
    problems: int = 512  # prompts of a measurement


SMOKE = {
    "steps": 2, "eval_every": 2, "reference_steps": 2, "reward_steps": 2, "problems": 4, "critic_steps": 1,
}  # fmt: skip
ARMS = {
    "sft": {"stages": 0},
    "ppo": {},
    "best_of_n": {"stages": 0, "pick": input_shift.best_of_n},
    "ppo_free": {"beta": 0.0},
    "ppo_tight": {"beta": 0.1},
}
METRICS = (
    "eval/gold", "shift/gold", "shift/kept", "shift/drop", "per_input/ead", "across/ead", "per_input/sentence",
    "across/sentence", "per_input/meaning", "across/meaning", "per_input/relative", "rm/accuracy", "rm/within",
)  # fmt: skip
CURVES = (*METRICS[:-2], "eval/kl", "reward/mean")
BED = experiment.Bed(
    metric="eval/gold", baseline="ppo", judges=(("ppo", "rm/accuracy", 0.8), ("ppo", "rm/within", 0.5))
)
D_STAR = {"shift/kept": 0.05}  # a quarter of what sft loses


def build(settings: Settings, task: Preferences = toy.STRINGS) -> experiment.Plan:
    """One online stage, or none; the measurement has 16 responses to each prompt."""
    stages = preference_strings.ppo_stages(
        task, partial(preference_strings.proxy, task), steps=settings.steps, beta=settings.beta,
        learning_rate=settings.learning_rate, prompts=input_shift.trained(task),
        critic_steps=settings.critic_steps,
    )  # fmt: skip
    start = preference_strings.make_start(
        task, reference_steps=settings.reference_steps, reward_steps=settings.reward_steps,
        draw_pairs=partial(input_shift.draw_pairs, task, flip_rate=0.1),
        behaviour=strings.bound(input_shift.draw_behaviour, task),
    )  # fmt: skip
    measure = strings.bound(input_shift.measure, task, settings.pick, prompts=settings.problems)
    return experiment.Plan(start, stages * settings.stages, measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """RLHF keeps more of its reward under the shift than SFT, and is less diverse per input than best of N.

    It is less diverse across inputs, too, but by less. It is judged at 4 nats.
    """
    at = {"step": experiment.at("eval/kl", 4.0)}
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "shift/kept", "ppo", "sft", **at),
        experiment.smaller(results, "per_input/ead", "ppo", "best_of_n", **at),
        experiment.smaller(results, "across/ead", "ppo", "sft", **at),
        experiment.smaller(results, "per_input/relative", "ppo", "sft", **at),
        experiment.smaller(results, "per_input/sentence", "ppo", "sft", **at),
        experiment.smaller(results, "per_input/meaning", "ppo", "sft", **at),
    )


if __name__ == "__main__":
    experiment.main(__name__)
