"""Hints for problems that a whole group fails (NuRL).

Paper:     Chen et al., "Nudging the Boundaries of LLM Reasoning", arXiv:2509.25666.
Claim:     abstract hints, given only where every rollout fails, make unsolvable problems teach and so raise the upper
           limit pass@k, which GRPO leaves where it is; always giving a hint, or giving the answer away, is worse.
Equations: G rollouts of x; when all are wrong, G - 1 of them are drawn again from x + hint and one stays un-hinted; A =
           (r - mean) / std over these G; each gradient is that under the prompt its rollout had. No hint at test time.
           nurl: hints in the second half of training, nurl_start: all the time, always: for every group, answer: the
           hint is the solution, partial: its first half. grpo: failed groups are drawn again without any hint (equal
           rollouts). plateau: hints from where the reward of validation problems, asked beside those that train,
           no longer rises (parts.plateau). The model writes the hints itself before training: it explains the known
           answer, and abstracts the explanation to a sentence of core knowledge, which is asked for again where it
           names the answer; --writer FOLDER, or --writer ADDRESS --writer-model NAME: a teacher does. Embedded, its
           explanation is the first right one of 64 responses of its own, and the cue that one's first pair of operands
           without a result (the small model has no words); reference: of the reference solution, for every problem.
Left out:  embedded, a hint for a problem that none of the 64 solves; the switch of all arms but plateau is at half
           time; the un-hinted member is a failed first response, not a fresh one; more than 80 steps and 16 samples a
           problem: 300 and 64 would take four times the hours of this record.
Expect:    eval/pass@16 nurl > grpo and nurl > always; unsolved/pass@16 nurl > grpo; answer lowest in eval/accuracy.
Measure:   held-out Countdown with 3 and 4 numbers without hints, 16 samples a problem; 8 seeds, at most two draws of a
           prompt in every arm (hints/draws), which the columns rollouts and tokens count; plateau asks 4 prompts of
           validation beside the 8 of a step. reference needs the steps of a generated solution. unsolved/pass@16: of
           the problems that the base solves in none of 64 samples (unsolved/share of all), those with a right one.
Run:       python -m experiments.curriculum.nurl; at scale --model DIR --data FILE --chat --arm grpo nurl
           [--writer DIR|ADDRESS]
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from experiments.curriculum.parts import hints, validation, written_hints
from experiments.parts import start_rates
from jaxrl_llm import experiment
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.tools import endpoints
from jaxrl_llm.types import Params, TrainState


def in_words(settings: "Settings") -> Callable[..., str]:
    """The model, or a teacher, is asked to explain the known answer and then for a cue."""
    writer = written_hints.Writer(settings.writer, settings.writer_model, settings.hint_tokens, settings.hint_tries)
    return written_hints.hint_of(settings, writer)


def from_right_responses(settings: "Settings") -> Callable[..., str]:
    """The model's own right responses are its explanations; a rule takes the cue."""
    return written_hints.cue_of(settings, settings.hint_samples)


@dataclasses.dataclass(frozen=True)
class Settings(endpoints.Settings, recipes.OnlineSettings):
    """The paper gives few numbers; see EMBEDDED for the small model."""

    steps: int = 200  # of each half
    group_size: int = 16
    hint: Callable[..., str] | None = None  # None: the model writes it
    write: Callable[..., Callable[..., str]] = in_words  # how it does, see parts.written_hints
    writer: str = ""  # folder or address, https://HOST/v1, of the model that writes hints; empty: the one that trains
    writer_model: str = ""  # its name behind an address
    hint_tokens: int = 64  # at most, of a written hint
    hint_tries: int = 4  # sentences written for a problem until one does not name its answer
    hint_samples: int = 64  # responses of the base to each problem, among which a right one is looked for
    halves: tuple[int, ...] = (2,)  # of the run, first and second, in which hints are given
    needs: Callable[..., object] = hints.all_wrong
    validation: int = 0  # prompts of validation in each step, which do not train; 0: halves decide
    validation_rows: int = 64  # training problems held back for them
    window: int = 8  # steps whose mean is one validation reward
    patience: int = 1  # rewards in a row without a rise that bring the hints


