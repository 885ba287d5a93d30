"""Demonstrations inside the group, with an estimated behaviour policy and a bonus for the unlikely (RL-PLUS).

Paper:     Dong et al., "RL-PLUS: Countering Capability Boundary Collapse of LLMs in Reinforcement Learning with
           Hybrid-policy Optimization", arXiv:2508.00222.
Claim:     RL on own samples narrows what a model can solve (pass@k for large k falls below the base model's); one
           demonstration in each group, importance-weighted against a mixture and weighted up where the policy finds it
           unlikely, raises pass@1 and keeps pass@k.
Equations: own tokens -A rho, no clip; demonstration tokens -A (1 - p)^0.5 2 p / (p_old + (p_old + 1) / 2); A = r - mean
           over both; sum over tokens / constant; entropy bonus 0.001. luffy: -A p / (p + 0.1) instead;
           no_mis: -A rho (1 - p)^0.5; no_eba: without (1 - p)^0.5. grpo: eight own samples.
           sft: fine-tuning on demonstrations; sft_grpo: then GRPO; grpo_sft: GRPO beside likelihood of demonstrations.
Left out:  other domains; pass@32 and beyond: 32 responses to each problem, ten times a run, are thirty times the
           responses that train (--eval-samples 32).
Expect:    eval/accuracy: rl_plus > grpo; eval/pass@8: rl_plus > grpo and rl_plus not 0.02 below its start;
           ood/accuracy: rl_plus > grpo.
Measure:   held-out Countdown with four numbers, which the base model seldom solves; demonstrations are solver traces;
           8 seeds, equal updates and group sizes (a demonstration takes the place of one own sample) but in sft, which
           has its supervised updates alone, and sft_grpo, which has them beside all others: both begin from one
           fine-tuned model for all seeds, so that sft differs over seeds by its evaluation alone. ood: problems with
           three numbers, which no arm trains on (the base has read both in its pre-training). Random legal steps are
           right for 0.05 with four numbers and for 0.12 with three, ceiling 1.
Run:       python -m experiments.policy_gradient.rl_plus
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import optax

from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses import mixed
from jaxrl_llm.losses.entropy import entropy_bonus_terms
from jaxrl_llm.run.bench import is_generated, most_heldout
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import TokenTerms


def without_mixture(logp, old_logp, advantages, mask) -> TokenTerms:
    """The plain ratio to the old policy in place of the mixture's."""
    terms = mixed.ratio_loss(logp, old_logp, advantages, mask)
    return TokenTerms(terms.loss * mixed.exploration_factor(logp), terms.aux)


def imitation(logp, old_logp, advantages, mask) -> TokenTerms:
    """The likelihood of the demonstration, whatever its advantage: fine-tuning beside reinforcement."""
    return TokenTerms(jnp.where(mask, -logp, 0.0), {})


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 500
    max_new_tokens: int = 8192
    outside_loss: Callable[..., TokenTerms] | None = mixed.mixture_loss  # None: no demonstration in the group
    entropy_bonus: float = 1e-3
    sft_steps: int = 0  # on demonstrations, before, if any as many as steps at least
    ood_levels: tuple[int, ...] = ()  # of problems that are measured beside; none: no such measurement
    sft_rate: float = 1e-5  # of those steps
    reinforced: float = 1.0  # share of the steps that follow; 0: the fine-tuned model is measured


EMBEDDED = {
    "data": "countdown", "levels": (4,), "steps": 120, "eval_every": 30, "prompts_per_step": 6, "max_new_tokens": 27,
    "learning_rate": 2e-4, "eval_problems": 48, "eval_samples": 8, "ood_levels": (3,), "sft_rate": 1e-3,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 8,
}  # fmt: skip
ARMS = {
    "grpo": {"outside_loss": None},
    "luffy": {"outside_loss": mixed.shaped_probability_loss},
    "rl_plus": {},
    "no_mis": {"outside_loss": without_mixture},
    "no_eba": {"outside_loss": partial(mixed.mixture_loss, gamma=0.0)},
    "sft": {"sft_steps": 120, "reinforced": 0.0},
    "sft_grpo": {"outside_loss": None, "sft_steps": 120},
    "grpo_sft": {"outside_loss": imitation},
}
BED = experiment.Bed(chance=0.05)
METRICS = ("eval/accuracy", "eval/pass@4", "eval/pass@8", "ood/accuracy", "policy/entropy", "eval/tokens")
CURVES = (*METRICS, "policy/weight", "grad/norm")


def build(settings: Settings) -> experiment.Plan:
    """One online stage; the arm says how demonstrations train."""
    bench = recipes.bench(settings)
    policy, other, bonus = bench.model.policy, settings.outside_loss, settings.entropy_bonus
    rollout = recipes.rollout_of(settings, bench)

    def terms_of(logp, entropy, batch):
        arguments = logp, builders.current_anchor(logp, batch), batch.advantages, batch.mask
        own = mixed.ratio_loss(*arguments)
        return own if other is None else mixed.combined(own, other(*arguments), recipes.outside_of(batch.extras))

    online = recipes.make_online(
        settings,
        bench,
        rollout=rollout if other is None else recipes.demonstrating_rollout(settings, bench, rollout),
        estimate=builders.make_estimate(
            policy,
            builders.per_response(group.dr_grpo_advantages),
            reduction="constant",
            temperature=settings.temperature,
            row_extras=lambda extras, rows, rewards: recipes.Outside(
                recipes.last_members(rows.tokens.shape[0], settings.group_size)
            )._asdict(),
        ),
        loss=builders.make_batch_loss(
            policy,
            terms_of,
            reduction="constant",
            length_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            extra_terms=lambda _, entropy, batch: bonus * entropy_bonus_terms(entropy, batch.mask),
        ),
        tx=optax.adam(settings.learning_rate),
    )
    plan = recipes.one_stage(settings, bench, online)
    if settings.sft_steps:
        numbers = {"steps": max(settings.sft_steps, settings.steps), "learning_rate": settings.sft_rate}
        plan = plan._replace(init=lambda key: curricula.solutions_imitated(settings, **numbers))
    if settings.ood_levels and is_generated(settings.data):  # rows of one's own have no other level: the same problems
        # it reads no training row, of which another level may have fewer, and held-out ones as many as there are
        beside = dataclasses.replace(settings, levels=settings.ood_levels, train_problems=1)
        beside = dataclasses.replace(beside, eval_problems=most_heldout(beside))
        plan = plan._replace(measure=recipes.beside(plan.measure, recipes.make_measure(beside), "ood"))
    steps = round(settings.reinforced * settings.steps)
    return plan._replace(stages=tuple(stage._replace(steps=steps) for stage in plan.stages if steps))


def claim(results: experiment.Results) -> experiment.Claim:
    """RL-PLUS is more accurate than GRPO, there and on another level, solves more with eight samples, and no fewer than
    the base model."""
    last = results.curve("rl_plus", "eval/pass@8")[0][-1]
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "rl_plus", "grpo"),
        experiment.greater(results, "eval/pass@8", "rl_plus", "grpo"),
        experiment.greater(results, "eval/pass@8", "rl_plus", "rl_plus", by=-0.02, step=(last, 0)),
        experiment.greater(results, "ood/accuracy", "rl_plus", "grpo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
