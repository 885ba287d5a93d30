"""A better policy as a guide that begins or ends the responses: PPO++, AggreVaTeD, LOLS and D2LOLS (RLGF).

Paper:     Chang et al., "Learning to Generate Better Than Your LLM", arXiv:2306.11816.
Claim:     letting a guide write the beginning of a response (PPO++), or its end (AggreVaTeD), beats PPO, above all
           AggreVaTeD first and PPO++ afterwards (D2LOLS); the policy ends up better than its guide.
Equations: a roll-in is cut at h ~ U{1 .. l-1} with probability beta, else at 0. ppo_pp: guide in, policy out, both
           losses on the policy's tokens; aggrevated: policy in, guide out, policy loss on the roll-in, value loss on
           the guide's tokens. lols: PPO++ with probability 0.8 in each iteration; d2lols: AggreVaTeD at first. GAE
           over the whole response, a value head for either roll-out; rewards less 0.001 (log pi - log start) at every
           token of the response, 0.1 of the likelihood of reference solutions in the loss (free: without both).
           ppo_pp_30, ppo_pp_90: other beta (0 is ppo). The guide is sampled from and asked for nothing else:
           --guide-model DIR is any model of the policy's vocabulary, of any size and shape, here or behind --guide
           ADDRESS, where it is called so.
Left out:  nothing but the paper's tasks (reviews of films, summaries, common sense).
Expect:    eval/accuracy: ppo_pp > ppo, d2lols > ppo and ppo_pp > guide.
Measure:   held-out Countdown; the guide is the same small model after supervised fine-tuning on solutions, sampled at
           temperature 0.4 (the paper's: from the likeliest tokens) and one for all seeds, as any given model is; it is
           an arm by itself, and the bed is invalid unless it beats ppo. 8 seeds, equal rollouts of the policy, at
           temperature 1, and updates; the guide's come on top, and the columns rollouts and tokens count both. Random
           legal steps are right for 0.12, ceiling 1.
Run:       python -m experiments.policy_gradient.rlgf
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts.beside import load_beside
from experiments.policy_gradient.parts import roll_in_out
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import returns
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses import kl
from jaxrl_llm.losses.supervised import sft_loss
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.run import parts as job
from jaxrl_llm.tools import endpoints
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.train.plan import Plan
from jaxrl_llm.types import Params, Trajectories, declared


class Guided(NamedTuple):
    """Extras of a state: the parameters of the guide."""

    guide: Params


class Guide(NamedTuple):
    """Who guides: its parameters, and the rollout in which it and the policy take turns."""

    params: Callable[[], Params]
    mixed: roll_in_out.Mixed


class Tossed(NamedTuple):
    """Extras of a state, and of each row of a batch: whether the policy ends the responses, which the guide begins."""

    own: Array


class Parted(NamedTuple):
    """Extras of a batch: tokens that train the policy and those that train the value, and how many they are."""

    chosen: Array
    judged: Array
    totals: tuple[Array, Array]


class Solved(NamedTuple):
    """Extras of a batch: the prompts with their solutions."""

    gold: Trajectories


def writer(settings, model: job.Model, temperature: float) -> roll_in_out.Writer:
    """How a model writes in whole groups, and alone."""
    sampling = {"max_new_tokens": settings.max_new_tokens, "temperature": temperature}
    return roll_in_out.Writer(*(
        recipes.rollout_of_model(model, group_size=n, **sampling) for n in (settings.group_size, 1)
    ))  # fmt: skip


def server(settings) -> endpoints.Completion:
    """The guide behind an address, which has answered once.

    Raises:
      UserError: without a name, or for flags of the endpoint out of range; RunStopped: where nothing answers.
    """
    if not settings.guide_model:
        raise UserError(f"--guide {settings.guide} needs --guide-model NAME, by which the server knows its model")
    endpoints.check_one_process(f"--guide {settings.guide}")
    complete = endpoints.make_completion(
        settings.guide, settings.guide_model,
        cache=endpoints.replies_of("guide", settings.guide, settings.guide_model),
        budget=endpoints.budget_of(settings), temperature=settings.endpoint_temperature,
        max_tokens=settings.max_new_tokens, seed=settings.endpoint_seed,
    )  # fmt: skip
    try:
        complete("1")
    except endpoints.Unanswered as error:
        raise UserError(f"--guide {settings.guide}: {error}") from error
    return complete


def guide_of(settings, bench) -> Guide:
    """The model behind an address or the named one, else the policy's own, fine-tuned on solutions when asked for."""
    own, new = writer(settings, bench.model, settings.temperature), settings.max_new_tokens
    sizes = {"new_tokens": new, "share": settings.share, "pad_id": bench.model.tokenizer.pad_id}
    if settings.guide:
        guide = roll_in_out.behind_address(
            server(settings), bench.model, new_tokens=new, group_size=settings.group_size,
            workers=settings.endpoint_concurrency,
        )  # fmt: skip
        return Guide(dict, roll_in_out.in_two_programs(own, guide, **sizes))
    if not settings.guide_model:
        params = partial(
            curricula.solutions_imitated, settings, steps=settings.guide_steps, learning_rate=settings.sft_rate
        )
        if settings.guide_temperature == settings.temperature:
            return Guide(params, roll_in_out.in_one_program(own, **sizes))
        cold = writer(settings, bench.model, settings.guide_temperature)
        return Guide(params, roll_in_out.in_two_programs(own, cold, **sizes))
    most = bench.train.tokens.shape[1] + 2 * new  # a roll-out begins behind a whole roll-in at most
    by = load_beside("--guide-model", settings.guide_model, bench.model, tokens=most)
    cold = writer(settings, by, settings.guide_temperature)
    return Guide(lambda: by.params, roll_in_out.in_two_programs(own, cold, **sizes))


