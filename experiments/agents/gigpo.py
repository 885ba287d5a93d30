"""Turns of a group in the same situation as groups of their own (GiGPO).

Paper:     Feng et al., "Group-in-Group Policy Optimization for LLM Agent Training", arXiv:2505.10978.
Claim:     episodes of one task come through the same situations; comparing what turns in the same situation led to
           gives every turn its own credit without a critic, and beats GRPO at the same rollouts.
Equations: A_ik = A_E(i) + w A_S(i, k); A_E = (R_i - mean) / std of the episodes of the task, A_S = (G_ik - mean_S) /
           std_S over the turns S of the group in the situation of turn k, G_ik = r_k + gamma G_ik+1. grpo: w = 0;
           no_std: neither is divided; step_only: without A_E; by_turn (control): S holds the turns of equal number
           instead of equal situation; random (control): situations dealt anew among the turns of a group, so that S has
           the sizes of gigpo's and turns of chance; similar: S holds the turns whose observations share most tokens, 2
           LCS / (|a| + |b|) >= similarity to the first of them; critic: PPO, A of GAE (gamma 1, lambda 0.95) with a
           value head.
Left out:  the KL term in the embedded worlds, and of critic. At scale a turn of training that webshop, alfworld or
           textworld takes for no action costs the paper's tenth; the embedded worlds have none such.
Expect:    eval/success: gigpo > grpo and gigpo > by_turn.
Measure:   held-out corridors of the key-door world, actions turn by turn; in the record 64 seeds of grpo and gigpo and
           8 of the others, without random, which came later; equal episodes and updates. step/shared: share of turns
           whose situation was met more than once in the group: nearly all in a corridor. --places 4 --skies 8 takes
           the grid of the bed sub_goals in its place, where fewer are, with its 24 turns or --grid-turns 32. Not
           measured.
Run:       python -m experiments.agents.gigpo [--places 4 --skies 8 --grid-turns 32; of a record also --bed grid]; at
           scale --model DIR --data webshop:FOLDER (or alfworld:FOLDER)
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import errands, keydoor_arena, similar_situations
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group, turns
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan, Setup, Stage, no_extras, setup_of
from jaxrl_llm.types import Trajectories, declared


def situation(rows: Trajectories, settings: Any) -> Array:
    return multi_turn.turns_of(rows).identity


def number(rows: Trajectories, settings: Any) -> Array:
    taken = multi_turn.turns_of(rows).taken
    return jnp.broadcast_to(jnp.arange(taken.shape[1], dtype=jnp.int32)[None, :], taken.shape)


def random(rows: Trajectories, settings: Any) -> Array:
    found = multi_turn.turns_of(rows)
    key = jax.random.key(jnp.sum(rows.tokens * (1 + rows.positions), dtype=jnp.int32))  # another one for every batch
    return similar_situations.shuffled(found.identity, rows.group_ids, found.taken, key)


def similar(rows: Trajectories, settings: Any) -> Array:
    texts = similar_situations.shown(rows, width=settings.compared)
    given = texts, rows.group_ids, multi_turn.turns_of(rows).taken
    if not settings.data:  # few enough to compare all with all
        return similar_situations.clusters(*given, least=settings.similarity)
    return similar_situations.clusters_in_groups(*given, least=settings.similarity, size=settings.group_size)


@dataclasses.dataclass(frozen=True)
class Settings(multi_turn_plan.Settings):
    """The paper's, for --data and a model of one's own; the embedded model is a small decoder made here."""

    steps: int = 150
    learning_rate: float = 1e-6
    eval_every: int = 25
    prompts_per_step: int = 16
    group_size: int = 8
    base_steps: int = 150  # of imitation, in the embedded world
    places: int = 0  # of the embedded world: to go to on a grid, one after another; 0: the corridor of key and door
    skies: int = 1  # of the grid, that look different and mean nothing
    grid_turns: int = 24  # of the grid, at most in an episode; a shortest plan has 17 on average
    invalid_penalty: float = 0.1  # off the reward of a turn that is no action, in training in a shop or a game of text
    kl_weight: float = 0.01  # of k3 to the policy at the start; 0: no reference
    gamma: float = 0.95
    episode: float = 1.0  # weight of the whole episode's advantage
    step: float = 1.0  # weight of the turn's
    anchor: Callable[[Trajectories, Any], Array] = situation
    similarity: float = 0.95  # share of common tokens at which two situations are alike
    compared: int = 256  # tokens of what was shown last that are compared
    normalise: Callable[..., Array] | None = group.group_normalized_advantages  # None: a value head, no groups


EMBEDDED = {
    "steps": 60,
    "kl_weight": 0.0,
    "learning_rate": 1e-3,
    "eval_every": 15,
    "prompts_per_step": 4,
    "similarity": 0.85,
    "compared": 9,
}
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "grpo": {"step": 0.0},
    "gigpo": {},
    "no_std": {"normalise": group.dr_grpo_advantages},
    "step_only": {"episode": 0.0},
    "by_turn": {"anchor": number},
    "random": {"anchor": random},
    "similar": {"anchor": similar},
    "critic": {"normalise": None},
}
METRICS = ("eval/success", "eval/turns", "eval/revisits", "step/shared")
CURVES = ("eval/success", "eval/turns", "reward/mean", "step/shared", "policy/entropy")


class Shared(NamedTuple):
    """Extras of a batch: 1 at tokens of turns whose situation other turns share."""

    shared: Array


def by_groups(settings: Settings) -> Callable[..., Online]:
    """Episodes with an advantage for every turn."""
    weights = {"episode": settings.episode, "step": settings.step, "normalise": settings.normalise}
    anchor = partial(settings.anchor, settings=settings)
    advantages = partial(episode_methods.by_situation, gamma=settings.gamma, anchor=anchor, **weights)

    def shared(extras, rows, rewards):
        found = multi_turn.turns_of(rows)
        sizes = turns.anchor_sizes(anchor(rows), rows.group_ids, found.taken)
        return Shared(multi_turn.over_turns((sizes > 1).astype(jnp.float32), found, rows.mask))._asdict()

    return partial(
        episode_methods.make_grpo, settings=settings, advantages=advantages, row_extras=shared,
        kl_weight=settings.kl_weight,
        diagnostics=lambda logp, entropy, batch: {"step/shared": declared(Shared, batch.extras).shared},
    )  # fmt: skip


def world_of(settings: Settings) -> arenas.Arena:
    """The embedded world: the corridor, or the grid of the bed sub_goals with so many places and skies."""
    if settings.places:
        if settings.grid_turns < settings.places:
            raise UserError(f"--grid-turns {settings.grid_turns}: each of {settings.places} places takes one at least")
        return errands.make_errands(places=settings.places, skies=settings.skies, turns=settings.grid_turns)
    if settings.skies != 1:
        raise UserError(f"--skies {settings.skies}: a corridor has none; give --places, too")
    if settings.grid_turns != Settings.grid_turns:
        raise UserError(f"--grid-turns {settings.grid_turns}: a corridor has turns of its own; give --places, too")
    return keydoor_arena.make_keydoor()


def embedded(settings: Settings) -> Setup:
    """A world of places."""
    arena, valued = world_of(settings), settings.normalise is None
    return arenas.make_setup(arena, steps=settings.base_steps, valued=valued, samples=16)


def own(settings: Settings) -> Setup:
    """With a value head where there is a critic."""
    critic = {"start": episode_methods.with_value, "part": "model"} if settings.normalise is None else {}
    return multi_turn_plan.hosted(settings, **critic)


def build(settings: Settings) -> Plan:
    """One online stage."""
    critic = settings.normalise is None
    ppo = partial(episode_methods.make_ppo, settings=settings, group_size=settings.group_size)
    method = ppo if critic else by_groups(settings)
    extras = no_extras if critic else episode_methods.reference_for(settings.kl_weight)
    setup = setup_of(settings, embedded, own)
    return setup.plan(Stage(method(setup.tasks, **setup.slots), settings.steps, extras))


def claim(results: experiment.Results) -> experiment.Claim:
    """Credit by situation beats GRPO, and credit by the number of the turn."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/success", "gigpo", "grpo"),
        experiment.greater(results, "eval/success", "gigpo", "by_turn"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
