"""The reward of an episode divided over its turns by a learned estimator of progress (SPA-RL).

Paper:     Wang et al., "SPA-RL: Reinforcing LLM Agents via Stepwise Progress Attribution", arXiv:2505.20732.
Claim:     one reward at the end teaches long episodes slowly; contributions of single turns, fitted so that they sum
           to the reward, with a signal for actions that can be executed, train PPO better.
Equations: (sum_k c_k - R)^2 -> min on episodes of the base; r_k = alpha c_k + beta g_k at the last token of turn k,
           g_k = 1 where the action changed the situation; PPO with GAE on these rewards. ppo: c is R at the last turn,
           beta = 0; grounding_only: the same with beta; no_grounding: beta = 0; uniform: c_k = R / K; beta_10, strong:
           ten and fifty times beta, embedded 0.1 and the paper's 0.5, at which eleven and three steps anywhere outweigh
           the task; won, strong_won: spa and strong with g_k = 0 in episodes that do not succeed, where walking about
           pays nothing (longer ones still earn more); oracle (the positive control, embedded alone): c_k the share of
           the places to go to that turn k is the first to reach.
Left out:  the KL penalty; the estimator is fitted once, as in the paper. Its episodes come on top of those that train.
Expect:    eval/success: spa > ppo, and spa > uniform; strong walks about: eval/turns strong > spa (looked at, no
           part of the claim: turns are those of successes).
Measure:   held-out grids of the bed sub_goals, its sizes and rate and a weaker base: five by five cells, four places to
           go to in turn in at most 24 turns, judged by the end alone; equal online episodes and updates. A walker at
           random does none, 2 of 128 tasks have no plan so short. eval/moved: share of actions that changed the
           situation; eval/credit: chance that the estimator gives a turn that reaches a place more than another (0.5:
           none; below 0.6 the bed is invalid); with --data, where no such turn is known, an episode that succeeds more
           in all its turns than one that fails.
Run:       python -m experiments.agents.spa_rl; at scale --model DIR --data webshop:FOLDER (alfworld:, textworld:)
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import errands, progress_estimator
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.advantages import turns
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.metrics import calibration
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.plan import Plan, Setup, Stage, setup_of
from jaxrl_llm.types import Key, Params, Rewards, Trajectories


def learned(arena, params, rows, rewards, counted) -> Array:
    return jax.lax.stop_gradient(progress_estimator.contributions(arena, params["progress"], rows))


def terminal(arena, params, rows, rewards, counted) -> Array:
    return turns.terminal_progress(rewards.value, counted)


def uniform(arena, params, rows, rewards, counted) -> Array:
    return turns.uniform_progress(rewards.value, counted)


def oracle(arena, params, rows, rewards, counted) -> Array:
    return errands.progress(multi_turn.turns_of(rows), counted, places=errands.PLACES)


def everywhere(rewards: Rewards) -> Array:
    return jnp.ones(rewards.value.shape, bool)


def successes(rewards: Rewards) -> Array:
    return rewards.value >= multi_turn_plan.ENOUGH


def measure(arena: arenas.Arena, params: Params, key: Key, *, samples: int) -> dict[str, Array]:
    """``arenas.measure``, and ``eval/credit``: the AUROC of contributions, of turns that reach a place among all."""
    rows = arenas.make_heldout(arena, samples=samples, part="model")(params, key)
    found, said = multi_turn.turns_of(rows), progress_estimator.contributions(arena, params["progress"], rows)
    reaches = errands.progress(found, found.taken, places=errands.PLACES) > 0
    credit = calibration.auroc(*(x.reshape(-1) for x in (jax.nn.sigmoid(said), reaches, found.taken)))
    return episode_methods.figures(rows) | {"eval/credit": credit}


def told_apart(
    place: episode_methods.HostTasks, params: Params, rows: Trajectories, *, chunk: int = 8
) -> dict[str, Array]:
    """``eval/credit`` of a world whose places nobody knows: the AUROC of an episode's contributions, of successes.

    Args:
      chunk: episodes that are read at once.
    """
    said = jax.jit(lambda params, part: jnp.sum(progress_estimator.contributions(place, params, part), axis=1))
    parts = [jax.tree.map(lambda x, k=k: x[k : k + chunk], rows) for k in range(0, rows.tokens.shape[0], chunk)]
    sums = jnp.concatenate([said(params["progress"], part) for part in parts])
    won = multi_turn.episode_rewards({}, rows)
    credit = calibration.auroc(jax.nn.sigmoid(sums), won.value >= multi_turn_plan.ENOUGH, won.valid)
    return {"eval/credit": credit}


@dataclasses.dataclass(frozen=True)
class Settings(multi_turn_plan.Settings):
    """The paper's weights, for --data and a model of one's own, or a decoder of 32 numbers a token made here."""

    steps: int = 200
    learning_rate: float = 1e-6
    eval_every: int = 20
    prompts_per_step: int = 32
    base_steps: int = 150
    fit_steps: int = 200
    fit_episodes: int = 512
    fit_rate: float = 1e-5  # at scale
    weight: float = 1.0  # alpha, of the progress
    grounding: float = 0.5  # beta
    pays: Callable[[Rewards], Array] = everywhere  # episodes in which grounding pays
    attribute: Callable[..., Array] = learned


# of the bed sub_goals with a weaker base: from that of the bed PPO at its best rate gets as far as with true progress;
# 24 executable actions are worth a quarter of the task
EMBEDDED = {
    "grounding": 0.01, "steps": 40, "eval_every": 4, "learning_rate": 3e-4, "base_steps": 60, "fit_rate": 1e-3,
}  # fmt: skip
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "fit_steps": 2, "fit_episodes": 8, "prompts_per_step": 4}
ARMS = {
    "ppo": {"attribute": terminal, "grounding": 0.0},
    "spa": {},
    "no_grounding": {"grounding": 0.0},
    "grounding_only": {"attribute": terminal},
    "uniform": {"attribute": uniform},
    "beta_10": {"grounding": experiment.Times(10)},
    "strong": {"grounding": experiment.Times(50)},
    "won": {"pays": successes},
    "strong_won": {"grounding": experiment.Times(50), "pays": successes},
    "oracle": {"attribute": oracle},
}
METRICS = ("eval/success", "eval/turns", "eval/moved", "eval/revisits", "eval/credit")
CURVES = ("eval/success", "eval/turns", "eval/moved", "eval/credit", "reward/mean", "policy/entropy")
BED = experiment.Bed(
    metric="eval/success", chance=0.0, ceiling=0.984, baseline="ppo", positive="oracle",
    judges=(("spa", "eval/credit", 0.6),),
)  # fmt: skip


def fit_of(settings: Settings) -> Callable[..., Stage]:
    """The fit of the estimator, the same for all arms."""
    sizes = {"steps": settings.fit_steps, "table": settings.fit_episodes, "learning_rate": settings.fit_rate}
    return strings.bound(progress_estimator.fit_stage, **sizes)


def embedded(settings: Settings) -> Setup:
    """Errands on a grid; the estimator is fitted in the base, once for all arms."""
    arena = errands.make_errands()
    start = progress_estimator.make_start(arena, base_steps=settings.base_steps, fit=fit_of(settings))
    return Setup(arena, start, strings.bound(measure, arena, samples=8))


def own(settings: Settings) -> Setup:
    """A second model only where something is asked of it; it is fitted first.

    Raises:
      UserError: for the oracle, who reads the places to go to off the situations of the embedded world.
    """
    if settings.attribute is oracle:
        rest = " ".join(name for name, changes in ARMS.items() if changes.get("attribute") is not oracle)
        raise UserError(f"--data {settings.data}: arm oracle knows the places of the embedded world; give --arm {rest}")
    if settings.attribute is not learned:
        return multi_turn_plan.hosted(settings, part="model", start=episode_methods.with_value)
    start = progress_estimator.with_estimator
    setup = multi_turn_plan.hosted(settings, part="model", start=start, told=told_apart)
    fit = fit_of(settings)(setup.tasks, rows_per_step=settings.prompts_per_step, **setup.tables)
    return setup._replace(first=(fit,))


def build(settings: Settings) -> Plan:
    """The estimator fitted to episodes of the base, then PPO on the rewards of turns."""
    weights = {"weight": settings.weight, "grounding": settings.grounding}
    setup = setup_of(settings, embedded, own)

    def paid(params, extras, rows, rewards):
        found = multi_turn.turns_of(rows)
        counted = found.taken & rewards.valid[:, None]
        progress = settings.attribute(setup.tasks, params, rows, rewards, counted)
        grounded = turns.moved(found.identity, counted) & settings.pays(rewards)[:, None]
        return multi_turn.at_ends(turns.spa_rewards(progress, grounded, counted, **weights), found)

    online = episode_methods.make_ppo(setup.tasks, settings, token_rewards=paid, **setup.slots)
    return setup.plan(Stage(online, settings.steps))


def claim(results: experiment.Results) -> experiment.Claim:
    """Learned progress beats the reward at the end, and the reward in equal parts."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/success", "spa", "ppo"),
        experiment.greater(results, "eval/success", "spa", "uniform"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
