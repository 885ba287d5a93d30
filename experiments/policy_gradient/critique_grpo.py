"""A refinement after a critique in the group, trained as if it had been the first answer (Critique-GRPO).

Paper:     Zhang et al., "Critique-GRPO: Advancing LLM Reasoning with Natural Language and Numerical Feedback",
           arXiv:2506.03106.
Claim:     rewards alone leave what a model cannot solve unsolved; one refinement guided by a critique in each group
           solves it, and beats GRPO and imitation of experts; critiques that say more help more.
Equations: A_i = r_i - mean over the group with its refinement; own tokens -rho A; tokens of the refinement -f(p) A,
           f(p) = p / (p + 0.1), p under the plain prompt; sum / constant, entropy bonus 0.001. indicative: the critique
           says right or wrong; answer: also the right answer; critique: where the first wrong step is (of rows of one's
           own, whose steps are not the only right ones, it says the answer). plain_ratio: -rho A for all; drop_wrong:
           no refinement that is wrong; expert: the reference solution in its place.
           self_critique: the policy reads prompt and response, is told no reward, and writes the critique itself;
           model_critique: another model does, frozen: --critic-model DIR, here a copy trained on critiques alone.
Left out:  nothing of the method. Critiques of all arms but these two are scripted.
Expect:    unsolved/accuracy: critique > grpo and critique > indicative; eval/accuracy: critique > grpo.
Measure:   held-out chains of six to eight operations, where the base has read five; every arm starts from one copy that
           has seen refinements and errs in five of six first answers, the same for all seeds. unsolved: the chains of
           which this start solves at most 2 of 16 samples, not 1 in 20, since a constant guess is right for one in six.
           8 seeds, equal responses of the policy (grpo: twice as many, for none are refinements) and updates.
Run:       python -m experiments.policy_gradient.critique_grpo
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts import start_rates
from experiments.parts.beside import load_beside
from experiments.policy_gradient.parts import refinement
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.losses import mixed
from jaxrl_llm.losses.entropy import entropy_bonus_terms
from jaxrl_llm.run import parts as job
from jaxrl_llm.run.options import sampling_of
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.plan import no_extras
from jaxrl_llm.types import Key, Params, TrainState, declared


class Critic(NamedTuple):
    """Extras of a state: the parameters of the critic, where it is a model of its own."""

    critic: Params


class Criticism(NamedTuple):
    """Who criticises: the function, the parameters it reads of a state, and the extras that hold them."""

    criticise: refinement.Criticise
    longest: int  # tokens between an attempt and the next, at most
    reads: Callable[[TrainState], Params]
    extras: Callable[[Params, Key], dict[str, Any]] = no_extras


def _ends(model: job.Model) -> dict[str, Any]:
    return {"eos_ids": model.tokenizer.eos_ids, "pad_id": model.tokenizer.pad_id}


def scripted(settings, bench) -> Criticism:
    """``settings.critic``, who knows what is right."""
    problems = recipes.solved_problems(settings)
    critiques = refinement.encode_critiques(bench.model, problems, settings.critic, chat=settings.chat)
    longest = critiques.tokens.shape[-1]
    return Criticism(refinement.make_scripted(critiques, **_ends(bench.model)), longest, lambda state: ())


def _written(settings, bench, by: job.Model) -> tuple[refinement.Criticise, int]:
    sampling = sampling_of(settings)._asdict() | {"max_new_tokens": settings.critique_tokens}
    speak = recipes.rollout_of_model(by, group_size=1, **sampling)
    words = refinement.words_of(bench.model, recipes.solved_problems(settings), chat=settings.chat)
    longest = len(words.criticise) + settings.critique_tokens + len(words.again)
    return refinement.make_written(speak, words, **_ends(bench.model)), longest


def by_policy(settings, bench) -> Criticism:
    """The policy itself, as it is at each step."""
    return Criticism(*_written(settings, bench, bench.model), lambda state: state.params)


def by_model(settings, bench) -> Criticism:
    """A model of its own that does not train: the named one, else the start, of chains after it learnt to criticise."""
    model = bench.model
    if settings.critic_model:
        most = bench.train.tokens.shape[1] + settings.max_new_tokens + settings.critique_tokens
        by = load_beside("--critic-model", settings.critic_model, model, tokens=most)
        params = by.params
    elif settings.data == "chain":
        by = model
        params = refinement.trained_critic(settings, chain.flawed, wrong=0.7, steps=settings.critic_steps)
    else:
        by, params = model, model.params
    reads = lambda state: declared(Critic, state.extras).critic  # noqa: E731
    return Criticism(*_written(settings, bench, by), reads, lambda _, key: Critic(params)._asdict())


def refined(settings, bench, rollout, *, only_right: bool = False) -> tuple[dict[str, Callable], Callable]:
    """The best refinement after a critique takes the last place of its group; without a critic none does."""
    if settings.critic is None:
        return {"rollout": rollout}, no_extras
    said, size = settings.criticise(settings, bench), settings.group_size
    longest = bench.train.tokens.shape[1] + 2 * settings.max_new_tokens + said.longest
    if longest > bench.model.config.max_positions:
        raise UserError(
            f"a second attempt stands at up to {longest} tokens, the model has {bench.model.config.max_positions} "
            "positions; lower --max-new-tokens or --critique-tokens"
        )
    parts = rollout, recipes.rollout_of(settings, bench, group_size=1), curricula.train_score(bench)
    sizes = {"group_size": size, "new_tokens": settings.max_new_tokens}
    slots = refinement.make_refining_rollout(
        *parts, bench.train.answers, said.criticise, **sizes, only_right=only_right
    )
    return slots | {"actor": lambda state: (state.params, said.reads(state))}, said.extras


def refined_if_right(settings, bench, rollout) -> tuple[dict[str, Callable], Callable]:
    """A refinement that is wrong leaves its place empty."""
    return refined(settings, bench, rollout, only_right=True)


def demonstrated(settings, bench, rollout) -> tuple[dict[str, Callable], Callable]:
    """The reference solution in place of the refinement."""
    return {"rollout": recipes.demonstrating_rollout(settings, bench, rollout)}, no_extras


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 400
    max_new_tokens: int = 6144
    critic: refinement.Critic | None = refinement.located  # None: no refinement
    criticise: Callable[..., Criticism] = scripted  # who says it: by_policy, by_model, or the scripted critic
    critic_model: str = ""  # folder of the model that criticises, in the arm that has one
    critique_tokens: int = 1024  # of a critique that a model writes, at most
    critic_steps: int = 1000  # of supervised fine-tuning of the embedded critic
    last: Callable[..., tuple[dict, Callable]] = refined  # what takes the last place of a group
    outside_loss: Callable = mixed.shaped_probability_loss  # of the refinement
    warm_steps: int = 500  # of supervised fine-tuning on pairs of attempts


EMBEDDED = {
    "levels": (6, 7, 8), "steps": 120, "eval_every": 12, "prompts_per_step": 6, "max_new_tokens": 68,
    "learning_rate": 1e-4, "eval_problems": 192, "train_problems": 1024, "warm_steps": 300,
    "critique_tokens": 4, "critic_steps": 300,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 4, "warm_steps": 2, "critique_tokens": 3, "critic_steps": 2,
}  # fmt: skip
ARMS = {
    "grpo": {"critic": None, "group_size": 16}, "critique": {}, "indicative": {"critic": refinement.indicative},
    "answer": {"critic": refinement.with_answer}, "plain_ratio": {"outside_loss": mixed.ratio_loss},
    "drop_wrong": {"last": refined_if_right}, "expert": {"last": demonstrated, "group_size": 16},
    "self_critique": {"criticise": by_policy}, "model_critique": {"criticise": by_model},
}  # fmt: skip
BED = experiment.Bed(chance=0.16)
METRICS = (
    "eval/accuracy",
    "unsolved/accuracy",
    "eval/pass@4",
    "outside/right",
    "outside/rescued",
    "policy/entropy",
    "eval/tokens",
)
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "grad/norm")


@lru_cache(maxsize=4)  # arms share the compiled measurement
def of_the_unsolved(identity: tuple, warm_steps: int) -> Callable[..., dict[str, Array]]:
    """``recipes.summary``, and the accuracy on problems that the practised start does not solve."""

    def figures(found, answers, rows, rewards):
        rates = start_rates.start_rates(found, practised(OnlineSettings(**dict(identity)), warm_steps), rows)
        solved = start_rates.right_where_the_start_failed(rewards, rates)
        return recipes.of_samples(found, answers, rows, rewards) | {"unsolved/accuracy": solved}

    return figures


def practised(settings: OnlineSettings, steps: int) -> Params:
    """The copy that all arms begin with, see ``refinement.practised``."""
    critics = (refinement.indicative, refinement.with_answer, refinement.located)
    return refinement.practised(settings, chain.flawed, critics, wrong=0.85, steps=steps)


class Right(NamedTuple):
    """Extras of a batch: the reward of each response."""

    right: Array


def build(settings: Settings) -> experiment.Plan:
    """One online stage; the last place of each group may hold a refinement or a demonstration."""
    bench, size, new = recipes.bench(settings), settings.group_size, settings.max_new_tokens
    model = bench.model
    slots, extras = settings.last(settings, bench, recipes.rollout_of(settings, bench))
    slots |= {"tx": optax.adam(settings.learning_rate)}

    def outside(extras, rows, rewards):
        place = recipes.last_members(rows.tokens.shape[0], size)
        there = place & (settings.critic is not None)
        return recipes.Outside(there)._asdict() | Right(rewards.value)._asdict()

    def terms_of(logp, entropy, batch):
        arguments = logp, builders.current_anchor(logp, batch), batch.advantages, batch.mask
        own, other = mixed.ratio_loss(*arguments), settings.outside_loss(*arguments)
        return mixed.combined(own, other, recipes.outside_of(batch.extras))

    def figures(batch, metrics):
        right, outside = declared(Right, batch.extras).right, recipes.outside_of(batch.extras)
        alone = jnp.any((right > 0.5).reshape(-1, size)[:, :-1], axis=1)  # solved without what came from outside
        last = ((right > 0.5) & outside).reshape(-1, size)[:, -1]
        rescued = reduce.scalars((last & ~alone).astype(jnp.float32))
        return {"outside/right": reduce.scalars(right, outside), "outside/rescued": rescued}

    advantages = builders.per_response(group.dr_grpo_advantages)
    same = {"reduction": "constant", "temperature": settings.temperature}
    bonus = {"extra_terms": lambda _, entropy, batch: 0.001 * entropy_bonus_terms(entropy, batch.mask)}
    loss = builders.make_batch_loss(model.policy, terms_of, length_tokens=new, **same, **bonus)
    slots |= {"estimate": builders.make_estimate(model.policy, advantages, row_extras=outside, **same)}
    slots |= {"loss": loss, "figures": figures}
    plan = recipes.one_stage(settings, bench, recipes.make_online(settings, bench, **slots), extras=extras)
    if settings.data != "chain":  # a model for rows of your own knows what a second attempt is
        return plan
    unsolved = of_the_unsolved(recipes.bench_identity(settings), settings.warm_steps)
    measure = recipes.make_measure(settings, figures=unsolved)
    return plan._replace(init=lambda key: practised(settings, settings.warm_steps), measure=measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """A refinement after a critique solves more of what was unsolved than GRPO, the more the critique says."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "unsolved/accuracy", "critique", "grpo"),
        experiment.greater(results, "unsolved/accuracy", "critique", "indicative"),
        experiment.greater(results, "eval/accuracy", "critique", "grpo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
