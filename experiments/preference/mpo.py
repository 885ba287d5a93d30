"""DPO on pairs that are easy to tell apart, then reinforcement learning on hard prompts (MPO).

Paper:     Gou and Nguyen, "Mixed Preference Optimization: Reinforcement Learning with Data Selection and Better
           Reference Model", arXiv:2403.19443.
Claim:     DPO on pairs with a large reward gap and then PPO on small-gap prompts, with the DPO model as reference,
           beats DPO and PPO alone; the better reference and the order both matter.
Equations: gap = r(y_w) - r(y_l) of a trained reward model r, easy: gap > gamma. Stage 1: DPO on easy pairs. Stage 2:
           policy gradient on r(x, y) - beta_kl log(pi / pi_ref) with pi_ref the DPO model (mpo) or the first
           (sft_ref).
Left out:  a value model (the baseline is the mean of the prompt's other samples). Which prompts are hard comes from
           the labels' law, not pair by pair: half of the topics are labelled with 40 % flips, the others with 5 %.
Expect:    eval/gold: mpo > dpo, mpo > ppo, mpo > sft_ref, mpo > reversed.
Measure:   true reward of samples on fresh prompts; reward model trained on 1024 pairs of the same law. 8 seeds, equal
           updates; dpo arms see 32 pairs an update, ppo 16 prompts of 4 samples.
Run:       python -m experiments.preference.mpo
"""

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings
from experiments.parts import preference_task as toy
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """beta of DPO and the threshold are the paper's; the rest fits the small model."""

    steps: int = 100  # of each of two stages
    eval_every: int = 40
    learning_rate: float = 1e-3
    reference_steps: int = 200
    reward_steps: int = 200
    pairs: int = 512
    rows_per_step: int = 32
    low: float = -1e9  # gaps that DPO trains on lie above
    high: float = 1e9  # and not above
    hard_first: bool = False  # PPO on the easy prompts
    stages: str = "dp"  # d: DPO, p: policy gradient
    own_reference: bool = True  # the second stage's reference is its own start
    beta: float = 0.1
    beta_kl: float = 0.05


SMOKE = {"steps": 1, "eval_every": 1, "reference_steps": 2, "reward_steps": 2, "pairs": 8, "rows_per_step": 4}
GAMMA = 1.0
ARMS = {
    "dpo": {"stages": "dd", "own_reference": False},
    "dpo_easy": {"stages": "dd", "own_reference": False, "low": GAMMA},
    "ppo": {"stages": "pp", "own_reference": False},
    "sft_ref": {"low": GAMMA, "own_reference": False},
    "mpo": {"low": GAMMA},
    "reversed": {"high": GAMMA, "hard_first": True},
}
METRICS = ("eval/gold", "eval/proxy", "eval/kl", "eval/unseen")
CURVES = (*METRICS, "pair/accuracy", "reward/mean")


def labelled(key, n: int) -> toy.Pairs:
    """Pairs of whose prompts those with topic 2 or 3 are labelled almost at random."""
    clean, noisy = (toy.draw_pairs(key, n, flip_rate=rate) for rate in (0.05, 0.4))
    hard = clean.prompts[:, :1] >= 2  # one key: the same responses, other labels
    return jax.tree.map(lambda a, b: jnp.where(hard, b, a), clean, noisy)


@lru_cache(maxsize=16)
def make_pairs(pairs: int, low: float, high: float):
    """Those of ``pairs`` whose reward gap lies in ``(low, high]`` count."""

    def found(params, key):
        drawn = labelled(key, pairs)
        won, lost = (preference_strings.proxy(params, drawn.prompts, x) for x in (drawn.chosen, drawn.rejected))
        return drawn, (won - lost > low) & (won - lost <= high)

    return found


def build(settings: Settings) -> experiment.Plan:
    """Two stages, of pairs or of reward."""
    prompts = toy.draw_prompts(jax.random.key(0), 1024)
    topics = prompts[:, :1] % 2 + (0 if settings.hard_first else 2)
    if "d" in settings.stages:  # else all prompts
        prompts = jnp.concatenate([topics, prompts[:, 1:]], axis=1)
    anchor = preference_strings.policy_of if settings.own_reference else preference_strings.reference_of
    common = {"steps": settings.steps, "learning_rate": settings.learning_rate}
    kinds = {
        "d": preference_strings.preference_stage(
            partial(preference.dpo_loss, beta=settings.beta),
            make_pairs(settings.pairs, settings.low, settings.high),
            rows_per_step=settings.rows_per_step,
            **common,
        ),
        "p": preference_strings.reward_stage(
            preference_strings.proxy, beta=settings.beta_kl, anchor=anchor, prompts=prompts, **common
        ),
    }
    start = preference_strings.make_start(
        reference_steps=settings.reference_steps, reward_steps=settings.reward_steps, draw_pairs=labelled
    )
    return experiment.Plan(start, tuple(kinds[k] for k in settings.stages), preference_strings.measure_parts)


def claim(results: experiment.Results) -> experiment.Claim:
    """Easy pairs first, then hard prompts from a reference of their own, beat the other order and one stage alone."""
    others = ("dpo", "ppo", "sft_ref", "reversed")
    parts = [experiment.greater(results, "eval/gold", "mpo", other) for other in others]
    return experiment.conclude(" ".join(claim.__doc__.split()), *parts)


if __name__ == "__main__":
    experiment.main(__name__)
