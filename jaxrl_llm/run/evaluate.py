"""pass@1 and pass@k with 95 % intervals over problems."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed import hosts
from jaxrl_llm.errors import UserError
from jaxrl_llm.metrics.intervals import Interval, mean_interval, pass_at_k, score_interval
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.types import Key, Params, Problems, Rewards, Trajectories

SHOWN = 4  # problems whose first sample is kept to be read


class Evaluation(NamedTuple):
    """Scores of a policy on a table of problems, ``value`` and ``valid`` are ``[N, samples]``."""

    pass_at_1: Interval
    pass_at_k: Interval
    k: int
    mean_tokens: float
    truncated: float
    invalid: int
    value: np.ndarray
    first: list[np.ndarray]  # token rows of the first sample of the first problems
    by_level: dict[int, Interval]  # pass@1 of the problems of each level
    reward: Interval  # mean reward, which a reward model gives and no share of right responses says


def figures(found: Evaluation) -> dict[str, float]:
    """An evaluation while training as figures of its step, by name."""
    shown = {"eval/pass@1": found.pass_at_1, f"eval/pass@{found.k}": found.pass_at_k}
    ends = {f"{name}/{side}": getattr(x, side) for name, x in shown.items() for side in ("low", "high")}
    means = {name: x.mean for name, x in (shown | {"eval/reward": found.reward}).items()}
    rest = {"eval/mean_tokens": found.mean_tokens, "eval/truncated": found.truncated, "eval/invalid": found.invalid}
    return {name: float(x) for name, x in (means | ends | rest).items()}


def while_training(lines: list[dict]) -> dict[int, tuple[float, float, float]]:
    """Of the steps that ``figures`` were measured at: pass@1 with its interval."""
    names = ("eval/pass@1", "eval/pass@1/low", "eval/pass@1/high")
    measured = [line for line in lines if all(isinstance(line.get(name), int | float) for name in names)]
    return {line["step"]: tuple(line[name] for name in names) for line in measured}


def summarize(value: np.ndarray, valid: np.ndarray) -> tuple[Interval, Interval]:
    """pass@1 and pass@k (k = samples) over problems; intervals over per-problem values, see ``score_interval``.

    Invalid verdicts leave their problem's estimate: pass@1 over the valid samples; pass@k needs all of them.
    """
    count = valid.sum(1)
    judged = count > 0
    right = np.where(valid, value > 0.5, False).sum(1)
    whole = valid.all(1)
    if not judged.any():
        raise UserError("no sample has a valid verdict; the verifier failed on all of them")
    samples = value.shape[1]
    at_k = Interval(np.nan, np.nan, np.nan, 0)
    if whole.any():
        at_k = score_interval(pass_at_k(right[whole], samples, samples))
    return score_interval(right[judged] / count[judged]), at_k


def mean_rewards(value: np.ndarray, valid: np.ndarray) -> Interval:
    """Over problems, of each the mean over its valid samples."""
    count = valid.sum(1)
    judged = count > 0
    return mean_interval(np.where(valid, value, 0.0).sum(1)[judged] / count[judged])


def levels(value: np.ndarray, valid: np.ndarray, level: np.ndarray) -> dict[int, Interval]:
    """pass@1 of each level; a level without a valid verdict is left out."""
    found = {}
    for one in sorted(set(level.tolist())):
        rows = level == one
        if valid[rows].any():
            found[int(one)] = summarize(value[rows], valid[rows])[0]
    return found


def sampled(
    rollout: Callable[..., Trajectories],
    score: Callable[[Trajectories], Rewards],
    params: Params,
    problems: Problems,
    key: Key,
    *,
    samples: int,
    chunk: int = 128,
) -> dict[str, Any]:
    """Samples every problem ``samples`` times, ``chunk`` problems to a compiled call; numbers for ``of_samples``.

    Args:
      rollout: compiled ``(params, tokens, valid, keys, problem_ids) -> Trajectories`` with groups of ``samples``.
      score: rewards of a rollout, host or device.
    """
    count = problems.tokens.shape[0]
    chunk = min(chunk, count)
    values, valids, lengths, truncated, first = [], [], [], [], []
    for start in range(0, count, chunk):
        # the last chunk is filled with repeats so that one shape serves all; the repeats are cut off again
        ids = np.minimum(np.arange(start, start + chunk), count - 1).astype(np.int32)
        keys = sample_keys(key, 0, jnp.asarray(ids), samples)
        trajectories = rollout(params, problems.tokens[ids], problems.valid[ids], keys, jnp.asarray(ids))
        trajectories = hosts.gathered(trajectories)
        rewards = score(trajectories)
        real = min(chunk, count - start)
        values.append(np.asarray(rewards.value).reshape(chunk, samples)[:real])
        valids.append(np.asarray(rewards.valid).reshape(chunk, samples)[:real])
        lengths.append(trajectories.mask.sum(1)[: real * samples])
        truncated.append(trajectories.truncated[: real * samples])
        first.extend(np.where(trajectories.mask, trajectories.tokens, -1)[: real * samples : samples])
    return {
        "eval/value": np.concatenate(values),
        "eval/valid": np.concatenate(valids),
        "eval/mean_tokens": float(np.concatenate(lengths).mean()),
        "eval/truncated": float(np.concatenate(truncated).mean()),
        "eval/first": np.stack(first[:SHOWN]),
    }


def of_samples(found: dict[str, Any], problems: Problems) -> Evaluation:
    """The scores of what ``sampled`` gave, also where it was written as numbers and read again."""
    value, valid = np.asarray(found["eval/value"]), np.asarray(found["eval/valid"]).astype(bool)
    first = np.asarray(found["eval/first"]).astype(np.int64)
    at_1, at_k = summarize(value, valid)
    return Evaluation(
        pass_at_1=at_1,
        pass_at_k=at_k,
        k=value.shape[1],
        mean_tokens=float(found["eval/mean_tokens"]),
        truncated=float(found["eval/truncated"]),
        invalid=int((~valid).sum()),
        value=value,
        first=[row[row >= 0] for row in first],
        by_level=levels(value, valid, np.asarray(problems.level)),
        reward=mean_rewards(value, valid),
    )
