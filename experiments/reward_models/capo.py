"""Credit for single steps from the votes of critics (CAPO).

Paper:     Xie et al., "CAPO: Towards Enhancing LLM Reasoning through Generative Credit Assignment", arXiv:2508.02298.
Claim:     critics that name the wrong steps of a solution, put to a vote, turn into token rewards that beat the outcome
           alone; voting makes up for critics that err; the outcome must weigh more than the penalty.
Equations: r_t = C 1[right] - P w(step of t), C = 2, P = 1; w from V = 4 critiques: majority, unanimous, average; A_t =
           (r_t - mean) / std over all tokens of the group. outcome: P = 0. single: V = 1. equal: C = P = 1.
           process_only: C = 0. careful: critics that never err. These critics are an oracle of the steps whose every
           verdict is turned round with chance 0.2; one critique in ten cannot be read and has no vote (outspoken:
           none). generative, generative_single: the critic is a language model, the base taught critiques of its own
           labelled samples, which reads problem and solution and writes its verdicts, drawn V times.
Left out:  a critic larger than the policy that is asked as it is, also behind an address: every update asks V critiques
           of every response, thousands a step, and no cache helps, for every response is new; a generative reward model
           of the outcome alone, whose verdict a verifier has for nothing here. Oracles err at 0.2 or not at all: the
           dose of their error between is not recorded. C, P and V are recalled from the paper, not read. Of --data the
           steps are lines, right by the results of the worked solutions.
Expect:    eval/accuracy majority > outcome, majority > single, careful >= majority; process_only < outcome, by answers
           with few steps; as figures beside the claim generative > generative_single and majority > equal, whose
           penalty weighs as much as a right answer.
Measure:   held-out chains of 4 and 5 operations; 8 seeds, equal rollouts and updates.
Run:       python -m experiments.reward_models.capo
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.reward_models.parts import step_labels
from experiments.reward_models.parts import steps as reader
from jaxrl_llm import experiment
from jaxrl_llm.advantages import process
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import declared


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
    critic_prompts: int = 0  # whose labelled samples teach a critic that writes; 0: the oracle that errs
    critic_steps: int = 200


EMBEDDED = {
    "levels": (4, 5), "steps": 40, "eval_every": 20, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 48,
    "learning_rate": 2e-4, "train_problems": 1024, "eval_problems": 96,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 10, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 2, "critic_steps": 2,
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
    "generative": {"critic_prompts": 512},
    "generative_single": {"critic_prompts": 512, "critics": 1},
}
METHOD = "majority"
METRICS = ("eval/accuracy", "eval/right_steps", "eval/right_steps_of_right", "eval/steps", "eval/tokens")
CURVES = ("eval/accuracy", "eval/right_steps", "eval/steps", "reward/mean", "policy/entropy")


class Criticised(NamedTuple):
    """Extras of a state: the critic that writes; and of trajectories: the critic of then."""

    critic: Any


def oracle(settings, key, rows, right, valid):
    """``(wrong, spoke)`` of critics whose every verdict is turned round now and then; some say nothing."""
    shape = (right.shape[0], settings.critics, right.shape[1])
    errs = jax.random.uniform(key, shape) < settings.error_rate
    wrong = ((right < 0.5) & valid)[:, None, :] ^ (errs & valid[:, None, :])
    return wrong, jax.random.uniform(jax.random.fold_in(key, 1), shape[:2]) >= settings.abstains


def build(settings: Settings) -> experiment.Plan:
    """One online stage: GRPO on rewards of tokens."""
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)
    most, slots, begins, criticised = settings.max_new_tokens // 4, {}, {}, partial(oracle, settings)
    if settings.critic_prompts:
        critic = step_labels.make_critic(settings, found, most=most)
        fit = step_labels.make_critic_fit(
            settings, critic, prompts=settings.critic_prompts, steps=settings.critic_steps, most=most
        )
        begins["extras"] = lambda params, key: Criticised(fit(key))._asdict()
        slots["shows"] = lambda extras, rows: Criticised(declared(Criticised, extras).critic)._asdict()

        def criticised(key, rows, right, valid):
            params = declared(Criticised, rows.extras).critic
            return step_labels.critiques(critic, params, rows, valid, key, votes=settings.critics)

    def advantages(rows, rewards):
        steps, right, valid = step_labels.step_scores(stepped, rows, most=most)
        # what the critics say is drawn from the responses themselves
        key = jax.random.fold_in(jax.random.key(17), jnp.sum(rows.tokens))
        flaws = settings.vote(*criticised(key, rows, right, valid))
        paid = process.credited(
            (rewards.value > 0.5) & rewards.valid,
            reader.over_steps(flaws, steps),
            rows.mask,
            outcome=settings.outcome,
            penalty=settings.penalty,
        )
        return process.group_token_normalized(paid, rows.group_ids, rows.mask & rewards.valid[:, None])

    estimate = builders.make_estimate(found.model.policy, advantages, temperature=settings.temperature, **slots)
    online = curricula.make_single_turn_grpo(settings, found, estimate=estimate)
    return step_labels.make_step_plan(settings, found, [experiment.Stage(online, settings.steps, **begins)])


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
