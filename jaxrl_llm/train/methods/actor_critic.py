"""PPO with heads on the policy's own hidden states: a value for every token, trained beside the policy.

The parameters are ``{"model": the policy's tree, "value": head, ...}`` (``models.heads.with_heads``); every slot of
``Online`` takes such a tree, and ``rollout`` and ``measure`` of the plain policy take its ``"model"``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm import logprobs, reduce
from jaxrl_llm.advantages import returns, whiten
from jaxrl_llm.losses import kl
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.value import clipped_value_loss, squared_value_loss
from jaxrl_llm.models import heads
from jaxrl_llm.train.methods import builders, packed
from jaxrl_llm.train.plan import keep_reference
from jaxrl_llm.types import Batch, Key, Metrics, Params, Policy, Rewards, TokenTerms, Trajectories, declared


def model_of(state: Any) -> Params:
    """The ``actor`` of ``Online`` for parameters with heads."""
    return state.params["model"]


def keep_model(params: Params, key: Key) -> dict[str, Any]:
    """``train.plan.keep_reference`` of the policy among parameters with heads."""
    return keep_reference(params["model"], key)


Read = Callable[[Array], Array]  # outputs of a head [B, T, K] to values [B, T]


def score_with_values(
    policy: Policy,
    params: Params,
    rows: Any,
    *,
    temperature: float = 1.0,
    head: str = "value",
    read: Read | None = None,
) -> tuple[Array, Array, Array, Array]:
    """``(logp, entropy, values, hidden)`` of the tokens of ``rows``, one pass; ``values`` as ``heads.state_values``.

    Args:
      policy: of the plain model.
      params: with heads.
      read: the values that the outputs of a head with several stand for, for example ``losses.expected_values``; None:
        the first output.
    """
    places = (rows.tokens, rows.positions, rows.segment_ids)
    hidden = policy.hidden(params["model"], *places, **packed.recorded(rows))
    logp, entropy = logprobs.chunked(
        hidden,
        lambda h: policy.unembed(params["model"], h),
        rows.tokens,
        temperature=temperature,
        segment_ids=rows.segment_ids,
        scored=policy.scored and partial(policy.scored, params["model"]),
    )
    return logp, entropy, heads.state_values(params[head], hidden, rows.segment_ids, read), hidden


class Valued(NamedTuple):
    """Extras of a batch: the head's values before the updates, and what they should have been."""

    values: Float[Array, "B T"]
    returns: Float[Array, "B T"]


def reference_kl(batch: Batch, metrics: Metrics) -> Metrics:
    """The ``figures`` of a stage whose batches have ``ref_logp``: k3 of the policy before the updates, ``kl/ref``."""
    return {"policy/kl/ref": reduce.tokens(kl.k3(batch.old_logp, batch.ref_logp, batch.mask), batch.mask)}


