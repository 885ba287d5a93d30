"""Asked again after every wrong answer: one fixed feedback as observation, early and new answers pay (UFO).

Paper:     "A Simple 'Try Again' Can Elicit Multi-Turn LLM Reasoning", arXiv:2507.14295.
Claim:     a policy trained on single answers repeats itself when it is told that it was wrong; episodes made of the
           same questions, with the feedback "try again", keep its first answers and make it right within more turns.
Equations: R = gamma^(k-1) [right at turn k] - lambda (1 - E / T), E different of T answers; PPO with one critic value a
           token, GAE with gamma = lambda = 1, R at the last token, actions only. single: one turn (baseline);
           single_tokens: one turn of 3.4 times the questions a step, about as many tokens as ufo's episodes have;
           three: three; no_decay: gamma 1; no_penalty: lambda 0; grpo: R normalised in its group, no critic.
           At scale, as in the authors' code, a quarter of the groups trains, those whose rewards deviate most
           (--keep-share; embedded all do), 0.001 of the KL to the policy at the start is taken off every token's reward
           (--kl-weight; for grpo it is a term of the loss), and 0.001 of the entropy is a bonus (--entropy-weight).
Left out:  the price of 0.1 for answers without their form: here every answer has one; one update a rollout, so nothing
           is clipped; embedded, KL and entropy. Training is short: no arm comes near the best first answer, 0.4.
Expect:    eval/success@5: ufo > single, ufo > single_tokens; eval/success@1: ufo > single - 0.03; eval/distinct:
           ufo > no_penalty; eval/answers: ufo < no_decay.
Measure:   held-out questions that show five letters, one of them right, the first most often; always five turns;
           equal episodes and updates, and equal tokens in single_tokens. success@k: right within k turns; answers:
           turns used, five on failure. In the old record success@1 of ufo was 0.045 below that of single, and single
           had trained on 19 thousand tokens, ufo on 65.
Run:       python -m experiments.agents.ufo; at scale --model DIR --data FILE --format gsm8k
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import asked_again
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.envs import retry_question
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan, recipes
from jaxrl_llm.losses.entropy import entropy_bonus_terms
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.run import catalog
from jaxrl_llm.train.methods import actor_critic, builders, episode_methods
from jaxrl_llm.train.methods.episode_methods import EpisodeTasks
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan, Setup, Stage, setup_of
from jaxrl_llm.types import Batch, Rewards


def widest(estimate: Callable[..., Batch], share: float) -> Callable[..., Batch]:
    """The estimate of the groups whose rewards deviate most; 1: of all."""

    def kept(params, extras, rows, rewards):
        keep = group.widest_groups(rewards.value, rows.group_ids, share=share, valid=rewards.valid)
        return estimate(params, extras, rows._replace(mask=rows.mask & keep[:, None]), rewards)

    return estimate if share == 1 else kept


def ppo(arena: EpisodeTasks, settings, **slots) -> Online:
    restrained = episode_methods.restrained(settings.kl_weight)
    estimate = widest(
        actor_critic.make_value_estimate(arena.policy, gamma=1.0, lam=1.0, **restrained), settings.keep_share
    )
    loss = actor_critic.make_actor_critic_loss(arena.policy, extra_terms=terms(settings.entropy_weight))
    return episode_methods.learned_from_episodes(arena, estimate=estimate, loss=loss, actor=recipes.model_of, **slots)


def grpo(arena: EpisodeTasks, settings, **slots) -> Online:
    values = builders.per_response(group.group_normalized_advantages)
    against = episode_methods.against(settings.kl_weight)
    estimate = widest(builders.make_estimate(arena.policy, values, **against), settings.keep_share)
    extra = terms(settings.entropy_weight, episode_methods.divergence(settings.kl_weight))
    loss = builders.make_policy_loss(arena.policy, clipped_policy_loss, extra_terms=extra)
    return strings.of_part(episode_methods.learned_from_episodes(arena, estimate=estimate, loss=loss, **slots), "model")


def terms(entropy_weight: float, other: Callable[..., Array] | None = None) -> Callable[..., Array] | None:
    """The bonus of entropy beside other terms of a loss; None without any."""
    if not entropy_weight:
        return other

    def both(logp, entropy, batch):
        bonus = entropy_weight * entropy_bonus_terms(entropy, batch.mask)
        return bonus if other is None else bonus + other(logp, entropy, batch)

    return both


ONLY = "it asks a question again after a wrong answer, and an env asks by itself"


@dataclasses.dataclass(frozen=True)
class Settings(multi_turn_plan.Settings):
    """The paper's weights, turns and batch, for --data and a model of one's own, or a decoder made here."""

    steps: int = 200
    eval_every: int = 30
    prompts_per_step: int = 8
    group_size: int = 16
    base_steps: int = 300
    max_turns: int = asked_again.MOST_TURNS
    turns: int = 5  # at most, in training
    times: float = 1.0  # prompts_per_step: more of them where episodes are short
    decay: float = 0.5
    repetition: float = 0.5  # weight of the penalty
    keep_share: float = 0.25  # of the groups that train, those whose rewards deviate most
    kl_weight: float = 0.001  # of the KL to the policy at the start; 0: no reference
    entropy_weight: float = 0.001  # of the bonus
    learn: Callable[..., Online] = ppo


EMBEDDED = {"steps": 150, "learning_rate": 1e-3, "keep_share": 1.0, "kl_weight": 0.0, "entropy_weight": 0.0}
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "single": {"turns": 1},
    "ufo": {},
    "three": {"turns": 3},
    "no_decay": {"decay": 1.0},
    "no_penalty": {"repetition": 0.0},
    "grpo": {"learn": grpo},
    "single_tokens": {"turns": 1, "times": 3.4},
}
METRICS = (*(f"eval/success@{k}" for k in range(1, 6)), "eval/answers", "eval/distinct")
CURVES = (
    "eval/success@1", "eval/success@5", "eval/answers", "eval/distinct", "tokens/generated", "policy/entropy",
)  # fmt: skip
# single loses later answers by design: it must learn what it trains, the first answer
BED = experiment.Bed(metric="eval/success@1", baseline="single", chance=0.2, ceiling=0.4)


def embedded(settings: Settings) -> Setup:
    """Problems that are asked again; the measurement allows all turns."""
    arena = asked_again.make_asked_again()
    slots = {"answers_of": asked_again.answers_of}
    more = {"samples": 16, "more": asked_again.figures}
    setup = arenas.make_setup(arena, steps=settings.base_steps, valued=True, slots=slots, **more)
    return setup._replace(tasks=arenas.shortened(arena, settings.turns))


def own(settings: Settings) -> Setup:
    """Rows of the main job, asked again."""
    return multi_turn_plan.hosted(
        settings, start=episode_methods.with_value, part="model", opened=catalog.retries, turns=settings.turns,
        slots={"answers_of": retry_question.answers_of}, more=retry_question.figures, only=ONLY,
    )  # fmt: skip


def build(settings: Settings) -> Plan:
    """One online stage of as many turns as the arm allows; the measurement allows all."""
    if not 0 < settings.keep_share <= 1:
        raise UserError(f"--keep-share {settings.keep_share} must lie in (0, 1]; 1 trains all groups")

    def method(tasks, answers_of, **slots):
        def score(answers, rows):
            outcome = multi_turn.episode_rewards(answers, rows)
            used = jnp.sum(multi_turn.turns_of(rows).taken.astype(jnp.int32), axis=1)
            early = shaping.early_rewards(outcome.value, used, decay=settings.decay)
            penalty = shaping.repetition_penalty(*answers_of(rows), weight=settings.repetition)
            return Rewards(early + penalty, outcome.valid)

        prompts = round(settings.times * settings.prompts_per_step)
        sizes = {"prompts_per_step": prompts, "group_size": settings.group_size}
        slots |= {"score": score, "tx": optax.adam(settings.learning_rate)}
        return settings.learn(tasks, settings, **sizes, **slots)

    setup = setup_of(settings, embedded, own)
    extras = episode_methods.model_for(settings.kl_weight)
    return setup.plan(Stage(method(setup.tasks, **setup.slots), settings.steps, extras))


def claim(results: experiment.Results) -> experiment.Claim:
    """Asked again it is right within five turns more often, at no cost to its first answer; both prices work."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/success@5", "ufo", "single"),
        experiment.greater(results, "eval/success@5", "ufo", "single_tokens"),
        experiment.greater(results, "eval/success@1", "ufo", "single", by=-0.03),
        experiment.greater(results, "eval/distinct", "ufo", "no_penalty"),
        experiment.smaller(results, "eval/answers", "ufo", "no_decay"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
