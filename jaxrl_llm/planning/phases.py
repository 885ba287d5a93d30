"""The programs of one RL step as functions of abstract arrays: what a plan compiles, and what it counts."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.distributed import rules
from jaxrl_llm.distributed.mesh import batch_parts, replicated
from jaxrl_llm.distributed.model_parallel import on_mesh
from jaxrl_llm.distributed.reshard import make_reshard
from jaxrl_llm.distributed.ring import Parts
from jaxrl_llm.distributed.rollout_weights import make_move, travelling
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models import heads, lora, quantised
from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import as_used, make_policy
from jaxrl_llm.models.kernels import attention_kernels
from jaxrl_llm.planning.work import Work, judge_phases, judged_columns, layout_of
from jaxrl_llm.rollout.decode import Job, decode, stage_ends, step_keys
from jaxrl_llm.rollout.generate import prefill
from jaxrl_llm.rollout.next_token import make_choice
from jaxrl_llm.train import packing
from jaxrl_llm.train.methods.builders import make_policy_loss, score_tokens
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.train.optimisers import stochastic_rounding
from jaxrl_llm.train.step import BASE, make_update, trained_part
from jaxrl_llm.types import Batch, Policy, TrainState

ADAPTER = "lora"  # beside ``BASE``, see ``models.lora``


class Phase(NamedTuple):
    """``jax.jit(run, donate_argnums).lower(*arguments)`` is the program of a phase."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    out: Any = None  # shardings (or formats) of the results; None: the compiler's choice
    given: Any = None  # formats of the arguments, where they are not just shardings
    filled: float = 1.0  # the share of what kernels declare that they do on average

    def lower(self) -> jax.stages.Lowered:
        """Traced and lowered for the devices of its arguments."""
        settings = {name: x for name, x in (("out_shardings", self.out), ("in_shardings", self.given)) if x is not None}
        return jax.jit(self.run, donate_argnums=self.donate, **settings).lower(*self.arguments)


def _abstract(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _rows(shapes: dict[str, tuple[tuple[int, ...], Any]], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    plain = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}
    return _abstract(plain, rules.batch_shardings(plain, mesh))


def _batch(work: Work, rows: int, mesh: Mesh, parts: int = 0) -> Batch:
    """Rows as a batch; where they have a planner with their layout, in so many parts (0: without an axis of parts)."""
    whole, ids, numbers = (rows, work.length), jnp.int32, jnp.float32
    found = _rows(
        {
            "tokens": (whole, ids), "segment_ids": (whole, ids), "positions": (whole, ids), "mask": (whole, bool),
            "advantages": (whole, numbers), "old_logp": (whole, numbers), "sampler_logp": (whole, numbers),
            "ref_logp": (whole, numbers), "group_ids": ((rows,), ids), "total": ((), numbers),
        },
        mesh,
    )  # fmt: skip
    return Batch(**found, extras={} if work.planner is None else {packing.LAYOUT: _layout(work, rows, mesh, parts)})


def _layout(work: Work, rows: int, mesh: Mesh, parts: int) -> packing.Layout:
    """Everywhere the same, as the host hands it over."""
    layout = layout_of(dataclasses.replace(work, rows=rows), max(parts, 1), batch_parts(mesh))
    layout = layout if parts else packing.only_part(layout)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), layout)


def kernels(mesh: Mesh) -> dict[str, Any]:
    """What a run takes on these devices: their kernels, see ``models.kernels.attention_kernels``."""
    platform = mesh.devices.flat[0].platform
    attend_fn = attention_kernels.make_attend("auto", platform=platform)
    otherwise = None if attend_fn is attend else attend
    cached_fn = attention_kernels.make_cached("auto", platform=platform)
    rows_fn = attention_kernels.make_rows("auto", platform=platform)
    sums_fn = attention_kernels.make_sums("auto", platform=platform)
    parts = Parts(*attention_kernels.make_parts("auto", platform=platform))
    grouped_fn = attention_kernels.make_grouped("auto", platform=platform)
    token_rows = attention_kernels.make_token_rows("auto", platform=platform)
    return on_mesh(mesh, attend_fn, grouped_fn, otherwise, cached_fn, rows_fn, sums_fn, parts, token_rows)


def _params(policy: Policy, dtype: Any) -> Any:
    tree = jax.eval_shape(policy.init, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree)


