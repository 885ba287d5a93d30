"""A learned reward of whole responses, beside the codes: a part that reads the frozen model's states at the last token.

It learns from the policy's own responses to training problems, which a verifier judges, and takes the verifier's place
where a search has none.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.policy_gradient.parts import latent_code_training as training
from experiments.policy_gradient.parts.latent_codes import Form
from jaxrl_llm import reduce
from jaxrl_llm.losses.reward import log_odds_loss
from jaxrl_llm.types import Batch, Metrics, Params, Policy, Rewards, Trajectories, declared


class Judged(NamedTuple):
    """Extras of a batch: whether each response is right."""

    right: Float[Array, " B"]


def last_token(rows: Any) -> Int[Array, " B"]:
    """The column of a response's last token; of one without any that of the prompt's.

    >>> import collections, jax.numpy as jnp
    >>> rows = collections.namedtuple("Rows", "mask segment_ids")
    >>> mask = jnp.array([[False, True, True, False], [False, False, False, False]])
    >>> last_token(rows(mask, jnp.array([[1, 1, 1, 0], [0, 1, 0, 0]]))).tolist()
    [2, 1]
    """
    columns = jnp.arange(rows.mask.shape[1], dtype=jnp.int32)[None, :]
    real = rows.mask | ((rows.segment_ids > 0) & ~jnp.any(rows.mask, axis=1, keepdims=True))
    return jnp.max(jnp.where(real, columns, 0), axis=1)


def log_odds(policy: Policy, form: Form, params: Params, rows: Any) -> Float[Array, " B"]:
    """What ``params["reward"]`` says of responses: log-odds of being right; gradients reach that part alone.

    Args:
      policy: the language model's own, not the one over codes.
    """
    hidden = training.frozen_hidden(policy, params, rows)
    said = form.read(params["reward"], hidden, rows.positions, rows.segment_ids)[:, :, 0]
    return jnp.take_along_axis(said, last_token(rows)[:, None], axis=1)[:, 0]


def make_reward_slots(policy: Policy, form: Form) -> dict[str, Any]:
    """Slots ``estimate``, ``loss`` and ``trained`` of a stage that trains ``params["reward"]`` and nothing else.

    ``-[l log s(z) + (1 - l) log s(-z)]`` with the log-odds ``z`` of a response and whether it is right ``l``, as
    outcome reward models are trained ("Training Verifiers to Solve Math Word Problems", arXiv:2110.14168, here at the
    last token alone). Rollouts are the policy's, right is what ``score`` calls above 1/2. ``outcome/accuracy`` is the
    share of responses that it is on the right side of before the update.
    """

    def estimate(params: Params, extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> Batch:
        said = jnp.any(rows.mask, axis=1) & rewards.valid
        ends = jnp.arange(rows.mask.shape[1], dtype=jnp.int32)[None, :] == last_token(rows)[:, None]
        zeros = jnp.zeros(rows.mask.shape, jnp.float32)
        return Batch(
            tokens=rows.tokens, segment_ids=rows.segment_ids, positions=rows.positions, mask=ends & said[:, None],
            advantages=zeros, old_logp=rows.sampler_logp, sampler_logp=rows.sampler_logp, ref_logp=zeros,
            group_ids=rows.group_ids, total=jnp.maximum(jnp.sum(said.astype(jnp.float32)), 1.0),
            extras=Judged((rewards.value > 0.5).astype(jnp.float32))._asdict(),
        )  # fmt: skip

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        judged = jnp.any(batch.mask, axis=1)  # its only column is the last one
        said = jnp.where(judged, log_odds(policy, form, params, batch), 0.0)
        terms = log_odds_loss(said, jnp.zeros(said.shape, jnp.float32), declared(Judged, batch.extras).right)
        value = jnp.sum(jnp.where(judged, terms.loss, 0.0)) / batch.total
        shown = {"outcome/loss": terms.loss, "outcome/accuracy": terms.aux["accuracy"]}
        return value, {name: reduce.scalars(jax.lax.stop_gradient(x), judged) for name, x in shown.items()}

    return {"estimate": estimate, "loss": loss, "trained": "reward"}
