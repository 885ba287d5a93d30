"""Stages of rising difficulty, measured by a ladder of models.

Paper:     Ji et al., "How Difficulty-Aware Staged Reinforcement Learning Enhances LLMs' Reasoning Capabilities: A
           Preliminary Experimental Study", arXiv:2504.00829.
Claim:     training on problems of a measured difficulty, and going on to harder ones in stages, beats training on all
           of them mixed and on any one level.
Equations: pass rates p of a small, a medium and a large model; level 1: 0 < p_small < 1; level 2: (p_small = 0 and
           p_medium > 0) or (0 < p_small < 1 and 0 < p_medium < 1); level 3: p_large = 0 and half of the others. GRPO;
           every stage starts from the parameters of the one before with a new optimiser. both, maths, code: staged,
           half, none or all of a step's prompts programs (levels of the same rule), right when they pass all tests in
           the sandbox; the three begin with one copy that has read solutions of both. validated: a stage ends where
           the reward of validation problems, asked beside those that train, no longer rises (parts.plateau).
Left out:  the reference model (no KL here); validated keeps its optimiser from stage to stage; a ladder of models of
           three sizes: its models are copies of the one that trains, fine-tuned on solutions for longer and longer.
Expect:    eval/accuracy staged > mixed and > each single level; staged > reverse; both > maths in eval/accuracy and in
           code/accuracy, both > code in code/accuracy.
Measure:   held-out Countdown with 2 to 4 numbers; the ladder is the model itself and two copies, after 40 and 160 steps
           on the solutions of the training problems; 8 seeds, three stages with equal updates in every arm, and equal
           rollouts in all but validated, which asks its 4 validation prompts beside the 8 of a step. Over a model of
           one's own the ladder has to be named (--ladder A B C, or three --ladder-temperatures of one model; or copies
           by --ladder-steps, where rows have solutions).
           The arms with programs also measure code/accuracy, on held-out programs; their ladder on programs are copies
           after a quarter, half and all of the fine-tuning, with --warm-steps 0 the ladder of the mathematics.
Run:       python -m experiments.curriculum.staged_difficulty; code of one's own with --code FILE --code-format mbpp
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments.curriculum.parts import domains, validation
from jaxrl_llm import experiment
from jaxrl_llm.curriculum.subset import ladder_levels
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.run import parts as job


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper gives no numbers; see EMBEDDED for the small model."""

    stages: tuple[int, ...] = (1, 2, 3)  # levels in the order of training; 0: all problems
    ladder: tuple[str, ...] = ("", "", "")  # three models from small to large; empty: the one that trains
    ladder_temperatures: tuple[float, ...] = (1.0, 1.0, 1.0)
    ladder_steps: tuple[int, ...] = ()  # of fine-tuning on solutions: three copies of the model in their place
    sft_rate: float = 1e-5  # of that: one ladder, and so one set of levels, for arms of any learning rate
    ladder_samples: int = 8
    code: str = ""  # a second domain: programs, or rows as --data takes; empty: none
    code_format: job.Format = "plain"
    code_levels: tuple[int, ...] = ()  # difficulties of generated programs
    code_share: float = 0.5  # of a step's prompts
    warm_steps: int = 0  # of fine-tuning on solutions of both domains before the first stage
    validation: int = 0  # prompts of validation in each step, which do not train; 0: stages of equal length
    validation_rows: int = 64  # training problems held back for them
    window: int = 6  # steps whose mean is one validation score
    patience: int = 1  # scores in a row without a rise that end a stage


