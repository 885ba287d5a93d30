"""An average of independently fine-tuned models as the reference of RLHF (SALSA).

Paper:     Chegini et al., "SALSA: Soup-based Alignment Learning for Stronger Adaptation in RLHF", arXiv:2411.01798.
Claim:     a reference that is the average of two fine-tuned models lets the policy move further and earn more than one
           of them does.
Equations: ref = alpha theta_a + (1 - alpha) theta_b, leaf by leaf; theta_a and theta_b: the same pre-trained model
           tuned on the same data in other order. Policy gradient from theta_a on r(x, y) - beta log(pi / pi_ref).
Left out:  a value model (the baseline is the mean of the prompt's other samples); the map of rewards in the plane.
Expect:    eval/gold: salsa > ref_a, and salsa > broken (average with an unrelated initialisation).
Measure:   true reward of samples on fresh prompts, reward model trained on 1024 labels, 10 % flipped; soup is the
           average itself, not trained. eval/kl is to theta_a. 8 seeds, equal updates and rollouts.
Run:       python -m experiments.preference.salsa
"""

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.models.merging import soup
from jaxrl_llm.train import offline


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """alpha is the paper's; beta is one of its range."""

    steps: int = 150
    eval_every: int = 30
    learning_rate: float = 1e-3
    reference_steps: int = 150
    tuning_steps: int = 100
    reward_steps: int = 200
    beta: float = 0.1
    weights: tuple[float, ...] = (0.5, 0.5, 0.0, 0.0)  # of theta_a, theta_b, theta_c and an unrelated start
    from_soup: bool = False  # the policy starts there too
    stages: int = 1  # 0: only measured


SMOKE = {"steps": 2, "eval_every": 2, "reference_steps": 2, "tuning_steps": 2, "reward_steps": 2}
ARMS = {
    "ref_a": {"weights": (1.0, 0.0, 0.0, 0.0)},
    "salsa": {},
    "ref_b": {"weights": (0.0, 1.0, 0.0, 0.0)},
    "salsa_25": {"weights": (0.25, 0.75, 0.0, 0.0)},
    "salsa_75": {"weights": (0.75, 0.25, 0.0, 0.0)},
    "soup_of_3": {"weights": (0.333333, 0.333333, 0.333334, 0.0)},
    "broken": {"weights": (0.5, 0.0, 0.0, 0.5)},
    "from_soup": {"from_soup": True},
    "soup": {"from_soup": True, "stages": 0},
}
METRICS = ("eval/gold", "eval/proxy", "eval/kl", "eval/unseen")
CURVES = (*METRICS, "reward/mean", "policy/entropy")
NAMES = ("a", "b", "c", "other")
flipped = partial(toy.draw_pairs, flip_rate=0.1)


def draw_chosen(key, n: int):
    """What the fine-tuned models are tuned on: the preferred of two responses."""
    pairs = flipped(key, n)
    return pairs.prompts, pairs.chosen


@lru_cache(maxsize=4)
def make_models(reference_steps: int, tuning_steps: int, reward_steps: int):
    """Three models tuned from one, an unrelated one, and the reward model."""
    pretrain = strings.make_base(preference_strings.WORLD, toy.draw_behaviour, steps=reference_steps)
    tuning = strings.make_supervised(preference_strings.WORLD, 64, 1e-3)

    def init(key):
        base, data = pretrain(key), jax.random.fold_in(key, 1)
        rows = {"rows": draw_chosen(data, 1024)}

        def tuned(order):
            state = offline.init_state(tuning, base, jax.random.fold_in(key, 2 + order), extras=rows)
            return offline.scan_steps(tuning, state, tuning_steps)[0].params

        found = {name: tuned(k) for k, name in enumerate(NAMES[:3])}
        found["other"] = preference_strings.WORLD.policy.init(jax.random.fold_in(key, 5))
        reward = preference_strings.fit_reward(
            base, flipped(data, 1024), jax.random.fold_in(key, 6), steps=reward_steps
        )
        copies = {name: jax.tree.map(jnp.copy, found["a"]) for name in ("policy", "reference")}
        return found | copies | {"reward": reward}

    return init


@lru_cache(maxsize=16)
def make_anchor(weights: tuple[float, ...]):
    """The reference of an arm."""
    return lambda params: soup([params[name] for name in NAMES], weights)


def build(settings: Settings) -> experiment.Plan:
    """One online stage with the arm's reference; without steps the start is only measured."""
    start = make_models(settings.reference_steps, settings.tuning_steps, settings.reward_steps)
    anchor = make_anchor(settings.weights)
    common = {"beta": settings.beta, "learning_rate": settings.learning_rate, "anchor": anchor}
    stage = preference_strings.reward_stage(preference_strings.proxy, steps=settings.steps, **common)
    init = (lambda key: start(key) | {"policy": anchor(start(key))}) if settings.from_soup else start
    return experiment.Plan(init, (stage,) * settings.stages, preference_strings.measure_parts)


def claim(results: experiment.Results) -> experiment.Claim:
    """With the average as its reference the policy earns more than with one model, and than with a broken average."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "salsa", "ref_a"),
        experiment.greater(results, "eval/gold", "salsa", "broken"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
