"""Preference optimisation with an auxiliary judge that corrects for a misspecified reward (VRPO).

Paper:     Ye et al., "Robust Reinforcement Learning from Human Feedback for Large Language Models Fine-Tuning",
           arXiv:2504.03784.
Claim:     where people's choices follow no reward, a judge as control variate gives DPO less variance and a better
           policy, and a useless judge does little harm.
Equations: L = phi(h) - [g phi(h) + (1 - g) phi(-h)] + g* phi(h*) + (1 - g*) phi(-h*); h the margin of a labelled pair,
           g the judge's probability of its label, h*, g* of a pair drawn from the reference; phi = -log sig (ramp:
           relu(1 - h) - relu(-0.5 - h)). vrpo_true: the law itself; vrpo: a reward model; vrpo_half: 1/2; vrpo_self:
           sig(h) of a copy of the policy from the start of each half.
Left out:  the two-stage form with a reward model and PPO; error of the estimate over redrawn data (seeds redraw it).
Expect:    eval/gold: vrpo_true > dpo; vrpo_half within 0.5 of dpo.
Measure:   true reward on fresh prompts; two halves of 128 labels each from P = 0.6 sig(gold gap + cycle) + 0.2, where
           the cycle (1, 0, -1 by the first tokens modulo 3) has no reward; the reward model read 128 more. 8 seeds,
           equal labels and updates; vrpo also reads two unlabelled responses a prompt.
Run:       python -m experiments.preference.robust_rlhf
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from jaxrl_llm import experiment, reduce
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference

WORLD, LAW, BETA = preference_strings.WORLD, {"flip_rate": 0.2, "cycle": 1.0}, 0.1
draw_pairs = partial(toy.draw_pairs, **LAW)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Sizes for the small model; beta is the paper's."""

    steps: int = 100  # of each half
    eval_every: int = 20
    learning_rate: float = 1e-3
    reference_steps: int = 200
    reward_steps: int = 100
    pairs: int = 128
    pairs_per_step: int = 32
    pair_loss: Callable | None = None  # of labelled pairs alone
    judge: Callable = preference_strings.judged
    phi: Callable = preference.logistic


SMOKE = {"steps": 1, "eval_every": 1, "reference_steps": 2, "reward_steps": 2, "pairs": 8, "pairs_per_step": 4}
ARMS = {
    "dpo": {"pair_loss": partial(preference.dpo_loss, beta=BETA)},
    "vrpo": {},
    "vrpo_true": {"judge": lambda params, *rows: toy.chance(*rows, **LAW)},
    "vrpo_half": {"judge": lambda params, prompts, *both: jnp.full(prompts.shape[:1], 0.5, jnp.float32)},
    "vrpo_self": {"judge": lambda params, *rows: jax.nn.sigmoid(preference_strings.margins(params, *rows, beta=BETA))},
    "vrpo_ramp": {"phi": preference.ramp},
    "robust_dpo": {"pair_loss": partial(preference.robust_dpo_loss, beta=BETA, flip_rate=0.2)},
    "ipo": {"pair_loss": partial(preference.ipo_loss, tau=BETA)},
}
METRICS = ("eval/gold", "eval/kl", "eval/unseen", "pair/accuracy")
CURVES = (*METRICS, "pair/chosen_drift")


@lru_cache(maxsize=16)
def make_rows(pairs: int, judge: Callable):
    """Labelled pairs and pairs of the reference ``[N, 4, T]``, their log-probabilities and judgements."""

    def rows(params, key):
        known, *keys = draw_pairs(key, pairs), *jax.random.split(jax.random.fold_in(key, 1), 2)
        drawn = [strings.sample(WORLD, params["reference"], known.prompts, k) for k in keys]
        four = [known.chosen, known.rejected, *drawn]
        ref = [strings.sum_logp(WORLD, params["reference"], known.prompts, x) for x in four]
        judged = [judge(params, known.prompts, *four[k : k + 2]) for k in (0, 2)]
        return known.prompts, *(jnp.stack(x, axis=1) for x in (four, ref, judged))

    return rows


def build(settings: Settings) -> experiment.Plan:
    """Two halves with data of their own; a frozen copy as judge is renewed between them."""

    def loss(params, extras, batch):
        prompts, four, ref, judged = batch
        flat = strings.sum_logp(
            WORLD, params["policy"], jnp.repeat(prompts, 4, axis=0), four.reshape(-1, four.shape[2])
        )
        logp, wins = flat.reshape(-1, 4), settings.pair_loss
        if wins is None:
            h, fresh = (BETA * ((logp - ref)[:, k] - (logp - ref)[:, k + 1]) for k in (0, 2))
            terms = preference.vrpo_loss(h, judged[:, 0], fresh, judged[:, 1], phi=settings.phi)
        else:
            terms = wins(*logp.T[:2], *ref.T[:2])
        return reduce.scalars(terms.loss), {
            "pair/accuracy": reduce.scalars(terms.aux["accuracy"]),
            "pair/chosen_drift": reduce.scalars(logp[:, 0] - ref[:, 0]),
            "tokens/trained": jnp.asarray(float(four.size), jnp.float32),
        }

    stage = strings.table_stage(
        make_rows(settings.pairs, settings.judge), loss, steps=settings.steps,
        rows_per_step=settings.pairs_per_step, learning_rate=settings.learning_rate,
    )  # fmt: skip
    sizes = {"reference_steps": settings.reference_steps, "reward_steps": settings.reward_steps, "labels": 128}
    start = preference_strings.make_start(**sizes, draw_pairs=draw_pairs)
    return experiment.Plan(start, (stage, stage), preference_strings.measure_parts)


def claim(results: experiment.Results) -> experiment.Claim:
    """With the true law as judge the policy is better than DPO's, and a judge that knows nothing does little harm."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "vrpo_true", "dpo"),
        experiment.close(results, "eval/gold", "vrpo_half", "dpo", within=0.5),
    )


if __name__ == "__main__":
    experiment.main(__name__)