EMBEDDED = {
    "data": "countdown", "levels": (2, 3, 4), "steps": 80, "eval_every": 40, "prompts_per_step": 8,
    "max_new_tokens": 28, "learning_rate": 3e-4, "eval_problems": 96, "eval_samples": 8, "train_problems": 512,
    "ladder_steps": (0, 40, 160), "sft_rate": 3e-4, "warm_steps": 300,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 48, "eval_problems": 8,
    "eval_samples": 8, "max_new_tokens": 28, "ladder_steps": (0, 1, 2), "ladder_samples": 4, "warm_steps": 4,
    "validation_rows": 8,
}  # fmt: skip
CODE = {"code": "programs", "code_levels": (1, 2, 3)}
ARMS = {
    "mixed": {"stages": (0, 0, 0)},
    "level1": {"stages": (1, 1, 1)},
    "level2": {"stages": (2, 2, 2)},
    "level3": {"stages": (3, 3, 3)},
    "staged": {},
    "reverse": {"stages": (3, 2, 1)},
    "both": CODE,
    "maths": CODE | {"code_share": 0.0},
    "code": CODE | {"code_share": 1.0},
    "validated": {"validation": 4},
}
METHOD = "staged"
METRICS = (
    "eval/accuracy", "eval/accuracy_2", "eval/accuracy_3", "eval/accuracy_4", "eval/pass@8", "code/accuracy",
)  # fmt: skip
CURVES = (
    "eval/accuracy",
    "eval/accuracy_4",
    "eval/pass@8",
    "code/accuracy",
    "reward/mean",
    "group/degenerate_fraction",
)


def masks(rates, size: int) -> list[np.ndarray]:
    """Which problems belong to all, level 1, level 2, level 3, by the pass rates of three models."""
    coins = jnp.asarray(np.random.default_rng(0).random(size) < 0.5)
    levels = ladder_levels(*(jnp.asarray(x, jnp.float32) for x in rates), coins)
    return [np.ones(size, bool), *(np.asarray(x) for x in levels)]


def level_rows(settings: Settings, found, asked: recipes.OnlineSettings) -> list[np.ndarray]:
    """``masks`` of a bench's training problems by the ladder of copies, or else by the named one."""
    every = np.arange(found.train.tokens.shape[0])
    if settings.ladder_steps:
        if any(settings.ladder) or any(heat != 1.0 for heat in settings.ladder_temperatures):
            heats = " ".join(f"{heat:g}" for heat in settings.ladder_temperatures)
            raise UserError(
                f"--ladder {' '.join(settings.ladder)} --ladder-temperatures {heats}: the ladder is of copies "
                f"(--ladder-steps {' '.join(map(str, settings.ladder_steps))}); drop them, or give --ladder-steps "
                "without a number, too"
            )
        numbers = {"samples": settings.ladder_samples, "learning_rate": settings.sft_rate}
        return masks(rates_of_copies(asked, settings.ladder_steps, **numbers), every.size)
    if len(settings.ladder) != 3 or len(settings.ladder_temperatures) != 3:
        raise UserError(f"--ladder {' '.join(settings.ladder)}: name three models and three temperatures")
    named = [
        (name or settings.model, heat) for name, heat in zip(settings.ladder, settings.ladder_temperatures, strict=True)
    ]
    if len(set(named)) < 3:
        steps = ", ".join(f"{name} at {heat:g}" for name, heat in named)
        raise UserError(f"--ladder: {steps} are no three steps, so that levels are one and the same; name three models "
                        "from small to large, or give --ladder-temperatures 1 0.7 0.4")  # fmt: skip
    rates = [
        curricula.sample_pass_rates(
            found, asked, every, samples=settings.ladder_samples, model=name, temperature=temperature
        )
        for name, temperature in zip(settings.ladder, settings.ladder_temperatures, strict=True)
    ]
    return masks(rates, every.size)


@recipes.cached_by_task
def rates_of_copies(
    settings: recipes.OnlineSettings, steps: tuple[int, ...], *, samples: int, learning_rate: float
) -> list[np.ndarray]:
    """Pass rates on training problems of copies of the model after so many steps on their solutions; computed once.

    Raises:
      UserError: for another number of copies than three, or steps that do not rise.
    """
    if len(steps) != 3 or not 0 <= steps[0] < steps[1] < steps[2]:
        raise UserError(f"--ladder-steps {' '.join(map(str, steps))}: name three that rise, as 0 40 160")
    found = recipes.bench(settings)
    every, sampling = np.arange(found.train.tokens.shape[0]), {"max_new_tokens": settings.max_new_tokens}

    def rates(count):
        taught = partial(curricula.solutions_imitated, settings, steps=count, learning_rate=learning_rate)
        copy = found.model._replace(params=taught() if count else found.model.params)
        return curricula.pass_rates(found, copy, every, samples=samples, **sampling)

    return [rates(count) for count in steps]


