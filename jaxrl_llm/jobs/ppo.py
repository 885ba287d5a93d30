"""PPO: a value of every token beside the policy, and advantages by it; VAPO's with ``--gae``.

Run: jaxrl ppo --model DIR --data FILE.jsonl [--gae length_adaptive_gae_advantages --gae-args alpha=0.05]

The critic is a head on the policy's own hidden states (``train.methods.actor_critic``). Left out of VAPO are its
warm-up of the critic and its imitation of right responses.
"""

import dataclasses

import jax.numpy as jnp
import optax

from jaxrl_llm import advantages, losses
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.claims import open_claim
from jaxrl_llm.jobs import scoring
from jaxrl_llm.jobs.scoring import DrawnSettings, with_reward
from jaxrl_llm.run import named
from jaxrl_llm.run.method import LOSS, learning_rate
from jaxrl_llm.train.methods.actor_critic import make_actor_critic_loss, make_value_estimate
from jaxrl_llm.train.plan import Plan

GAE = ("rewards", "values", "bootstrap", "mask")


@dataclasses.dataclass(frozen=True)
class Settings(DrawnSettings):
    """Proximal policy optimisation on verifiable problems."""

    gae: str = "gae_advantages"  # a function of jaxrl_llm.advantages of rewards and values, or MODULE:FUNCTION
    gae_args: tuple[str, ...] = ()  # its settings, for example lam=0.95
    loss: str = "clipped_policy_loss"  # a function of jaxrl_llm.losses, or MODULE:FUNCTION
    loss_args: tuple[str, ...] = ()  # its settings, for example clip_high=0.28
    value_weight: float = 0.5  # of the critic's loss
    reward: str = ""  # MODULE:FUNCTION of (answer, response) to a number or a Verdict, in place of the verifier
    inner_epochs: int = 1  # updates on every rollout
    learning_rate: float = 1e-6
    group_size: int = 4
    max_grad_norm: float = 1.0


EMBEDDED = scoring.EMBEDDED
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 4, "max_new_tokens": 8, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 2,
}  # fmt: skip
ARMS = {"ppo": {}}
METRICS = ("eval/accuracy", "eval/tokens", "reward/mean")
SEEDS, EXPORT = 1, "always"


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
    if settings.inner_epochs < 1 or settings.value_weight < 0:
        raise UserError(f"--inner-epochs {settings.inner_epochs} must be at least 1, and --value-weight "
                        f"{settings.value_weight} not negative")  # fmt: skip
    found, measure = with_reward(settings, recipes.bench(settings))
    policy, heat = found.model.policy, settings.temperature
    online = recipes.make_online(
        settings,
        found,
        estimate=make_value_estimate(policy, gae=values_of, temperature=heat),
        loss=make_actor_critic_loss(policy, token_loss=loss, value_weight=settings.value_weight, temperature=heat),
        tx=optax.adamw(
            learning_rate(settings, settings.steps * settings.inner_epochs), weight_decay=settings.weight_decay
        ),
        actor=recipes.model_of,
        updates_per_rollout=settings.inner_epochs,
        max_grad_norm=settings.max_grad_norm or None,
    )
    plan = recipes.one_stage(settings, found, online)._replace(on_host=True)
    return recipes.with_heads(found, plan if measure is None else plan._replace(measure=measure), value=1)


def claim(results):  # a job claims nothing, and says so by having no text
    return open_claim("")