def make_value_estimate(
    policy: Policy,
    *,
    token_rewards: Callable[[Params, dict[str, Any], Trajectories, Rewards], Array] | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    gae: Callable[..., tuple[Array, Array]] | None = None,
    temperature: float = 1.0,
    reduction: str = "token_mean",
    head: str = "value",
    bootstrap: bool = False,
    read: Read | None = None,
    row_extras: Callable[[Params, dict[str, Any], Trajectories, Rewards], dict[str, Array]] | None = None,
    reference: Callable[[Params, dict[str, Any]], Params] | None = None,
    kl_weight: float = 0.0,
) -> Callable[[Params, dict[str, Any], Trajectories, Rewards], Batch]:
    """The ``estimate`` slot of PPO: GAE over the head's values, whitened over the batch's tokens.

    ``Batch.extras`` gets ``Valued``. After the last token comes nothing: a
    verifier judges a truncated response as it judges an ended one, and an episode out of turns has failed.

    Args:
      token_rewards: ``(params, extras, trajectories, rewards) -> [B, T]``; default: the outcome at the last token.
      gae: ``(rewards, values, bootstrap, mask) -> (advantages, targets of the values)``, both [B, T], in the place of
        ``advantages.gae_advantages`` with ``gamma`` and ``lam``.
      bootstrap: where the limit is no part of the task and what a truncated response lacks would still be paid, it is
        worth what the head says after its last token. With a final reward this is wrong: a policy that never ends
        keeps whatever value it has, and learning runs into the limit.
      read: as in ``score_with_values``.
      row_extras: further entries of ``Batch.extras``.
      reference: ``(params, extras)`` to the parameters of a plain policy; ``kl_weight`` times the KL to it is taken off
        the reward of every token (``losses.kl_in_reward``, by the log-probabilities of the sampler), and ``ref_logp``
        is its. None: no reference.
    """

    def estimate(params, extras, trajectories, rewards):
        logp, _, values, hidden = score_with_values(
            policy, params, trajectories, temperature=temperature, head=head, read=read
        )
        mask = trajectories.mask & rewards.valid[:, None]
        if token_rewards is None:
            paid = returns.at_last_token(rewards.value, mask)
        else:
            paid = token_rewards(params, extras, trajectories, rewards)
        other = None
        if reference is not None:
            other, _ = builders.score_tokens(policy, reference(params, extras), trajectories, temperature=temperature)
            paid = kl.kl_in_reward(paid, trajectories.sampler_logp, other, trajectories.mask, coefficient=kl_weight)
        last = jnp.zeros(mask.shape[:1], jnp.float32)
        if bootstrap:
            after = heads.token_values(params[head], hidden, read)
            end = jnp.take_along_axis(after, heads.last_index(trajectories.segment_ids)[:, None], axis=1)[:, 0]
            last = jnp.where(trajectories.truncated, end, last)
        advantages, targets = (gae or partial(returns.gae_advantages, gamma=gamma, lam=lam))(paid, values, last, mask)
        stop = jax.lax.stop_gradient
        more = {} if row_extras is None else row_extras(params, extras, trajectories, rewards)
        return Batch(
            tokens=trajectories.tokens,
            segment_ids=trajectories.segment_ids,
            positions=trajectories.positions,
            mask=mask,
            advantages=whiten.whitened_tokens(advantages, mask),
            old_logp=stop(logp),
            sampler_logp=trajectories.sampler_logp,
            ref_logp=jnp.zeros(mask.shape, jnp.float32) if other is None else stop(other),
            group_ids=trajectories.group_ids,
            total=reduce.denominator(mask, mode=reduction),
            extras=packed.recorded(trajectories) | Valued(stop(values), targets)._asdict() | more,
        )

    return estimate


def unclipped(values: Array, old_values: Array, targets: Array, mask: Array) -> TokenTerms:
    """``squared_value_loss`` with the arguments of a clipped one."""
    return squared_value_loss(values, targets, mask)


def all_tokens(batch: Batch) -> Array:
    """Every trained token."""
    return batch.mask


