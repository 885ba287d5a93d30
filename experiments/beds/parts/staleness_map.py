"""The first map of the atlas: policy losses on samples of older weights, by lag and base model.

Run:       python -m jaxrl_llm.experiment atlas experiments/beds/stale_sampler.py
Measure:   held-out Countdown with three numbers, as in the bed ``stale_sampler``: 512 problems x 4 samples where there
           are as many, the mean of the last three of ten evaluations; equal rollouts, updates and learning rate for
           all, which is that of the bed and was not tuned for any of them.
Left out:  TBA: its loss is AGRO's times a constant, which Adam removes; its buffer is no loss. Servers apart.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from jaxtyping import Array

from experiments.beds.parts import rare_answers
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import off_policy, sequence
from jaxrl_llm.losses.policy import cispo_loss, clipped_policy_loss
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.plan import keep_reference, referred
from jaxrl_llm.types import Batch, TokenTerms


@dataclasses.dataclass(frozen=True)
class Settings(rare_answers.Settings):
    """Values for a model of your own; see EMBEDDED for the small ones."""

    lag: int = 0  # updates between every sample and its use
    beta: float = 0.02  # of AGRO, as in its paper


Terms = Callable[[Array, Batch], TokenTerms]


def to_sampler(loss: Callable[..., TokenTerms]) -> Terms:
    """A loss of tokens whose ratio is to what the sampler recorded."""
    return lambda logp, batch: loss(logp, batch.sampler_logp, batch.advantages, batch.mask)


def corrected(settings: Settings, *, loss: Callable[..., TokenTerms]) -> experiment.Plan:
    """A loss with a ratio to the sampler in the place of the bed's."""
    return _lagged(settings, terms=to_sampler(loss))


def uncorrected(settings: Settings) -> experiment.Plan:
    """The bed's own arm: as if the samples were the policy's own."""
    return _lagged(settings)


def agro(settings: Settings) -> experiment.Plan:
    """Half the variance of regularised rewards within groups, and the starting model as reference."""

    def terms(logp, batch):
        rewards = builders.rewards_of(batch.extras)
        return off_policy.agro_loss(
            logp, batch.ref_logp, rewards, batch.group_ids, batch.mask, beta=settings.beta
        )  # fmt: skip

    lagged = recipes.lagged_extras(settings.lag)

    def extras(params, key):
        return lagged(params, key) | keep_reference(params, key)

    slots = {"reference": referred, "row_extras": builders.keep_rewards}
    return rare_answers.build(
        settings, terms=terms, estimated=slots, extras=extras, **recipes.lagged_actor(settings.lag)
    )


def _lagged(settings: Settings, **more) -> experiment.Plan:
    lagged = recipes.lagged_extras(settings.lag)
    return rare_answers.build(settings, extras=lagged, **recipes.lagged_actor(settings.lag), **more)


EMBEDDED, SMOKE = rare_answers.EMBEDDED, rare_answers.SMOKE
TITLE = "Stale samples: which corrections help, by lag"
METHODS = {
    "none": uncorrected,
    "grpo": partial(corrected, loss=clipped_policy_loss),  # clipped ratio of tokens
    "tis": partial(corrected, loss=partial(off_policy.aipo_loss, cap=2.0)),  # truncated importance weight
    "aipo": partial(corrected, loss=partial(off_policy.aipo_loss, cap=4.0)),
    "cispo": partial(corrected, loss=cispo_loss),
    "gspo": partial(corrected, loss=sequence.gspo_loss),
    "rec": partial(corrected, loss=off_policy.rec_loss),  # the clip of one side without the ratio
    "agro": agro,
}
BASELINE = "none"
KNOB, DOSES = "lag", (0, 1, 2, 4, 8, 16)
BASES = ("nano", "tiny")
METRIC = "eval/accuracy"
