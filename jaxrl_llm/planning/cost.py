"""A roofline of one training step: seconds of each phase from operations, memory traffic and links.

Optimistic by construction (peak rates, perfect overlap within a phase): for ranking plans, not for promises.
From "How to scale your model" (the chapters on training and inference).
"""

from jaxrl_llm.distributed import expert_exchange
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import READ_AT_ONCE
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.parallel_layout import Number, Sizes, held
from jaxrl_llm.planning.work import (
    Work,
    cached_bytes,
    columns,
    judge_phases,
    judged_columns,
    saved_bytes,
    trained,
)  # fmt: skip

LINKS = 2  # directions of a ring in which a chip sends and receives
_MATRICES = 7  # of a layer, each collected by itself


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token multiplies with: of a mixture only the chosen experts, of the embedding the head."""
    total = config.num_parameters
    if config.experts is not None:
        e = config.experts
        total -= config.num_layers * 3 * config.hidden_size * e.size * (e.number - e.per_token)
    return total if config.tie_embeddings else total - config.padded_vocab_size * config.hidden_size


def cache_bytes(config: ModelConfig, sizes: Sizes, work: Work | None = None) -> Number:
    """Bytes of keys and values of one token on one chip, in bfloat16 or as the rollouts of ``work`` keep them."""
    heads = config.num_kv_heads // sizes.tensor if config.num_kv_heads % sizes.tensor == 0 else config.num_kv_heads
    return 2 * config.num_layers * heads * (2 * config.head_dim if work is None else cached_bytes(config, work))


def _attention(config: ModelConfig, tokens: Number, context: Number) -> Number:
    """Operations of scores and values for ``tokens`` queries of ``context`` keys each, or of what a layer's window has.

    ``context`` is the mean of a text that is twice as long: behind its first tokens a query sees the whole window.
    """

    def seen(window: int) -> Number:
        return window - window**2 / (4 * context) if 0 < window < 2 * context else context

    if not config.windows:
        return 4 * config.num_layers * config.num_heads * config.head_dim * tokens * context
    return 4 * config.num_heads * config.head_dim * tokens * sum(map(seen, config.windows))


def _operations(config: ModelConfig, work: Work, passes: int, tokens: Number, context: Number) -> Number:
    """Of so many passes forward, the way back being two: one with the weights where a base has no gradient."""
    weights = passes - 1 if work.adapter and passes > 1 else passes
    return weights * 2 * active_parameters(config) * tokens + passes * _attention(config, tokens, context)


def _gather(total: Number, parts: int, chip: Chip, pieces: int = 1) -> Number:
    """Seconds until each chip of a ring has all of ``total`` bytes, collected in so many ``pieces``."""
    return pieces * chip.meeting + total * (parts - 1) / parts / (chip.link * LINKS) if parts > 1 else 0.0


def _tensor(config: ModelConfig, sizes: Sizes, chip: Chip, rows: Number, exchanges: int) -> Number:
    """Seconds of the sums over tensor: ``exchanges`` a layer, of hidden states in bfloat16, there and back."""
    size = rows * config.hidden_size * 2
    return exchanges * config.num_layers * _gather(2 * size, sizes.tensor, chip)


def _experts(config: ModelConfig, sizes: Sizes, chip: Chip, rows: Number, exchanges: int) -> Number:
    """Seconds in which tokens go to their experts along expert, and sums come back, ``exchanges`` a layer."""
    if config.experts is None or sizes.expert == 1:
        return 0.0
    size = rows * sizes.expert * config.hidden_size * 2
    per_token, parts = config.experts.per_token, sizes.expert
    sent = expert_exchange.pays(chip.platform, chip.kind, sizes.chips, parts, per_token)
    carried = expert_exchange.load(per_token, parts) if sent else 1.0  # else they are collected
    return exchanges * config.num_layers * _gather(size * carried, sizes.expert, chip)


def _ring(config: ModelConfig, sizes: Sizes, chip: Chip, rows: Number) -> Number:
    """Seconds in which the keys and values of ``rows`` tokens on each chip go once around along context."""
    heads = config.num_kv_heads // sizes.tensor if config.num_kv_heads % sizes.tensor == 0 else config.num_kv_heads
    size = 2 * 2 * rows * heads * config.head_dim
    return config.num_layers * (sizes.context - 1) * (chip.meeting + size / chip.link)


def step_seconds(config: ModelConfig, chip: Chip, train: Sizes, rollout: Sizes, work: Work) -> dict[str, Number]:
    """Seconds of each phase of one step."""
    chips = train.chips
    active, tokens = active_parameters(config), columns(work)
    whole = 2 * held(config, Sizes(tensor=train.tensor, expert=train.expert))  # bfloat16 weights gathered over fsdp
    collected = _gather(whole, train.fsdp, chip, config.num_layers * _MATRICES)
    scattered = 0 if work.adapter else 2 * collected  # gradients, in float32
    # gradients over what else splits tokens: scattered sums, and back
    summed = _gather(2 * 2 * trained(config, train, work), train.data * train.context, chip)
    passes = 4 if work.remat else 3  # forward, again, and twice that backward
    context = work.length / 2

    def compute(passes: int, count: Number) -> Number:
        return _operations(config, work, passes, count, context) / chips / chip.flops

    rows = tokens / train.rows / train.context
    around = _ring(config, train, chip, rows)
    update = max(
        compute(passes, tokens),
        work.microbatches * collected * (2 if work.remat else 1) + scattered + summed + around * (passes + 1),
    )
    update += _tensor(config, train, chip, rows, 6 if work.remat else 4)
    update += _experts(config, train, chip, rows, 6 if work.remat else 4)
    score = max(compute(1, tokens), work.microbatches * collected + around)
    score += _tensor(config, train, chip, rows, 2) + _experts(config, train, chip, rows, 2)

    waves = -(-work.rows // work.rollout_rows)
    weights = held(config, rollout) * 2 - saved_bytes(config, rollout, work)
    prompts = work.rows / work.group
    prefill = (2 * active * prompts * work.prompt + _attention(config, prompts * work.prompt, work.prompt / 2)) / chips
    local = work.rollout_rows / rollout.rows
    step = (weights + local * cache_bytes(config, rollout, work) * (work.prompt + work.response / 2)) / chip.bandwidth
    step = max(step, 2 * active * work.rollout_rows / chips / chip.flops)
    step += _tensor(config, rollout, chip, local, 2) + _experts(config, rollout, chip, local, 2)
    read = prompts * work.prompt / rollout.rows
    exchanged = _tensor(config, rollout, chip, read, 2) + _experts(config, rollout, chip, read, 2)
    whole = held(config, Sizes(tensor=rollout.tensor, expert=rollout.expert)) * 2
    moved = 0.0 if train == rollout else _gather(whole, chips, chip)  # there they are cast where they lie
    # weights that lie over fsdp come together for every token
    step += _gather(whole, rollout.fsdp, chip, config.num_layers * _MATRICES)
    return {
        "reshard": moved,
        "prefill": prefill / chip.flops + exchanged,
        "decode": waves * work.response * step,
        "score": score * work.scores,
        "update": update,
    } | {name: judged_seconds(judge, chip, train, work) for name, judge in judge_phases(work).items()}


def _read(judge: ModelConfig, work: Work, rows: Number) -> Number:
    """Operations of a reward model on so many responses; it has a number to say in the place of the vocabulary."""
    length = judged_columns(judge, work)
    active = active_parameters(judge) - judge.padded_vocab_size * judge.hidden_size
    return 2 * active * rows * length + _attention(judge, rows * length, length / 2)


def judged_seconds(judge: ModelConfig, chip: Chip, sizes: Sizes, work: Work) -> Number:
    """Seconds in which a reward model on the mesh of training reads all responses, some rows at a time."""
    times = -(-work.rows // (READ_AT_ONCE * sizes.rows))
    whole = 2 * held(judge, Sizes(tensor=sizes.tensor, expert=sizes.expert))
    collected = times * _gather(whole, sizes.fsdp, chip, judge.num_layers * _MATRICES)
    local = work.rows * judged_columns(judge, work) / sizes.rows
    exchanged = _tensor(judge, sizes, chip, local, 2) + _experts(judge, sizes, chip, local, 2)
    return max(_read(judge, work, work.rows) / sizes.chips / chip.flops, collected) + exchanged


def least_seconds(config: ModelConfig, chip: Chip, train: Sizes, rollout: Sizes, work: Work) -> dict[str, Number]:
    """The least that each compiled phase can take on one chip: its operations or its bytes at the peak rate.

    Nothing recomputed, links free but for ``reshard``; of ``decode`` one rollout, of ``score`` one part of the batch.
    """
    active, context = active_parameters(config), work.length / 2

    def computing(passes: int, tokens: Number, chips: int, seen: Number) -> Number:
        return _operations(config, work, passes, tokens, seen) / chips / chip.flops

    prompts, rows = work.rollout_rows // work.group * work.prompt, work.rollout_rows / rollout.rows
    read = (
        2 * held(config, rollout)
        - saved_bytes(config, rollout, work)
        + rows * cache_bytes(config, rollout, work) * (work.prompt + work.response / 2)
    )
    head = 2 * config.padded_vocab_size * config.hidden_size * (prompts - work.rollout_rows // work.group)
    token = max(read / chip.bandwidth, 2 * active * work.rollout_rows / rollout.chips / chip.flops)
    return {
        "reshard": step_seconds(config, chip, train, rollout, work)["reshard"],
        "prefill": computing(1, prompts, rollout.chips, work.prompt / 2) - head / rollout.chips / chip.flops,
        "decode": (work.response - 1) * token,
        "score": computing(1, columns(work) / work.microbatches, train.chips, context),
        "update": computing(3, columns(work), train.chips, context),
    } | {name: judged_least(judge, chip, train, work) for name, judge in judge_phases(work).items()}


def judged_least(judge: ModelConfig, chip: Chip, sizes: Sizes, work: Work) -> Number:
    """The least that a reward model takes for the rows that it reads at once: their operations."""
    return _read(judge, work, READ_AT_ONCE * sizes.rows) / sizes.chips / chip.flops