def make_actor_critic_loss(
    policy: Policy,
    *,
    token_loss: Callable[[Array, Array, Array, Array], TokenTerms] = clipped_policy_loss,
    value_loss: Callable[[Array, Array, Array, Array], TokenTerms] = clipped_value_loss,
    value_weight: float = 0.5,
    read: Read | None = None,
    temperature: float = 1.0,
    reduction: str = "token_mean",
    length_tokens: int | None = None,
    head: str = "value",
    policy_tokens: Callable[[Batch], Array] = all_tokens,
    value_tokens: Callable[[Batch], Array] = all_tokens,
    totals: Callable[[Batch], tuple[Array, Array]] | None = None,
    token_weights: Callable[[Batch], Array] | None = None,
    extra_loss: Callable[[Params, Array, Batch], tuple[Array, Metrics]] | None = None,
    extra_terms: Callable[[Array, Array, Batch], Array] | None = None,
) -> Callable[[Params, Batch], tuple[Array, Metrics]]:
    """The ``loss`` slot of PPO: clipped policy loss plus ``value_weight`` times the clipped value loss.

    Args:
      value_loss: ``(values, old_values, returns, mask) -> TokenTerms``; with ``read`` its first argument is what the
        head says of every state, ``[B, T, K]``.
      read: as in ``score_with_values``.
      length_tokens: the divisor of the reduction ``constant``.
      policy_tokens: ``batch -> bool [B, T]``, tokens whose policy loss counts; ``value_tokens`` likewise. Each loss
        divides by its own tokens.
      totals: ``batch -> (policy, value)``, how many those are in the whole step, where it may be trained in parts.
      token_weights: ``batch -> [B, T]`` multiplies both losses.
      extra_loss: ``(params, hidden, batch) -> (scalar, metrics)`` added as it is.
      extra_terms: ``(logp, entropy, batch) -> [B, T]`` added to the policy's loss of every token.
    """

    def weighed(terms, batch, mask, place):
        loss = terms.loss if token_weights is None else token_weights(batch) * terms.loss
        # a choice of tokens has its own count; all of them have that of the whole step
        chosen = None if totals is None else totals(batch)[place]
        total = batch.total if mask is batch.mask else chosen
        return reduce.tokens(loss, mask, mode=reduction, total=total, length_tokens=length_tokens)

    def loss(params, batch):
        logp, entropy, values, hidden = score_with_values(
            policy, params, batch, temperature=temperature, head=head, read=read
        )
        if read is not None:
            values = heads.of_state_before(heads.apply_head(params[head], hidden), batch.segment_ids)
        acting, judged = policy_tokens(batch), value_tokens(batch)
        own = token_loss(logp, batch.old_logp, batch.advantages, acting)
        if extra_terms is not None:
            own = own._replace(loss=own.loss + extra_terms(logp, entropy, batch))
        worth = value_loss(values, *declared(Valued, batch.extras), judged)
        value = weighed(own, batch, acting, 0) + value_weight * weighed(worth, batch, judged, 1)
        metrics = reduce.metrics(own.aux | {"entropy": entropy}, acting, prefix="policy")
        metrics |= reduce.metrics(worth.aux, judged, prefix="value")
        if extra_loss is not None:
            added, figures = extra_loss(params, hidden, batch)
            value, metrics = value + added, metrics | figures
        return value, metrics

    return loss


def make_critic_loss(
    policy: Policy,
    *,
    value_loss: Callable[[Array, Array, Array, Array], TokenTerms] = unclipped,
    read: Read | None = None,
    reduction: str = "token_mean",
    length_tokens: int | None = None,
    head: str = "value",
) -> Callable[[Params, Batch], tuple[Array, Metrics]]:
    """The ``loss`` slot of the critic's warm-up: its loss alone, which moves the head and nothing below it.

    A head that says 0 of every state makes advantages that depend on how far the end is and hardly on the reward: the
    updates until it has learned undo what the policy knows. With targets of ``make_value_estimate(lam=1.0)``.

    From "What's Behind PPO's Collapse in Long-CoT? Value Optimization Holds the Secret", arXiv:2503.01491, section 3.1.
    Differs from the paper in that its critic is a model of its own, which learns whole.

    Args:
      value_loss: as in ``make_actor_critic_loss``.
      read: as in ``score_with_values``.
    """

    def loss(params, batch):
        places = (batch.tokens, batch.positions, batch.segment_ids)
        hidden = jax.lax.stop_gradient(policy.hidden(params["model"], *places, **packed.recorded(batch)))
        if read is None:
            values = heads.state_values(params[head], hidden, batch.segment_ids)
        else:
            values = heads.of_state_before(heads.apply_head(params[head], hidden), batch.segment_ids)
        worth = value_loss(values, *declared(Valued, batch.extras), batch.mask)
        value = reduce.tokens(worth.loss, batch.mask, mode=reduction, total=batch.total, length_tokens=length_tokens)
        return value, reduce.metrics(worth.aux, batch.mask, prefix="value")

    return loss
