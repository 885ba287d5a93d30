"""PPO: a value of every token beside the policy, and advantages by it; VAPO's with ``--gae``.

Run: jaxrl ppo --model DIR --data FILE.jsonl [--gae length_adaptive_gae_advantages --gae-args alpha=0.05]

The critic is a head on the policy's own hidden states (``train.methods.actor_critic``): one number a state, by the
clipped or, ``--value-loss squared_value_loss``, the plain squared error; or a distribution over bins, by
``--value-loss categorical_value_loss --value-args low=0 high=1``. ``--critic-warmup N`` trains it alone first, on the
responses of the policy as it begins. ``--kl-weight`` takes the KL to the loaded model off the reward of every token;
``--imitation`` adds the likelihood of right responses to the loss (VAPO, arXiv:2504.05118, has 0.1 of it).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl_llm import advantages, losses
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.claims import open_claim
from jaxrl_llm.jobs import scoring
from jaxrl_llm.jobs.scoring import DrawnSettings, with_reward
from jaxrl_llm.run import flags, lora_state, named
from jaxrl_llm.run.method import LOSS, adamw, in_epochs, looks_at_all
from jaxrl_llm.train import parity
from jaxrl_llm.train.methods.actor_critic import (
    Read,
    make_actor_critic_loss,
    make_critic_loss,
    make_value_estimate,
    reference_kl,
)
from jaxrl_llm.train.plan import Plan, Stage, keep_reference, reference_of
from jaxrl_llm.train.step import trained_part
from jaxrl_llm.types import Batch, Metrics, Params, Rewards, TokenTerms, Trajectories, declared

RIGHT = 0.5  # a reward above it
GAE = ("rewards", "values", "bootstrap", "mask")
VALUE = ("values", "old_values", "returns", "mask")


@dataclasses.dataclass(frozen=True)
class Settings(DrawnSettings):
    """Proximal policy optimisation on verifiable problems."""

    gae: str = "gae_advantages"  # a function of jaxrl_llm.advantages of rewards and values, or MODULE:FUNCTION
    gae_args: tuple[str, ...] = ()  # its settings, for example lam=0.95
    loss: str = "clipped_policy_loss"  # a function of jaxrl_llm.losses, or MODULE:FUNCTION
    loss_args: tuple[str, ...] = ()  # its settings, for example clip_high=0.28
    value_weight: float = 0.5  # of the critic's loss
    value_loss: str = "clipped_value_loss"  # a function of jaxrl_llm.losses of values or logits, or MODULE:FUNCTION
    value_args: tuple[str, ...] = ()  # its settings, for example clip=0.5; of categorical_value_loss low=0 high=1
    value_bins: int = 51  # outputs of a critic whose loss takes logits: its bins between low and high
    critic_warmup: int = 0  # steps before those of --steps in which the critic learns alone, of undiscounted returns
    critic_learning_rate: float = 1e-5  # of its warm-up
    # in place of the verifier: MODULE:FUNCTION of (answer, response) to a number or a Verdict, or the folder of a
    # reward model; of several the sum
    reward: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()  # of several; none: 1 each
    kl_weight: float = 0.0  # of the KL to the model as it was loaded, in the reward of every token; 0: no reference
    # weight of the negative log-likelihood of right responses, those of rewards above a half, a mean over their tokens
    imitation: float = 0.0
    inner_epochs: int = 1  # updates on every rollout
    learning_rate: float = 1e-6
    group_size: int = 4
    max_grad_norm: float = 1.0  # of the whole step's gradient; 0: no bound


EMBEDDED = scoring.EMBEDDED
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 4, "max_new_tokens": 8, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 2,
}  # fmt: skip
ARMS = {"ppo": {}}
METRICS = ("eval/accuracy", "eval/tokens", "reward/mean")
SEEDS, EXPORT = 1, "always"


def value_loss(settings: Settings) -> tuple[Callable[..., TokenTerms], Read | None]:
    """The critic's loss, and how values are read where it predicts distributions over bins.

    Raises:
      UserError: for a loss that takes what this command has not, or settings that do not serve.
    """
    named_as = f"--value-loss {settings.value_loss}"
    found = named.find(losses, settings.value_loss, "--value-loss")
    loss = named.with_settings(found, settings.value_args, "--value-args", losses)
    wanted = named.check_arrays(loss, (*VALUE, "logits"), named_as)
    if not {"values", "logits"} & set(wanted):
        raise UserError(f"{named_as} takes {', '.join(wanted)}, neither values nor logits: it is no loss of a critic")

    def worth(outputs, old_values, returns, mask):
        offered = {"values": outputs, "logits": outputs, "old_values": old_values, "returns": returns, "mask": mask}
        return named.of_kind(loss(*(offered[name] for name in wanted)), TokenTerms, named_as)

    if "logits" not in wanted:
        return worth, None
    ends = {name: getattr(loss, "keywords", {}).get(name) for name in ("low", "high")}
    if None in ends.values() or not ends["low"] < ends["high"] or settings.value_bins < 2:
        raise UserError(f"{named_as} needs --value-args low=... high=..., low the smaller, and --value-bins "
                        f"{settings.value_bins} at least 2")  # fmt: skip
    return worth, partial(losses.expected_values, **ends)


class Imitated(NamedTuple):
    """Extras of a batch: by how much each response is imitated: of right ones the tokens of all over theirs, else 0."""

    share: Float[Array, " B"]


def right_ones(params: Params, extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """``Imitated``, so that a mean over all tokens of the batch becomes one over those of right responses."""
    right = rewards.valid & (rewards.value > RIGHT)
    counted = (rows.mask & rewards.valid[:, None]).astype(jnp.float32)
    of_right = jnp.sum(counted * right[:, None].astype(jnp.float32))
    return Imitated(jnp.where(right, jnp.sum(counted) / jnp.maximum(of_right, 1.0), 0.0))._asdict()


def imitation_terms(weight: float) -> Callable[[Array, Array, Batch], Array]:
    """``extra_terms`` of the loss: ``-weight log pi`` at the tokens of right responses, see ``Imitated``."""

    def terms(logp, entropy, batch):
        return weight * declared(Imitated, batch.extras).share[:, None] * losses.sft_loss(logp, batch.mask).loss

    return terms


def sampler_gap(batch: Batch, metrics: Metrics) -> Metrics:
    """``figures`` of a stage: how far the sampler lies from the policy before the updates."""
    return parity.finished(parity.metrics_of(jnp.abs(batch.old_logp - batch.sampler_logp), batch.mask))


def with_kl(batch: Batch, metrics: Metrics) -> Metrics:
    """``sampler_gap``, and the KL of the policy before the updates to the reference."""
    return sampler_gap(batch, metrics) | reference_kl(batch, metrics)


def build(settings: Settings) -> Plan:
    """One online stage of a policy with a value head."""
    gae = named.find(advantages, settings.gae, "--gae")
    gae = named.with_settings(gae, settings.gae_args, "--gae-args", advantages)
    if named.arrays(gae) != GAE:
        raise UserError(f"--gae {settings.gae} takes {', '.join(named.arrays(gae))}; choose gae_advantages, "
                        "length_adaptive_gae_advantages, lambda_returns or n_step_returns")  # fmt: skip

    def values_of(rewards, values, bootstrap, mask):
        estimated = gae(rewards, values, bootstrap, mask)
        if isinstance(estimated, tuple):
            return estimated
        return jnp.where(mask, estimated - values, 0.0), estimated  # of returns: how far they lie above the critic

    loss = named.with_settings(named.find(losses, settings.loss, "--loss"), settings.loss_args, "--loss-args", losses)
    if named.check_arrays(loss, LOSS, f"--loss {settings.loss}") != LOSS:
        raise UserError(f"--loss {settings.loss} takes {', '.join(named.arrays(loss))}; PPO takes a loss of "
                        f"{', '.join(LOSS)}: clipped_policy_loss, gspo_loss ...")  # fmt: skip

    def token_loss(*given):
        return named.of_kind(loss(*given), TokenTerms, f"--loss {settings.loss}")

    if settings.inner_epochs < 1 or settings.value_weight < 0:
        raise UserError(f"--inner-epochs {settings.inner_epochs} must be at least 1, and --value-weight "
                        f"{settings.value_weight} not negative")  # fmt: skip
    if settings.critic_warmup < 0 or settings.critic_learning_rate <= 0:
        raise UserError(f"--critic-warmup {settings.critic_warmup} must not be negative, and --critic-learning-rate "
                        f"{settings.critic_learning_rate} positive")  # fmt: skip
    for name in ("kl_weight", "imitation"):
        flags.check_amount(name, getattr(settings, name))
    worth, read = value_loss(settings)
    found, measure = with_reward(settings, recipes.bench(settings))
    settings = in_epochs(settings, found.train.tokens.shape[0], settings.prompts_per_step)
    policy, heat, part = found.model.policy, settings.temperature, lora_state.PART if settings.lora else ""

    def reference(params, extras):
        return reference_of(params["model"], extras, part)

    def extras(params, key):
        return keep_reference(trained_part(params["model"], part), key) if settings.kl_weight else {}

    over = {"temperature": heat, "read": read}
    over |= {"reference": reference, "kl_weight": settings.kl_weight} if settings.kl_weight else {}
    slots = {"actor": recipes.model_of, "updates_per_rollout": settings.inner_epochs,
             "max_grad_norm": settings.max_grad_norm or None}  # fmt: skip
    slots |= {"figures": with_kl if settings.kl_weight else sampler_gap}
    online = recipes.make_online(
        settings,
        found,
        estimate=make_value_estimate(
            policy, gae=values_of, **over, row_extras=right_ones if settings.imitation else None
        ),
        loss=make_actor_critic_loss(
            policy,
            token_loss=token_loss,
            value_loss=worth,
            value_weight=settings.value_weight,
            temperature=heat,
            read=read,
            extra_terms=imitation_terms(settings.imitation) if settings.imitation else None,
        ),
        tx=adamw(settings, settings.steps * settings.inner_epochs),
        **slots,
        whole_batch="its loss looks at all tokens of a step" if looks_at_all(token_loss, LOSS) else "",
    )
    plan = recipes.one_stage(settings, found, online, extras=extras)._replace(on_host=True)
    if settings.critic_warmup:
        alone = recipes.make_online(
            settings,
            found,
            estimate=make_value_estimate(policy, lam=1.0, **over),
            loss=make_critic_loss(policy, value_loss=worth, read=read),
            tx=optax.adam(settings.critic_learning_rate),
            trained="value",
            **slots,
        )
        plan = plan._replace(stages=(Stage(alone, settings.critic_warmup, extras), *plan.stages))
    return recipes.with_heads(found, plan if measure is None else plan._replace(measure=measure),
                              value=1 if read is None else settings.value_bins)  # fmt: skip


def claim(results):  # a job claims nothing, and says so by having no text
    return open_claim("")
