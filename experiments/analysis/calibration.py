"""How far models mean the confidence that they state, after four kinds of training.

Paper:     Zeng et al., "Thinking Out Loud: Do Reasoning Models Know When They're Right?", arXiv:2504.06564.
Claim:     reasoning models are better calibrated than instructed ones where there is something to work out; on facts
           reinforcement learning gains nothing and distilled traces make a model more over-confident.
Equations: ECE = sum_m |B_m| / n |acc(B_m) - conf(B_m)|, ten bins of equal width; Brier = mean (c - y)^2; AUROC =
           P(c_right > c_wrong) + P(=) / 2; overconfidence = mean c - mean y; vote: c = share of the most frequent of
           four answers; ptrue: c = p(yes) / (p(yes) + p(no)) of the verdict token when the answer is proposed. rl:
           reward y, GRPO; rl_brier: y + 1 - (c - y)^2, an extension.
Left out:  the paper's models and benchmarks, for which --model DIR --data FILE.jsonl --arm base measures what lies in
           the text ("Confidence: 85 %"), and P(True) behind every response, of questions that have an answer; logic
           questions. That traces make a model over-confident is shown and not judged: those of long state 100 %,
           whatever is asked, and instruct's 80 %, so that facts/overconfidence and hidden/overconfidence are decided
           by what is imitated.
Expect:    sums/ece: long < instruct and rl < instruct; facts/ece: rl not below base by more than 0.05; sums/brier:
           rl_brier < rl.
Measure:   fresh sums modulo 7, facts of which a quarter never occurs in training, sums with a hidden digit, that have
           no answer and that only the base has read, at temperature 0.6; base is measured only; the others have equal
           updates from it, instruct on short right answers at about 80 %, long on worked ones at 100 %. 512 questions
           of each kind x 4 samples. rl finds the worked answers in some seeds and not in others: sums/accuracy is
           bimodal, and its mean no seed's. sums/found is 1 where it is above a half: its mean is the share of seeds
           that found them, and above a half where the median seed did. Supervised arms read given answers, so rollouts
           and tokens differ.
Run:       python -m experiments.analysis.calibration
"""

import dataclasses
from collections.abc import Callable

import jax
import optax

from experiments.parts import confidence as toy_confidence
from experiments.parts import confidence_task as toy
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.arms import bundled
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders

WORLD = toy_confidence.WORLD
correctness = toy_confidence.make_reward(lambda right, confidence: right)
with_brier = toy_confidence.make_reward(lambda right, confidence: right + 1.0 - (confidence - right) ** 2)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """Of the training routes; ``data``, ``levels`` and what evaluation needs serve ``--model DIR``."""

    steps: int = 150
    eval_every: int = 50
    learning_rate: float = 1e-3
    prompts_per_step: int = 16
    eval_problems: int = 1000
    base_steps: int = 1500
    draw: Callable | None = None  # answers to imitate
    score: Callable | None = None  # or a reward to earn


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "base": {},
    "instruct": {"draw": toy.draw_short},
    "long": {"draw": toy.draw_long},
    "rl": {"score": correctness},
    "rl_brier": {"score": with_brier},
}
D_STAR = {"sums/ece": 0.05}  # a twentieth of stated confidence: less no reader of one response would see
METRICS = (
    "sums/accuracy", "sums/found", "sums/ece", "sums/brier", "facts/accuracy", "facts/ece", "facts/overconfidence",
    "sums/ptrue_auroc", "facts/ptrue_auroc", "hidden/overconfidence", "hidden/told_auroc",
)  # fmt: skip
CURVES = (*METRICS, "sums/auroc", "facts/auroc", "sums/vote_ece", "facts/vote_ece", "sums/ptrue_ece", "facts/ptrue_ece")


def training(settings: Settings) -> tuple[experiment.Stage, ...]:
    """No stage for the base; imitation or GRPO for the others."""
    if settings.draw is not None:
        rows, rate = settings.prompts_per_step * settings.group_size, settings.learning_rate
        stage = strings.supervised_stage(
            WORLD, settings.draw, steps=settings.steps, rows_per_step=rows, learning_rate=rate
        )
        return (stage,)
    if settings.score is None:
        return ()
    advantages = builders.per_response(group.group_normalized_advantages)
    online = strings.learned_from_prompts(
        WORLD,
        toy.draw_questions(jax.random.key(0), 2048),
        settings.score,
        estimate=builders.make_estimate(WORLD.policy, advantages),
        loss=builders.make_policy_loss(WORLD.policy, clipped_policy_loss),
        tx=optax.adam(settings.learning_rate),
        prompts_per_step=settings.prompts_per_step,
        group_size=settings.group_size,
    )
    return (experiment.Stage(online, settings.steps),)


def build(settings: Settings) -> experiment.Plan:
    """The arm's training from one base; a model of your own is measured only."""
    if bundled(settings.model):
        start = toy_confidence.make_base(steps=settings.base_steps)
        return experiment.Plan(start, training(settings), toy_confidence.measure)
    if settings.draw is not None or settings.score is not None:
        raise UserError("--model measures a model as it is; add --arm base")
    params, measure = recipes.bench(settings).model.params, toy_confidence.make_text_measure(settings)
    return experiment.Plan(lambda key: params, (), measure, on_host=True)


def claim(results: experiment.Results) -> experiment.Claim:
    """Worked traces and RL mean their confidence more on sums, more with Brier in the reward; facts change little."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.smaller(results, "sums/ece", "long", "instruct"),
        experiment.smaller(results, "sums/ece", "rl", "instruct"),
        experiment.greater(results, "facts/ece", "rl", "base", by=-0.05),
        experiment.smaller(results, "sums/brier", "rl_brier", "rl"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
