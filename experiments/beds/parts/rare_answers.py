"""What the test beds share: plain policy gradients with group advantages on Countdown, whose right answers are rare.

Both bundled models solve three numbers with one response in six and two problems of three with eight, four numbers with
one in sixteen and four of ten: a skill to gain, not a style to drop.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Integer, UInt

from experiments.parts import rare_search
from jaxrl_llm.advantages import group
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import reinforce_loss
from jaxrl_llm.run import bench as benches
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.plan import Plan
from jaxrl_llm.types import Batch, Rewards, TokenTerms, Trajectories

EMBEDDED = rare_search.EMBEDDED
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """What every bed of this kind has."""

    steps: int = 400
    warmup: int = 10  # steps in which the learning rate rises


def share(seed: int, *integers: Integer[Array, " B"]) -> Float[Array, " B"]:
    """A number in [0, 1) of every row that only its integers decide: the same row meets the same luck every time.

    Rounds of multiply and shift in 32 bits; after "Prospecting for Hash Functions" (Wellons, 2018).
    """
    mixed = jnp.full(integers[0].shape, seed, jnp.uint32)
    for x in integers:
        mixed = mixed ^ x.astype(jnp.uint32)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed = (mixed ^ (mixed >> jnp.uint32(shift))) * jnp.uint32(factor)
        mixed = mixed ^ (mixed >> jnp.uint32(16))
    return (mixed >> jnp.uint32(8)).astype(jnp.float32) / jnp.float32(1 << 24)


def text_number(rows: Trajectories) -> UInt[Array, " B"]:
    """A number of every response that only its tokens decide, up to chance collisions in 32 bits."""
    powers = jnp.cumprod(jnp.full((rows.tokens.shape[1],), 0x9E3779B1, jnp.uint32))
    return jnp.sum(jnp.where(rows.mask, rows.tokens.astype(jnp.uint32) * powers[None], jnp.uint32(0)), axis=1)


def judge(bench: benches.Bench) -> Callable[[Any, Trajectories], Rewards]:
    """The bench's exact verifier on the device.

    Raises:
      UserError: for a tokenizer with which answers are judged on the host.
    """
    if bench.score is None:
        raise UserError("this bed judges on the device: --data countdown and a tokenizer with one token a character")
    return bench.score


def build(
    settings: Settings,
    *,
    score: Callable[[Any, Trajectories], Rewards] | None = None,
    extras: Callable[..., dict[str, Any]] | None = None,
    terms: Callable[[Array, Batch], TokenTerms] | None = None,
    estimated: dict[str, Any] | None = None,
    **slots: Any,
) -> Plan:
    """Plain REINFORCE with ``A = (r - mean) / std`` of the group, one update a rollout, without KL, clipping or length
    terms.

    Args:
      score: in the place of the bench's; the measurement keeps the true one.
      terms: another loss, of ``(logp, batch)``.
      estimated: slots of ``builders.make_estimate`` that it needs.
      slots: of ``train.online.Online``, for example whose samples train.
    """
    bench = recipes.bench(settings)
    policy, same = bench.model.policy, {"reduction": "seq_mean", "temperature": settings.temperature}

    def loss(logp, old_logp, advantages, mask):
        return reinforce_loss(logp, advantages, mask)

    step = builders.make_policy_loss(policy, loss, **same)
    if terms is not None:
        step = builders.make_batch_loss(policy, lambda logp, entropy, batch: terms(logp, batch), **same)
    advantages = builders.per_response(group.group_normalized_advantages)
    rate = optax.linear_schedule(0.0, settings.learning_rate, settings.warmup)
    online = recipes.make_online(
        settings, bench,
        estimate=builders.make_estimate(policy, advantages, **same, **(estimated or {})),
        loss=step,
        tx=optax.adam(rate),
        **({} if score is None else {"score": score}), **slots,
    )  # fmt: skip
    return recipes.one_stage(settings, bench, online, **({} if extras is None else {"extras": extras}))
