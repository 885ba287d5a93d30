"""Arithmetic chains with labels for every written step: the tables, the figures, and a model that likes to repeat."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from experiments.reward_models.parts import text_lines
from jaxrl_llm import reduce
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.run import parts
from jaxrl_llm.train.methods import actor_critic, supervised
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan, Stage
from jaxrl_llm.types import Params, Policy, Responses, Rewards, Trajectories
from jaxrl_llm.verifiers import steps as reader
from jaxrl_llm.verifiers.steps import Steps


class Stepped(NamedTuple):
    """What it takes to label the steps of a bench: ``label(rows, heldout)``, and the tokens that end a step."""

    label: Callable[[Trajectories | Responses, bool], tuple[Steps, Bool[Array, "B T"]]]
    separators: tuple[int, ...]


def reference_steps(problem: Problem) -> list[str]:
    """The texts of the right steps.

    >>> reference_steps(chain.from_parts([3, 5, 4], "+*", 11))
    ['3+5=8', '8*4=10']
    """
    return problem.solution.rsplit("#", 1)[0].split(",")


def make_stepped(settings: OnlineSettings) -> Stepped:
    """The labels of ``bench(settings)``: of chains, or of problems of one's own with worked solutions.

    Equal settings share one.

    Raises:
      UserError: for rows without a worked solution.
    """
    return _stepped(recipes.bench_identity(settings))


@lru_cache(maxsize=8)
def _stepped(identity: tuple) -> Stepped:
    settings = OnlineSettings(**dict(identity))
    if settings.data != "chain" and settings.data in parts.TASKS:
        raise UserError(
            f"--data {settings.data}: the right steps are not known; use --data chain, or rows of your own with worked "
            "solutions"
        )
    if settings.data != "chain":
        return Stepped(*text_lines.make_label(settings))
    encode, levels = recipes.bench(settings).model.tokenizer.encode, settings.levels or None
    sizes = {"train": settings.train_problems, "heldout": settings.eval_problems}
    made = {split: tables.make_split(chain, split=split, n=n, seed=0, levels=levels) for split, n in sizes.items()}
    hashed = {
        split: jnp.asarray(reader.hash_table(encode, [reference_steps(p) for p in problems]))
        for split, problems in made.items()
    }
    separator, mark = encode(",")[0], encode("#")[0]

    def label(rows, heldout):
        found = reader.read_steps(rows, separator=separator, mark=mark)
        return found, reader.right_steps(found, hashed["heldout" if heldout else "train"][rows.problem_ids])

    return Stepped(label, (separator,))


def label(
    stepped: Stepped, rows: Trajectories | Responses, *, heldout: bool = False
) -> tuple[Steps, Bool[Array, "B T"]]:
    """The steps of each response and, at their ends, whether each is one of the reference's (repeats are, too)."""
    return stepped.label(rows, heldout)


def step_scores(
    stepped: Stepped, rows: Trajectories, *, most: int
) -> tuple[Steps, Float[Array, "B K"], Bool[Array, "B K"]]:
    """``label`` as one number a step: 1 right, 0 wrong; and which steps there are."""
    found, right = label(stepped, rows)
    scores, valid = reader.per_step(right.astype(jnp.float32), found, most=most)
    return found, scores, valid


def make_figures(settings: OnlineSettings):
    """Steps of a response, the share of them that are right, and that repeat an earlier one: a ``more`` of plans."""
    return _figures(recipes.bench_identity(settings))


@lru_cache(maxsize=8)
def _figures(identity: tuple):
    stepped = _stepped(identity)

    def more(found: Bench):
        def figures(rows: Trajectories | Responses, rewards: Rewards) -> dict[str, Array]:
            steps, right = label(stepped, rows, heldout=True)
            again = reader.repeated_steps(steps)

            def share(which, of):
                total = jnp.maximum(jnp.sum(of.astype(jnp.float32)), 1.0)
                return jnp.sum((which & of).astype(jnp.float32)) / total

            good = steps.ends & (rewards.value > 0.5)[:, None]
            return {
                "eval/steps": reduce.scalars(steps.count.astype(jnp.float32)),
                "eval/right_steps": share(right, steps.ends),
                "eval/right_steps_of_right": share(right, good),
                "eval/repeated_steps": share(again, steps.ends),
            }

        return figures

    return more


