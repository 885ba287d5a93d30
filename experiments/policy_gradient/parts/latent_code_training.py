"""Learning the codes of a latent-action model from text: world model, inverse model and the policy that imitates it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.policy_gradient.parts import latent_codes
from experiments.policy_gradient.parts.latent_codes import PERCEPTRONS, Form
from jaxrl_llm import logprobs, reduce
from jaxrl_llm.losses import kl
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Batch, Key, Metrics, Params, Policy, Rewards, TokenTerms, Trajectories, declared


def world_loss(
    policy: Policy, params: Params, rows: Any, noise: Array, *, usage: float = 0.001, form: Form = PERCEPTRONS,
    chunk: int = 128,
) -> tuple[Array, Metrics]:  # fmt: skip
    """Stages 0 and 1 of CoLA at once: ``-log W(token | state, code) + usage sum p log p``, and imitation of the codes.

    The code is the inverse model's, straight through; the policy learns its most likely one. Neither loss reaches the
    other's part, none the language model.

    Args:
      rows: ``tokens``, ``positions``, ``segment_ids`` and ``mask``, all ``[B, T]``.
      noise: Gumbel numbers ``[B, T, K]``.
      chunk: time steps whose logits exist at once.
    """
    frozen = jax.lax.stop_gradient(params["model"])
    hidden = jax.lax.stop_gradient(policy.hidden(frozen, rows.tokens, rows.positions, rows.segment_ids))
    read = hidden, rows.positions, rows.segment_ids
    before = latent_codes.before_each(form.states(params["policy"], *read))
    logits = form.read(params["inverse"], *read)
    action = latent_codes.straight_through(logits, noise) @ params["codes"]
    state = form.merged(params["merge"], latent_codes.text_of(params, before), action)
    # the state at index t brings about token t; ``chunked`` wants it one index earlier
    ahead = jnp.pad(state[:, 1:], ((0, 0), (0, 1), (0, 0)))
    logp, _ = logprobs.chunked(
        ahead, partial(policy.unembed, frozen), rows.tokens, chunk=chunk, segment_ids=rows.segment_ids
    )
    wanted = jnp.argmax(logits, axis=-1)
    copied = jax.nn.log_softmax(form.chances(params["policy"], before), axis=-1)
    copied = jnp.take_along_axis(copied, wanted[:, :, None], axis=-1)[:, :, 0]
    even = latent_codes.code_usage(logits)
    mean = {
        name: reduce.tokens(jnp.where(rows.mask, x, 0.0), rows.mask)
        for name, x in (("world", -logp), ("usage", even), ("imitation", -copied))
    }
    return mean["world"] + usage * mean["usage"] + mean["imitation"], {f"latent/{k}": v for k, v in mean.items()}


PARTS = ("inverse", "codes", "merge", "policy")
GUIDED = ("merge", "policy")  # what the codes mean stays


def learn_world(
    policy: Policy,
    params: Params,
    rows: Any,
    key: Key,
    *,
    steps: int,
    rows_per_step: int,
    learning_rate: float,
    usage: float = 0.001,
    form: Form = PERCEPTRONS,
    trained: tuple[str, ...] = PARTS,
) -> Params:
    """``init_latent``'s parameters after ``steps`` of Adam on ``world_loss``; the language model stays as it is.

    Args:
      rows: a table whose leaves are ``[N, T]``.
      trained: the parts that learn; ``GUIDED`` is fine-tuning to a task under the codes that are there.
    """
    tx, codes = optax.adam(learning_rate), params["codes"].shape[0]
    fixed, parts = ({k: v for k, v in params.items() if (k in trained) == learns} for learns in (False, True))

    def step(carry, k):
        parts, state = carry
        draw, gumbel = jax.random.split(jax.random.fold_in(key, k))
        ids = jax.random.randint(draw, (rows_per_step,), 0, rows.tokens.shape[0])
        batch = jax.tree.map(lambda x: x[ids], rows)
        noise = jax.random.gumbel(gumbel, (*batch.tokens.shape, codes), jnp.float32)

        def loss(parts):
            return world_loss(policy, parts | fixed, batch, noise, usage=usage, form=form)[0]

        with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts with floats
            updates, state = tx.update(jax.grad(loss)(parts), state)
        return (optax.apply_updates(parts, updates), state), None

    (parts, _), _ = jax.lax.scan(step, (parts, tx.init(parts)), jnp.arange(steps, dtype=jnp.int32))
    return parts | fixed


class Begun(NamedTuple):
    """Extras of a state: the policy over codes before its first update."""

    first: Params


class Coded(NamedTuple):
    """Extras of a batch: the codes that were drawn."""

    codes: Array


def make_code_slots(
    policy: Policy,
    advantages: Callable[[Trajectories, Rewards], Array],
    token_loss: Callable[..., TokenTerms],
    *,
    sharpness: float,
    kl_weight: float = 0.0,
    form: Form = PERCEPTRONS,
) -> dict[str, Any]:
    """Slots ``estimate``, ``loss``, ``trained``: a policy gradient on the codes drawn, with a KL to where it began.

    ``log pi(k_t | s_t)`` in the place of the log-probability of the token, clipped as ``token_loss`` has it. The stage
    keeps the first policy over codes, see ``keep_policy``. ``codes/used``: ``exp H(mean_t pi(. | s_t)) / K``, the share
    of the codes that the responses of a batch make use of.

    Args:
      policy: the language model's own, not the one over codes.

    From "Controlling Large Language Model with Latent Actions" (CoLA), arXiv:2503.21383, section 3.
    """

    plain = builders.make_estimate(policy, advantages)

    def estimate(params: Params, extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> Batch:
        batch, before = plain(params, extras, rows, rewards), states_before(policy, form, params, rows)
        codes = codes_behind(policy, form, params, before, rows.tokens, sharpness)
        old, _ = latent_codes.code_logp(params, before, codes, form=form)
        first = params | {"policy": declared(Begun, extras).first}
        ref, _ = latent_codes.code_logp(first, states_before(policy, form, first, rows), codes, form=form)
        fixed = jax.lax.stop_gradient((old, ref))
        kept = batch.extras | Coded(codes)._asdict()
        return batch._replace(old_logp=fixed[0], ref_logp=fixed[1], extras=kept)

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        before = states_before(policy, form, params, batch)
        logp, entropy = latent_codes.code_logp(params, before, declared(Coded, batch.extras).codes, form=form)
        terms = token_loss(logp, batch.old_logp, batch.advantages, batch.mask)
        held = kl_weight * kl.kl_gradient_terms(logp, batch.ref_logp, batch.mask)
        value = reduce.tokens(terms.loss + held, batch.mask, total=batch.total)
        chances = jax.nn.softmax(form.chances(params["policy"], before), axis=-1)
        weight = batch.mask.astype(jnp.float32)[:, :, None]
        mean = jnp.sum(chances * weight, axis=(0, 1)) / jnp.maximum(jnp.sum(weight), 1.0)
        used = jnp.exp(-jnp.sum(mean * jnp.log(jnp.maximum(mean, 1e-12)))) / mean.shape[0]
        metrics = reduce.metrics(dict(terms.aux) | {"entropy": entropy}, batch.mask, prefix="policy")
        return value, metrics | {"codes/used": jax.lax.stop_gradient(used)}

    return {"estimate": estimate, "loss": loss, "trained": latent_codes.TRAINED_BY_REWARD}


def frozen_hidden(policy: Policy, params: Params, rows: Any) -> Array:
    """The states of the language model after each token, without a gradient."""
    hidden = policy.hidden(params["model"], rows.tokens, rows.positions, rows.segment_ids)
    return jax.lax.stop_gradient(hidden.astype(jnp.float32))


def states_before(policy: Policy, form: Form, params: Params, rows: Any) -> Array:
    """The states of the form in which each token was chosen; gradients reach the policy over codes alone."""
    hidden = frozen_hidden(policy, params, rows)
    return latent_codes.before_each(form.states(params["policy"], hidden, rows.positions, rows.segment_ids))


def codes_behind(policy: Policy, form: Form, params: Params, before: Array, tokens: Array, sharpness: float) -> Array:
    """``drawn_codes`` of responses, which are themselves the seed of the draw."""
    key = jax.random.fold_in(jax.random.key(23), jnp.sum(tokens))
    return latent_codes.drawn_codes(policy, params, before, tokens, key, sharpness=sharpness, form=form)


def keep_policy(params: Params, key: Key) -> dict[str, Params]:
    """The ``extras`` of a stage with ``make_code_slots``: the policy over codes before its first update."""
    return Begun(jax.tree.map(jnp.copy, params["policy"]))._asdict()


def distinct_fraction(tokens: Array, mask: Array, samples: int) -> Array:
    """Share of different responses among the ``samples`` of each prompt, averaged over prompts."""
    shown = jnp.where(mask, tokens, -1).reshape(-1, samples, tokens.shape[1])
    same = jnp.all(shown[:, :, None] == shown[:, None, :], axis=-1)
    earlier = jnp.tril(jnp.ones((samples, samples), bool), -1)
    return 1.0 - reduce.scalars(jnp.any(same & earlier[None], axis=2).astype(jnp.float32).ravel())


def likelihood(policy: Policy, params: Params, rows: Any) -> Array:
    """Mean log-probability of the masked tokens of given text: what a model has kept."""
    hidden = policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
    logp, _ = logprobs.chunked(
        hidden, lambda h: policy.unembed(params, h), rows.tokens, temperature=1.0, segment_ids=rows.segment_ids
    )
    return reduce.tokens(jnp.where(rows.mask, logp, 0.0), rows.mask)
