"""Builders for the ``estimate`` and ``loss`` slots: they compose functions that are passed in."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm import logprobs, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.losses import correction, kl
from jaxrl_llm.train import packing, parity
from jaxrl_llm.train.methods import packed
from jaxrl_llm.types import Batch, Metrics, Params, Policy, Rewards, TokenTerms, Trajectories, declared


def score_tokens(
    policy: Policy, params: Params, rows: Any, *, temperature: float = 1.0, chunk: int = 128
) -> tuple[Array, Array]:
    """``(logp, entropy)`` of the tokens of ``rows`` (trajectories or a batch), never forming ``[B, T, V]``.

    Where the host has planned a layout for the rows, they are computed in it: then only of the tokens in the mask.
    """
    layout = packed.layout_of(rows)
    if layout is not None:
        return packed.score_laid_out(policy, params, rows, layout, temperature=temperature, chunk=chunk)
    hidden = policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids, **packed.recorded(rows))
    return logprobs.chunked(
        hidden,
        lambda h: policy.unembed(params, h),
        rows.tokens,
        temperature=temperature,
        chunk=policy.steps_at_once(rows.tokens.shape[0], chunk),
        segment_ids=rows.segment_ids,
        scored=policy.scored and partial(policy.scored, params),
    )


def in_row_parts(function: Callable[[Any], Any], rows: Any, *, at_once: int) -> Any:
    """``function(rows)`` for ``at_once`` rows at a time, one part after another: what it forms is of so few rows.

    Args:
      function: treats rows apart: arrays ``[B, ...]`` to arrays ``[B, ...]``, any tree of them.
      at_once: where it is not less than the rows, the function is called once, with all.

    >>> import jax.numpy as jnp
    >>> in_row_parts(lambda x: 2 * x, jnp.arange(5), at_once=2).tolist()
    [0, 2, 4, 6, 8]
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    if at_once < 1:
        raise ValueError(f"at_once={at_once} must be at least 1 row")
    if at_once >= count:
        return function(rows)
    parts = -(-count // at_once)
    # the last part is filled with the last row, and cut off again
    ids = jnp.minimum(jnp.arange(parts * at_once, dtype=jnp.int32), count - 1).reshape(parts, at_once)
    found = jax.lax.map(lambda some: function(jax.tree.map(lambda x: x[some], rows)), ids)
    return jax.tree.map(lambda x: x.reshape(parts * at_once, *x.shape[2:])[:count], found)


def rows_within(size: int, bytes_a_row: int) -> int:
    """How many rows of so many bytes fit into ``size`` bytes, at least one.

    >>> rows_within(2**30, 2**28), rows_within(2**20, 2**28)
    (4, 1)
    """
    return max(1, size // max(1, bytes_a_row))


def current_anchor(logp: Array, batch: Batch) -> Array:
    """Old log-probabilities for the first update on samples of its own weights: the ratio is exactly 1, without a pass.

    Of samples of older weights it hides how far those have moved: ``sampler_anchor``, or a correction.
    """
    return jax.lax.stop_gradient(logp)


def stored_anchor(logp: Array, batch: Batch) -> Array:
    """``old_logp`` of ``estimate``: the sampler's, or with ``recompute_old`` the learner's before these updates."""
    return batch.old_logp


def sampler_anchor(logp: Array, batch: Batch) -> Array:
    """What the sampler recorded."""
    return batch.sampler_logp


def reference_kl(logp: Array, entropy: Array, batch: Batch) -> dict[str, Array]:
    """``kl/ref`` for ``diagnostics``: the k3 estimate of ``KL(policy || reference)`` at every token.

    A value to log; it needs ``make_estimate(reference=...)``.
    """
    return {"kl/ref": kl.k3(logp, batch.ref_logp, batch.mask)}


def mismatch_weights(*, cap: float = 2.0, several: bool = False) -> Callable[[Array, Array, Batch], Array]:
    """``token_weights`` for a sampler in other numerics: ``min(pi / sampler, cap)`` of every token.

    Of the policy that the sampler stands for, see ``losses.correction``: what the updates of a rollout have changed
    since is in the ratio of the loss.

    Args:
      several: updates per rollout, whose batches hold the policy before them as ``old_logp``; with one update it is
        that of the update.
    """

    def weights(logp, entropy, batch):
        ratio = correction.mismatch_ratio(batch.old_logp if several else logp, batch.sampler_logp, batch.mask)
        return correction.truncated_weights(ratio, batch.mask, cap=cap)

    return weights


def per_response(
    estimator: Callable[..., Array],
) -> Callable[[Trajectories, Rewards], Array]:
    """The ``advantages`` of ``make_estimate`` from an estimator of one number a response, at each of its tokens.

    Args:
      estimator: ``(rewards [B], group_ids [B], valid=) -> [B]``, for example ``group.group_normalized_advantages``.
    """

    def advantages(trajectories, rewards):
        return group.per_token(estimator(rewards.value, trajectories.group_ids, valid=rewards.valid), trajectories.mask)

    return advantages


class Diverged(NamedTuple):
    """Extras of trajectories: ``old_logp - ref_logp`` of every trained token, an estimate of the divergence."""

    token_kl: Float[Array, "B T"]


class Rewarded(NamedTuple):
    """Extras of a batch: the reward of each response, for a loss that reads rewards beside advantages."""

    rewards: Float[Array, " B"]


def keep_rewards(extras: dict[str, Any], trajectories: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """``row_extras`` of ``make_estimate``: ``Rewarded``."""
    return Rewarded(rewards.value)._asdict()


def rewards_of(extras: dict[str, Any]) -> Float[Array, " B"]:
    """The reward of each response, from the extras of a batch with ``Rewarded``."""
    return declared(Rewarded, extras).rewards


def make_estimate(
    policy: Policy,
    advantages: Callable[[Trajectories, Rewards], Array],
    *,
    reduction: str = "token_mean",
    temperature: float = 1.0,
    recompute_old: bool = False,
    reference: Callable[[dict[str, Any]], Params] | None = None,
    keep: Callable[[Trajectories, Rewards], Array] | None = None,
    row_extras: Callable[[dict[str, Any], Trajectories, Rewards], dict[str, Array]] | None = None,
    score: Callable[..., tuple[Array, Array]] = score_tokens,
    shows: Callable[[dict[str, Any], Trajectories], dict[str, Any]] | None = None,
) -> Callable[[Params, dict[str, Any], Trajectories, Rewards], Batch]:
    """The ``estimate`` slot of a method without a value model.

    Args:
      advantages: ``(trajectories, rewards) -> [B, T]``. With a reference it finds ``Diverged`` in the extras of the
        trajectories.
      reduction: mode of ``reduce.tokens`` whose denominator goes into ``total``.
      recompute_old: one scoring pass for ``old_logp`` (needed for several updates per rollout); else the sampler's.
      reference: picks the reference parameters from ``state.extras``; None leaves ``ref_logp`` 0 and saves the pass.
      keep: ``(trajectories, rewards) -> bool [B]``: sequences that enter loss and denominator (dynamic filtering).
        Invalid rewards never do.
      row_extras: ``(state.extras, trajectories, rewards) -> {name: [B, ...]}`` for ``Batch.extras``: weights, or a
        hyper-parameter of the run spread over the rows, so that it can be a ``vmap`` axis of the state.
      score: ``score_tokens``, or ``shared_prompt.share_prompts``.
      shows: ``(state.extras, trajectories) -> {name: ...}``, which ``advantages`` sees in ``trajectories.extras``.
    """
    alone = policy.for_scores()

    def estimate(params, extras, trajectories, rewards):
        used = rewards.valid if keep is None else rewards.valid & keep(trajectories, rewards)
        mask = trajectories.mask & used[:, None]
        zeros = jnp.zeros(mask.shape, jnp.float32)
        old, reference_logp = trajectories.sampler_logp, zeros
        if recompute_old:
            old, _ = score(alone, params, trajectories, temperature=temperature)
        if reference is not None:
            rows = packed.without_record(trajectories)  # its router chooses for itself
            reference_logp, _ = score(alone, reference(extras), rows, temperature=temperature)
        shown = trajectories
        if shows is not None:
            shown = trajectories._replace(extras=trajectories.extras | shows(extras, trajectories))
        if reference is not None:
            kl_of_tokens = jax.lax.stop_gradient(jnp.where(mask, old - reference_logp, 0.0))
            shown = shown._replace(extras=shown.extras | Diverged(kl_of_tokens)._asdict())
        values = advantages(shown, rewards)
        return Batch(
            tokens=trajectories.tokens,
            segment_ids=trajectories.segment_ids,
            positions=trajectories.positions,
            mask=mask,
            advantages=jnp.where(mask, values, 0.0),
            old_logp=jax.lax.stop_gradient(old),
            sampler_logp=trajectories.sampler_logp,
            ref_logp=jax.lax.stop_gradient(reference_logp),
            group_ids=trajectories.group_ids,
            total=reduce.denominator(mask, mode=reduction),
            extras=packed.recorded(trajectories)
            | ({} if row_extras is None else row_extras(extras, trajectories, rewards)),
        )

    return packing.reads_layouts(estimate) if recompute_old or reference is not None else estimate


class Collided(NamedTuple):
    """Extras of trajectories, of the policy before the update; ``collision``: the chance that two draws agree."""

    logp: Float[Array, "B T"]
    collision: Float[Array, "B T"]


def with_collision(make: Callable[..., Callable]) -> Callable[..., Callable]:
    """``make_estimate`` whose advantages also see ``Collided`` among the extras of the trajectories.

    Of the policy before the update: one pass over the rows, which the optimal token baseline needs
    (``advantages.baseline``).
    """

    def made(policy: Policy, *given: Any, temperature: float = 1.0, **named: Any):
        estimate = make(policy, *given, temperature=temperature, **named)

        def estimated(params, extras, trajectories, rewards):
            rows = trajectories
            hidden = policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids, **packed.recorded(rows))
            logp, collision = logprobs.chunked(
                hidden, lambda h: policy.unembed(params, h), rows.tokens, temperature=temperature,
                segment_ids=rows.segment_ids, figure=logprobs.collision,
            )  # fmt: skip
            seen = jax.lax.stop_gradient(Collided(logp, collision)._asdict())
            return estimate(params, extras, rows._replace(extras=rows.extras | seen), rewards)

        return estimated

    return made


def make_policy_loss(
    policy: Policy,
    token_loss: Callable[[Array, Array, Array, Array], TokenTerms],
    *,
    anchor: Callable[[Array, Batch], Array] = current_anchor,
    **settings: Any,
) -> Callable[[Params, Batch], tuple[Array, Metrics]]:
    """The ``loss`` slot: score, per-token loss, one reduction.

    Args:
      token_loss: ``(logp, old_logp, advantages, mask) -> TokenTerms``, for example a partial of
        ``losses.policy.clipped_policy_loss``.
      anchor: where ``old_logp`` comes from: ``current_anchor`` (one update per rollout), ``stored_anchor``,
        ``sampler_anchor``.
      settings: those of ``make_batch_loss``.
    """

    def terms_of(logp, entropy, batch):
        return token_loss(logp, anchor(logp, batch), batch.advantages, batch.mask)

    return make_batch_loss(policy, terms_of, **settings)


def make_batch_loss(
    policy: Policy,
    terms_of: Callable[[Array, Array, Batch], TokenTerms],
    *,
    reduction: str = "token_mean",
    length_tokens: int | None = None,
    temperature: float = 1.0,
    token_weights: Callable[[Array, Array, Batch], Array] | None = None,
    extra_terms: Callable[[Array, Array, Batch], Array] | None = None,
    diagnostics: Callable[[Array, Array, Batch], dict[str, Array]] | None = None,
    score: Callable[..., tuple[Array, Array]] = score_tokens,
) -> Callable[[Params, Batch], tuple[Array, Metrics]]:
    """``make_policy_loss`` for a loss that needs more of the batch than one token's numbers: its groups, its extras.

    Args:
      terms_of: ``(logp, entropy, batch) -> TokenTerms``.
      token_weights: ``(logp, entropy, batch) -> [B, T]`` multiplies the per-token loss, without gradient of its own.
      extra_terms: ``(logp, entropy, batch) -> [B, T]`` added to the loss (KL, entropy), same reduction.
      diagnostics: ``(logp, entropy, batch) -> {metric name: [B, T]}`` whose token means are logged, for example
        ``reference_kl``.
      score: ``score_tokens``, or ``shared_prompt.share_prompts``.

    Metrics: ``policy/<name>`` for every diagnostic of the terms (its ``clipped`` also as ``policy/clip_fraction``),
    ``policy/entropy``, and the absolute gap between the log-probabilities of trainer and sampler: ``kl/sampler_mean``,
    ``kl/sampler_max``, and after ``train.step`` ``kl/sampler_p50``, ``_p90``, ``_p99``.
    """

    def loss(params, batch):
        logp, entropy = score(policy, params, batch, temperature=temperature)
        terms = terms_of(logp, entropy, batch)
        per_token = terms.loss
        if token_weights is not None:
            weights = jax.lax.stop_gradient(token_weights(logp, entropy, batch))
            per_token = jnp.where(batch.mask, weights * per_token, 0.0)
        if extra_terms is not None:
            per_token = per_token + jnp.where(batch.mask, extra_terms(logp, entropy, batch), 0.0)
        value = reduce.tokens(per_token, batch.mask, mode=reduction, total=batch.total, length_tokens=length_tokens)
        gap = jnp.abs(jax.lax.stop_gradient(logp) - batch.sampler_logp)
        metrics = reduce.metrics(dict(terms.aux) | {"entropy": entropy}, batch.mask, prefix="policy")
        if "clipped" in terms.aux:
            metrics["policy/clip_fraction"] = metrics["policy/clipped"]
        if diagnostics is not None:
            figures = diagnostics(logp, entropy, batch)
            metrics |= {k: reduce.tokens(jax.lax.stop_gradient(x), batch.mask) for k, x in figures.items()}
        return value, metrics | parity.metrics_of(gap, batch.mask)

    return packing.reads_layouts(loss)
