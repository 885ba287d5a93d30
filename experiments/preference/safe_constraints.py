"""Constraints learned from safe and violating demonstrations, kept where dangers are new (CLIRL, CAPO).

Paper:     Chua, Wang and Yao, "Learning Natural Language Constraints for Safe Reinforcement Learning of Language
           Agents", arXiv:2504.03185.
Claim:     constraints inferred from positive and negative demonstrations, in words, keep violations rare where the
           domain shifts; a fixed penalty or preferences do not.
Equations: e(word) from a corpus (PPMI); R_w = w . outcomes of a walk, grad_w = E_safe demonstrations - E_policy (max.
           entropy IRL); c(s) = sig(v . e + b), V(tau) = 1 - prod_t (1 - c(s_t)), loss -log V on violating, -log (1 - V)
           on safe walks + 0.01 mean c (clirl); rules "avoid WORD", the most suspicious words first, kept where held-out
           likelihood rises; advantage (A_r - lambda A_c) / (1 + lambda), lambda <- max(0, lambda + 0.1 J_c) (capo).
           rules: c of the rules written out; penalty: lambda = 1 throughout; listed: likewise, V = 1 where a listed
           danger is met; cells: c of coordinates; dpo: safe over violating walks; known_reward: capo on arrival itself.
Left out:  keys and doors, 6 x 6 cells; rules phrased by a language model (they name words).
Expect:    shifted/violations: capo < listed, capo < penalty, capo < dpo, capo < cells; shifted/arrived: capo > reward -
           0.1.
Measure:   4 x 4 worlds of words, 1024 to train in for each seed; demonstrations have three dangerous words, the shifted
           worlds three others in which all but dpo go on training without new demonstrations. Policies of all arms have
           the encoder in their token embeddings. Shortest walks, blind to danger, arrive and violate in 0.45 of the
           worlds; random moves violate in 0.36 and arrive in 0.02; in 0.89 a walk of six moves arrives and violates
           nothing. Gates: listed learns to arrive safely in known worlds (known/safe), and the constraint suspects new
           dangers more than harmless words (constraint/apart, 0.5 by chance, at least 0.75). Rates are chosen by safe
           arrivals in fresh known worlds. Equal rollouts and updates; dpo has as many updates. Tuned by arrival alone,
           every arm learned to arrive (0.78 to 0.99) by one way for each start and goal, whatever its words are: eight
           walks of a world then break the constraint alike, and nothing is left to learn it from.
Run:       python -m experiments.preference.safe_constraints
"""

import dataclasses
from collections.abc import Callable

from experiments.preference.parts import constraints
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes

EMBEDDED_ONLY = "a constraint is learnt from demonstrations in a grid whose cells are known"


def under_cost(settings) -> tuple[experiment.Stage, ...]:
    """Policy gradient on the reward under the cost."""
    return tuple(
        constraints.online_stage(
            settings.cost, shifted=shifted, multiplier=settings.multiplier, rate=settings.rate,
            prompts_per_step=settings.prompts_per_step, group_size=settings.group_size, reward=settings.reward,
            steps=settings.steps, learning_rate=settings.learning_rate,
        )
        for shifted in (False, True)
    )  # fmt: skip


def from_pairs(settings) -> tuple[experiment.Stage, ...]:
    """DPO on safe over violating demonstrations."""
    rows, rate = settings.prompts_per_step * settings.group_size, settings.learning_rate
    return (constraints.pair_stage(rows_per_step=rows, steps=settings.steps, learning_rate=rate),) * 2


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """The rate of the multiplier follows the sheet; the paper gives no numbers."""

    steps: int = 60  # in the known and in the shifted world
    eval_every: int = 20
    learning_rate: float = 5e-4
    prompts_per_step: int = 16
    group_size: int = 8
    base_steps: int = 800
    constraint_steps: int = 200
    cost: Callable = constraints.word_cost
    reward: Callable = constraints.inferred_reward
    multiplier: float = 0.0  # lambda at the start of each world
    rate: float = 0.1  # 0: lambda stays what it is
    learn: Callable[..., tuple[experiment.Stage, ...]] = under_cost


SMOKE = {
    "steps": 1, "eval_every": 1, "base_steps": 1, "constraint_steps": 2, "prompts_per_step": 2, "group_size": 2,
}  # fmt: skip
ARMS = {
    "reward": {"cost": constraints.no_cost},
    "capo": {},
    "rules": {"cost": constraints.rule_cost},
    "penalty": {"multiplier": 1.0, "rate": 0.0},
    "listed": {"cost": constraints.listed_cost, "multiplier": 1.0, "rate": 0.0},
    "cells": {"cost": constraints.cell_cost},
    "known_reward": {"reward": constraints.given_reward},
    "dpo": {"learn": from_pairs},
}
METRICS = ("shifted/violations", "shifted/arrived", "known/violations", "known/arrived")
CURVES = (*METRICS, "known/safe", "shifted/safe", "rules/kept", "rules/right", "constraint/apart", "goal/arrival")
BED = experiment.Bed(metric="known/safe", baseline="listed", judges=(("capo", "constraint/apart", 0.75),))


def build(settings: Settings) -> experiment.Plan:
    """The known world, then the shifted one, with one cost."""
    start = constraints.make_start(base_steps=settings.base_steps, constraint_steps=settings.constraint_steps)
    return experiment.Plan(start, settings.learn(settings), constraints.measure, validate=constraints.validate)


def claim(results: experiment.Results) -> experiment.Claim:
    """A constraint learned in words keeps violations rarer under the shift than its rivals, and arrivals frequent."""
    rivals = ("listed", "penalty", "dpo", "cells")
    others = [experiment.smaller(results, "shifted/violations", "capo", x) for x in rivals]
    kept = experiment.greater(results, "shifted/arrived", "capo", "reward", by=-0.1)
    return experiment.conclude(" ".join(claim.__doc__.split()), *others, kept)


if __name__ == "__main__":
    experiment.main(__name__)
