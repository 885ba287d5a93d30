"""PPO without a critic for long interactive tasks: leave-one-out, several updates, clipped by token (LOOP).

Paper:     Chen et al., "Reinforcement Learning for Long-Horizon Interactive LLM Agents", arXiv:2502.01600.
Claim:     for an agent in a world with state, leave-one-out advantages with several updates on the same episodes beat
           one update on them; ratios clipped by token do better than by turn or by trajectory, and dividing the
           advantage by the deviation of its group does worse.
Equations: A_k = R_k - mean_{j != k} R_j, |A_k| < 0.01 dropped; L_k = -(1/|y_k|) sum_t min(w A_k, clip(w, 1/(1+eps),
           1+eps) A_k), w of a token, a turn or the trajectory. rloo: one update, w = 1; rloo_often: the same on a
           quarter of the episodes, four times as often, so as many updates as loop makes; normalised: GRPO's A; critic:
           A of GAE with a value head; rejection: no RL, -log pi of the base's own episodes that completed their task.
           Passes over mini-batches of episodes; an iteration ends before an update at which |mean_k log w_k| of whole
           episodes exceeds kl_bound (20, of the released code). whole: four updates on all.
Left out:  LoRA, the documentation as a tool, the cut of episodes that take too long. No real AppWorld was run: the path
           of --data appworld:FOLDER has met stand-ins of its servers only, see docs/agents.md.
Expect:    eval/completed: loop > rloo, loop > rloo_often, loop > per_turn, loop > per_trajectory, loop > normalised.
Measure:   tasks on a database behind calls; what has to be seen and said in one of the 192 that are measured, which are
           32 by that, is seen and said in none of the 512 that train: of what is swapped, copied or added to, some
           values are new, and to clear a record is trained alone. Equal episodes; rloo makes a quarter of the updates.
           eval/scenarios: all three variants of a scenario completed. A step of rejection is one update. update/made:
           the share of an iteration's updates before its end.
Run:       python -m experiments.agents.loop; at scale --model DIR --data appworld:FOLDER --servers http://localhost:8000
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from experiments.agents.parts import apis, imitation
from experiments.agents.parts import arena as arenas
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.sequence import loop_loss
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.run import catalog
from jaxrl_llm.train.methods import builders, episode_methods
from jaxrl_llm.train.plan import Plan, Setup, Stage, setup_of
from jaxrl_llm.types import Batch, Policy, declared


def reinforced(settings, arena, method) -> Stage:
    """RL."""
    return Stage(method(arena), settings.steps)


def rejection(settings, arena, method) -> Stage:
    """As many episodes of the base, and as many updates on those that completed their task."""
    updates = settings.updates_per_rollout * settings.minibatches
    return imitation.rejection_stage(arena, settings, apis.completed, updates=updates)


def at_once(settings):
    """The settings as they are given."""
    return settings


def update_by_update(settings):
    """As many episodes in pieces, one update on each: as many updates as several on the whole, or some more."""
    fewer = max(settings.prompts_per_step // (settings.updates_per_rollout * settings.minibatches), 1)
    steps = settings.steps * settings.prompts_per_step // fewer
    new = {"steps": steps, "prompts_per_step": fewer, "updates_per_rollout": 1, "minibatches": 1}
    return dataclasses.replace(settings, **new)


@dataclasses.dataclass(frozen=True)
class Settings(multi_turn_plan.Settings):
    """The paper's values, for --data and a model of one's own, or a decoder of 32 numbers a token made here."""

    steps: int = 100
    eval_every: int = 30
    prompts_per_step: int = 40
    group_size: int = 6
    max_turns: int = 40
    servers: tuple[str, ...] = ()  # addresses of AppWorld's environments, each for one episode at a time
    base_steps: int = 700  # after 300 the base completes 8 of 100 tasks that it has not met, after 700 it is 15
    updates_per_rollout: int = 2  # passes over the episodes
    minibatches: int = 8  # of a pass: of 240 episodes 30 each
    kl_bound: float = 20.0  # in nats of a whole episode; beyond it an iteration ends
    eps: float = 0.1
    smallest: float = 0.01  # episodes whose advantage is smaller are dropped
    max_grad_norm: float = 0.1
    advantages: Callable[..., Array] | None = group.rloo_advantages  # None: a value head's
    spans: Callable[..., Array] = multi_turn.token_spans  # tokens of equal number share one ratio
    spend: Callable = at_once  # the episodes of a step, or an update's at a time
    learn: Callable[..., Stage] = reinforced  # or imitate the base's own episodes that completed their task


# at 1e-3 rloo unlearned what it had won before its 60th step
EMBEDDED = {
    "steps": 60, "eval_every": 6, "learning_rate": 6e-4, "prompts_per_step": 8, "minibatches": 2, "kl_bound": 1.0,
}  # fmt: skip
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2, "minibatches": 2}
ARMS = {
    "rloo": {"updates_per_rollout": 1, "minibatches": 1}, "loop": {},
    "whole": {"updates_per_rollout": 4, "minibatches": 1}, "per_turn": {"spans": multi_turn.turn_spans},
    "per_trajectory": {"spans": multi_turn.episode_spans},
    "normalised": {"advantages": group.group_normalized_advantages}, "critic": {"advantages": None},
    "rejection": {"learn": rejection, "eval_every": 24},
    "rloo_often": {"spend": update_by_update, "eval_every": 24},
}  # fmt: skip
METRICS = ("eval/completed", "eval/scenarios", "eval/return", "eval/turns", "update/made")
CURVES = (
    "eval/completed", "eval/scenarios", "reward/mean", "policy/clip_fraction", "policy/entropy", "kl/episode",
    "update/made",
)  # fmt: skip


def moved(logp: Array, entropy: Array, batch: Batch) -> dict[str, Array]:
    """``kl/episode``: ``mean_k log(old_k / new_k)`` over whole episodes ``k``, spread so that its token mean is it."""
    tokens = jnp.sum(batch.mask.astype(jnp.float32))
    episodes = jnp.maximum(jnp.sum(jnp.any(batch.mask, axis=1).astype(jnp.float32)), 1.0)
    return {"kl/episode": jnp.where(batch.mask, batch.old_logp - logp, 0.0) * tokens / episodes}


class Spanned(NamedTuple):
    """Extras of a batch: tokens of equal number share one ratio."""

    span: Array


def by_group(settings: Settings, policy: Policy) -> dict[str, Callable]:
    """Slots of the methods whose advantage is one number an episode."""

    def keep(rows, rewards):
        values = settings.advantages(rewards.value, rows.group_ids, valid=rewards.valid)
        return jnp.abs(values) >= settings.smallest

    def terms(logp, entropy, batch):
        given = logp, batch.old_logp, batch.advantages, batch.mask
        return loop_loss(*given, eps=settings.eps, segment_ids=declared(Spanned, batch.extras).span)

    def spans(extras, rows, rewards):
        return Spanned(settings.spans(rows))._asdict()

    values = builders.per_response(settings.advantages)
    options = {"reduction": "seq_mean", "recompute_old": True, "keep": keep, "row_extras": spans}
    loss = builders.make_batch_loss(policy, terms, reduction="seq_mean", diagnostics=moved)
    return {"estimate": builders.make_estimate(policy, values, **options), "loss": loss}


def embedded(settings: Settings) -> Setup:
    """Programs of interfaces."""
    return arenas.make_setup(
        apis.make_apis(), steps=settings.base_steps, valued=settings.advantages is None, slots={"score": apis.returns},
        samples=4, figures=apis.figures,
    )  # fmt: skip


def own(settings: Settings) -> Setup:
    """AppWorld's environments."""
    if settings.learn is rejection:
        raise UserError("arm rejection imitates episodes of the embedded world: drop --data, or leave the arm out")
    critic = {"start": episode_methods.with_value, "part": "model"} if settings.advantages is None else {}
    return multi_turn_plan.hosted(settings, **critic, **catalog.APPWORLD)