def _kept(config: ModelConfig, policy: Policy, work: Work) -> Any:
    """The parameters between two steps: float32, or matrices and tables in ``work.weights``; or a base and an adapter.

    Args:
      policy: of the whole model, that of ``make_policy``.
    """
    whole = _params(policy, jnp.float32)
    kept = jax.eval_shape(partial(as_used, config, compute_dtype=_frozen_type(work)), whole)
    if not work.adapter:
        return kept
    if work.base:
        kept = jax.eval_shape(lambda base: quantised.quantise(config, base, work.base, block=quantised.BLOCK), kept)
    adapter = jax.eval_shape(partial(lora.init, config, _spec(config, work)), jax.random.key(0))
    return {BASE: kept, ADAPTER: adapter}


def _frozen_type(work: Work) -> Any:
    return work.compute_dtype if work.adapter else work.weights


def _spec(config: ModelConfig, work: Work) -> lora.Lora:
    return lora.Lora(work.adapter, targets=lora.targets_of(config))


def _runs(config: ModelConfig, policy: Policy, work: Work) -> Policy:
    """The policy of what ``_kept`` returns."""
    return lora.make_policy(policy, config, _spec(config, work)) if work.adapter else policy


def update_phase(config: ModelConfig, mesh: Mesh, work: Work) -> Phase:
    """GRPO: clipped ratio, AdamW on what trains, the batch in parts."""
    policy = make_policy(config, compute_dtype=work.compute_dtype, remat=work.remat, **kernels(mesh))
    tx = optax.adamw(1e-6)
    tx = tx if work.adapter or work.weights == jnp.float32 else stochastic_rounding(tx)
    params, trained = _kept(config, policy, work), ADAPTER if work.adapter else ""
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    moments = jax.eval_shape(tx.init, trained_part(params, trained))
    state = TrainState(params, moments, zero, jax.eval_shape(jax.random.key, 0), (), {})
    loss = make_policy_loss(_runs(config, policy, work), partial(clipped_policy_loss, clip_high=0.28))
    update = make_update(loss, tx, microbatches=work.microbatches, trained=trained)
    shardings = rules.shardings(state, mesh)
    return Phase(
        update,
        (_abstract(state, shardings), _batch(work, work.rows, mesh, work.microbatches)),
        donate=(0,),
        out=(shardings, None),
    )


def score_phase(config: ModelConfig, mesh: Mesh, work: Work) -> Phase:
    """Log-probabilities of the reference or of the old policy for one part of the batch."""
    plain = make_policy(config, compute_dtype=work.compute_dtype, **kernels(mesh))
    params, policy = _kept(config, plain, work), _runs(config, plain, work).for_scores()

    def score(params: Any, batch: Batch) -> Any:
        return score_tokens(policy, params, batch)[0]  # no run that scores alone keeps the entropy

    return Phase(score, (_abstract(params, rules.shardings(params, mesh)), _batch(work, work.update_rows, mesh)))


def reshard_phase(config: ModelConfig, mesh: Mesh, work: Work, rollout_mesh: Mesh) -> Phase:
    """From what trains in the training layout to compute weights in the rollout layout."""
    policy = make_policy(config, compute_dtype=work.compute_dtype, **kernels(mesh))
    params = _kept(config, policy, work)
    trained, wanted = (rules.shardings(params, where) for where in (mesh, rollout_mesh))
    if work.sampled or work.adapter:  # what a run moves, by its own program
        move = make_move(config, params, mesh, rollout_mesh, compute_dtype=work.compute_dtype, few_bits=work.sampled)
        made = jax.eval_shape(travelling(config, work.compute_dtype, work.sampled), params)
        return Phase(move.program, (_abstract(params, trained),), out=rules.shardings(made, rollout_mesh))
    run = make_reshard(wanted, work.compute_dtype, before=trained)
    return Phase(run, (_abstract(params, trained),), out=wanted)


def _rollout_params(config: ModelConfig, mesh: Mesh, work: Work) -> tuple[Policy, Any]:
    few = jnp.dtype(work.cached) if work.cached else None
    policy = make_policy(config, compute_dtype=work.compute_dtype, cache_dtype=few, **kernels(mesh))
    params = _kept(config, policy, work) if work.adapter else _params(policy, work.compute_dtype)
    if work.sampled:
        made = travelling(config, work.compute_dtype, work.sampled)
        params = jax.eval_shape(made, _kept(config, policy, work))
    return _runs(config, policy, work), _abstract(params, rules.shardings(params, mesh))


