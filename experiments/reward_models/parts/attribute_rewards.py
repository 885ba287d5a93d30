"""Reward models on replies whose true qualities are known: heads to fit, a policy that optimises them, the truth.

The parameters of a run are ``{"model": policy, "value": head of PPO, "reward": {"model": tree, "head": head}}``: first
stages fit ``reward``, later ones train the policy on what it says. The verifier of a rollout is the true utility, so
that ``reward/mean`` is what is wanted and never what is optimised.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from experiments.parts import strings
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts import combine
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm import reduce
from jaxrl_llm.advantages import group, returns
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import kl
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.preference import dpo_loss
from jaxrl_llm.losses.reward import bradley_terry_loss, gaussian_reward_loss, label_regression_loss
from jaxrl_llm.models import heads
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Stage, keep_reference, referred, tabled
from jaxrl_llm.types import Key, Params, Rewards, Trajectories

READ_AT_ONCE = 64  # replies that loaded weights read in one piece
Proxy = Callable[[Replies, Params, Array, Array], Array]  # (task, parameters, prompts, responses) -> optimised [B]


def init_reward(task: Replies, key: Key, *, outputs: int) -> Params:
    """A reward model of the policy's shape with a head of so many numbers."""
    first, second = jax.random.split(key)
    model = task.world.policy.init(first)
    width = heads.width_of(task.world.policy.hidden, model)
    return {"model": model, "head": heads.init_head(width, second, outputs=outputs, scale=width**-0.5)}


def scores(
    task: Replies, reward: Params, prompts: Int[Array, "N P"], responses: Int[Array, "N T"]
) -> Float[Array, "N K"]:
    """All outputs of a reward model for whole replies; loaded weights read them in parts."""

    def some(given):
        rows = strings.whole(task.world, *given)
        hidden = task.world.policy.hidden(reward["model"], rows.tokens, rows.positions, rows.segment_ids)
        return heads.apply_head(reward["head"], strings.last_hidden(task.world, hidden, rows))[:, 0]

    at_once = prompts.shape[0] if task.world.start is None else READ_AT_ONCE
    return builders.in_row_parts(some, (prompts, responses), at_once=at_once)


@lru_cache(maxsize=16)
def make_start(task: Replies, *, base_steps: int, outputs: int) -> Callable[[Key], Params]:
    """The ``init`` of a plan: a policy trained on the behaviour, a fresh reward model, a value head that says 0."""
    base = strings.make_base(task.world, task.draw_behaviour, steps=base_steps)

    def init(key):
        model = base(key)
        value = heads.init_head(heads.width_of(task.world.policy.hidden, model), key)
        return {
            "model": model,
            "value": value,
            "reward": init_reward(task, jax.random.fold_in(key, 9), outputs=outputs),
        }

    return init


# ------------------------------------------------------------------ fitting a reward model


def fit_stage(
    task: Replies,
    draw: Callable[[Replies, Key, int], Any],
    loss: Callable[[Replies, Params, Any], tuple[Array, dict[str, Array]]],
    *,
    steps: int,
    table: int = 1024,
    rows_per_step: int = 64,
    learning_rate: float = 3e-3,
) -> Stage:
    """Trains on a table of ``draw(key, rows)``; ``loss(task, params, rows)`` of the whole parameters.

    What the loss does not read keeps its value: Adam moves nothing without a gradient.
    """

    def of_rows(params, extras, rows):
        return loss(task, params, rows)

    method = Offline(
        tabled,
        make_uniform(),
        rows_per_step,
        of_rows,
        optax.adam(task.world.rate or learning_rate),
    )
    return Stage(method, steps, strings.make_table(partial(draw, task), table))


def preference_loss(
    task: Replies, params: Params, pairs: text.Pairs, *, output: int = 0
) -> tuple[Array, dict[str, Array]]:
    """Bradley-Terry on one output of the reward model."""
    both = [scores(task, params["reward"], pairs.prompts, x)[:, output] for x in (pairs.first, pairs.second)]
    terms = bradley_terry_loss(*both)
    return reduce.scalars(terms.loss), {"fit/accuracy": reduce.scalars(terms.aux["accuracy"])}


