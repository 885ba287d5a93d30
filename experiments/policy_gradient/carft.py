"""Sampled chains of thought drawn towards the annotated one (CARFT).

Paper:     Zhu et al., "CARFT: Boosting LLM Reasoning via Contrastive Learning with Annotated Chain-of-Thought-based
           Reinforced Fine-Tuning", arXiv:2508.15868.
Claim:     PPO from a verifier (ReFT) forgets the annotated solutions; an InfoNCE loss between a representation of the
           annotated and of the sampled chain of thought makes it faster, steadier and more accurate.
Equations: z = sum_t softmax_t(v_t) h_t with the value head v and a projection h; for right samples
           -log exp(min(cos(z_ann, z_i), 0.9) / 0.2) / sum_j exp(cos(z_ann, z_j) / 0.2), j over i and the samples of
           other prompts, times 0.1, beside PPO's policy loss and 0.1 of its value loss; reward 1 if right, 0.1 if some
           answer is given. reft: without it. every: right and wrong samples; mean: z without the weights v.
           negative: wrong samples alone, the part that they share with the annotation drawn to what they lack of it,
           away from the rest of them (see common_tokens); both: half of either.
           reft_kl, carft_kl: less 0.05 KL to the start at every token; sft: fine-tuning on the annotations alone, one
           model for all seeds.
           dr_grpo, dr_grpo_cl: A = r - mean of the group, sums over tokens by a constant, no value loss; with the
           contrast, which then alone teaches v.
Left out:  shared dropout of the two heads; the warm-up on annotations, since the base was pre-trained on such.
Expect:    eval/accuracy: carft > reft at the end and at half of the steps.
Measure:   held-out Countdown of three numbers, annotated by a solver, where one right sample in five is the annotation;
           8 seeds, equal rollouts and updates. Beyond the cap nothing is drawn: the bed is invalid unless a fifth of
           the right samples of reft, which draws nothing, lies below it (a third does at the start). Random legal steps
           are right for 0.12, ceiling 1. What is drawn together does not come closer: in the record contrast/cosine, a
           mean over all samples, is lower with the contrast than without from the first measurement on, and ends at
           0.758 in carft and at 0.816 in reft.
Run:       python -m experiments.policy_gradient.carft
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.policy_gradient.parts import common_tokens
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group, returns
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses import contrastive, kl
from jaxrl_llm.models import heads
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.train.plan import referred
from jaxrl_llm.types import Batch, declared

CAP = 0.9  # of the cosine: a sample closer to the annotation is not drawn


def right(values: Array) -> Array:
    """Samples of reward 1."""
    return values > 0.5


def every(values: Array) -> Array:
    """All samples."""
    return jnp.ones(values.shape, bool)


def with_critic(estimate: Callable[..., Batch]) -> Callable[..., Batch]:
    return estimate


def without_critic(estimate: Callable[..., Batch]) -> Callable[..., Batch]:
    """The same batch with Dr. GRPO's advantages: ``r - mean`` of the group at every token, not divided, not whitened.

    From "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783, eq. 3.
    """
    spread = builders.per_response(group.dr_grpo_advantages)

    def estimated(params, extras, rows, rewards):
        batch = estimate(params, extras, rows, rewards)
        return batch._replace(advantages=jnp.where(batch.mask, spread(rows, rewards), 0.0))

    return estimated


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 500
    contrast: float = 0.1  # weight of the contrastive loss; 0 is ReFT
    contrasted: Callable[[Array], Array] = right
    positive: float = 1.0  # share of the contrast of right samples
    negative: float = 0.0  # share of that of wrong ones
    weighted: float = 1.0  # factor of the value inside the pooling; 0 is the mean
    projection: int = 64
    kl_weight: float = 0.0  # in the reward of every token
    sft_steps: int = 0  # on annotations, if any as many as steps at least; they replace reinforcement
    sft_rate: float = 1e-5
    credit: Callable[[Callable], Callable] = with_critic  # PPO's batch to that of the method
    value_weight: float = 0.1
    reduction: str = "seq_mean"


EMBEDDED = {
    "data": "countdown", "levels": (3,), "train_problems": 2048, "steps": 120, "eval_every": 15, "prompts_per_step": 12,
    "group_size": 4, "max_new_tokens": 18, "learning_rate": 2e-4, "eval_problems": 192, "projection": 16,
    "sft_rate": 1e-3,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
}  # fmt: skip
DR_GRPO = {"credit": without_critic, "value_weight": 0.0, "reduction": "constant"}
ARMS = {
    "reft": {"contrast": 0.0}, "carft": {}, "every": {"contrasted": every}, "mean": {"weighted": 0.0},
    "negative": {"positive": 0.0, "negative": 1.0}, "both": {"positive": 0.5, "negative": 0.5},
    "reft_kl": {"contrast": 0.0, "kl_weight": 0.05}, "carft_kl": {"kl_weight": 0.05},
    "sft": {"contrast": 0.0, "sft_steps": 120}, "dr_grpo": {"contrast": 0.0} | DR_GRPO,
    "dr_grpo_cl": DR_GRPO,
}  # fmt: skip
BED = experiment.Bed(judges=(("reft", "contrast/below_cap", 0.2),))
METRICS = ("eval/accuracy", "eval/pass@4", "policy/entropy", "contrast/cosine", "contrast/below_cap", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "value/value_error", "grad/norm")


class Annotated(NamedTuple):
    """Extras of a batch: the representation of each prompt's annotation, and the reward of the response."""

    gold: Array
    reward: Array