def as_given(settings) -> int:
    """Iterations of AggreVaTeD before those of PPO++: so many as the settings say."""
    return settings.switch


def for_a_share(settings) -> int:
    """A share of the steps."""
    return round(settings.early * settings.steps)


def guided(settings, bench):
    """PPO; a coin in the state's extras says who begins and who ends the next responses."""
    guide, new, before = guide_of(settings, bench), settings.max_new_tokens, settings.before(settings)
    judge = curricula.train_score(bench)
    whole = partial(roll_in_out.whole, new_tokens=new)

    def toss(key, step):
        return (step >= before) & (jax.random.uniform(jax.random.fold_in(key, step)) < settings.own)

    def rollout(actor, *arguments):
        own = actor["own"]
        rows, prefix = guide.mixed(own, actor["policy"], actor["guide"], *arguments)
        return rows._replace(mask=rows.mask & (prefix != own))  # the policy chose what the guide did not

    def with_critic(params, own):
        return {"model": params["model"], "value": roll_in_out.either(own, params["value"], params["of_guide"])}

    policy, heat = bench.model.policy, settings.temperature
    solutions, there = recipes.demonstrations(settings)

    def restrained(params, extras, rows, rewards):
        paid = returns.at_last_token(rewards.value, rows.mask)
        reference, _ = builders.score_tokens(policy, bench.model.params, rows, temperature=heat)
        written, _ = builders.score_tokens(policy, params["model"], rows, temperature=heat)
        near = jax.lax.stop_gradient(written)
        return kl.kl_in_reward(paid, near, reference, rows.mask, coefficient=settings.kl_weight)

    def gold(params, extras, rows, rewards):
        ids = rows.problem_ids
        every = jnp.ones(ids.shape, bool)
        return Solved(given_responses.with_responses(rows, every, solutions[ids], there[ids]))._asdict()

    def like(params, hidden, batch):
        (every,) = declared(Solved, batch.extras)
        rows = jax.tree.map(lambda x: x[:: settings.group_size], every)  # one of each group
        logp, _ = builders.score_tokens(policy, params["model"], rows, temperature=heat)
        value = reduce.tokens(sft_loss(logp, rows.mask).loss, rows.mask)
        return settings.likelihood * value, {"imitation/loss": value}

    more = {"token_rewards": restrained} if settings.kl_weight else {}
    more |= {"row_extras": gold} if settings.likelihood else {}
    plain = actor_critic.make_value_estimate(policy, temperature=heat, **more)
    ppo = actor_critic.make_actor_critic_loss(
        bench.model.policy,
        temperature=settings.temperature,
        policy_tokens=lambda batch: declared(Parted, batch.extras).chosen,
        value_tokens=lambda batch: declared(Parted, batch.extras).judged,
        totals=lambda batch: declared(Parted, batch.extras).totals,
        **({"extra_loss": like} if settings.likelihood else {}),
    )

    def estimate(params, extras, rows, rewards):
        own = declared(Tossed, extras).own
        batch = plain(with_critic(params, own), extras, whole(rows), rewards)
        chosen, rest = rows.mask & batch.mask, batch.mask & ~rows.mask
        judged = jnp.where(own, chosen, rest)
        coin = Tossed(jnp.full(chosen.shape[:1], own))
        totals = tuple(jnp.sum(x, dtype=jnp.float32) for x in (chosen, judged))
        more = Parted(chosen, judged, totals)._asdict() | coin._asdict()
        return batch._replace(extras=batch.extras | more)

    slots = {"rollout": rollout, "estimate": estimate, "tx": optax.adam(settings.learning_rate)}
    slots["whole_batch"] = "the likelihood of references is a mean over it" if settings.likelihood else ""
    slots["score"] = lambda answers, rows: judge(answers, whole(rows))
    slots["loss"] = lambda params, batch: ppo(with_critic(params, declared(Tossed, batch.extras).own[0]), batch)
    slots["actor"] = lambda state: state.extras | {"policy": state.params["model"]}
    slots["remember"] = lambda state, *_: state.extras | Tossed(toss(state.key, state.step))._asdict()
    online = recipes.make_online(settings, bench, updates_per_rollout=settings.updates_per_rollout, **slots)
    first = {"extras": lambda params, key: Guided(guide.params())._asdict() | Tossed(toss(key, 0))._asdict()}
    return recipes.with_heads(bench, recipes.one_stage(settings, bench, online, **first), value=1, of_guide=1)