def label_loss(task: Replies, params: Params, rows: tuple[Array, Array, Array]) -> tuple[Array, dict[str, Array]]:
    """Squared error of all outputs: rows of ``(prompts, responses, labels [B, K])``."""
    prompts, responses, labels = rows
    terms = label_regression_loss(scores(task, params["reward"], prompts, responses), labels)
    value = reduce.scalars(terms.loss)
    return value, {"fit/error": value}


def mixed(task: Replies, params: Params, prompts: Array, responses: Array) -> Array:
    """The ``Proxy`` of several outputs, weighed by ``softmax(params["mix"])``; the outputs themselves are fixed."""
    found = jax.lax.stop_gradient(scores(task, params["reward"], prompts, responses))
    return combine.composed(found, jax.nn.softmax(params["mix"]))


def mix_loss(task: Replies, params: Params, pairs: text.Pairs) -> tuple[Array, dict[str, Array]]:
    """Bradley-Terry on ``mixed``: it fits the weights only."""
    both = [mixed(task, params, pairs.prompts, x) for x in (pairs.first, pairs.second)]
    return reduce.scalars(bradley_terry_loss(*both).loss), {}


def known(task: Replies, params: Params, prompts: Array, responses: Array) -> Array:
    """The ``Proxy`` that no one has: the truth. What a policy can learn at all, and the ceiling of every other."""
    return task.utility(prompts, responses)


def first_output(task: Replies, params: Params, prompts: Array, responses: Array) -> Array:
    """The ``Proxy`` of a scalar reward model."""
    return scores(task, params["reward"], prompts, responses)[:, 0]


# ------------------------------------------------------------------ ensembles


def draw_pairs(task: Replies, key: Key, rows: int, **annotator: float) -> text.Pairs:
    """Labelled pairs of the task."""
    return task.draw_pairs(key, rows, **annotator)


def draw_bootstraps(
    task: Replies, key: Key, rows: int, *, heads: int, **annotator: float
) -> tuple[text.Pairs, Array, Array]:
    """Pairs, how often each head's bootstrap has them ``[N, H]``, noise for samples of both rewards ``[N, 2, H]``."""
    pairs = task.draw_pairs(jax.random.fold_in(key, 0), rows, **annotator)
    counts = jax.random.poisson(jax.random.fold_in(key, 1), 1.0, (rows, heads)).astype(jnp.float32)
    return pairs, counts, jax.random.normal(jax.random.fold_in(key, 2), (rows, 2, heads))


def ensemble(task: Replies, params: Params, prompts: Array, responses: Array) -> tuple[Array, Array]:
    """Means and deviations of the heads ``[B, H]``: the first and the second half of the outputs."""
    return _as_gaussians(scores(task, params["reward"], prompts, responses))


def _as_gaussians(outputs: Float[Array, "B K"]) -> tuple[Array, Array]:
    mean, log_deviation = jnp.split(outputs, 2, axis=1)
    return mean, jnp.exp(jnp.clip(log_deviation, -3.0, 1.0))


def ensemble_loss(
    task: Replies, params: Params, rows: tuple[text.Pairs, Array, Array]
) -> tuple[Array, dict[str, Array]]:
    """Bradley-Terry of every head over its bootstrap, on samples ``mean + deviation * noise`` of both rewards.

    No gradient of it reaches the deviations, to which noise only costs: they would all fall to their bound. They learn
    how far each head lies from the mean of all, by ``calibration``.

    From "Reward-Robust RLHF in LLMs" (BRME), arXiv:2409.15360. Differs from the paper in that how its heads are fitted
    is a reconstruction.
    """
    pairs, counts, noise = rows
    sampled, outputs = [], []
    for side, replies in enumerate((pairs.first, pairs.second)):
        outputs.append(scores(task, params["reward"], pairs.prompts, replies))
        mean, deviation = _as_gaussians(outputs[-1])
        sampled.append(mean + jax.lax.stop_gradient(deviation) * noise[:, side])
    losses = [counts[:, h] * bradley_terry_loss(*(x[:, h] for x in sampled)).loss for h in range(counts.shape[1])]
    apart = calibration(jnp.concatenate(outputs))
    return reduce.scalars(sum(losses[1:], losses[0])) + reduce.scalars(apart), {}


