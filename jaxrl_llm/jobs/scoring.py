"""Rewards of one's own for jobs that draw responses: ``--reward MODULE:FUNCTION`` in place of a verifier."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import Array

from jaxrl_llm.experiment import recipes
from jaxrl_llm.run import bench, parts
from jaxrl_llm.run.method import own_reward
from jaxrl_llm.types import Key, Params


def judged(settings: Any, found: bench.Bench, name: str, flag: str) -> tuple[Callable, Callable, Callable]:
    """Scorers of training rows and of held-out ones, and of training rows in the middle of a compiled program.

    Raises:
      UserError: where ``name`` is no function.
    """
    verifier = own_reward(name, flag)
    pool, tokenizer = parts.make_pool(verifier), found.model.tokenizer
    sets = bench.problem_sets(settings)
    scorers = [parts.make_scorer(tokenizer, rows, verifier=verifier, pool=pool) for rows in sets[:2]]
    return *scorers, parts.make_callback(tokenizer, sets[0], verifier=verifier, pool=pool, mesh=found.model.mesh)


def with_reward(
    settings: Any, found: bench.Bench
) -> tuple[bench.Bench, Callable[[Params, Key], dict[str, Array]] | None]:
    """The bench judged by ``--reward``, and its measurement; without the flag the bench as it is, and None."""
    if not settings.reward:
        return found, None
    train, heldout, _ = judged(settings, found, settings.reward, "--reward")
    found, samples = found._replace(score=None, host_score=train, heldout_score=heldout), settings.eval_samples
    rollout = jax.jit(recipes.rollout_of(settings, found, group_size=samples, measured=True))
    return found, partial(recipes.measure_on_host, rollout, found.heldout, heldout, samples)
