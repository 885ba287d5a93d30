"""A weak meta-agent that writes workflows for an executor, taught offline by whether each beat the last (W4S, RLAO).

Paper:     Nie et al., "Weak-for-Strong: Training Weak Meta-Agent to Harness Strong Executors", arXiv:2504.04785.
Claim:     a small model that writes a workflow, reads its validation accuracy and writes the next finds better ones
           than untrained search once it is trained, by regression weighted with a reward for beating earlier scores.
Equations: r_i = 1 if v_i > max(v_0..v_{i-1}), 0.5 if only v_i > v_{i-1}, else 0; L = mean_n exp(r_n / tau) NLL_n of the
           last turn (arm rlao). Each turn has m candidates: the best goes on, all of them train. sft_best: weight 1 for
           r = 1 and 0 else; no_best: the first candidate goes on; untrained; archive: untrained, reads workflows at
           random of all so far (as ADAS) instead of the last three; repaired: rlao, where a program that cannot be run
           is shown and written anew up to three times before it counts, in its measurement as well. At scale a turn is
           an analysis and a program, and rlao is no_best: a search goes on with its own program, not the best of m.
Left out:  best of m for files of one's own: the m programs of a turn would have to be run by the executor before any
           search goes on, and the episodes of the host go on by themselves, each with the replies of its own requests;
           m searches stand in, with as many programs and calls. An analysis before embedded programs, whose letters
           could not say it; data are collected once. Three turns
           are read (paper: five; at scale all, and the m candidates are m searches), workflows drawn at
           temperature 1 (paper: 0.5). The best in validation counts at the end (released code: in test). Embedded
           training is short: all arms still rise at its end; and the untrained one writes much the same whatever it
           reads, so that an archive can hardly help it.
Expect:    eval/test@10: rlao > sft_best (what imitating the best programs brings), rlao > archive, rlao > untrained.
Measure:   programs of up to six letters for executors whose calculator, decomposing and verifying are good or bad, 64
           held out, one candidate a turn, 4 searches each; equal samples and updates. test@k: fresh items, best of k
           turns; runs: programs within the executor's limit; better: turns that beat all before. Effects are small: the
           untrained agent is at 0.67 already, all arms end between 0.67 and 0.71, and repaired begins at 0.72 for its
           measurement repairs, so that its end says nothing of what it was taught. A bed on which the untrained one is
           at 0.4 is open: --limits 3 4 5 --chains 6 9 (of a record also --bed hard) has longer chains and lower limits,
           and no record.
Run:       python -m experiments.agents.w4s; at scale --model DIR --data FILE --executor http://localhost:8000/v1
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array

from experiments.agents.parts import meta_agent, workflow_programs, workflows
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.advantages import selection
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.tools import endpoints
from jaxrl_llm.train.plan import Plan, Setup, Stage, setup_of


def exponential(rewards: Array, tau: float) -> Array:
    return selection.exponential_weights(rewards, temperature=tau)


def best_only(rewards: Array, tau: float) -> Array:
    return (rewards == 1.0).astype(jnp.float32)


def regression(settings, stage: Callable[..., Stage]) -> tuple[Stage, ...]:
    """Data are collected once, then trained on."""
    how = {"steps": settings.steps, "rows_per_step": settings.rows_per_step, "learning_rate": settings.learning_rate}
    return (stage(partial(settings.weigh, tau=settings.tau), **how),)


def nothing(settings, stage: Callable[..., Stage]) -> tuple[Stage, ...]:
    return ()


ONLY = "its programs answer questions, and play no env"


@dataclasses.dataclass(frozen=True)
class Settings(endpoints.Settings, multi_turn_plan.Settings):
    """The paper's tau, candidates and turns, for --data and a model of one's own, or a decoder made here."""

    steps: int = 120
    eval_every: int = 60
    eval_samples: int = 4  # searches that are measured
    max_turns: int = 10
    executor: str = ""  # address of the model that workflows ask, https://HOST/v1, and its name
    executor_model: str = ""
    endpoint_temperature: float = 0.7  # of the executor
    calls: int = 16  # of a workflow on one question, at most
    validation_items: int = 32
    sandboxes: int = 8
    rows_per_step: int = 64
    base_steps: int = 120
    searches: int = 512  # to train on
    turns: int = 2  # of those
    candidates: int = 5  # m
    tau: float = 0.4
    limits: tuple[int, ...] = workflows.LIMITS  # of the embedded executors: what a program may cost, at most 9
    chains: tuple[int, int] = workflows.CHAINS  # their fewest and most steps, at most 9
    weigh: Callable[[Array, float], Array] = exponential
    choose: Callable[[Array], Array] = meta_agent.best_of
    window: Callable[..., Array] = meta_agent.latest
    repairs: int = 0  # how often a program that cannot be run is written anew before it counts
    teach: Callable[..., tuple[Stage, ...]] = regression


EMBEDDED = {"steps": 240, "learning_rate": 1e-3}
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "rows_per_step": 4, "searches": 4, "candidates": 2}
ARMS = {
    "untrained": {"teach": nothing},
    "rlao": {},
    "sft_best": {"weigh": best_only},
    "no_best": {"choose": meta_agent.first_of},
    "archive": {"teach": nothing, "window": meta_agent.archive},
    "repaired": {"repairs": 3},
}
METRICS = ("eval/test@10", "eval/test@2", "eval/seed", "eval/runs", "eval/better")
CURVES = ("eval/test@10", "eval/test@2", "eval/test@1", "eval/runs", "eval/better", "grad/norm")


def embedded(settings: Settings) -> Setup:
    """Executors that are good or bad at something, and a base that scribbles workflows."""
    sizes = settings.searches, settings.turns, settings.candidates, settings.choose, settings.repairs
    met = strings.bound(workflows.executors, limits=tuple(settings.limits), chains=tuple(settings.chains))
    scribbles = strings.bound(meta_agent.draw_scribbles, met)
    return Setup(
        workflows.WORLD, strings.make_base(workflows.WORLD, scribbles, steps=settings.base_steps),
        strings.bound(meta_agent.measure, met, window=settings.window, repairs=settings.repairs),
        tables={"stage": partial(meta_agent.make_stage, meta_agent.make_rows(met, *sizes))},
    )  # fmt: skip


def own(settings: Settings) -> Setup:
    """Searches of a model of one's own, whose repairs are responses beside the turns."""
    if settings.choose is not meta_agent.best_of or settings.window is not meta_agent.latest:
        raise UserError(
            "arms no_best and archive are of the embedded world; give --arm untrained rlao sft_best repaired"
        )
    if settings.repairs < 0:
        raise UserError(f"--repairs {settings.repairs} must not be negative")
    responses, turns = 1 + settings.repairs, (settings.turns, settings.max_turns)
    setup = multi_turn_plan.hosted(
        dataclasses.replace(settings, max_turns=settings.max_turns * responses),
        opened=partial(workflow_programs.workflows, turns=turns if settings.repairs else None),
        more=partial(workflow_programs.figures, turns=settings.max_turns), turns=settings.turns * responses, only=ONLY,
    )  # fmt: skip
    sizes = {"searches": settings.searches, "candidates": settings.candidates}
    stage = partial(workflow_programs.regression_stage, setup.tasks, **sizes, **setup.tables)
    return setup._replace(tables={"stage": stage})


def build(settings: Settings) -> Plan:
    """A base that scribbles workflows, then the arm's teaching; measured by searches of its own."""
    setup = setup_of(settings, embedded, own)
    return setup.plan(*settings.teach(settings, **setup.tables))


def claim(results: experiment.Results) -> experiment.Claim:
    """RLAO finds better workflows in ten turns than the best imitated, than an archive and the untrained agent."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(experiment.greater(results, "eval/test@10", "rlao", other) for other in ("sft_best", "archive", "untrained")),
    )


if __name__ == "__main__":
    experiment.main(__name__)
