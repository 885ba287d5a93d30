"""What a step of training does, and its rows as a run arranges them: what a plan compiles, and what it counts."""

import dataclasses
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.quantised import BITS, BLOCK
from jaxrl_llm.planning.parallel_layout import Number, Sizes, held, held_adapter, held_matrices
from jaxrl_llm.train import packing
from jaxrl_llm.train.packing import Layout, Planner, Rows

_FLOAT = 4  # bytes of a number of an adapter


@dataclasses.dataclass(frozen=True)
class Work:
    """What one step of training does.

    ``rows`` sequences of ``prompt + response`` tokens, ``group`` to each prompt, are sampled ``rollout_rows`` at a time
    and trained on ``rows / microbatches`` at a time. ``scores``: passes that only score, one with a reference.
    ``planner``: who arranges the rows of scores and update (``train.packing``); None: they stay as they are. It sees
    responses of ``filled`` of their length in the mean. ``scored``: logits of so many tokens exist at once, if they are
    given (``models.cache.DeviceLayout``). ``weights``: what the matrices that train are kept in, see
    ``train.optimisers.stochastic_rounding``. ``adapter``: the rank of what trains beside weights that do not, which are
    kept in the type that computes, or their matrices in ``base``, one of ``models.quantised.BASES``. ``sampled``,
    ``cached``: what rollouts keep matrices in, and keys and values, where that is less than the type that computes.
    ``judges``: reward models that read every response, on the mesh of training.
    """

    prompt: int
    response: int
    rows: int
    rollout_rows: int
    group: int = 1
    microbatches: int = 1
    scores: int = 0
    remat: bool = True
    compute_dtype: Any = jnp.bfloat16
    weights: Any = jnp.float32
    planner: Planner | None = None
    filled: float = 1.0
    scored: int = 0
    adapter: int = 0
    base: str = ""
    sampled: str = ""
    cached: str = ""
    judges: tuple[ModelConfig, ...] = ()

    @property
    def length(self) -> int:
        """Columns of a sequence."""
        return self.prompt + self.response

    @property
    def update_rows(self) -> int:
        """Sequences in one part of the batch."""
        return self.rows // self.microbatches


def trained(config: ModelConfig, sizes: Sizes, work: Work) -> int:
    """Numbers on the fullest chip that train: those of the model, or of its adapter."""
    return held_adapter(config, sizes, work.adapter) if work.adapter else held(config, sizes)


def frozen_bytes(config: ModelConfig, sizes: Sizes, work: Work) -> Number:
    """Of the weights beside an adapter on the fullest chip: in the type that computes, matrices perhaps in few bits."""
    size, matrices = np.dtype(work.compute_dtype).itemsize, held_matrices(config, sizes) if work.base else 0
    few = BITS[work.base] / 8 + size / BLOCK if work.base else 0.0  # a scale to each block
    return (held(config, sizes) - matrices) * size + matrices * few


def kept_bytes(config: ModelConfig, sizes: Sizes, work: Work) -> Number:
    """Of a model on the fullest chip between two steps, without what the optimiser keeps."""
    if not work.adapter:
        return np.dtype(work.weights).itemsize * held(config, sizes)
    return frozen_bytes(config, sizes, work) + _FLOAT * trained(config, sizes, work)


def sampled_bytes(config: ModelConfig, sizes: Sizes, work: Work) -> Number:
    """Of the weights on the fullest chip that a rollout reads."""
    whole = np.dtype(work.compute_dtype).itemsize * held(config, sizes)
    return (kept_bytes(config, sizes, work) if work.adapter else whole) - saved_bytes(config, sizes, work)


def saved_bytes(config: ModelConfig, sizes: Sizes, work: Work) -> Number:
    """What weights of rollouts in few bits are smaller by; their scales, one to an output, are not counted."""
    if not work.sampled:
        return 0
    return held_matrices(config, sizes) * (np.dtype(work.compute_dtype).itemsize - BITS[work.sampled] / 8)


def cached_bytes(config: ModelConfig, work: Work) -> int:
    """Of a key or a value of one head and token: numbers of a byte have a scale in float32."""
    return config.head_dim + 4 if work.cached else config.head_dim * np.dtype(work.compute_dtype).itemsize


def judge_phases(work: Work) -> dict[str, ModelConfig]:
    """The reward models by the name of their phase."""
    return {"reward" if len(work.judges) == 1 else f"reward {k}": x for k, x in enumerate(work.judges, 1)}


def judge_bytes(judge: ModelConfig, sizes: Sizes, work: Work) -> Number:
    """Of a reward model on the fullest chip, in the type that computes."""
    return np.dtype(work.compute_dtype).itemsize * held(judge, sizes)


def judged_columns(judge: ModelConfig, work: Work) -> int:
    """Of a row as a reward model reads it, whose own tokens are taken to be as many as those of the policy."""
    return min(work.length, judge.max_positions)


def shared(train: Sizes, rollout: Sizes, work: Work) -> bool:
    """Whether rollouts read the weights that are there: beside an adapter, in the layout of training."""
    return work.adapter > 0 and train == rollout and not work.sampled


def responses(work: Work) -> np.ndarray:
    """Lengths whose mean is ``work.filled`` of a response, spread evenly as far as that allows, in no order.

    >>> responses(Work(4, 8, 4, 4, filled=0.5)).tolist(), responses(Work(4, 8, 4, 4)).tolist()
    ([5, 1, 3, 8], [8, 8, 8, 8])
    """
    least, most = max(2 * work.filled - 1, 0.0), min(2 * work.filled, 1.0)
    lengths = np.linspace(least, most, work.rows) * work.response
    return np.random.default_rng(0).permutation(np.clip(np.round(lengths), 1, work.response).astype(np.int64))


def rows_of(work: Work) -> Rows:
    """Whole prompts, one to a group, and responses that part at their first token."""
    width, ids = work.length, np.arange(work.rows)
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), (work.rows, width))
    real = positions < work.prompt + responses(work)[:, None]
    mask = real & (positions >= work.prompt)
    tokens = np.where(mask, 1 + ids[:, None], 0).astype(np.int32)  # a token of its own in each row
    return Rows(tokens, real.astype(np.int32), positions, mask, ids // work.group)


@lru_cache(maxsize=64)
def layout_of(work: Work, parts: int = 1, shards: int = 1) -> Layout:
    """The layout of ``rows_of`` by the work's planner, without the parts that stay empty, which cost a run nothing."""
    if work.planner is None:
        raise ValueError("rows that stay as they are have no layout")
    found = work.planner(rows_of(work), parts=parts, shards=shards)
    used = int((found.source >= 0).any(axis=(1, 2)).sum())
    arrays = {name: x[:used] for name, x in found._asdict().items() if name != "place" and x is not None}
    return found._replace(**arrays)


def columns(work: Work) -> Number:
    """Tokens that a pass through the model computes: of a whole batch, padding and what is shared left out."""
    padded = work.rows * work.length
    if work.planner is None:
        return padded
    whole = dataclasses.replace(work, rollout_rows=work.rows, microbatches=1, scores=0, remat=True)  # asked for once
    return padded * packing.share(layout_of(whole), padded)