def make_plan(settings: OnlineSettings, found: Bench, stages: Sequence[Stage]) -> Plan:
    """``curricula.make_plan`` with the figures of steps, also where the host judges."""
    plan = curricula.make_plan(settings, found, stages, more=make_figures(settings))
    if found.score is not None:
        return plan
    numbers = settings.temperature, settings.eval_samples
    return plan._replace(measure=_measured_on_host(recipes.bench_identity(settings), *numbers))


@lru_cache(maxsize=8)
def _measured_on_host(identity: tuple, temperature: float, samples: int):
    settings = OnlineSettings(**dict(identity))
    found = recipes.bench(settings)
    rollout = recipes.rollout_of(settings, found, group_size=samples, temperature=temperature, measured=True)
    of_bench = jax.jit(rollout), found.heldout, found.heldout_score, samples
    return partial(recipes.measure_on_host, *of_bench, more=_figures(identity)(found))


def repeating(problem: Problem, times: int) -> str:
    """The solution with its last step written ``times`` more often.

    >>> repeating(chain.from_parts([3, 5], "+", 11), 2)
    '3+5=8,3+5=8,3+5=8#8'
    """
    steps = reference_steps(problem)
    return ",".join([*steps, *[steps[-1]] * times]) + f"#{problem.answer['value']}"


def warm_stage(
    found: Bench, problems: Sequence[Problem], *, steps: int, most_repeats: int = 2, learning_rate: float = 1e-3
) -> Stage:
    """Supervised steps on solutions that repeat their last step 0 to ``most_repeats`` times, as often each."""
    rng = np.random.default_rng(0)
    if found.score is None:
        texts = [text_lines.repeating(p, int(rng.integers(most_repeats + 1))) for p in problems]
        width = max(len(found.model.tokenizer.encode(text)) for text in texts) + 1
        said = map(jnp.asarray, encode_responses(found.model.tokenizer, texts, width=width))
        rows = supervised.joined(found.train.tokens, found.train.valid, *said)
    else:
        pairs = [(p.prompt, repeating(p, int(rng.integers(most_repeats + 1)))) for p in problems]
        width = max(len(a) + len(b) for a, b in pairs) + 2
        rows = supervised.supervised_rows(found.model, pairs, width=width)
    method = supervised.make_supervised(found.model.policy, rows, rows_per_step=32, tx=optax.adam(learning_rate))
    return Stage(method, steps)


def make_ppo(settings: OnlineSettings, found: Bench, token_rewards: Callable[..., Array]) -> Online:
    """PPO with a value head and Monte Carlo returns of ``token_rewards(params, extras, rows, rewards) -> [B, T]``."""
    policy, temperature = found.model.policy, settings.temperature
    return recipes.make_online(
        settings,
        found,
        estimate=actor_critic.make_value_estimate(
            policy, token_rewards=token_rewards, lam=1.0, temperature=temperature
        ),
        loss=actor_critic.make_actor_critic_loss(policy, temperature=temperature),
        tx=optax.adam(settings.learning_rate),
        actor=recipes.model_of,
    )


def of_model(method: Offline) -> Offline:
    """The same stage for parameters ``{"model": ..., heads}``."""
    return method._replace(loss=lambda params, *rest: method.loss(params["model"], *rest))


def final_hidden(policy: Policy, params: Params, rows: Trajectories) -> Float[Array, "B T D"]:
    """Hidden states at every token, for a head of a process reward."""
    return jax.lax.stop_gradient(policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids))
