"""Rollouts as lines to read: text of every token, who wrote it, what it was worth; for ``run.records.view``."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed import hosts
from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.online import Online
from jaxrl_llm.types import Rewards, TrainState, Trajectories

BROKEN = "\ufffd"  # half a character; the tokens that complete it follow


def pieces(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """The text of each token; of tokens that make up one character together, the last has it.

    >>> pieces(lambda ids: bytes(ids).decode(errors="replace"), [104, 0xC3, 0xA9, 0xC3])
    ['h', '', 'é', '\ufffd']
    """
    found, held = [], []
    for k, token in enumerate(ids):
        held.append(int(token))
        text = decode(held)
        # a character has four bytes at most: what is broken after as many tokens stays broken
        if text.endswith(BROKEN) and len(held) < 4 and k + 1 < len(ids):
            found.append("")
            continue
        found.append(text)
        held = []
    return found


def transcribe(
    decode: Callable[[list[int]], str],
    rows: Trajectories,
    rewards: Rewards,
    *,
    advantages: np.ndarray,
    logp: np.ndarray,
    step: int,
) -> list[dict[str, Any]]:
    """One record a row, padding left out; all arrays are NumPy.

    Args:
      decode: text of token ids.
      advantages: ``[B, T]``, what the update multiplied.
      logp: ``[B, T]`` of the policy after the update; its ratio to the sampler's is what the update changed.
    """
    rounded = {"sampler_logp": rows.sampler_logp, "logp": logp, "advantage": advantages}
    played = multi_turn.turns_of(rows) if multi_turn.TURN in rows.extras else None
    records = []
    for b in range(rows.tokens.shape[0]):
        (columns,) = np.nonzero(np.asarray(rows.segment_ids[b]))
        mask = np.asarray(rows.mask[b])[columns]
        record = {
            "step": step,
            "group": int(rows.group_ids[b]),
            "problem": int(rows.problem_ids[b]),
            "reward": float(rewards.value[b]),
            "valid": bool(rewards.valid[b]),
            "truncated": bool(rows.truncated[b]),
            "tokens": pieces(decode, np.asarray(rows.tokens[b])[columns].tolist()),
            "mask": mask.astype(int).tolist(),
        }
        for name, values in rounded.items():
            kept = np.where(mask, np.asarray(values[b], np.float64)[columns], 0.0)
            record[name] = [float(f"{x:.4g}") for x in kept]
        if played is not None:
            taken = np.asarray(played.taken[b])
            record["turn"] = np.asarray(played.turn[b])[columns].tolist()
            record["turn_rewards"] = np.asarray(played.reward[b], float)[taken].tolist()
        if rewards.parts:
            record["rewards"] = {name: float(x[b]) for name, x in rewards.parts.items() if np.isfinite(x[b])}
        records.append(record)
    return records


def make_look(
    method: Online, decode: Callable[[list[int]], str], *, rows: int, temperature: float = 1.0
) -> Callable[..., list[dict[str, Any]]]:
    """``look(state, trajectories, rewards, step) -> records`` of the first ``rows`` sequences of any online method.

    Advantages are those of the method's own batch, made again after the update; of a method whose batch has other rows
    than its rollout they are 0. Compiles once.
    """

    @partial(jax.jit, compiler_options=options_of())
    def compute(state, trajectories, rewards):
        batch = method.estimate(state.params, state.extras, trajectories, rewards)
        values = jnp.zeros(trajectories.tokens.shape)
        if batch.advantages.shape == trajectories.tokens.shape:
            strange = jnp.any(batch.mask & (batch.tokens != trajectories.tokens), axis=1)  # of another rollout
            values = jnp.where(batch.mask & ~strange[:, None], batch.advantages, values)
        part, judged, values = jax.tree.map(lambda x: x[:rows], (trajectories, rewards, values))
        alone = method.policy.for_scores()
        logp, _ = score_tokens(alone, method.policy_params(state.params), part, temperature=temperature)
        return part, judged, values, logp

    def look(state: TrainState, trajectories: Trajectories, rewards: Rewards, step: int) -> list[dict[str, Any]]:
        part, judged, values, logp = hosts.gathered(compute(state, trajectories, rewards))
        return transcribe(decode, part, judged, advantages=values, logp=logp, step=step)

    return look