def calibration(outputs: Float[Array, "B K"]) -> Float[Array, " B"]:
    """``gaussian_reward_loss`` of heads to their mean, of which the deviations alone learn.

    Every head counts less its own mean over the batch: preferences leave it free.
    """
    mean, log_deviation = jnp.split(outputs, 2, axis=1)
    mean = jax.lax.stop_gradient(mean - jnp.sum(mean, axis=0, keepdims=True) / mean.shape[0])
    return gaussian_reward_loss(mean, log_deviation, jnp.sum(mean, axis=1) / mean.shape[1]).loss


def surest(task: Replies, params: Params, key: Key, *, replies: int = 128) -> dict[str, Array]:
    """How often the head that is the surest of most replies is the surest one: 1 where deviations choose nothing."""
    _, deviation = ensemble(task, params, *task.draw_behaviour(key, replies))
    chosen = jax.nn.one_hot(jnp.argmin(deviation, axis=1), deviation.shape[1])
    return {"head/most_chosen": jnp.max(jnp.sum(chosen, axis=0)) / replies}


def teacher_loss(task: Replies, params: Params, pairs: text.Pairs) -> tuple[Array, dict[str, Array]]:
    """Bradley-Terry of ``params["teacher"]``, the reward model to which heads are fitted by likelihood."""
    return preference_loss(task, {"reward": params["teacher"]}, pairs)


def likelihood_loss(task: Replies, params: Params, rows: tuple[Array, Array, Array]) -> tuple[Array, dict[str, Array]]:
    """Gaussian likelihood of every head on rows of ``(prompts, responses, target [B])``.

    From "Reward-Robust RLHF in LLMs" (BRME), arXiv:2409.15360, as ``losses.reward.gaussian_reward_loss``.
    """
    prompts, responses, target = rows
    mean, log_deviation = jnp.split(scores(task, params["reward"], prompts, responses), 2, axis=1)
    terms = gaussian_reward_loss(mean, log_deviation, target)
    return reduce.scalars(terms.loss), {"fit/error": reduce.scalars(terms.aux["error"])}


def taught_stage(
    task: Replies, *, steps: int, replies: int, rows_per_step: int = 64, learning_rate: float = 3e-3
) -> Stage:
    """Fits the ensemble's heads to what ``params["teacher"]`` says of replies of the behaviour."""

    def extras(params, key):
        prompts, responses = task.draw_behaviour(key, replies)
        target = scores(task, params["teacher"], prompts, responses)[:, 0]
        return {"rows": (prompts, responses, jax.lax.stop_gradient(target))}

    method = Offline(
        tabled, make_uniform(), rows_per_step,
        lambda params, extras, rows: likelihood_loss(task, params, rows), optax.adam(task.world.rate or learning_rate),
    )  # fmt: skip
    return Stage(method, steps, extras)


def robust(task: Replies, params: Params, prompts: Array, responses: Array, *, share: float) -> Array:
    """The ``Proxy`` of an ensemble between its surest head (``share=1``) and its worst (0)."""
    return combine.robust_rewards(*ensemble(task, params, prompts, responses), share=share)


def lower(task: Replies, params: Params, prompts: Array, responses: Array, *, weight: float) -> Array:
    """The ``Proxy`` of an ensemble: mean less ``weight`` deviations between the heads."""
    return combine.lower_bound_rewards(ensemble(task, params, prompts, responses)[0], weight=weight)


