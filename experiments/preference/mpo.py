"""DPO on pairs that are easy to tell apart, then reinforcement learning on hard prompts (MPO).

Paper:     Gou and Nguyen, "Mixed Preference Optimization: Reinforcement Learning with Data Selection and Better
           Reference Model", arXiv:2403.19443.
Claim:     DPO on pairs with a large reward gap and then PPO on small-gap prompts, with the DPO model as reference,
           beats DPO and PPO alone; the better reference and the order both matter.
Equations: gap = r(y_w) - r(y_l) of a trained reward model r, easy: gap > gamma. Stage 1: DPO on easy pairs. Stage 2:
           PPO (critic, GAE, clip) on r(x, y) - beta_kl log(pi / pi_ref) on the prompts of the hard pairs, pi_ref the
           DPO model (mpo) or the first (sft_ref). any_prompts: PPO on all prompts; reversed: DPO on the
           hard pairs, PPO on the prompts of the easy ones.
Left out:  large models; labels are scripted, half of the topics with 40 % flips, the others with 5 %. Differs from
           the paper in gamma, which is 1 on the scale of this reward model, and in the first stage, which has a tenth
           of the updates: it ends after a nat or less, so that the 2 nats are spent in the second one.
Expect:    eval/gold at eval/kl 2: mpo > dpo, mpo > ppo, mpo > sft_ref, mpo > reversed, mpo > any_prompts.
Measure:   true reward of four samples on each of 512 prompts where each arm is 2 nats from the start, and on the way;
           reward model of 65536 pairs of the same law (gates: rm/accuracy 0.8, rm/within 0.5; mpo is not 2 nats away
           when PPO begins). Equal updates: PPO takes two of its 64 responses a rollout, so its stages have half the
           rollouts that DPO has batches of 32; its critic learns alone on 20 before.
Run:       python -m experiments.preference.mpo
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """beta of DPO is the paper's; the rest fits the small model."""

    first_steps: int = 30  # updates of the first stage
    steps: int = 300  # and of the second one
    eval_every: int = 40
    learning_rate: float = 2.5e-4  # at 1e-3 DPO alone is beyond the budget of the claim
    reference_steps: int = 200
    reward_steps: int = 1000
    labels: int = 65536  # that the reward model reads
    pairs: int = 512
    rows_per_step: int = 32
    low: float = -1e9  # gaps that DPO trains on lie above
    high: float = 1e9  # and not above
    prompts: str = "hard"  # of PPO: those of hard pairs, of easy ones, or any
    stages: str = "dp"  # d: DPO, p: policy gradient
    anchor: Callable = preference_strings.policy_of  # of the second stage: its own start
    beta: float = 0.1
    beta_kl: float = 0.05
    critic_steps: int = preference_strings.CRITIC_STEPS


SMOKE = {
    "critic_steps": 1,
    "first_steps": 1,
    "steps": 1,
    "eval_every": 1,
    "reference_steps": 2,
    "reward_steps": 2,
    "labels": 64,
    "pairs": 8,
    "rows_per_step": 4,
}
GAMMA = 1.0
ARMS = {
    "dpo": {"stages": "dd", "anchor": preference_strings.reference_of},
    "dpo_easy": {"stages": "dd", "anchor": preference_strings.reference_of, "low": GAMMA},
    "ppo": {"stages": "pp", "anchor": preference_strings.reference_of, "prompts": "any"},
    "sft_ref": {"low": GAMMA, "anchor": preference_strings.reference_of},
    "mpo": {"low": GAMMA},
    "any_prompts": {"low": GAMMA, "prompts": "any"},
    "reversed": {"high": GAMMA, "prompts": "easy"},
}
METRICS = ("eval/gold", "eval/proxy", "eval/kl", "eval/unseen", "rm/accuracy", "rm/within")
CURVES = ("eval/gold", "eval/proxy", "eval/kl", "eval/unseen", "pair/accuracy", "reward/mean")
BED = experiment.Bed(judges=(("mpo", "rm/accuracy", 0.8), ("mpo", "rm/within", 0.5)), stages=(("mpo", "first_steps"),))
NATS = 2.0
JUDGED_AT = experiment.at("eval/kl", NATS)
UPDATES = 2  # of PPO a rollout


