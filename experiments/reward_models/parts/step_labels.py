"""Arithmetic chains with labels for every written step: the tables, the figures, and a model that likes to repeat."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.train.methods import actor_critic, supervised
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Params, Policy, Rewards, Trajectories
from jaxrl_llm.verifiers import steps as reader
from jaxrl_llm.verifiers.steps import Steps


class Stepped(NamedTuple):
    """What it takes to label the steps of a bench: hashes of its problems' steps, and the tokens that end them."""

    train: Int[Array, "N S"]
    heldout: Int[Array, "M S"]
    separator: int
    mark: int


def reference_steps(problem: Problem) -> list[str]:
    """The texts of the right steps.

    >>> reference_steps(chain.from_parts([3, 5, 4], "+*", 11))
    ['3+5=8', '8*4=10']
    """
    return problem.solution.rsplit("#", 1)[0].split(",")


def make_stepped(settings: OnlineSettings) -> Stepped:
    """The tables of ``bench(settings)``; equal settings share one.

    Raises:
      UserError: for problems that are no chains: their steps are not known, and those of chains are others.
    """
    if settings.data != "chain":
        raise UserError(
            f"--data {settings.data}: the right steps are known of generated chains alone, and a response to another "
            "problem would be graded against them; use --data chain, or an experiment that judges outcomes"
        )
    return _stepped(recipes.bench_identity(settings))


@lru_cache(maxsize=8)
def _stepped(identity: tuple) -> Stepped:
    settings = OnlineSettings(**dict(identity))
    encode, levels = recipes.bench(settings).model.tokenizer.encode, settings.levels or None
    sizes = {"train": settings.train_problems, "heldout": settings.eval_problems}
    made = {split: tables.make_split(chain, split=split, n=n, seed=0, levels=levels) for split, n in sizes.items()}
    hashed = {
        split: jnp.asarray(reader.hash_table(encode, [reference_steps(p) for p in problems]))
        for split, problems in made.items()
    }
    return Stepped(hashed["train"], hashed["heldout"], encode(",")[0], encode("#")[0])


def label(stepped: Stepped, rows: Trajectories, *, heldout: bool = False) -> tuple[Steps, Bool[Array, "B T"]]:
    """The steps of each response and, at their ends, whether each is one of the reference's (repeats are, too)."""
    found = reader.read_steps(rows, separator=stepped.separator, mark=stepped.mark)
    table = (stepped.heldout if heldout else stepped.train)[rows.problem_ids]
    return found, reader.right_steps(found, table)


def step_scores(
    stepped: Stepped, rows: Trajectories, *, most: int
) -> tuple[Steps, Float[Array, "B K"], Bool[Array, "B K"]]:
    """``label`` as one number a step: 1 right, 0 wrong; and which steps there are."""
    found, right = label(stepped, rows)
    scores, valid = reader.per_step(right.astype(jnp.float32), found, most=most)
    return found, scores, valid


def make_figures(settings: OnlineSettings):
    """Steps of a response, the share of them that are right, and that repeat an earlier one: a ``more`` of plans."""
    make_stepped(settings)  # refuses what has no known steps
    return _figures(recipes.bench_identity(settings))


@lru_cache(maxsize=8)
def _figures(identity: tuple):
    stepped = _stepped(identity)

    def more(found: Bench):
        def figures(rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
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