def arbitrary(task: Replies, params: Params, prompts: Array, responses: Array) -> Array:
    """A useless ``Proxy`` that is not constant: the weight of each token in ``params["noise"]``, see ``draw_noise``."""
    weights = jax.lax.stop_gradient(params["noise"])
    return jnp.sum(jnp.where(task.spoken(responses), weights[responses], 0.0), axis=1)


def draw_noise(task: Replies, key: Key) -> Float[Array, " V"]:
    """A random weight for each token.

    Every seed draws its own: one draw may be useful or harmful by luck, and no number of seeds averages over it.
    """
    return jnp.sin(3.0 * jax.random.normal(key, (task.size,)))


def constant(task: Replies, params: Params, prompts: Array, responses: Array) -> Array:
    """A useless ``Proxy`` that moves nothing."""
    return jnp.zeros(responses.shape[:1], jnp.float32)


# ------------------------------------------------------------------ agreement with the truth


def pair_accuracy(
    task: Replies, proxy: Proxy, params: Params, key: Key, *, rows: int = 256, **annotator: float
) -> Array:
    """How often the proxy agrees with true utilities on fresh pairs; ties count half."""
    pairs = task.draw_pairs(key, rows, **({"sharpness": 1e4} | annotator))
    gap = proxy(task, params, pairs.prompts, pairs.first) - proxy(task, params, pairs.prompts, pairs.second)
    return reduce.scalars(jnp.where(gap > 0, 1.0, jnp.where(gap < 0, 0.0, 0.5)))


# ------------------------------------------------------------------ a policy that optimises it


def true_score(task: Replies, answers: Any, rows: Trajectories) -> Rewards:
    """The ``score`` of every stage: the true utility, which no learner sees."""
    value = task.utility(*strings.responses_of(task.world, rows))
    return Rewards(value, jnp.ones(value.shape, bool))


def reference_extras(params: Params, key: Key) -> dict[str, Params]:
    """The policy as it is when a stage begins."""
    return keep_reference(params["model"], key)


def _prompts(task: Replies, count: int) -> Array:
    return task.draw_prompts(jax.random.key(21), count)


def grpo_stage(
    task: Replies,
    proxy: Proxy,
    *,
    steps: int,
    prompts_per_step: int = 8,
    group_size: int = 8,
    kl_weight: float = 0.05,
    learning_rate: float = 1e-3,
    advantages: Callable[..., Array] = group.group_normalized_advantages,
) -> Stage:
    """GRPO on the proxy with a KL term to the policy that the stage begins with.

    Args:
      advantages: ``(scores, group_ids, *, valid) -> [B]``; ``scores`` is what the proxy gives, ``[B]`` or ``[B, K]``.
    """
    loss = builders.make_policy_loss(
        task.world.policy,
        clipped_policy_loss,
        extra_terms=lambda logp, entropy, batch: kl_weight * kl.k3_gradient_terms(logp, batch.ref_logp, batch.mask),
        diagnostics=builders.reference_kl,
    )

    def estimate(params, extras, rows, rewards):
        judged = jax.lax.stop_gradient(proxy(task, params, *strings.responses_of(task.world, rows)))
        values = advantages(judged, rows.group_ids, valid=rewards.valid)
        inner = builders.make_estimate(
            task.world.policy,
            lambda rows, rewards: group.per_token(values, rows.mask),
            reference=referred,
        )
        return inner(params["model"], extras, rows, rewards)

    online = strings.learned_from_prompts(
        task.world, _prompts(task, 512), partial(true_score, task), estimate=estimate,
        loss=lambda params, batch: loss(params["model"], batch),
        tx=optax.adam(task.world.rate or learning_rate), prompts_per_step=prompts_per_step, group_size=group_size,
        actor=recipes.model_of,
    )  # fmt: skip
    return Stage(online, steps, reference_extras)