def _cache(policy: Policy, mesh: Mesh, work: Work) -> Any:
    columns = work.prompt + stage_ends(work.response, 1)[0]
    cache = jax.eval_shape(lambda: policy.init_cache(work.rollout_rows, columns))
    return _abstract(cache, rules.cache_shardings(cache, mesh))


def prefill_phase(config: ModelConfig, mesh: Mesh, work: Work) -> Phase:
    """The prompts of a rollout, and their cache repeated for each group: the first part of ``rollout.generate``."""
    policy, params = _rollout_params(config, mesh, work)
    prompts = work.rollout_rows // work.group
    rows = _rows({"tokens": ((prompts, work.prompt), jnp.int32), "valid": ((prompts, work.prompt), bool)}, mesh)
    columns = work.prompt + stage_ends(work.response, 1)[0]

    def run(params, rows):
        cache, logits, *_ = prefill(policy, params, rows["tokens"], rows["valid"], work.group, columns)
        return cache, logits

    cache = _cache(policy, mesh, work)
    return Phase(run, (params, rows), out=(jax.tree.map(lambda x: x.sharding, cache), None))


def decode_phase(config: ModelConfig, mesh: Mesh, work: Work) -> Phase:
    """All tokens of a rollout after the first: the loop of ``rollout.generate``, with the cache that it carries."""
    policy, params = _rollout_params(config, mesh, work)
    count, new = work.rollout_rows, work.response
    rows = _rows(
        {"logits": ((count, policy.vocab_size), jnp.float32), "following": ((count,), jnp.int32),
         "seeds": ((count,), jnp.uint32)},
        mesh,
    )  # fmt: skip
    how = make_choice(new, (config.vocab_size - 1,), 0, 1.0, None, None, None, None, None)

    def run(params, rows):
        # made here, where a rollout has it from its prompts: so the loop may keep it in the order that suits it
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), placed)
        cache = jax.lax.with_sharding_constraint(cache, jax.tree.map(lambda x: x.sharding, placed))
        params = policy.for_steps(params)
        keys = step_keys(jax.vmap(jax.random.key)(rows["seeds"]), 0, new)
        job = Job(policy, params, how, keys, rows["following"], work.prompt, new)
        return decode(job, cache, rows["logits"], jnp.ones((count,), bool), ends=stage_ends(new, 1))

    placed = _cache(policy, mesh, work)
    columns = placed["segment_ids"].shape[1]
    return Phase(run, (params, rows), filled=(work.prompt + work.response / 2) / columns)


def reward_phase(judge: ModelConfig, mesh: Mesh, work: Work) -> Phase:
    """What a reward model says of the rows that it reads at once: the program of ``run.rated``."""
    policy = make_policy(judge, compute_dtype=work.compute_dtype, **kernels(mesh))
    params = jax.eval_shape(partial(as_used, judge, compute_dtype=work.compute_dtype), _params(policy, jnp.float32))
    head = jax.eval_shape(lambda: heads.init_head(judge.hidden_size, jax.random.key(0)))
    whole = (heads.READ_AT_ONCE * batch_parts(mesh), judged_columns(judge, work))
    named = {name: (whole, jnp.int32) for name in ("tokens", "segment_ids", "positions")} | {"mask": (whole, bool)}
    rows = SupervisedRows(**_rows(named, mesh))
    given = (
        _abstract(params, rules.shardings(params, mesh)),
        _abstract(head, jax.tree.map(lambda _: replicated(mesh), head)),
    )
    return Phase(partial(heads.rewards_of, policy), (*given, rows))


def phases(config: ModelConfig, mesh: Mesh, rollout_mesh: Mesh, work: Work) -> dict[str, Callable[[], Phase]]:
    """The programs of one step in the order in which they run.

    Args:
      mesh: where training runs; ``rollout_mesh``: the same devices in the shape in which sampling runs.
    """
    moves = (
        {}
        if work.adapter and mesh == rollout_mesh and not work.sampled
        else {"reshard": lambda: reshard_phase(config, mesh, work, rollout_mesh)}
    )
    return (
        moves
        | {
            "prefill": lambda: prefill_phase(config, rollout_mesh, work),
            "decode": lambda: decode_phase(config, rollout_mesh, work),
            "score": lambda: score_phase(config, mesh, work),
            "update": lambda: update_phase(config, mesh, work),
        }
        | {name: partial(reward_phase, judge, mesh, work) for name, judge in judge_phases(work).items()}
    )
