"""Policy mirror descent on squared errors, a length reward and sampling of what fails (Kimi k1.5).

Paper:     Kimi Team, "Kimi k1.5: Scaling Reinforcement Learning with LLMs", arXiv:2501.12599.
Claim:     without value model, tree search or process rewards, online mirror descent with negative gradients beats
           imitation of good samples; a length reward shortens responses; sampling prompts in proportion to their
           failures beats uniform draws.
Equations: loss = (r - mean - tau log(pi(y) / pi_old(y)))^2 for each response; length reward lam = 0.5 - (len - min) /
           (max - min), min(0, lam) for wrong answers, from the first step on; length_warm: from half of the steps on,
           the paper's warm-up. Prompts are drawn with weight 1 - success (prioritised). positives: wrong responses do
           not train (ReST-like). grpo: clipped surrogate, normalised advantages; reinforce: -rho A, no clip.
           reset: the optimiser begins anew with every rollout, since the reference is another; curriculum: half of the
           steps on the half that the model solves most often when RL begins (of 10 tries, one grading for all seeds, as
           a set of problems is graded once), then all, by failures. partial: an iteration writes budget tokens of each
           response; those that have not ended wait, go on under the weights of the next one, and train with their group
           when all have ended (or repeat themselves), older tokens with the log-probabilities of their time;
           partial_fresh: older tokens do not train.
           long2short, the last third of the steps: short_rl with the length reward and half of the tokens; short_sft on
           the shortest right one of 8 samples; short_dpo, that one preferred to longer wrong ones and to right ones 1.5
           times as long; merged: the mean with the model before it became long-winded, nothing else trained.
Left out:  vision; the filter of prompts whose answer is guessed without work in 8 tries: of answers that are one of
           eleven values half of all prompts would go, easy and hard alike.
Expect:    length: eval/tokens below mirror's, with eval/accuracy not 0.03 below; short_rl likewise, and eval/accuracy:
           short_rl > short_sft, short_dpo and merged; mirror > positives.
Measure:   held-out arithmetic chains; the model is first taught to write its work twice (every arm), two updates for
           each rollout so that the squared log-ratio acts; 8 seeds, equal updates, and equal rollouts but for short_sft
           and short_dpo, which draw theirs at once, merged, which lacks the last third, and partial and partial_fresh,
           which begin fewer responses, for some go on. mirror > positives is a secondary part: chains bring both near
           the ceiling, and Countdown, where they could part, has no work that a length reward could shorten. A constant
           answer is right for 0.17, ceiling 1.
Run:       python -m experiments.policy_gradient.kimi_k15
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from experiments.parts import long_winded
from experiments.policy_gradient.parts import long_to_short, partial_rollouts
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group, sign
from jaxrl_llm.curriculum import balanced
from jaxrl_llm.curriculum.subset import make_subset
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses import mixed
from jaxrl_llm.losses.off_policy import mirror_descent_loss
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models import merging
from jaxrl_llm.rewards import shaping
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Stage, as_trained, no_extras
from jaxrl_llm.types import Params, Sampler, TokenTerms

TRIES = 10  # samples that grade a problem


def kept(tx: optax.GradientTransformation, updates: int) -> optax.GradientTransformation:
    """The optimiser as it is."""
    return tx


def reset_every(tx: optax.GradientTransformation, updates: int) -> optax.GradientTransformation:
    """``tx`` whose state begins anew after every ``updates``: those of one rollout."""

    def update(grads, state, params=None):
        count, inner = state
        fresh = tx.init(grads if params is None else params)
        inner = jax.tree.map(lambda new, old: jnp.where(count % updates == 0, new, old), fresh, inner)
        changes, inner = tx.update(grads, inner, params)
        return changes, (count + 1, inner)

    return optax.GradientTransformation(lambda params: (jnp.zeros((), jnp.int32), tx.init(params)), update)


def at_once(settings, bench: recipes.Bench) -> tuple[Stage, ...]:
    return (online_stage(settings, bench, settings.steps),)


def easy_first(settings, bench: recipes.Bench) -> tuple[Stage, ...]:
    """The easier half of the problems for half of the steps, then all by their failures."""
    every = np.arange(bench.train.tokens.shape[0])
    rates = rates_once_long(settings, settings.warm_steps)
    easy = np.argsort(-rates, kind="stable")[: max(1, every.size // 2)]
    half = settings.steps // 2
    return tuple(
        online_stage(dataclasses.replace(settings, sampler=sampler), bench, steps)
        for sampler, steps in (
            (partial(make_subset, easy), half),
            (partial(balanced.make_balanced, weigh=balanced.failure), settings.steps - half),
        )
    )


@recipes.cached_by_task
def rates_once_long(settings: recipes.OnlineSettings, warm_steps: int) -> np.ndarray:
    """Shares of right ones among ``TRIES`` answers of the model as RL finds it, by one run of the stage before."""
    found = recipes.bench(settings)
    by, every = found.model, np.arange(found.train.tokens.shape[0])
    if warm_steps and settings.data == "chain":
        long = long_winded.warm_base(found, recipes.solved_problems(settings), steps=warm_steps)
        by = by._replace(params=long(jax.random.key(0)))
    return curricula.pass_rates(found, by, every, samples=TRIES, max_new_tokens=settings.max_new_tokens)


def length_later(settings, bench: recipes.Bench) -> tuple[Stage, ...]:
    """The length reward has no weight in the first half of the steps: the paper's warm-up."""
    half = settings.steps // 2
    stages = (dataclasses.replace(settings, length_weight=0.0), half), (settings, settings.steps - half)
    return tuple(online_stage(how, bench, steps) for how, steps in stages)