def ppo_stage(
    task: Replies,
    proxy: Proxy,
    *,
    steps: int,
    rollouts_per_step: int = 64,
    kl_weight: float = 0.05,
    learning_rate: float = 1e-3,
) -> Stage:
    """PPO with a value head on the proxy, less the KL to the policy that the stage begins with at every token."""

    def token_rewards(params, extras, rows, rewards):
        judged = jax.lax.stop_gradient(proxy(task, params, *strings.responses_of(task.world, rows)))
        reference, _ = builders.score_tokens(task.world.policy, referred(extras), rows)
        paid = returns.at_last_token(judged, rows.mask)
        return kl.kl_in_reward(paid, rows.sampler_logp, reference, rows.mask, coefficient=kl_weight)

    estimate = actor_critic.make_value_estimate(task.world.policy, token_rewards=token_rewards)
    online = strings.learned_from_prompts(
        task.world, _prompts(task, 512), partial(true_score, task), estimate=estimate,
        loss=actor_critic.make_actor_critic_loss(task.world.policy),
        tx=optax.adam(task.world.rate or learning_rate), prompts_per_step=rollouts_per_step, group_size=1,
        actor=recipes.model_of,
    )  # fmt: skip
    return Stage(online, steps, reference_extras)


def dpo_stage(task: Replies, proxy: Proxy, *, steps: int, pairs: int = 1024, rows_per_step: int = 64, beta: float = 0.1,
              learning_rate: float = 1e-3) -> Stage:  # fmt: skip
    """DPO on pairs of the behaviour that the proxy ranks; the policy at its start is the reference."""

    def extras(params, key):
        found = task.draw_pairs(key, pairs, sharpness=0.0)
        wins = (proxy(task, params, found.prompts, found.first) >= proxy(task, params, found.prompts, found.second))[
            :, None
        ]
        chosen = jnp.where(wins, found.first, found.second), jnp.where(wins, found.second, found.first)
        base = [strings.sum_logp(task.world, params["model"], found.prompts, x) for x in chosen]
        return {"rows": (found.prompts, *chosen, *base)}

    def loss(params, extras, batch):
        prompts, chosen, rejected, *base = batch
        own = [strings.sum_logp(task.world, params["model"], prompts, x) for x in (chosen, rejected)]
        terms = dpo_loss(*own, *base, beta=beta)
        trained = sum(jnp.sum(strings.counted(x, task.world.end).astype(jnp.float32)) for x in (chosen, rejected))
        return reduce.scalars(terms.loss), {"tokens/trained": trained}

    method = Offline(tabled, make_uniform(), rows_per_step, loss, optax.adam(task.world.rate or learning_rate))
    return Stage(method, steps, extras)


# ------------------------------------------------------------------ the truth


def policy_figures(
    task: Replies, params: Params, key: Key, *, prompts: int = 128, samples: int = 2
) -> dict[str, Array]:
    """True utility, qualities and length of the policy's replies to fresh prompts, each quality on benign ones, too."""
    asked = task.draw_prompts(jax.random.fold_in(key, 0), prompts)
    said = strings.sample(task.world, params["model"], asked, jax.random.fold_in(key, 1), samples=samples)
    asked = jnp.repeat(asked, samples, axis=0)
    found, benign = task.attributes(asked, said), task.benign(asked)
    return {
        "eval/utility": reduce.scalars(task.utility(asked, said)),
        "eval/length": reduce.scalars(task.lengths(said)),
        **{f"eval/{name}": reduce.scalars(found[:, k]) for k, name in enumerate(text.NAMES)},
        "eval/benign_actionable": reduce.scalars(found[:, text.NAMES.index("actionable")], benign),
    }


def measure(task: Replies, proxy: Proxy, more: tuple[Callable[..., dict[str, Array]], ...], params: Params, key: Key):
    """The ``measure`` of a plan: ``policy_figures``, what the proxy says of the policy, and its accuracy on pairs."""
    asked = task.draw_prompts(jax.random.fold_in(key, 3), 64)
    said = strings.sample(task.world, params["model"], asked, jax.random.fold_in(key, 4))
    figures = policy_figures(task, params, key)
    figures["eval/proxy"] = reduce.scalars(proxy(task, params, asked, said))
    figures["pair/accuracy"] = pair_accuracy(task, proxy, params, jax.random.fold_in(key, 5))
    for extra in more:
        figures |= extra(task, params, jax.random.fold_in(key, 6))
    return figures


