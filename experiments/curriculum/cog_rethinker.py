"""Problems that a whole group fails are decomposed, then refined (Cog-Rethinker).

Paper:     Ren et al., "Cog-Rethinker: Hierarchical Metacognitive Reinforcement Learning for LLM Reasoning",
           arXiv:2510.15979.
Claim:     asking again for failed problems, first in sub-problems and then with a wrong solution to correct, turns
           wasted samples into training data; a supervised term that puts these answers under the direct prompt carries
           the gain over to it.
Equations: G responses to x; all wrong: G to decompose(x); still all wrong: G to refine(x, a wrong response); groups
           with 0 < mean r < 1 train, each under the prompt that made it, A = (r - mean) / std; loss + c mean over right
           responses y of the two later stages of -1/|y| log pi(y | x). direct: x is asked again; decompose, refine: one
           template and x once again; no_sft: c = 0; direct_sft: c times that term over all right responses to x alone.
           Over rows of one's own both requests are words: decompose(x) asks to split, solve and put together (inside
           the message with --chat), refine stands behind the attempt as a user's next message, or a paragraph.
Left out:  words in the embedded world, where to decompose means to begin with the first operation of the chain, read
           off the prompt (a rule, no sub-problem that the model states itself), to refine that the attempt and a ';'
           stand behind the prompt (taught first, in all arms, for --warm-steps on as many plain problems as
           corrections: on corrections alone the copy forgot the plain prompt); counts, weights, words and choice of the
           attempt are a reconstruction (the paper's text was not at hand).
Expect:    group/degenerate_fraction cog < direct; eval/accuracy cog > direct and cog > no_sft.
Measure:   held-out chains of 4 to 6 operations under the direct prompt; 8 seeds, at most three draws of a prompt in
           every arm (hints/draws), which the columns rollouts and tokens count. warm/gain: accuracy on them that the
           stage before gives all arms, of 16 samples each; where it costs 0.05 or more the bed is invalid.
Run:       python -m experiments.curriculum.cog_rethinker
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.curriculum.parts import hints
from experiments.parts import start_rates
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.supervised import sft_loss
from jaxrl_llm.run.bench import is_generated, problem_sets
from jaxrl_llm.run.parts import Model
from jaxrl_llm.train.methods import builders, supervised
from jaxrl_llm.types import Params, declared


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's numbers are not known; see EMBEDDED for the small model."""

    steps: int = 200
    later: tuple = (hints.first_operation, hints.shown_attempt)  # how a failed prompt is asked again
    sft_weight: float = 0.1
    sft_from: int = 1  # the first stage whose right responses are imitated
    warm_steps: int = 0  # supervised steps on corrections of a wrong attempt, and on as many plain problems


EMBEDDED = {
    "levels": (4, 5, 6), "steps": 200, "eval_every": 40, "prompts_per_step": 6, "group_size": 4, "max_new_tokens": 52,
    "learning_rate": 1.5e-4, "eval_problems": 96, "train_problems": 1024, "warm_steps": 40,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 4, "warm_steps": 2,
}  # fmt: skip
AGAIN = {"later": (hints.no_hint, hints.no_hint)}
ARMS = {
    "direct": {**AGAIN, "sft_weight": 0.0},
    "cog": {},
    "decompose": {"later": (hints.first_operation, hints.no_hint)},
    "refine": {"later": (hints.no_hint, hints.shown_attempt)},
    "no_sft": {"sft_weight": 0.0},
    "direct_sft": {**AGAIN, "sft_from": 0},
}
BED = experiment.Bed(judges=(("direct", "warm/gain", -0.05),))
METRICS = ("eval/accuracy", "eval/pass@4", "group/degenerate_fraction", "hints/draws", "warm/gain")
CURVES = (*METRICS[:-1], "reward/mean", "sft/rows", "policy/entropy")


class Plain(NamedTuple):
    """Extras of a batch: right responses behind the prompt without its hint."""

    plain: hints.PlainAnswers


