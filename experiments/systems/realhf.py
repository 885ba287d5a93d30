"""One mesh and one layout for every call of PPO, with the weights moved between them (ReaL).

Paper:     Mei et al., "ReaL: Efficient RLHF Training of Large Language Models with Parameter Reallocation",
           arXiv:2406.14088.
Claim:     when every call (generate, score, train) has devices and a layout of its own, and weights are moved between
           them, an iteration is faster than with one layout for all; Metropolis-Hastings finds such a plan.
Equations: start = max(ready, end of the last task on an overlapping mesh); cost = makespan, times 3 where memory does
           not suffice; accept with min(1, exp(-beta (cost' - cost) / 0.1 s)), beta 0.01, 0.1, 1.
           symmetric: the best single layout on all devices; zero: ZeRO-3, generation by tensor; greedy: each call's
           fastest place; fixed: a place for each model, never moved; mcmc: every block with every layout that is not
           worse in all, a proposal changes a call or both of a model, chains from greedy, symmetric, zero and fixed,
           so that it is never above them and only the size is a finding; walk: all moves accepted. --depths 1 2 4:
           training and scoring also in so many stages, (m + p - 1) / m times a stage's seconds of m parts; --host 8e9:
           weights of frozen models wait on the host, behind so many bytes a second.
Left out:  profiles (seconds are this library's roofline), overlap with the next batch, scalar heads. Nothing is
           trained.
Expect:    plan/relative (seconds over those of symmetric): mcmc < 0.9; mcmc - zero, mcmc - fixed < -0.05; mcmc < walk;
           plan/excess (over seconds that no plan can go below, whatever its places) of mcmc < 0.15.
Measure:   simulated seconds of an iteration of two on 32 v6e chips (on 8 or 32 v5p chips, with more rows, the greedy
           plan is the best one already); 64 rows, lengths drawn for each of 8 seeds.
Run:       python -m experiments.systems.realhf
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
from jaxtyping import Array

from experiments.systems.parts import placement_search, ppo_calls
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.arms import bundled
from jaxrl_llm.planning import chips, known_models
from jaxrl_llm.planning.work import Work

EMBEDDED_ONLY = "it searches plans of PPO calls by measured costs of small models"


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Sizes of the paper's kind; ``--model DIR`` is the actor."""

    steps: int = 20_000  # proposals of each chain
    actor: str = "Llama-3-70B"
    critic: str = "Llama-3-8B"
    topology: str = "v5p:4x4x4"
    smallest: int = 8  # devices of the smallest block
    rows: int = 512
    longest: int = 2048  # tokens of a response
    planner: Callable[..., Array] = placement_search.metropolis_plan
    allowed: Callable[..., Array] = ppo_calls.candidates
    betas: tuple[float, ...] = (0.01, 0.1, 1.0)
    depths: tuple[int, ...] = (1,)  # numbers of pipeline stages that are tried
    host: float = 0.0  # bytes a second to the host where frozen weights wait; 0: they stay on the devices


EMBEDDED = {
    "actor": "Llama-3.2-3B", "critic": "Llama-3.2-3B", "topology": "v6e:4x8", "rows": 64, "steps": 4000,
}  # fmt: skip
SMOKE = {
    "topology": "v5p:2x2x1", "smallest": 2, "critic": "Llama-3.2-1B", "actor": "Llama-3.2-1B", "steps": 10,
    "longest": 256,
}  # fmt: skip
ARMS = {
    "symmetric": {"planner": placement_search.symmetric_plan}, "zero": {"planner": placement_search.zero_plan},
    "greedy": {"planner": placement_search.greedy_plan},
    "fixed": {"planner": placement_search.metropolis_plan_of_models},
    "mcmc": {}, "walk": {"betas": (0.0, 0.0, 0.0)},
}  # fmt: skip
METRICS = ("plan/relative", "plan/excess", "plan/seconds", "plan/gib", "plan/idle")
CURVES = (*METRICS, "work/prompt", "work/response")
OUTCOME = jax.jit(ppo_calls.outcome)


@lru_cache(maxsize=32)
def prepared(
    actor: str, critic: str, topology: str, smallest: int, rows: int, prompt: int, response: int,
    depths: tuple[int, ...], host: float,
):  # fmt: skip
    """What every call costs on every place, and seconds below which no plan comes: the same for all arms."""
    found, shape = chips.parse(topology), known_models.shape_of(actor)
    options, stages = ppo_calls.staged_places(shape, found.chips, smallest=smallest, depths=depths)
    work = Work(prompt, response, rows, rows)
    costs = ppo_calls.tables(shape, known_models.shape_of(critic), found.chip, options, work, stages, host=host)
    return options, costs, ppo_calls.bound(costs)


D_STAR = {"plan/relative": 0.05}  # a twentieth of a step: below that no plan is changed


def build(settings: Settings) -> experiment.Plan:
    """A workload for each seed, a plan of its calls, and what the plan costs."""
    actor = settings.actor if bundled(settings.model) else settings.model
    chosen = partial(settings.planner, allowed=settings.allowed, betas=settings.betas, steps=settings.steps)
    depths, host = settings.depths, settings.host

    def measure(work, key):
        sizes = settings.critic, settings.topology, settings.smallest, settings.rows
        lengths = tuple(int(x) for x in work["tokens"])
        options, tables, least = prepared(actor, *sizes, *lengths, depths, host)
        plain = prepared(actor, *sizes, *lengths, (1,), 0.0)  # what all arms are compared with
        found = OUTCOME(tables, chosen(tables, options, key))
        base = OUTCOME(plain[1], placement_search.symmetric_plan(plain[1], plain[0], key))
        return {
            "plan/relative": found.penalised / base.penalised,
            "plan/excess": found.penalised / least - 1.0,
            "plan/seconds": found.penalised,
            "plan/gib": found.peak / 2**30,
            "plan/idle": found.idle,
            "work/prompt": work["tokens"][0],
            "work/response": work["tokens"][1],
        }

    return experiment.Plan(partial(ppo_calls.draw_work, longest=settings.longest), (), measure, on_host=True)


def claim(results: experiment.Results) -> experiment.Claim:
    """A searched plan with moved weights beats one layout by a tenth, ZeRO and fixed places by a twentieth."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.below(results, "plan/relative", "mcmc", 0.9),
        *(experiment.smaller(results, "plan/relative", "mcmc", x, by=0.05) for x in ("zero", "fixed")),
        experiment.smaller(results, "plan/relative", "mcmc", "walk"),
        experiment.below(results, "plan/excess", "mcmc", 0.15),
    )


if __name__ == "__main__":
    experiment.main(__name__)
