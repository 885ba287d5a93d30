"""Samples filtered by where a reward model can be trusted: policy filtration for PPO (PF-PPO).

Paper:     Zhang et al., "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv:2409.06957.
Claim:     a reward model is surest about very good and very bad responses; training PPO on the best and a random one
           (BR) or the best and the worst (BW) of several beats training on all and on the best alone, and the
           correlation of reward and truth on what is kept, measured beforehand, says which filter to take.
Equations: weights of a prompt's responses: BR 0.4 for the best by reward, 0.1 for the others; BW 1 for best and worst;
           BoN 1 for the best; power |R|^2; each loss, and the whitening of advantages, times the expected count of a
           draw with replacement by weight. PPO with GAE; reward: the model's score at the last token, less
           beta (log pi - log base) at each. oracle: the true reward, no filter.
           ppo_s: one response to each of as many times the prompts. ppo_1, br_1, bw_1 and ppo_2, br_2, bw_2: the fitted
           reward with noise of one and of two of its own standard deviations, drawn once for a response.
Left out:  scales of policies and reward models. Of beta 0, 0.05 and 0.2 the embedded was the first with which ppo kept
           the true reward that it gained from an earlier reward model (R^2 .13 on new samples): below it exploited it.
Expect:    eval/accuracy: bw > ppo and br > ppo, bw_1 > ppo_1 and bw_2 > ppo_2; filter/reliability: bw > ppo.
Measure:   held-out arithmetic chains; the reward model is a linear head on the frozen base model's last state and its
           confidence in the response, fitted by Bradley-Terry to the base model's own samples before training; equal
           rollouts and updates. filter/reliability: R^2 of what a filter keeps of samples of the base model to other
           problems of training, the same for all arms; filter/fit: of all of them. The bed is invalid unless that is
           0.3: a reward model that says less has nowhere that it can be trusted. A constant answer is right for 0.16,
           ceiling 1.
Run:       python -m experiments.policy_gradient.pf_ppo
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.policy_gradient.parts import linear_reward_model
from jaxrl_llm import experiment
from jaxrl_llm.advantages import returns, selection, whiten
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses import kl
from jaxrl_llm.models import heads
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.types import Params, declared


def fitted(model, features, rewards):
    """What the reward model says."""
    return model.scores(features)


def true_reward(model, features, rewards):
    """What the task says."""
    return rewards.value


def noisy(model, features, rewards, *, deviation: float):
    """What a worse reward model says: its errors belong to the response, which has them again when it is read again."""
    scores = model.scores(features)
    seeds = jax.lax.bitcast_convert_type(jnp.sum(features.astype(jnp.float32), axis=1), jnp.int32)
    draw = jax.vmap(lambda seed: jax.random.normal(jax.random.fold_in(jax.random.key(29), seed)))
    return scores + deviation * draw(seeds)


def several_each(settings: "Settings") -> "Settings":
    """``group_size`` responses to each prompt."""
    return settings


def one_each(settings: "Settings") -> "Settings":
    """One response to each of so many times the prompts."""
    return dataclasses.replace(settings, group_size=1, prompts_per_step=settings.prompts_per_step * settings.group_size)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 300
    prompts_per_step: int = 256
    group_size: int = 5
    weigh: Callable[..., Array] = selection.equal_weights
    kl_weight: float = 0.05  # of the base at every token, in the reward
    judge: Callable[..., Array] = fitted
    drawn: Callable[["Settings"], "Settings"] = several_each  # how many responses a prompt gets
    fit_problems: int = 512  # that the reward model is fitted on, and as many more on which it is measured


EMBEDDED = {
    "levels": (2, 3), "steps": 120, "eval_every": 15, "prompts_per_step": 9, "max_new_tokens": 26,
    "learning_rate": 3e-5, "eval_problems": 64, "fit_problems": 96, "kl_weight": 0.2,
}  # fmt: skip
SMOKE = {"steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
         "train_problems": 16, "eval_problems": 8, "eval_samples": 4, "fit_problems": 4}  # fmt: skip
NOISE_1, NOISE_2 = (partial(noisy, deviation=x) for x in (1.0, 2.0))
ARMS = {
    "ppo": {}, "bon": {"weigh": selection.best_weights}, "bw": {"weigh": selection.best_worst_weights},
    "br": {"weigh": selection.best_random_weights}, "power": {"weigh": selection.power_weights},
    "oracle": {"judge": true_reward}, "ppo_s": {"drawn": one_each},
    "ppo_1": {"judge": NOISE_1}, "br_1": {"judge": NOISE_1, "weigh": selection.best_random_weights},
    "bw_1": {"judge": NOISE_1, "weigh": selection.best_worst_weights},
    "ppo_2": {"judge": NOISE_2}, "br_2": {"judge": NOISE_2, "weigh": selection.best_random_weights},
    "bw_2": {"judge": NOISE_2, "weigh": selection.best_worst_weights},
}  # fmt: skip
AT_ONCE = 128  # problems whose responses are sampled and read together before training
BED = experiment.Bed(chance=0.16, judges=(("ppo", "filter/fit", 0.3),))
METHOD = "bw"
METRICS = ("eval/accuracy", "eval/pass@4", "filter/reliability", "filter/fit", "policy/entropy", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "value/value_error", "grad/norm")


class Fitted(NamedTuple):
    """Extras of a state: the reward model, the policy whose features it reads, and how far it can be relied on."""

    reward_model: linear_reward_model.LinearReward
    base: Params
    kept: Array  # R^2 of what the filter keeps
    fit: Array  # R^2 of everything


class Filtered(NamedTuple):
    """Extras of a batch: how often each response is expected to train, and what ``Fitted`` says of the filter."""

    weights: Array
    kept: Array
    fit: Array


def build(settings: Settings) -> experiment.Plan:
    """One online stage of PPO; the reward model is fitted when the stage begins and stays in the extras."""
    bench, several = recipes.bench(settings), max(settings.group_size, 5)  # the reward model compares responses
    policy, base = bench.model.policy, bench.model.params
    judge, settings = curricula.train_score(bench), settings.drawn(settings)

    def read(base, rows):
        """What the reward model sees of each response, and the log-probabilities of the base model."""
        hidden = policy.hidden(base, rows.tokens, rows.positions, rows.segment_ids)
        last = jnp.take_along_axis(hidden, heads.last_index(rows.segment_ids)[:, None, None], axis=1)[:, 0]
        logp, entropy = builders.score_tokens(policy, base, rows, temperature=settings.temperature)
        return linear_reward_model.with_confidence(last, logp, entropy, rows.mask), logp

    def fit(params, key):
        count = min(settings.fit_problems, bench.train.tokens.shape[0] // 2)
        rollout, table = recipes.rollout_of(settings, bench, group_size=several), bench.train
        groups = jnp.repeat(jnp.arange(count, dtype=jnp.int32), several)

        def sampled(first, key):
            """Features and verdicts of responses to so many problems, a part of them at a time."""

            def of(ids):
                rows = rollout(base, table.tokens[ids], table.valid[ids], sample_keys(key, 0, ids, several), ids)
                truth = judge(jax.tree.map(lambda x: x[rows.problem_ids], table.answers), rows)
                found = read(base, rows)[0], truth
                return jax.tree.map(lambda x: x.reshape(ids.shape[0], several, *x.shape[1:]), found)

            ids = first + jnp.arange(count, dtype=jnp.int32)
            found = builders.in_row_parts(of, ids, at_once=AT_ONCE)
            return jax.tree.map(lambda x: x.reshape(count * several, *x.shape[2:]), found)

        features, truth = sampled(0, key)
        model = linear_reward_model.fit_linear(features, truth.value, groups, valid=truth.valid)
        features, truth = sampled(count, jax.random.fold_in(key, 1))  # those of all arms
        scores = settings.judge(model, features, truth)
        weights = selection.expected_counts(settings.weigh(scores, groups, valid=truth.valid))
        kept = selection.reliability(scores, truth.value, weights)
        fit = selection.reliability(scores, truth.value, truth.valid.astype(jnp.float32))
        return Fitted(model, jax.tree.map(jnp.copy, base), kept, fit)._asdict()

    def estimate(params, extras, rows, rewards):
        model, base, kept, fit = declared(Fitted, extras)
        features, reference = read(base, rows)

        def paid(params, extras, rows, rewards):
            score = returns.at_last_token(rewards.value, rows.mask)
            return kl.kl_in_reward(score, rows.sampler_logp, reference, rows.mask, coefficient=settings.kl_weight)

        plain = actor_critic.make_value_estimate(policy, token_rewards=paid, temperature=settings.temperature)
        scores = settings.judge(model, features, rewards)
        weights = selection.expected_counts(settings.weigh(scores, rows.group_ids, valid=rewards.valid))
        batch = plain(params, extras, rows, rewards._replace(value=scores))
        advantages = whiten.reweighted_tokens(batch.advantages, weights, batch.mask)
        more = Filtered(weights, *(jnp.full(weights.shape, known) for known in (kept, fit)))
        return batch._replace(advantages=advantages, extras=batch.extras | more._asdict())

    def reliability(batch):
        _, kept, fit = declared(Filtered, batch.extras)
        return {"filter/reliability": jnp.mean(kept), "filter/fit": jnp.mean(fit)}

    loss = actor_critic.make_actor_critic_loss(
        policy,
        temperature=settings.temperature,
        token_weights=lambda batch: declared(Filtered, batch.extras).weights[:, None],
        extra_loss=lambda params, hidden, batch: (0.0, reliability(batch)),
    )
    online = recipes.make_online(
        settings, bench, estimate=estimate, loss=loss, tx=optax.adam(settings.learning_rate), actor=recipes.model_of
    )
    return recipes.with_heads(bench, recipes.one_stage(settings, bench, online, extras=fit), value=1)


def claim(results: experiment.Results) -> experiment.Claim:
    """Best-and-worst beats all samples, under noisier rewards too, as does best-and-random; what best-and-worst keeps
    is judged more reliably."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "bw", "ppo"),
        experiment.greater(results, "eval/accuracy", "br", "ppo"),
        *(experiment.greater(results, "eval/accuracy", f"bw_{noise}", f"ppo_{noise}") for noise in (1, 2)),
        experiment.greater(results, "filter/reliability", "bw", "ppo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
