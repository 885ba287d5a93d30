"""A scripted rollout and judge for tests of staged rollouts: what each stage answers is a table."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.curriculum.parts import hints
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.types import Rewards, Trajectories

WIDTH, NEW = 6, 2  # columns of the prompt (column 0 free) and of the response


def table(stages: int, problems: int, lengths=(0, 1, 2, 3)) -> hints.Hints:
    """Stage ``s`` has a hint of ``lengths[s]`` tokens of value ``10 + s``; prompts are one token long."""
    tokens, valid = np.zeros((stages, problems, WIDTH), np.int32), np.zeros((stages, problems, WIDTH), bool)
    for s in range(stages):
        valid[s, :, WIDTH - 1 - lengths[s] :] = True
        tokens[s, :, WIDTH - 1 - lengths[s]] = 5
        tokens[s, :, WIDTH - lengths[s] :] = 10 + s
    length = jnp.broadcast_to(jnp.asarray(lengths[:stages], jnp.int32)[:, None], (stages, problems))
    return hints.Hints(jnp.asarray(tokens), jnp.asarray(valid), length)


def scripted(outcomes, *, group_size: int, make=hints.make_staged_rollout, lengths=(0, 1, 2, 3), **options):
    """Slots of a staged rollout where ``outcomes[stage][problem]`` are the rewards of a group; the call's rows too."""
    outcomes = jnp.asarray(outcomes, jnp.float32)
    stages, problems = outcomes.shape[:2]
    asked = table(stages, problems, lengths)

    def rollout(params, tokens, valid, keys, ids):
        rows = ids.shape[0] * group_size
        # the stage can be read off the prompt: its hint tokens are 10 + stage, and stage 0 has none
        stage = jnp.where(tokens[:, -1] >= 10, tokens[:, -1] - 10, 0)
        drawn = outcomes[stage, ids].reshape(-1)
        prompt = jnp.repeat(jnp.concatenate([tokens, jnp.zeros((ids.shape[0], NEW), jnp.int32)], axis=1), group_size, 0)
        mask = jnp.broadcast_to(jnp.arange(WIDTH + NEW)[None, :] >= WIDTH, prompt.shape)
        prompt = jnp.where(mask, drawn[:, None].astype(jnp.int32), prompt)
        grid = jnp.zeros(prompt.shape, jnp.int32)
        groups = jnp.repeat(jnp.arange(ids.shape[0], dtype=jnp.int32), group_size)
        return Trajectories(
            prompt,
            grid,
            grid,
            mask,
            grid.astype(jnp.float32),
            jnp.zeros(rows, bool),
            groups,
            jnp.repeat(ids, group_size),
        )

    def judge(answers, rows):
        return Rewards(rows.tokens[:, -1].astype(jnp.float32), jnp.ones(rows.tokens.shape[0], bool))

    answers = {"value": jnp.arange(problems)}
    slots = make(rollout, judge, answers, asked, group_size=group_size, **options)
    return slots, asked


def run(slots, problems: int, group_size: int, params=None):
    """One call of the rollout on all problems."""
    keys = jax.random.split(jax.random.key(0), problems * group_size)
    ids = jnp.arange(problems, dtype=jnp.int32)
    return slots["rollout"](params, None, None, keys, ids)


def problem(prompt: str, solution: str) -> Problem:
    """A problem of no task."""
    return Problem("none", prompt, solution, {}, 1, prompt)