def labelled(task: Preferences, key, n: int) -> toy.Pairs:
    """Pairs of whose prompts those with topic 2 or 3 are labelled almost at random."""
    clean, noisy = (task.draw_pairs(key, n, flip_rate=rate) for rate in (0.05, 0.4))
    hard = task.disputed(clean.prompts)  # one key: the same responses, other labels
    return jax.tree.map(lambda a, b: jnp.where(hard, b, a), clean, noisy)


@lru_cache(maxsize=16)
def make_pairs(task: Preferences, pairs: int, low: float, high: float):
    """Those of ``pairs`` whose reward gap lies in ``(low, high]`` count."""

    def found(params, key):
        drawn = labelled(task, key, pairs)
        won, lost = (preference_strings.proxy(task, params, drawn.prompts, x) for x in (drawn.chosen, drawn.rejected))
        return drawn, (won - lost > low) & (won - lost <= high)

    return found


def first_of(which: Array, prompts: Array, n: int) -> Array:
    """``n`` prompts out of those that ``which`` says, again and again in their order; of all where there are none."""
    order = jnp.argsort(~which, stable=True)
    count = jnp.sum(which.astype(jnp.int32))
    return prompts[order[jnp.arange(n) % jnp.where(count > 0, count, which.shape[0])]]


@lru_cache(maxsize=8)
def make_prompts(task: Preferences, kind: str) -> Callable | None:
    """The prompts of PPO by the gap of pairs labelled on them; None: any."""
    if kind == "any":
        return None

    def found(params, key):
        drawn = labelled(task, key, 1024)
        won, lost = (preference_strings.proxy(task, params, drawn.prompts, x) for x in (drawn.chosen, drawn.rejected))
        easy = won - lost > GAMMA
        return first_of(easy if kind == "easy" else ~easy, drawn.prompts, 1024)

    return found


def build(settings: Settings, task: Preferences = toy.STRINGS) -> experiment.Plan:
    """Two stages, of pairs or of reward; before the first of reward its critic is warmed up."""
    common = {"learning_rate": settings.learning_rate, "anchor": settings.anchor}
    kinds = {
        "d": lambda updates, begins: (preference_strings.preference_stage(
            task, partial(preference.dpo_loss, beta=settings.beta),
            make_pairs(task, settings.pairs, settings.low, settings.high),
            rows_per_step=settings.rows_per_step,
            steps=updates,
            **common,
        ),),
        "p": lambda updates, begins: preference_strings.ppo_stages(
            task, partial(preference_strings.centred_proxy, task), beta=settings.beta_kl,
            prompts=make_prompts(task, settings.prompts), steps=max(1, updates // UPDATES),
            updates_per_rollout=UPDATES, critic_steps=settings.critic_steps if begins else 0, **common,
        ),
    }  # fmt: skip
    start = preference_strings.make_start(
        task,
        reference_steps=settings.reference_steps,
        reward_steps=settings.reward_steps,
        labels=settings.labels,
        draw_pairs=strings.bound(labelled, task),
    )
    updates = (settings.first_steps, settings.steps)
    parts = enumerate(zip(settings.stages, updates, strict=True))
    stages = sum((kinds[kind](number, kind not in settings.stages[:i]) for i, (kind, number) in parts), ())
    number = preference_strings.evaluated(task)
    measure = strings.bound(preference_strings.measure_within, task, evaluated=number)
    return experiment.Plan(start, stages, measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Easy pairs first, then hard prompts from a reference of their own, beat the other order and one stage alone."""
    others = ("dpo", "ppo", "sft_ref", "reversed", "any_prompts")
    parts = [experiment.greater(results, "eval/gold", "mpo", other, step=JUDGED_AT) for other in others]
    whole = experiment.greater(results, "eval/gold", "mpo", "dpo", step=experiment.up_to("eval/kl", NATS))
    return experiment.conclude(" ".join(claim.__doc__.split()), *parts, whole)


if __name__ == "__main__":
    experiment.main(__name__)