def build(settings: Settings) -> experiment.Plan:
    """One online stage for each level of the arm's order, GRPO throughout."""
    if settings.code:
        if settings.validation:
            raise UserError(f"--validation {settings.validation} does not go with --code {settings.code}: drop one")
        return build_domains(settings)
    found = recipes.bench(settings)
    rows = level_rows(settings, found, settings)
    if settings.validation:
        return curricula.make_single_turn_plan(
            settings, found, [validated(settings, found, rows)], more=curricula.by_level
        )
    stages = [
        experiment.Stage(
            curricula.make_single_turn_grpo(
                settings, found, sampler=curricula.make_chosen(rows[level], f"of level {level}")
            ),
            settings.steps,
        )
        for level in settings.stages
    ]
    return curricula.make_single_turn_plan(settings, found, stages, more=curricula.by_level)


def validated(settings: Settings, found: recipes.Bench, rows: list[np.ndarray]) -> experiment.Stage:
    """All levels of the arm's order in one stage of the run; each ends where the validation score stops rising."""
    slots = validation.until_flat(settings, [rows[level] for level in settings.stages])
    online = curricula.make_single_turn_grpo(settings, found, **slots)
    return experiment.Stage(online, settings.steps * len(settings.stages))


def build_domains(settings: Settings) -> experiment.Plan:
    """The same stages on problems of mathematics and programs, each domain by levels of its own."""
    asked = domains.code_settings(settings, settings.code, settings.code_format, settings.code_levels)
    found, warm = domains.open_domains(settings, asked), settings.warm_steps
    maths = level_rows(settings, found.maths, settings)
    if warm:
        copies = domains.ladder_of_copies(settings, asked, warm, settings.ladder_samples)
        code = masks(copies, copies[0].size)
    else:
        code = level_rows(settings, found.code, asked)
    passing, none = domains.solvable(asked), [np.zeros(rows[0].size, bool) for rows in (maths, code)]

    def of_level(rows, level, what):
        if rows[level].any():
            return rows[level]
        print(f"no {what} is of level {level}: all of them are drawn in its stage", flush=True)
        return rows[0]

    def stage(level):
        first = np.r_[of_level(maths, level, "problem of mathematics"), none[1]]
        second = np.r_[none[0], of_level([rows & passing for rows in code], level, "program")]
        sampler = domains.make_shares(first, second, settings.code_share)
        return experiment.Stage(curricula.make_single_turn_grpo(settings, found.joint, sampler=sampler), settings.steps)

    stages = [stage(level) for level in settings.stages]
    plan = curricula.make_single_turn_plan(settings, found.maths, (), more=curricula.by_level)
    measured = plan.measure if plan.on_host else jax.jit(plan.measure)
    measure = recipes.beside(measured, recipes.make_measure(asked), "code")
    plan = plan._replace(
        stages=tuple(stages), measure=measure, on_host=True, host_score=recipes.host_judge(found.joint, stages)
    )
    return plan._replace(init=lambda key: domains.warmed(settings, asked, warm)) if warm else plan


def claim(results: experiment.Results) -> experiment.Claim:
    """Levels in rising order beat all mixed, each alone, and the reverse order; two domains help each other."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(
            experiment.greater(results, "eval/accuracy", "staged", arm)
            for arm in ("mixed", "level1", "level2", "level3", "reverse")
        ),
        experiment.greater(results, "eval/accuracy", "both", "maths"),
        experiment.greater(results, "code/accuracy", "both", "maths"),
        experiment.greater(results, "code/accuracy", "both", "code"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
