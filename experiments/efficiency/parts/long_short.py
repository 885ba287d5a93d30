"""A quick and a slow model of one base: their training side by side, and every way of merging them.

The parameters of a run are ``{"quick": tree, "slow": tree}``. A merge is ``(model, params, tables, key) -> tree``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts import long_winded
from jaxrl_llm import reduce
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.experiment.recipes import Bench
from jaxrl_llm.losses.preference import dpo_loss
from jaxrl_llm.losses.supervised import sft_loss
from jaxrl_llm.models import merging
from jaxrl_llm.run import parts as job
from jaxrl_llm.run.parts import Model
from jaxrl_llm.train.methods import builders, supervised
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import keep_reference, referred
from jaxrl_llm.types import Key, Params, Policy, Rewards, Trajectories

CALIBRATION_ROWS = 16


class Tables(NamedTuple):
    """The same problems with a short and with a long answer, row for row."""

    quick: SupervisedRows
    slow: SupervisedRows


def make_tables(found: Bench, problems: Sequence[Problem]) -> Tables:
    """Work that is written once, and work that is written twice.

    Raises:
      UserError: for a mesh.
    """
    job.refuse_mesh(found.model, "a merge reads the whole base model inside the measurement")
    return Tables(
        long_winded.rows_of(found, problems, [p.solution for p in problems]),
        long_winded.rows_of(found, problems, [long_winded.written_over(p) for p in problems]),
    )


def _sft(policy: Policy, params: Params, rows: SupervisedRows, total: Array | None = None) -> Array:
    logp, _ = builders.score_tokens(policy, params, rows)
    return reduce.tokens(sft_loss(logp, rows.mask).loss, rows.mask, total=total)


def make_experts(policy: Policy, tables: Tables, *, rows_per_step: int, tx: optax.GradientTransformation) -> Offline:
    """Supervised training of both models on the same problems."""

    def loss(params: Params, extras: dict[str, Any], part: Tables, totals: list[Array]):
        quick = _sft(policy, params["quick"], part.quick, totals[0])
        slow = _sft(policy, params["slow"], part.slow, totals[1])
        trained = sum(jnp.sum(rows.mask.astype(jnp.float32)) for rows in part)
        return quick + slow, {"sft/loss": slow, "tokens/trained": trained}

    def whole(part: Tables) -> list[Array]:
        return [supervised.trained_tokens(rows) for rows in part]

    return Offline(lambda extras: tables, make_uniform(), rows_per_step, loss, tx, whole=whole)


def reference_extras(params: Params, key: Key) -> dict[str, Params]:
    """The slow model as it is when a stage begins."""
    return keep_reference(params["slow"], key)


def make_dpo(
    policy: Policy, tables: Tables, *, rows_per_step: int, tx: optax.GradientTransformation, beta: float
) -> Offline:
    """DPO of the slow model: the short answer preferred to the long one."""

    def total(params, rows):
        logp, _ = builders.score_tokens(policy, params, rows)
        return reduce.sequences(logp, rows.mask)

    def loss(params: Params, extras: dict[str, Any], part: Tables, count: int):
        logps = [total(p, rows) for p in (params["slow"], referred(extras)) for rows in (part.quick, part.slow)]
        terms = dpo_loss(logps[0], logps[1], *(jax.lax.stop_gradient(x) for x in logps[2:]), beta=beta)
        trained = sum(jnp.sum(rows.mask.astype(jnp.float32)) for rows in part)
        value = jnp.sum(terms.loss) / count
        return value, {"dpo/loss": value, "tokens/trained": trained}

    return Offline(
        lambda extras: tables, make_uniform(), rows_per_step, loss, tx, whole=lambda part: part.quick.mask.shape[0]
    )


def reflections(found: Bench):
    """``eval/reflection``: responses that begin their work again. A ``more`` of ``curricula.make_single_turn_plan``."""
    again = found.model.tokenizer.encode(";")[0]

    def figures(rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
        return {"eval/reflection": reduce.scalars(jnp.any(rows.mask & (rows.tokens == again), axis=1).astype(float))}

    return figures


# ------------------------------------------------------------------ merges


def _models(params: Params) -> list[Params]:
    return [params["quick"], params["slow"]]


def quick(model: Model, params: Params, tables: Tables, key: Key) -> Params:
    """The model that writes its work once."""
    return params["quick"]


def slow(model: Model, params: Params, tables: Tables, key: Key) -> Params:
    """The model that writes its work twice."""
    return params["slow"]


def average(model: Model, params: Params, tables: Tables, key: Key) -> Params:
    """The mean of both."""
    return merging.average(_models(params))


def make_task_arithmetic(alpha: float) -> Callable[[Model, Params, Tables, Key], Params]:
    """``quick + alpha (slow - quick)``: from the quick model towards the slow one.

    From "Unlocking Efficient Long-to-Short LLM Reasoning with Model Merging", arXiv:2503.20641, where the quick model
    is the one that the slow one was made from; ``alpha`` .7 is its value for 1.5B.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} must lie in [0, 1]: between the two models")

    def merge(model: Model, params: Params, tables: Tables, key: Key) -> Params:
        return merging.task_arithmetic(params["quick"], [params["slow"]], scale=alpha)

    return merge


def _towards_slow(params: Params) -> list[Params]:
    return merging.deltas(params["quick"], [params["slow"]])


def ties(model: Model, params: Params, tables: Tables, key: Key) -> Params:
    """TIES from the quick model: the fifth of ``slow - quick`` that is largest, leaf by leaf."""
    return merging.added(params["quick"], merging.ties_delta(_towards_slow(params), share=0.8))


def dare_ties(model: Model, params: Params, tables: Tables, key: Key) -> Params:
    """TIES of a difference of which three tenths are dropped."""
    changes = [merging.dare(key, change, rate=0.3) for change in _towards_slow(params)]
    return merging.added(params["quick"], merging.ties_delta(changes, share=0.8))


def lore(model: Model, params: Params, tables: Tables, key: Key) -> Params:
    """LoRE with penalty 0.1."""
    return merging.lore(model.params, _models(params), penalty=0.1)


def twin(model: Model, params: Params, tables: Tables, key: Key) -> Params:
    """Twin with rank 4 and equal weights."""
    return merging.twin(model.params, _models(params), rank=4, weights=(0.5, 0.5))


def _calibration(tables: Tables) -> SupervisedRows:
    return jax.tree.map(lambda x: x[:CALIBRATION_ROWS], tables.slow)


def aim_ties(model: Model, params: Params, tables: Tables, key: Key) -> Params:
    """AIM after TIES, importance from the quick model on some of the slow model's texts."""
    rows, first = _calibration(tables), params["quick"]
    importance = merging.channel_importance(model.config, first, rows.tokens, rows.positions, rows.segment_ids)
    merged = ties(model, params, tables, key)
    return merging.activation_informed(merged, first, importance, omega=0.4)


def sens(model: Model, params: Params, tables: Tables, key: Key) -> Params:
    """Sens-Merging: each model's sensitivity on some of the texts it was trained on."""
    parts = [jax.tree.map(lambda x: x[:CALIBRATION_ROWS], rows) for rows in tables]
    models = _models(params)
    felt = [
        merging.sensitivity(one, jax.grad(partial(_sft, model.policy))(one, rows))
        for one, rows in zip(models, parts, strict=True)
    ]
    return merging.sens_merging(model.params, models, felt, scale=0.7, temperature=2.0)