def drift(task: Replies, params: Params, key: Key, *, prompts: int = 128) -> dict[str, Array]:
    """``strings.drift`` of the policy from ``params["start"]``, on replies to fresh prompts."""
    asked = task.draw_prompts(jax.random.fold_in(key, 0), prompts)
    said = strings.sample(task.world, params["model"], asked, jax.random.fold_in(key, 1))
    return {"eval/kl": strings.drift(task.world, params["model"], params["start"], asked, said)}


def tilted_weights(scores: Float[Array, "N K"], nats: float) -> Float[Array, "N K"]:
    """``softmax_k(t scores)``, with the one ``t >= 0`` for all rows at which the mean KL to equal weights is ``nats``.

    Of all policies at that KL from the one that drew the ``K`` replies, this one earns the most of the scores. Where
    the scores are too alike, for ties, the weights come as far as they can; of equal ones they stay equal.

    Raises:
      ValueError: for a KL that ``K`` replies cannot have.

    >>> weights = tilted_weights(jnp.array([[2.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]), 0.1)
    >>> [round(float(x), 3) for x in weights[0]], round(float(jnp.sum(weights * jnp.log(4 * weights)) / 2), 4)
    ([0.547, 0.151, 0.151, 0.151], 0.1)
    """
    most = float(np.log(scores.shape[1]))
    if not 0 < nats < most:
        raise ValueError(f"nats={nats} must lie between 0 and log({scores.shape[1]}) = {most:.4g}; give more replies")
    scale = jnp.maximum(jnp.std(scores), 1e-6)

    def weights(log_t: Array) -> Array:
        return jax.nn.softmax(jnp.exp(log_t) * scores / scale, axis=1)

    def halved(bounds: Array, _: None) -> tuple[Array, None]:
        middle = jnp.mean(bounds)
        found = weights(middle)
        spent = jnp.sum(jax.scipy.special.xlogy(found, found * scores.shape[1])) / scores.shape[0]
        return jnp.where(spent < nats, bounds.at[0].set(middle), bounds.at[1].set(middle)), None

    bounds, _ = jax.lax.scan(halved, jnp.asarray([-8.0, 8.0], jnp.float32), None, length=40)
    return weights(jnp.mean(bounds))


@lru_cache(maxsize=32)
def tilted(proxy: Proxy, nats: tuple[float, ...], *, prompts: int, samples: int) -> Callable[..., dict[str, Array]]:
    """Figures ``tilted/utility_1``, ...: true utility of what earns most of the proxy at so many nats from the start.

    The best policy at a KL is the start's, tilted: its replies weighed by ``tilted_weights``. No training is in it and
    no policy of its own, so that of two proxies that are asked of the same replies only the proxies differ.
    """

    def figures(task: Replies, params: Params, key: Key) -> dict[str, Array]:
        asked = task.draw_prompts(jax.random.fold_in(key, 0), prompts)
        said = strings.sample(task.world, params["start"], asked, jax.random.fold_in(key, 1), samples=samples)
        asked = jnp.repeat(asked, samples, axis=0)
        both = proxy(task, params, asked, said), task.utility(asked, said)
        judged, worth = (x.reshape(prompts, samples) for x in both)
        worths = [jnp.sum(tilted_weights(judged, x) * worth, axis=1) for x in nats]
        return {f"tilted/utility_{x:g}": reduce.scalars(w) for x, w in zip(nats, worths, strict=True)}

    return figures


def column(index: int) -> Proxy:
    """The ``Proxy`` that reads one output alone."""
    return partial(_column, index=index)


def _column(task: Replies, params: Params, prompts: Array, responses: Array, *, index: int) -> Array:
    return scores(task, params["reward"], prompts, responses)[:, index]
