"""Credit for single steps from the votes of critics (CAPO).

Paper:     Xie et al., "CAPO: Towards Enhancing LLM Reasoning through Generative Credit Assignment", arXiv:2508.02298.
Claim:     critics that name the wrong steps of a solution, put to a vote, turn into token rewards that beat the outcome
           alone; voting makes up for critics that err; the outcome must weigh more than the penalty.
Equations: r_t = C 1[right] - P w(step of t), C = 2, P = 1; w from V = 4 critiques: majority, unanimous, average; A_t =
           (r_t - mean) / std over all tokens of the group. outcome: P = 0. single: V = 1. equal: C = P = 1.
           process_only: C = 0. careful: critics that never err. Of all critiques one in ten cannot be read and has no
           vote (outspoken: none).
Left out:  language models as critics: an oracle of the steps whose every verdict is turned round with chance 0.2; C, P
           and V are recalled from the paper, not read. Of --data the steps are lines, right by
           the results of the worked solutions.
Expect:    eval/accuracy majority > outcome, majority > single, careful >= majority; process_only lowest, by answers
           with few steps.
Measure:   held-out chains of 3 and 4 operations; 8 seeds, equal rollouts and updates.
Run:       python -m experiments.reward_models.capo
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.reward_models.parts import step_labels
from jaxrl_llm import experiment
from jaxrl_llm.advantages import process
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.train.methods import builders
from jaxrl_llm.verifiers import steps as reader


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values as recalled; see EMBEDDED for the small model."""

    steps: int = 200
    vote: Callable = process.majority
    critics: int = 4
    error_rate: float = 0.2  # chance that a critic's verdict on a step is wrong
    abstains: float = 0.1  # chance that a critique cannot be read and has no vote
    outcome: float = 2.0
    penalty: float = 1.0


EMBEDDED = {
    "levels": (3, 4), "steps": 40, "eval_every": 20, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 40,
    "learning_rate": 2e-4, "train_problems": 1024, "eval_problems": 96,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 10, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 2,
}  # fmt: skip
ARMS = {
    "outcome": {"penalty": 0.0},
    "majority": {},
    "single": {"critics": 1},
    "unanimous": {"vote": process.unanimous},
    "average": {"vote": process.average},
    "careful": {"error_rate": 0.0},
    "outspoken": {"abstains": 0.0},
    "equal": {"outcome": 1.0},
    "process_only": {"outcome": 0.0},
}
METHOD = "majority"
METRICS = ("eval/accuracy", "eval/right_steps", "eval/right_steps_of_right", "eval/steps", "eval/tokens")
CURVES = ("eval/accuracy", "eval/right_steps", "eval/steps", "reward/mean", "policy/entropy")


def build(settings: Settings) -> experiment.Plan:
    """One online stage: GRPO on rewards of tokens."""
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)
    most = settings.max_new_tokens // 4

    def advantages(rows, rewards):
        steps, right, valid = step_labels.step_scores(stepped, rows, most=most)
        # the critics' errors are drawn from the responses themselves
        key = jax.random.fold_in(jax.random.key(17), jnp.sum(rows.tokens))
        shape = (right.shape[0], settings.critics, most)
        errs = jax.random.uniform(key, shape) < settings.error_rate
        wrong = ((right < 0.5) & valid)[:, None, :] ^ (errs & valid[:, None, :])
        spoke = jax.random.uniform(jax.random.fold_in(key, 1), shape[:2]) >= settings.abstains
        flaws = settings.vote(wrong, spoke)
        paid = process.credited(
            (rewards.value > 0.5) & rewards.valid,
            reader.over_steps(flaws, steps),
            rows.mask,
            outcome=settings.outcome,
            penalty=settings.penalty,
        )
        return process.group_token_normalized(paid, rows.group_ids, rows.mask & rewards.valid[:, None])

    estimate = builders.make_estimate(found.model.policy, advantages, temperature=settings.temperature)
    online = curricula.make_grpo(settings, found, estimate=estimate)
    stages = [experiment.Stage(online, settings.steps)]
    return step_labels.make_plan(settings, found, stages)


def claim(results: experiment.Results) -> experiment.Claim:
    """Voted credit beats the outcome alone and one critic; without the outcome it is worst."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "majority", "outcome"),
        experiment.greater(results, "eval/accuracy", "majority", "single"),
        experiment.greater(results, "eval/accuracy", "careful", "majority", by=-0.01),
        experiment.smaller(results, "eval/accuracy", "process_only", "outcome"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