def build(settings: Settings) -> experiment.Plan:
    """One online stage of staged rollouts; of chains from a copy that was taught to correct."""
    found, generated = recipes.bench(settings), is_generated(settings.data)
    model, size = found.model, settings.group_size
    problems = curricula.train_problems(settings) if generated else list(problem_sets(settings)[0])
    asked = (hints.no_hint, *(settings.later if generated else map(in_words, settings.later)))
    behind = model.tokenizer.encode(";") if generated else hints.refine_words(model, problems, chat=settings.chat)
    table = hints.encode_hints(
        model, problems, asked, spare_tokens=settings.max_new_tokens + len(behind), chat=settings.chat, phrase="\n"
    )
    rollout = recipes.rollout_of(settings, found)
    if not generated:
        table = hints.asked_in_words(table)
        check_room(settings, model, table)
    judge = curricula.device_score(found) if generated else curricula.train_score(found)
    prompts = hints.make_attempt_prompts(table, asked, model.tokenizer, group_size=size, separator=behind)
    slots = hints.make_staged_rollout(rollout, judge, found.train.answers, table, group_size=size, prompts=prompts)

    def row_extras(extras, rows, rewards):
        right = (rewards.value > 0.5) & rewards.valid & (hints.stage_of(rows) >= settings.sft_from)
        return hints.draw_extras(extras, rows, rewards) | Plain(hints.plain_answers(rows, table, right))._asdict()

    policy_loss = builders.make_policy_loss(
        model.policy, clipped_policy_loss, temperature=settings.temperature, diagnostics=hints.draw_figures
    )

    def loss(params, batch):
        value, metrics = policy_loss(params, batch)
        (plain,) = declared(Plain, batch.extras)
        taught = jnp.any(plain.mask, axis=1)
        logp, _ = builders.score_tokens(model.policy, params, plain)
        sft = reduce.scalars(reduce.sequences(sft_loss(logp, plain.mask).loss, plain.mask, mode="mean"), taught)
        return value + settings.sft_weight * sft, metrics

    warm_steps = settings.warm_steps if generated else 0  # a loaded model knows what to correct means

    def figures(batch, metrics):
        rows = jnp.any(declared(Plain, batch.extras).plain.mask, axis=1)
        gain = warm_gain(settings, warm_steps) if warm_steps else 0.0
        return {"sft/rows": jnp.sum(rows, dtype=jnp.float32), "warm/gain": jnp.asarray(gain, jnp.float32)}

    def mixed(rows, rewards):
        return group.group_spread(rewards.value, rows.group_ids, valid=rewards.valid) > 0

    slots |= {"figures": figures, "whole_batch": "its supervised term is a mean" if settings.sft_weight else ""}
    online = curricula.make_single_turn_grpo(settings, found, keep=mixed, row_extras=row_extras, loss=loss, **slots)
    plan = curricula.make_single_turn_plan(settings, found, [experiment.Stage(online, settings.steps)])
    return plan._replace(init=lambda key: corrected(settings, warm_steps)) if warm_steps else plan


def in_words(ask: Callable[[Problem], str]) -> Callable[[Problem], str]:
    """The same way of asking, of rows of one's own."""
    return hints.in_parts if ask is hints.first_operation else ask


def check_room(settings: Settings, model: Model, table: hints.Hints) -> None:
    """UserError where the model's context does not hold a problem, an attempt, the request to refine and an answer."""
    columns = table.tokens.shape[2] + settings.max_new_tokens
    if columns > model.config.max_positions:
        raise UserError(
            f"problems with an attempt behind them and --max-new-tokens {settings.max_new_tokens} take {columns} of "
            f"the model's {model.config.max_positions} positions; lower --max-new-tokens, or drop long rows"
        )


@recipes.cached_by_task
def corrected(settings: recipes.OnlineSettings, steps: int) -> Params:
    """The model after ``steps`` on solutions behind a wrong attempt at a chain and a ';', and behind plain prompts.

    The copy that all arms begin with; it knows what to correct means, and still answers what is asked plainly.
    Computed once.
    """
    model, pairs = recipes.bench(settings).model, taught_pairs(curricula.train_problems(settings))
    return supervised.imitated_pairs(model, pairs, width=max(len(a) + len(b) for a, b in pairs) + 2, steps=steps)


@recipes.cached_by_task
def warm_gain(settings: recipes.OnlineSettings, steps: int) -> float:
    """What ``corrected`` has gained over the model on held-out problems under the plain prompt; a loss is negative."""
    found = recipes.bench(settings)
    sampling = {"samples": start_rates.SAMPLES, "max_new_tokens": settings.max_new_tokens}
    after = start_rates.heldout_rates(found, corrected(settings, steps), **sampling)
    return float(np.mean(after - start_rates.base_rates(settings, start_rates.SAMPLES)))


def taught_pairs(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """Prompts with solutions: of each problem one behind a wrong attempt, and one behind the problem alone."""
    rng = np.random.default_rng(0)
    return [(prompt, p.solution) for p in problems for prompt in (f"{p.prompt}{chain.flawed(rng, p)};", str(p.prompt))]


def claim(results: experiment.Results) -> experiment.Claim:
    """Decomposing and refining leave fewer groups idle than asking again, and the supervised term carries it over."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "cog", "direct"),
        experiment.smaller(results, "group/degenerate_fraction", "cog", "direct"),
        experiment.greater(results, "eval/accuracy", "cog", "no_sft"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
