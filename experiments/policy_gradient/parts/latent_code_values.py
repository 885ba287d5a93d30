"""The value of a latent action: what it is regressed on, and the stage that learns it from rollouts of the policy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.policy_gradient.parts import latent_code_training as training
from experiments.policy_gradient.parts.latent_codes import Form, before_each
from jaxrl_llm import reduce
from jaxrl_llm.losses.policy import masked
from jaxrl_llm.types import Batch, Key, Metrics, Params, Policy, Rewards, TokenTerms, Trajectories, declared


def double_q_targets(
    target: Float[Array, "B T K"],
    current: Float[Array, "B T K"],
    rewards: Float[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 0.99,
) -> Float[Array, "B T"]:
    """``gamma Q'(s_{t+1}, argmax_a Q(s_{t+1}, a))`` at every masked token, and the reward at the last one.

    From "Deep Reinforcement Learning with Double Q-learning", arXiv:1509.06461, as the release of CoLA
    (arXiv:2503.21383) trains its Q: ``Q'`` is an earlier copy.

    Args:
      target, current: ``Q'`` and ``Q`` of the state in which each token was chosen.
      rewards: of each response, paid at its end.

    >>> target, current = jnp.array([[[9.0, 9.0], [0.5, 0.25]]]), jnp.array([[[9.0, 9.0], [1.0, 2.0]]])
    >>> double_q_targets(target, current, jnp.array([1.0]), jnp.ones((1, 2), bool), gamma=0.5).tolist()
    [[0.125, 1.0]]
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma} must lie in [0, 1]")
    best = jnp.argmax(current, axis=-1)
    (value,) = masked(mask, jnp.take_along_axis(target, best[:, :, None], axis=-1)[:, :, 0])
    following = jnp.pad(value[:, 1:], ((0, 0), (0, 1)))
    goes_on = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    found = jnp.where(goes_on, gamma * following, rewards.astype(jnp.float32)[:, None])
    return jax.lax.stop_gradient(jnp.where(mask, found, 0.0))


def q_loss(
    q: Float[Array, "B T K"], codes: Int[Array, "B T"], targets: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> TokenTerms:
    """``(Q(s_t, k_t) - target_t)^2`` of the codes that were drawn. ``aux``: ``value``, the Q of the drawn code.

    >>> q = jnp.array([[[0.5, 2.0]]])
    >>> q_loss(q, jnp.array([[1]]), jnp.array([[1.0]]), jnp.ones((1, 1), bool)).loss.tolist()
    [[1.0]]
    """
    (drawn,) = masked(mask, jnp.take_along_axis(q, codes[:, :, None], axis=-1)[:, :, 0])
    gap = jnp.where(mask, drawn - targets, 0.0)
    return TokenTerms(gap**2, {"value": jax.lax.stop_gradient(drawn)})


class Aimed(NamedTuple):
    """Extras of a state: the earlier copy of Q."""

    earlier: Params


class Told(NamedTuple):
    """Extras of a batch: the codes that were drawn, and what their Q is regressed on."""

    codes: Array
    targets: Array


def keep_earlier(params: Params, key: Key) -> dict[str, Params]:
    """The ``extras`` of a stage with ``make_q_slots``."""
    return Aimed(jax.tree.map(jnp.copy, params["q"]))._asdict()


def q_before(policy: Policy, form: Form, params: Params, rows: Any, *parts: Params) -> tuple[Array, ...]:
    """What Qs say of every code in the state in which each token was chosen; gradients reach the Qs alone."""
    hidden = training.frozen_hidden(policy, params, rows)
    return tuple(before_each(form.read(part, hidden, rows.positions, rows.segment_ids)) for part in parts)


def make_q_slots(
    policy: Policy, form: Form, *, sharpness: float, gamma: float = 0.99, every: int = 50
) -> dict[str, Any]:
    """Slots ``estimate``, ``loss``, ``remember``, ``trained`` of a stage that trains ``params["q"]`` and nothing else.

    Rollouts are the policy's; rewards are what ``score`` says. ``q/error`` is the mean of ``q_loss``, ``q/value`` that
    of the Q of drawn codes.

    Args:
      policy: the language model's own, not the one over codes.
      every: updates after which the earlier copy is renewed.
    """

    def estimate(params: Params, extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> Batch:
        before = training.states_before(policy, form, params, rows)
        codes = training.codes_behind(policy, form, params, before, rows.tokens, sharpness)
        mask = rows.mask & rewards.valid[:, None]
        current, target = q_before(policy, form, params, rows, params["q"], declared(Aimed, extras).earlier)
        targets = double_q_targets(target, current, rewards.value, mask, gamma=gamma)
        zeros = jnp.zeros(mask.shape, jnp.float32)
        return Batch(
            tokens=rows.tokens, segment_ids=rows.segment_ids, positions=rows.positions, mask=mask, advantages=zeros,
            old_logp=rows.sampler_logp, sampler_logp=rows.sampler_logp, ref_logp=zeros, group_ids=rows.group_ids,
            total=reduce.denominator(mask, mode="token_mean"), extras=Told(codes, targets)._asdict(),
        )  # fmt: skip

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        told = declared(Told, batch.extras)
        (q,) = q_before(policy, form, params, batch, params["q"])
        terms = q_loss(q, told.codes, told.targets, batch.mask)
        value = reduce.tokens(terms.loss, batch.mask, total=batch.total)
        return value, reduce.metrics({"error": terms.loss, **terms.aux}, batch.mask, prefix="q")

    def remember(state, batch, trajectories, rewards):
        now, earlier = state.step % every == 0, declared(Aimed, state.extras).earlier
        kept = jax.tree.map(lambda new, old: jnp.where(now, new, old), state.params["q"], earlier)
        return state.extras | Aimed(kept)._asdict()

    return {"estimate": estimate, "loss": loss, "remember": remember, "trained": "q"}
