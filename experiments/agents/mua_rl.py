"""Agents of tools trained with the user in the loop (MUA-RL).

Paper:     Zhao et al., "MUA-RL: Multi-turn User-interacting Agent Reinforcement Learning for Agentic Tool Use",
           arXiv:2508.18669.
Claim:     an agent trained in talks with a user who holds back what it needs, and may want something else later, serves
           such users more reliably than its cold start, and than one trained where the user says everything at once.
Equations: R = 1 where the database at good-bye is the gold one and the user was told what is due, else 0;
           A_i = (R_i - mean) / std of the talks of a request; PPO's clip, + beta k3(pi, cold start), on the agent's
           tokens only. cold_start: not trained; static: users who say everything in the first message; process: 0.1
           more for every call that a tool could answer; no_mask: tokens of user and tools are trained on, too.
Left out:  a language model as the user: here it is a script; synthesis of the talks of the cold start, whose script
           is right four times in five and sees users of both kinds.
Expect:    eval/pass1: mua_rl > cold_start, mua_rl > static; eval/pass4: mua_rl > static.
Measure:   held-out requests of users who hold back, eight trials each; 8 seeds, equal episodes and updates. pass^k:
           chance that k trials of a request all succeed; eval/fickle: success where the user changes the mind.
Run:       python -m experiments.agents.mua_rl
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from jaxrl_llm import experiment, recipes
from jaxrl_llm.rollout import episodes
from jaxrl_llm.train.plan import Plan, Stage
from jaxrl_llm.types import Trajectories
from jaxrl_llm.worlds import arenas, toy_retail, toys


def agent_only(arena: arenas.Arena, rows: Trajectories) -> Trajectories:
    return rows


def everybody(arena: arenas.Arena, rows: Trajectories) -> Trajectories:
    """What user and tools say counts as if the agent had chosen it; the first message does not."""
    return episodes.with_observations(rows, prompt_tokens=rows.tokens.shape[1] - arena.new_tokens)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """The paper's group and KL weight; the model is a decoder of 32 numbers a token made here."""

    steps: int = 50
    learning_rate: float = 1e-3
    eval_every: int = 25
    prompts_per_step: int = 4
    group_size: int = 8
    base_steps: int = 300
    kl_weight: float = 0.001
    rl: bool = True
    openly: bool = False  # users who say everything in the first message
    bonus: float = 0.0  # for every call that a tool could answer
    trained: Callable[..., Trajectories] = agent_only


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "cold_start": {"rl": False},
    "static": {"openly": True},
    "mua_rl": {},
    "process": {"bonus": 0.1},
    "no_mask": {"trained": everybody},
}
METRICS = ("eval/pass1", "eval/pass4", "eval/fickle", "eval/turns")
CURVES = (*METRICS, "reward/mean", "policy/entropy")


def build(settings: Settings) -> Plan:
    """GRPO on whole talks; every arm starts from the same cold start, and is tested with users who hold back."""
    arena = toy_retail.make_arena()
    ground = toy_retail.to_train(arena, openly=settings.openly, bonus=settings.bonus)
    online = arenas.make_grpo(ground, settings, kl_weight=settings.kl_weight, trained=partial(settings.trained, arena))
    stages = (Stage(online, settings.steps, toys.keep_reference),) if settings.rl else ()
    base = arenas.make_base(arena, steps=settings.base_steps)
    return Plan(base, stages, toy_retail.make_measure(arena, samples=8))


def claim(results: experiment.Results) -> experiment.Claim:
    """Trained with users who hold back, an agent serves them more reliably than untrained, or trained without."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/pass1", "mua_rl", "cold_start"),
        experiment.greater(results, "eval/pass1", "mua_rl", "static"),
        experiment.greater(results, "eval/pass4", "mua_rl", "static"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