def _long(settings) -> int:
    return settings.steps - settings.steps // 3


def shortened_by_reward(settings, bench: recipes.Bench) -> tuple[Stage, ...]:
    """The last third with the length reward and half of the tokens."""
    room = max(1, settings.max_new_tokens // 2)
    short = dataclasses.replace(settings, length_weight=settings.length_weight or 0.5, max_new_tokens=room)
    stages = (settings, _long(settings)), (short, settings.steps - _long(settings))
    return tuple(online_stage(how, bench, steps) for how, steps in stages)


def shortened_offline(stage: Callable[..., Stage], settings, bench: recipes.Bench) -> tuple[Stage, ...]:
    """The last third, in updates, of a stage on samples that are drawn when it begins."""
    updates = (settings.steps - _long(settings)) * settings.updates_per_rollout
    return online_stage(settings, bench, _long(settings)), stage(settings, bench, steps=updates)


def without_last_third(settings, bench: recipes.Bench) -> tuple[Stage, ...]:
    return (online_stage(settings, bench, _long(settings)),)


def kept_whole(bench: recipes.Bench) -> Callable[..., Params]:
    """What was trained."""
    return as_trained


def averaged_with_first(bench: recipes.Bench) -> Callable[..., Params]:
    """The mean of what was trained and the model that it was made from."""
    return lambda params, key: merging.average([bench.model.params, params])


def whole(settings, bench: recipes.Bench) -> tuple[dict, Callable]:
    """Every response is written in one iteration."""
    return {}, no_extras


def in_parts(settings, bench: recipes.Bench) -> tuple[dict, Callable]:
    """An iteration writes ``budget`` tokens of a response; what has not ended goes on in the next.

    Raises:
      UserError: for a sampler or an order of prompts that a group which waits would mislead.
    """
    if settings.sampler is not make_uniform:  # easy_first draws by samplers of its own
        # the outcome of a group that waited would be told to the sampler as that of the prompt drawn in its place
        raise UserError("a rollout in parts needs prompts drawn uniformly and at once; leave sampler and order")
    budget = settings.budget or max(1, settings.max_new_tokens // 3)
    return partial_rollouts.make_partial_rollout(settings, bench, budget=budget)


def every_token(estimate: Callable) -> Callable:
    """All tokens of a response train, whichever iteration wrote them."""
    return estimate


def newest_tokens(estimate: Callable) -> Callable:
    """Only the tokens of this iteration train."""
    return partial_rollouts.only_fresh(estimate, reduction="seq_mean")


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    steps: int = 400
    updates_per_rollout: int = 4
    loss: Callable[..., TokenTerms] = partial(mirror_descent_loss, tau=0.1)
    advantages: Callable[..., Array] = group.dr_grpo_advantages
    samples: Callable[[Array], Array] | None = None  # sign.right_samples, or all
    length_weight: float = 0.0
    sampler: Callable[[], Sampler] = make_uniform
    optimiser: Callable[..., optax.GradientTransformation] = kept  # (tx, updates of a rollout) -> tx
    order: Callable[..., tuple[Stage, ...]] = at_once
    finish: Callable[[recipes.Bench], Callable[..., Params]] = kept_whole
    warm_steps: int = 0  # supervised steps on work that is written twice
    short_problems: int = 2048  # prompts that long2short samples from
    write: Callable[..., tuple[dict, Callable]] = whole  # slots and extras of the rollout
    train_on: Callable[[Callable], Callable] = every_token
    budget: int = 0  # tokens of a response in an iteration, where it is written in parts; 0: a third of the most


EMBEDDED = {
    "levels": (4, 5), "steps": 120, "eval_every": 30, "prompts_per_step": 6, "max_new_tokens": 72,
    "learning_rate": 1e-4, "eval_problems": 64, "updates_per_rollout": 2, "train_problems": 1024,
    "budget": 24, "warm_steps": 80, "short_problems": 128,
}  # fmt: skip
SMOKE = {
    "steps": 3, "eval_every": 3, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4, "budget": 3, "warm_steps": 2, "short_problems": 4,
}  # fmt: skip
ARMS = {
    "grpo": {"loss": clipped_policy_loss, "advantages": group.group_normalized_advantages},
    "mirror": {},
    "reinforce": {"loss": mixed.ratio_loss},
    "length": {"length_weight": 0.5},
    "length_warm": {"length_weight": 0.5, "order": length_later},
    "prioritised": {"sampler": partial(balanced.make_balanced, weigh=balanced.failure)},
    "positives": {"samples": sign.right_samples},
    "reset": {"optimiser": reset_every},
    "curriculum": {"order": easy_first},
    "partial": {"write": in_parts},
    "partial_fresh": {"write": in_parts, "train_on": newest_tokens},
    "short_rl": {"order": shortened_by_reward},
    "short_sft": {"order": partial(shortened_offline, long_to_short.imitation_stage)},
    "short_dpo": {"order": partial(shortened_offline, long_to_short.preference_stage)},
    "merged": {"order": without_last_third, "finish": averaged_with_first},
}
BED = experiment.Bed(chance=0.17)
METRICS = ("eval/accuracy", "eval/pass@4", "eval/tokens", "eval/right_tokens", "policy/entropy")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "grad/norm")


def online_of(settings: Settings, bench: recipes.Bench) -> tuple[Online, Callable]:
    """The online method and the extras of its state; the arm sets loss, length reward, sampler and what trains."""
    chosen, weight = settings.samples, settings.length_weight

    def advantages(rows, rewards):
        length = jnp.sum(rows.mask.astype(jnp.int32), axis=1)
        extremes = shaping.group_extremes(length.astype(jnp.float32), rows.group_ids, valid=rewards.valid)
        bonus = shaping.length_reward(length, rewards.value > 0.5, *extremes)
        total = rewards._replace(value=rewards.value + weight * bonus)
        return builders.per_response(settings.advantages)(rows, total)

    slots, extras = settings.write(settings, bench)
    estimate = builders.make_estimate(
        bench.model.policy,
        advantages,
        reduction="seq_mean",
        temperature=settings.temperature,
        keep=None if chosen is None else lambda rows, rewards: chosen(rewards.value),
    )
    online = recipes.make_online(
        settings,
        bench,
        sampler=settings.sampler(),
        estimate=settings.train_on(estimate),
        loss=builders.make_policy_loss(
            bench.model.policy,
            settings.loss,
            reduction="seq_mean",
            temperature=settings.temperature,
            anchor=builders.stored_anchor,
        ),
        tx=settings.optimiser(optax.adam(settings.learning_rate), settings.updates_per_rollout),
        updates_per_rollout=settings.updates_per_rollout,
        **slots,
    )
    return online, extras


def online_stage(settings: Settings, bench: recipes.Bench, steps: int) -> Stage:
    """So many steps of the online method."""
    online, extras = online_of(settings, bench)
    return Stage(online, steps, extras)


def build(settings: Settings) -> experiment.Plan:
    """A supervised stage that makes the model long-winded, then the stages of the arm."""
    bench = recipes.bench(settings)
    stages = settings.order(settings, bench)
    if settings.warm_steps and settings.data == "chain":  # a model for rows of one's own is long-winded already
        stages = long_winded.warm_stage(bench, recipes.solved_problems(settings), steps=settings.warm_steps), *stages
    plan = curricula.make_single_turn_plan(settings, bench, stages)
    return plan._replace(finish=settings.finish(bench))


def claim(results: experiment.Results) -> experiment.Claim:
    """A length reward shortens at 0.03 of accuracy, best in a phase of its own; mirror descent beats right samples."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.smaller(results, "eval/tokens", "length", "mirror"),
        experiment.greater(results, "eval/accuracy", "length", "mirror", by=-0.03),
        experiment.greater(results, "eval/accuracy", "mirror", "positives"),
        experiment.smaller(results, "eval/tokens", "short_rl", "mirror"),
        experiment.greater(results, "eval/accuracy", "short_rl", "mirror", by=-0.03),
        *(experiment.greater(results, "eval/accuracy", "short_rl", x) for x in ("short_sft", "short_dpo", "merged")),
    )


if __name__ == "__main__":
    experiment.main(__name__)
