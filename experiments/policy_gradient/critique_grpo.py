"""A refinement after a critique in the group, trained as if it had been the first answer (Critique-GRPO).

Paper:     Zhang et al., "Critique-GRPO: Advancing LLM Reasoning with Natural Language and Numerical Feedback",
           arXiv:2506.03106.
Claim:     rewards alone leave what a model cannot solve unsolved; one refinement guided by a critique in each group
           solves it, and beats GRPO and imitation of experts; critiques that say more help more.
Equations: A_i = r_i - mean over the group with its refinement; own tokens -rho A; tokens of the refinement -f(p) A,
           f(p) = p / (p + 0.1), p under the plain prompt; sum / constant, entropy bonus 0.001. indicative: the critique
           says right or wrong; answer: also the right answer; critique: where the first wrong step is. plain_ratio:
           -rho A for all; drop_wrong: no refinement that is wrong; expert: the reference solution in its place.
Left out:  critiques by a large model or by the policy itself: they are scripted here.
Expect:    eval/accuracy: critique > grpo and critique > indicative - 0.02.
Measure:   held-out arithmetic chains; every arm starts from the same copy that has seen refinements and errs in four of
           five first answers; 8 seeds, equal responses of the policy (grpo: twice as many, for none are refinements)
           and updates.
Run:       python -m experiments.policy_gradient.critique_grpo
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import optax
from jaxtyping import Array

from experiments.policy_gradient.parts import refinement
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses import mixed
from jaxrl_llm.losses.entropy import entropy_bonus_terms
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import declared


def refined(settings, bench, rollout, *, only_right: bool = False) -> dict[str, Callable]:
    """The best refinement after a critique takes the last place of its group; without a critic none does."""
    if settings.critic is None:
        return {"rollout": rollout}
    model, size = bench.model, settings.group_size
    critiques = refinement.encode_critiques(model, recipes.solved_problems(settings), settings.critic)
    parts = rollout, recipes.rollout_of(settings, bench, group_size=1), curricula.train_score(bench)
    ids = {"eos_ids": model.tokenizer.eos_ids, "pad_id": model.tokenizer.pad_id}
    sizes = {"group_size": size, "new_tokens": settings.max_new_tokens}
    return refinement.make_refining_rollout(
        *parts, bench.train.answers, critiques, **sizes, only_right=only_right, **ids
    )


def refined_if_right(settings, bench, rollout) -> dict[str, Callable]:
    """A refinement that is wrong leaves its place empty."""
    return refined(settings, bench, rollout, only_right=True)


def demonstrated(settings, bench, rollout) -> dict[str, Callable]:
    """The reference solution in place of the refinement."""
    return {"rollout": recipes.demonstrating_rollout(settings, bench, rollout)}


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 400
    max_new_tokens: int = 6144
    critic: refinement.Critic | None = refinement.located  # None: no refinement
    last: Callable[..., dict[str, Callable]] = refined  # what takes the last place of a group
    outside_loss: Callable = mixed.shaped_probability_loss  # of the refinement
    warm_steps: int = 500  # of supervised fine-tuning on pairs of attempts


EMBEDDED = {
    "levels": (2, 3), "steps": 120, "eval_every": 30, "prompts_per_step": 6, "max_new_tokens": 26,
    "learning_rate": 2e-4, "eval_problems": 64, "train_problems": 1024, "warm_steps": 150,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 4, "warm_steps": 2,
}  # fmt: skip
ARMS = {
    "grpo": {"critic": None, "group_size": 16}, "critique": {}, "indicative": {"critic": refinement.indicative},
    "answer": {"critic": refinement.with_answer}, "plain_ratio": {"outside_loss": mixed.ratio_loss},
    "drop_wrong": {"last": refined_if_right}, "expert": {"last": demonstrated, "group_size": 16},
}  # fmt: skip
METRICS = ("eval/accuracy", "eval/pass@4", "outside/right", "policy/entropy", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "grad/norm")


class Right(NamedTuple):
    """Extras of a batch: the reward of each response."""

    right: Array


def build(settings: Settings) -> experiment.Plan:
    """One online stage; the last place of each group may hold a refinement or a demonstration."""
    bench, size, new = recipes.bench(settings), settings.group_size, settings.max_new_tokens
    model, critics = bench.model, (refinement.indicative, refinement.with_answer, refinement.located)
    slots = settings.last(settings, bench, recipes.rollout_of(settings, bench))
    slots |= {"tx": optax.adam(settings.learning_rate)}

    def outside(extras, rows, rewards):
        place = recipes.last_members(rows.tokens.shape[0], size)
        there = place & (settings.critic is not None)
        return recipes.Outside(there)._asdict() | Right(rewards.value)._asdict()

    def terms_of(logp, entropy, batch):
        arguments = logp, builders.current_anchor(logp, batch), batch.advantages, batch.mask
        own, other = mixed.ratio_loss(*arguments), settings.outside_loss(*arguments)
        return mixed.combined(own, other, recipes.outside_of(batch.extras))

    def figures(batch, metrics):
        return {"outside/right": reduce.scalars(declared(Right, batch.extras).right, recipes.outside_of(batch.extras))}

    advantages = builders.per_response(group.dr_grpo_advantages)
    same = {"reduction": "constant", "temperature": settings.temperature}
    bonus = {"extra_terms": lambda _, entropy, batch: 0.001 * entropy_bonus_terms(entropy, batch.mask)}
    loss = builders.make_batch_loss(model.policy, terms_of, length_tokens=new, **same, **bonus)
    slots |= {"estimate": builders.make_estimate(model.policy, advantages, row_extras=outside, **same)}
    slots |= {"loss": loss, "figures": figures}
    plan = recipes.one_stage(settings, bench, recipes.make_online(settings, bench, **slots))
    if settings.data != "chain":  # a model for rows of your own knows what a second attempt is
        return plan
    warm = {"wrong": 0.85, "steps": settings.warm_steps}
    return plan._replace(init=lambda key: refinement.practised(settings, chain.flawed, critics, **warm))


def claim(results: experiment.Results) -> experiment.Claim:
    """A refinement after a critique beats GRPO, and saying where the error is does not do worse than that there is."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "critique", "grpo"),
        experiment.greater(results, "eval/accuracy", "critique", "indicative", by=-0.02),
    )


if __name__ == "__main__":
    experiment.main(__name__)
