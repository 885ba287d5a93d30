"""What every turn teaches a model of the user, as a reward beside the outcome (CURIO).

Paper:     Wan et al., "Enhancing Personalized Multi-Turn Dialogue with Curiosity Reward", arXiv:2504.03206.
Claim:     one reward at the end does not teach a dialogue to find out who the user is; the gain of a frozen user
           model's belief at each turn does. Grounded in the user's true type it cannot be had by talking the user model
           into something, which the gain of certainty can.
Equations: r_k = R [last turn] + w r_int,k; diff_acc: g b_{k+1}(u*) - b_k(u*); diff_log_acc: of log b(u*); diff_ent: of
           -H(b); acc: b_{k+1}(u*); ent: -H(b_{k+1}); info_gain: KL(b_{k+1} || b_k); rlhf: w = 0. GAE over turns. At
           scale 0.01 of the KL to the policy at the start is taken off every token's reward (--kl-weight).
           exact_ent: diff_ent with a user model that knows what a suggestion is worth.
Left out:  the conversation's quality; embedded, the KL penalty, language models as user, user model and reward model.
           At scale the user model is the model as it was; lines of FILE are {"profile": TEXT, "type": TEXT}.
Expect:    eval/success: diff_acc > rlhf, diff_log_acc > rlhf and diff_acc > diff_ent, which suggests instead of asking:
           eval/suggested diff_ent > diff_acc.
Measure:   users of 8 types, answers wrong one time in ten, five turns; 8 seeds, equal episodes and updates.
           eval/belief: what an exact user model believes of the true type at the end; eval/asked: questions;
           eval/suggested: share of them that suggest the answer. acc, which is no potential, ends .09 below diff_acc in
           the record, and exact_ent beside it: what spoils the gain of certainty here is the user model that believes
           suggestions, not that it is ungrounded. --domain pupils: six types, four traits, whose questions are
           answered truly 95, 90, 80 and 70 times in a hundred.
Run:       python -m experiments.agents.curio [--domain pupils]; at scale --model DIR --data FILE --user http://localhost:8000/v1
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
from jaxtyping import Array

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import dialogue, user_simulator
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.advantages import beliefs
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.tools import endpoints
from jaxrl_llm.train.methods import actor_critic, episode_methods
from jaxrl_llm.train.plan import Plan, Setup, Stage, referred, setup_of

log_acc = partial(beliefs.shaped_rewards, potential=beliefs.log_right_belief)
entropy = partial(beliefs.shaped_rewards, potential=beliefs.certainty)


ONLY = "it guesses the types of users, which an env does not have"


@dataclasses.dataclass(frozen=True)
class Settings(endpoints.Settings, multi_turn_plan.Settings):
    """For --data and a model of one's own, or a decoder made here; the paper does not give the weights."""

    steps: int = 200
    learning_rate: float = 1e-6
    eval_every: int = 40
    prompts_per_step: int = 64
    max_turns: int = 10
    user: str = ""  # address of the model that plays users, https://HOST/v1, and its name
    user_model: str = ""
    base_steps: int = 300
    gamma: float = 1.0
    weight: float = 1.0
    kl_weight: float = 0.01  # of the KL to the policy at the start, in the reward of every token; 0: no reference
    intrinsic: Callable[..., Array] = beliefs.shaped_rewards
    believe: Callable[..., tuple[Array, Array]] = dialogue.trusting  # of the embedded user model
    domain: Literal["guests", "pupils"] = "guests"  # who is talked to in the embedded world


EMBEDDED = {"learning_rate": 1e-3, "kl_weight": 0.0}
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 4}
ARMS = {
    "rlhf": {"weight": 0.0},
    "diff_acc": {},
    "diff_log_acc": {"intrinsic": log_acc},
    "diff_ent": {"intrinsic": entropy},
    "acc": {"intrinsic": beliefs.level_rewards},
    "ent": {"intrinsic": partial(beliefs.level_rewards, potential=beliefs.certainty)},
    "info_gain": {"intrinsic": beliefs.information_rewards},
    "exact_ent": {"intrinsic": entropy, "believe": dialogue.exact},
}
METRICS = ("eval/success", "eval/belief", "eval/asked", "eval/suggested")
CURVES = (*METRICS, "reward/mean", "policy/entropy")
# rlhf never asks, by design, and is soon done; that questions can be learned shows where the user model is exact
BED = experiment.Bed(baseline="exact_ent")


def embedded(settings: Settings) -> Setup:
    """Users of a kind, and what a model that knows their lessons believes of them."""
    users = dialogue.KINDS[settings.domain]
    arena = dialogue.make_dialogue(users)
    slots = {"believed": lambda extras, rows, answers: settings.believe(rows, users)}
    more = {"samples": 4, "more": strings.bound(dialogue.figures, users)}
    return arenas.make_setup(arena, steps=settings.base_steps, valued=True, slots=slots, **more)


def own(settings: Settings) -> Setup:
    """Users played by a model; the policy as it was in the beginning is the model that believes."""
    if settings.believe is not dialogue.trusting:
        raise UserError("arm exact_ent is of the embedded world; leave it out")
    setup = multi_turn_plan.hosted(
        settings, start=episode_methods.with_value, part="model", opened=user_simulator.users,
        more=user_simulator.figures, only=ONLY,
    )  # fmt: skip

    def believed(extras, rows, answers):
        return user_simulator.user_beliefs(setup.tasks.policy, referred(extras), rows, answers)

    return setup._replace(slots=setup.slots | {"believed": believed}, extras=actor_critic.keep_model)


def build(settings: Settings) -> Plan:
    """One online stage of actor and critic on rewards of turns."""

    def method(tasks, believed, **slots):
        def paid(params, extras, rows, rewards):
            found, answers = multi_turn.turns_of(rows), jax.tree.map(lambda x: x[rows.problem_ids], tasks.train.answers)
            counted = found.taken & rewards.valid[:, None]
            if settings.weight == 0:
                return multi_turn.at_ends(found.reward, found)
            before, after = believed(extras, rows, answers)
            curious = settings.intrinsic(before, after, answers["kind"], counted, gamma=settings.gamma)
            return multi_turn.at_ends(found.reward + settings.weight * curious, found)

        estimate = actor_critic.make_value_estimate(
            tasks.policy, token_rewards=paid, gamma=settings.gamma, **episode_methods.restrained(settings.kl_weight)
        )
        return episode_methods.make_ppo(tasks, settings, estimate=estimate, **slots)

    setup = setup_of(settings, embedded, own)
    # the policy as it was: what the KL is measured to and, at scale, the user model
    extras = actor_critic.keep_model if settings.kl_weight else setup.extras
    return setup.plan(Stage(method(setup.tasks, **setup.slots), settings.steps, extras))


def claim(results: experiment.Results) -> experiment.Claim:
    """Gains of belief in the true type beat the outcome alone, and gains of certainty, which are had by suggesting."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/success", "diff_acc", "rlhf"),
        experiment.greater(results, "eval/success", "diff_log_acc", "rlhf"),
        experiment.greater(results, "eval/success", "diff_acc", "diff_ent"),
        experiment.greater(results, "eval/suggested", "diff_ent", "diff_acc"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