class Compared(NamedTuple):
    """Extras of a batch: what the annotation has and the response lacks, and which tokens of the response it shares."""

    missing: Array
    lacks: Array
    shared: Array
    wrong: Array


def build(settings: Settings) -> experiment.Plan:
    """One online stage of PPO with two heads; the annotated representation is taken before the updates."""
    bench = recipes.bench(settings)
    policy, read = bench.model.policy, recipes.make_answer_reader(bench)
    solutions, valid = recipes.demonstrations(settings)

    def represent(params, hidden, mask):
        values = settings.weighted * heads.token_values(params["value"], hidden)
        return contrastive.pooled(values, heads.apply_head(params["cot"], hidden), mask)

    def annotated(params, extras, rows, rewards):
        ids, all_rows = rows.problem_ids, jnp.ones(rows.problem_ids.shape, bool)
        gold = given_responses.with_responses(rows, all_rows, solutions[ids], valid[ids])
        hidden = policy.hidden(params["model"], gold.tokens, gold.positions, gold.segment_ids)
        of_gold = lambda mask: jax.lax.stop_gradient(represent(params, hidden, mask))  # noqa: E731
        found = Annotated(of_gold(gold.mask), rewards.value)._asdict()
        if not settings.negative:
            return found
        known, shared = common_tokens.in_common(gold.tokens, gold.mask, rows.tokens, rows.mask)
        lacked = gold.mask & ~known
        return found | Compared(of_gold(lacked), jnp.any(lacked, axis=1), shared, rows.mask & ~shared)._asdict()

    def contrast(params, hidden, batch):
        gold, reward = declared(Annotated, batch.extras)
        there = jnp.any(batch.mask, axis=1)
        keep = settings.contrasted(reward) & there
        near = {"group_ids": batch.group_ids, "cap": CAP}
        terms = contrastive.capped_infonce_loss(gold, represent(params, hidden, batch.mask), keep, **near)
        cosine, value = terms.aux["cosine"], settings.positive * reduce.scalars(terms.loss, keep)
        below = reduce.scalars((cosine < CAP).astype(jnp.float32), right(reward) & there)
        if settings.negative:
            value += settings.negative * from_errors(params, hidden, batch, ~right(reward) & there, near)
        return settings.contrast * value, {"contrast/cosine": reduce.scalars(cosine), "contrast/below_cap": below}

    def from_errors(params, hidden, batch, failed, near):
        missing, lacks, *parts = declared(Compared, batch.extras)
        shared, wrong = (represent(params, hidden, part) for part in parts)
        keep = failed & lacks & jnp.any(parts[0], axis=1) & jnp.any(parts[1], axis=1)
        return reduce.scalars(common_tokens.negative_infonce_loss(missing, shared, wrong, keep, **near).loss, keep)

    def graded(rewards, rows):
        return rewards._replace(value=jnp.maximum(rewards.value, 0.1 * read(rows)[1].astype(jnp.float32)))

    def restrained(params, extras, rows, rewards):
        paid = returns.at_last_token(rewards.value, rows.mask)
        reference, _ = builders.score_tokens(policy, referred(extras), rows, temperature=settings.temperature)
        return kl.kl_in_reward(paid, rows.sampler_logp, reference, rows.mask, coefficient=settings.kl_weight)

    judged = {} if bench.score is None else {"score": lambda answers, rows: graded(bench.score(answers, rows), rows)}
    over = {"reduction": settings.reduction, "temperature": settings.temperature}
    estimate = actor_critic.make_value_estimate(
        policy, **over, row_extras=annotated,
        token_rewards=restrained if settings.kl_weight else None,
    )  # fmt: skip
    online = recipes.make_online(
        settings, bench, **judged, actor=recipes.model_of,
        estimate=settings.credit(estimate),
        loss=actor_critic.make_actor_critic_loss(
            policy, value_weight=settings.value_weight, **over, extra_loss=contrast,
            length_tokens=settings.max_new_tokens if settings.reduction == "constant" else None,
        ),
        tx=optax.adam(settings.learning_rate),
        whole_batch="every response is contrasted with all others" if settings.contrast else "",
    )  # fmt: skip
    if settings.sft_steps:
        tuned = partial(
            curricula.solutions_imitated, settings, steps=max(settings.sft_steps, settings.steps),
            learning_rate=settings.sft_rate,
        )  # fmt: skip
        return recipes.one_stage(settings, bench, online)._replace(init=lambda key: tuned(), stages=())
    plan = recipes.one_stage(
        settings, bench, online, host_score=lambda rows: graded(bench.host_score(rows), rows),
        **({"extras": actor_critic.keep_model} if settings.kl_weight else {}),
    )  # fmt: skip
    return recipes.with_heads(bench, plan, value=1, cot=settings.projection)


def claim(results: experiment.Results) -> experiment.Claim:
    """CARFT is more accurate than ReFT at the end, and half way."""
    steps = results.curve("carft", "eval/accuracy")[0]
    half = int(steps[len(steps) // 2])
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "carft", "reft"),
        experiment.greater(results, "eval/accuracy", "carft", "reft", step=half),
    )


if __name__ == "__main__":
    experiment.main(__name__)
