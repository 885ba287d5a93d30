"""Rewards for progress under a prover (process advantage verifiers).

Paper:     Setlur et al., "Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning", arXiv:2410.08146.
Claim:     a step should be rewarded by how much it raises a prover's chance of success, and the prover should be a
           complementary one, such as the best of 4 of the policy: RL then learns faster than on outcomes, while the
           chance itself as a reward makes solutions longer.
Equations: Q(prefix) = P(the prover completes it rightly), by a head on the base model's hidden states fitted to
           completions; A_h = Q_h - Q_{h-1}; best of K: 1 - (1 - Q)^K; reward alpha A_h at the end of step h, 1 for a
           right answer at the end; PPO with a value head, lambda = 1. pav: K = 4, pav_1, pav_32: others. weak: the
           prover samples at temperature 1.6; strong: it was taught right solutions first; --prover-model DIR is any
           model of the policy's vocabulary, of any size and shape. pits: half of the completions seek the first prefix
           that none finishes, the others are spent there and one step before, and nothing behind is learnt. chance:
           alpha Q_h. outcome: alpha = 0; low, high: 0.3 and 3 times alpha. search: no training; beams of two prefixes,
           each continued by four steps, go on where Q + 0.5 A of the step under the best of 4 is largest (search_q: Q
           alone), against the best of eight whole samples by Q of the same head.
Left out:  embedded, KL; provers of another vocabulary; alpha is 1 where the paper has about 5 for larger models; in
           search Q is the prover's, too, where the paper adds the prover's advantage to the chance of the policy
           itself.
Expect:    eval/accuracy after half of the run pav > outcome; at the end pav > pav_1, > pav_32, > weak and > strong;
           eval/steps chance > outcome; search/gain, beam search less best of samples, above 0, and search/beam search >
           search_q.
Measure:   held-out chains of 4 and 5 operations; each seed has its own verifier; equal rollouts (the verifier's own
           completions apart).
Run:       python -m experiments.reward_models.pav
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from experiments.parts import step_search
from experiments.reward_models.parts import progress_verifier, step_labels
from experiments.reward_models.parts import steps as reader
from experiments.reward_models.parts.progress_verifier import Prover, make_progress
from jaxrl_llm import experiment
from jaxrl_llm.advantages import returns
from jaxrl_llm.experiment import recipes
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.types import declared


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values as recalled; see EMBEDDED for the small model."""

    steps: int = 200
    of_steps: Callable = make_progress(4)
    alpha: float = 5.0
    verified_prompts: int = 512  # whose prefixes the verifier learns
    completions: int = 20
    prover: Prover = progress_verifier.BASE
    prover_model: str = ""  # who completes: a folder or a bundled model of --model's vocabulary; empty: --model
    spend: Callable = progress_verifier.everywhere  # on which prefixes the completions are spent
    stages: int = 1  # 0: the base searches with the verifier
    searched: int = 64  # problems
    beamed: Callable = progress_verifier.with_progress  # what a prefix is worth among beams
    kl_weight: float = 0.01  # of the KL to the policy at the start, in the reward of every token; 0: no reference


EMBEDDED = {
    "levels": (4, 5), "steps": 40, "eval_every": 20, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 48,
    "learning_rate": 2e-4, "train_problems": 1024, "eval_problems": 96, "alpha": 1.0, "verified_prompts": 48,
    "completions": 6, "kl_weight": 0.0,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 10, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 2, "verified_prompts": 4, "completions": 2,
    "searched": 2,
}  # fmt: skip
ARMS = {
    "outcome": {"of_steps": progress_verifier.no_process},
    "pav": {},
    "pav_1": {"of_steps": make_progress(1)},
    "pav_32": {"of_steps": make_progress(32)},
    "chance": {"of_steps": progress_verifier.success_itself},
    "weak": {"prover": progress_verifier.WEAK},
    "strong": {"prover": progress_verifier.STRONG},
    "low": {"alpha": experiment.Times(0.3)},
    "high": {"alpha": experiment.Times(3)},
    "pits": {"spend": progress_verifier.around_pits},
    "search": {"stages": 0},
    "search_q": {"stages": 0, "beamed": progress_verifier.chance_alone},
}
METHOD = "pav"
METRICS = ("eval/accuracy", "eval/steps", "eval/right_steps", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "policy/entropy")


class Verified(NamedTuple):
    """Extras of a state: the verifier of progress."""

    verifier: Any


def build(settings: Settings) -> experiment.Plan:
    """The verifier from completions of the base model, then PPO on outcome and progress."""
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)
    most = settings.max_new_tokens // 4
    fit = progress_verifier.make_verifier(
        settings, prompts=settings.verified_prompts, completions=settings.completions,
        most=progress_verifier.prefixes_of(settings), prover=settings.prover,
        prover_model=settings.prover_model, spend=settings.spend,
    )  # fmt: skip

    def token_rewards(params, extras, rows, rewards):
        steps, _ = step_labels.label(stepped, rows)
        chances = progress_verifier.step_success(found, declared(Verified, extras).verifier, rows, steps, most=most)
        paid = returns.at_last_token(rewards.value, rows.mask & rewards.valid[:, None])
        return paid + settings.alpha * reader.at_ends(settings.of_steps(*chances), steps)

    online = step_labels.make_ppo(settings, found, token_rewards, kl_weight=settings.kl_weight)
    kept = episode_methods.model_for(settings.kl_weight)
    stage = experiment.Stage(
        online, settings.steps, lambda params, key: kept(params, key) | Verified(fit(key))._asdict()
    )
    plan = step_labels.make_step_plan(settings, found, [stage] * settings.stages)
    plan = recipes.with_heads(found, plan, value=1)
    if settings.stages:
        return plan
    search = step_search.make_figures(
        found, partial(progress_verifier.last_chance, found), separators=stepped.separators,
        problems=min(settings.searched, found.heldout.tokens.shape[0]), new_tokens=settings.max_new_tokens,
        beamed=settings.beamed, **progress_verifier.search_sizes(settings),
    )  # fmt: skip

    def measure(params, key):
        verifier = fit(jax.random.fold_in(key, 50))
        return plan.measure(params, key) | search(verifier, params["model"], jax.random.fold_in(key, 51))

    return plan._replace(measure=measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Progress under the best of 4 learns faster than outcomes and better than other provers; chances inflate steps."""
    steps = results.curve("pav", "eval/accuracy")[0]
    half = int(min(steps, key=lambda step: abs(step - steps[-1] / 2)))
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "pav", "outcome", step=half),
        experiment.greater(results, "eval/accuracy", "pav", "pav_1"),
        experiment.greater(results, "eval/accuracy", "pav", "pav_32"),
        experiment.greater(results, "eval/accuracy", "pav", "weak"),
        experiment.greater(results, "eval/accuracy", "pav", "strong"),
        experiment.above(results, "search/gain", "search", 0.0),
        experiment.greater(results, "search/beam", "search", "search_q"),
        experiment.greater(results, "eval/steps", "chance", "outcome"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