def build(settings: Settings) -> Plan:
    """Several updates on the same episodes; or imitation."""
    settings = settings.spend(settings)
    clip = partial(clipped_policy_loss, clip_low=settings.eps / (1 + settings.eps), clip_high=settings.eps)
    episodes = settings.prompts_per_step * settings.group_size
    if episodes % settings.minibatches:
        raise UserError(f"--minibatches {settings.minibatches} does not divide the {episodes} episodes of a step; "
                        "choose a divisor")  # fmt: skip
    several = {
        "updates_per_rollout": settings.updates_per_rollout, "max_grad_norm": settings.max_grad_norm,
        "minibatches": settings.minibatches, "divisor": partial(reduce.denominator, mode="seq_mean"),
    }  # fmt: skip

    def method(tasks, **slots):
        slots |= several | {"group_size": settings.group_size}
        if settings.advantages is None:
            return episode_methods.make_ppo(tasks, settings, token_loss=clip, reduction="seq_mean", **slots)
        slots["enough"] = lambda metrics: jnp.abs(metrics["kl/episode"]) > settings.kl_bound
        return episode_methods.make_grpo(tasks, settings, **by_group(settings, tasks.policy), **slots)

    setup = setup_of(settings, embedded, own)
    return setup.plan(settings.learn(settings, setup.tasks, partial(method, **setup.slots)))


def claim(results: experiment.Results) -> experiment.Claim:
    """Leave-one-out with several updates, clipped by token, beats one update, larger spans, and a division."""
    others = ("rloo", "rloo_often", "per_turn", "per_trajectory", "normalised")
    parts = (experiment.greater(results, "eval/completed", "loop", other) for other in others)
    return experiment.conclude(" ".join(claim.__doc__.split()), *parts)


if __name__ == "__main__":
    experiment.main(__name__)