def guide_alone(settings, bench):
    """The guide is measured, nothing is trained."""
    if settings.guide:
        raise UserError(
            "--arm guide measures a model that is here; give --guide-model DIR without --guide, or other arms"
        )
    guide = guide_of(settings, bench)
    changes = {"model": settings.guide_model or settings.model, "temperature": settings.guide_temperature}
    measured = dataclasses.replace(settings, **changes)
    return Plan(lambda key: guide.params(), (), recipes.make_measure(measured))


@dataclasses.dataclass(frozen=True)
class Settings(endpoints.Settings, recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 50
    updates_per_rollout: int = 5
    share: float = 0.6  # beta: responses that keep a part of their roll-in
    own: float = 1.0  # probability of PPO++ in an iteration, else AggreVaTeD
    switch: int = 0  # iterations of AggreVaTeD before that
    early: float = 0.4  # or these, as a share of the steps, where AggreVaTeD comes first
    before: Callable[..., int] = as_given
    guide: str = ""  # address of a server that goes on behind token ids of the vocabulary of --model, https://HOST/v1
    guide_model: str = ""  # its name there, or a folder of that vocabulary; empty: --model fine-tuned on solutions
    guide_temperature: float = 1.0  # of a guide that is here; of one behind an address --endpoint-temperature
    guide_steps: int = 1000  # of supervised fine-tuning
    sft_rate: float = 1e-5  # of that
    kl_weight: float = 0.001  # in the reward of every token
    likelihood: float = 0.1  # of reference solutions
    learn: Callable[..., Plan] = guided


EMBEDDED = {
    "data": "countdown", "levels": (3,), "steps": 120, "eval_every": 15, "prompts_per_step": 6, "max_new_tokens": 18,
    "learning_rate": 2e-4, "eval_problems": 192, "updates_per_rollout": 2, "train_problems": 2048, "guide_steps": 240,
    "sft_rate": 1e-3, "guide_temperature": 0.4, "early": 1 / 3,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 4, "guide_steps": 2,
}  # fmt: skip
ARMS = {
    "ppo": {"share": 0.0}, "ppo_pp": {}, "aggrevated": {"own": 0.0, "share": 0.8}, "lols": {"own": 0.8, "share": 0.8},
    "d2lols": {"before": for_a_share, "share": 0.8}, "guide": {"learn": guide_alone},
    "ppo_pp_30": {"share": 0.3}, "ppo_pp_90": {"share": 0.9}, "free": {"kl_weight": 0.0, "likelihood": 0.0},
}  # fmt: skip
BED = experiment.Bed(positive="guide", baseline="ppo", chance=0.12)
METRICS = ("eval/accuracy", "eval/pass@4", "policy/entropy", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "value/value_error", "grad/norm")


def build(settings: Settings) -> experiment.Plan:
    """One online stage, or none; the guide is imitated when it is asked for."""
    bench = recipes.bench(settings)
    return settings.learn(settings, bench)


def claim(results: experiment.Results) -> experiment.Claim:
    """Guided beginnings beat PPO, alone and after guided ends, and the policy passes its guide."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "ppo_pp", "ppo"),
        experiment.greater(results, "eval/accuracy", "d2lols", "ppo"),
        experiment.greater(results, "eval/accuracy", "ppo_pp", "guide"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