EMBEDDED = {
    "data": "countdown", "levels": (3, 4), "steps": 40, "eval_every": 40, "prompts_per_step": 8, "group_size": 8,
    "max_new_tokens": 28, "learning_rate": 3e-4, "eval_problems": 64, "eval_samples": 16, "train_problems": 1024,
    "write": from_right_responses,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 28, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 16, "validation_rows": 4, "hint_samples": 8,
}  # fmt: skip
ARMS = {
    "grpo": {"halves": ()},
    "nurl": {},
    "nurl_start": {"halves": (1, 2)},
    "always": {"halves": (1, 2), "needs": hints.everyone},
    "answer": {"halves": (1, 2), "hint": hints.whole_solution},
    "partial": {"hint": hints.make_prefix_hint(0.5)},
    "plateau": {"validation": 4},
    "reference": {"hint": hints.first_operands},
}
STEPPED = ("countdown", "chain")  # tasks whose solutions are steps, operands before their '='
METRICS = ("eval/accuracy", "eval/pass@4", "eval/pass@16", "unsolved/pass@16", "unsolved/share", "hints/draws")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction")


@lru_cache(maxsize=4)  # arms share the compiled measurement
def of_the_unsolved(identity: tuple, samples: int) -> Callable[..., dict[str, Array]]:
    """``recipes.summary``, and what is solved of the problems that the base solves in none of so many samples."""

    def figures(found, answers, rows, rewards):
        rates = start_rates.base_rates(recipes.OnlineSettings(**dict(identity)), samples)
        solved, share = start_rates.solved_where_the_start_never_was(rewards, jnp.asarray(rates))
        more = {f"unsolved/pass@{rows.tokens.shape[0] // rates.size}": solved, "unsolved/share": share}
        return recipes.of_samples(found, answers, rows, rewards) | more

    return figures


def build(settings: Settings) -> experiment.Plan:
    """The arm's stages, measured on held-out problems and apart on those that the base does not solve."""
    unsolved = of_the_unsolved(recipes.bench_identity(settings), settings.hint_samples)
    return trained(settings)._replace(measure=recipes.make_measure(settings, figures=unsolved))


def trained(settings: Settings) -> experiment.Plan:
    """Two online stages; in each a failed group is drawn again, with the hint or without."""
    if settings.hint is hints.first_operands and settings.data not in STEPPED:
        raise UserError(f"--data {settings.data}: the arm reference takes its cue from the first step of a solution of "
                        "--data countdown or chain; choose other arms, --arm nurl grpo")  # fmt: skip
    found = recipes.bench(settings)
    problems = recipes.solved_problems(settings)
    rollout, hint = recipes.rollout_of(settings, found), settings.hint
    if hint is None and settings.halves:
        hint = settings.write(settings)
    if settings.validation:
        return curricula.make_single_turn_plan(
            settings, found, [until_plateau(settings, found, problems, rollout, hint)]
        )
    stages = []
    for half in (1, 2):
        hinted = half in settings.halves
        second = hint if hinted else hints.no_hint
        slots = hints.make_staged_rollout(
            rollout,
            curricula.train_score(found),
            found.train.answers,
            hints.encode_hints(found.model, problems, (hints.no_hint, second), chat=settings.chat),
            group_size=settings.group_size,
            unhinted=1,
            needs=settings.needs if hinted else hints.all_wrong,
        )
        online = curricula.make_single_turn_grpo(
            settings, found, row_extras=hints.draw_extras, diagnostics=hints.draw_figures, **slots
        )
        stages.append(experiment.Stage(online, settings.steps))
    return curricula.make_single_turn_plan(settings, found, stages)


def hinted_after(state: TrainState) -> tuple[Params, Bool[Array, ""]]:
    """Whose samples train, and whether the validation reward has been flat: the ``actor`` slot."""
    return state.params, state.sampler.stage > 0


def until_plateau(settings: Settings, found: recipes.Bench, problems, rollout, hint) -> experiment.Stage:
    """Both halves in one stage: failed groups are drawn again plain, and with the hint from the plateau on."""
    everything = np.ones(found.train.tokens.shape[0], bool)
    slots = hints.make_switched_rollout(
        rollout,
        curricula.train_score(found),
        found.train.answers,
        hints.encode_hints(found.model, problems, (hints.no_hint, hints.no_hint, hint), chat=settings.chat),
        group_size=settings.group_size,
        unhinted=1,
        needs=settings.needs,
    )
    online = curricula.make_single_turn_grpo(
        settings,
        found,
        actor=hinted_after,
        row_extras=hints.switched_extras,
        diagnostics=hints.draw_figures,
        **slots | validation.until_flat(settings, [everything]),
    )
    return experiment.Stage(online, 2 * settings.steps)


def claim(results: experiment.Results) -> experiment.Claim:
    """Cues for failed groups raise pass@16, of what the base never solves too; the answer as a hint is worst."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/pass@16", "nurl", "grpo"),
        experiment.greater(results, "unsolved/pass@16", "nurl", "grpo"),
        experiment.greater(results, "eval/pass@16", "nurl", "always"),
        experiment.smaller(results, "eval/accuracy", "answer", "nurl"),
        experiment.smaller(results, "eval/accuracy", "answer", "grpo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
