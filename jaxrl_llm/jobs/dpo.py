"""Training on preferences: any pair or single-response loss of ``jaxrl_llm.losses``.

Run: jaxrl dpo --model DIR --data FILE.jsonl [--format plain|hh-rlhf|ultrafeedback|tldr|unpaired] [--loss simpo_loss]

Losses on responses that are drawn while the policy trains, which a file cannot hold, are those of ``jaxrl online-dpo``.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_llm import logprobs, losses, reduce
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment.claims import open_claim
from jaxrl_llm.jobs import rows
from jaxrl_llm.losses import distill
from jaxrl_llm.run import named
from jaxrl_llm.run.bench import open_model
from jaxrl_llm.run.method import adamw, in_epochs
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Plan, Stage
from jaxrl_llm.types import PairTerms

PAIRED = (
    "chosen_logp", "rejected_logp", "ref_chosen_logp", "ref_rejected_logp", "chosen_mean_logp", "rejected_mean_logp",
    "chosen_tokens", "rejected_tokens", "gold_mean_logp", "chosen_kl", "rejected_kl", "weights",
)  # fmt: skip
DRAWN = ("ref_sample_logp", "judged", "win_chance", "levels")  # arrays that rows of a file do not give
SINGLE = ("logp", "ref_logp", "desirable", "kl", "shift")
WHOLE_BATCH = ("aot_loss", "aot_unpaired_loss", "kto_loss", "bco_loss")  # whose rows know of each other
REFERENCE = "reference"  # its weights, kept for losses that want more of it than the figures of each row
CHUNK = 16  # rows that the reference scores at once


@dataclasses.dataclass(frozen=True)
class Settings(rows.RowSettings):
    """DPO, or another loss on pairs or on single judged responses."""

    format: rows.PairFormat = "plain"  # the columns of a file
    loss: str = "dpo_loss"  # a function of jaxrl_llm.losses, or MODULE:FUNCTION
    loss_args: tuple[str, ...] = ()  # its settings, for example beta=0.05
    # LD-DPO: the weight, 0 to 1, of what a response has beyond the length of the other one of its pair; 1: DPO
    length_desensitised: float = 1.0
    learning_rate: float = 5e-7


EMBEDDED = {"steps": 40, "eval_every": 20, "learning_rate": 1e-4, "max_new_tokens": 96, "train_rows": 512}
SMOKE = {"steps": 2, "eval_every": 2, "rows_per_step": 4, "train_rows": 64, "eval_rows": 8}
ARMS = {"dpo": {}}
METRICS = ("eval/accuracy", "eval/margin", "eval/chosen_logp")
SEEDS, EXPORT = 1, "always"


class Summed(NamedTuple):
    """How the log-probabilities of a response's tokens become one number."""

    temperature: float = 1.0
    alpha: float = 1.0  # of LD-DPO: the weight of the tokens beyond the shorter response of a pair; 1: all count alike


PLAIN = Summed()


def sequence_logp(
    policy: Any, params: Any, some: SupervisedRows, shared: Array | None = None, how: Summed = PLAIN
) -> Array:
    """The sum of the log-probabilities of every response ``[B]``.

    Args:
      shared: tokens of the shorter response of each pair ``[B]``, which ``how.alpha`` needs; None: all count alike.
    """
    logp, _ = score_tokens(policy, params, some, temperature=how.temperature)
    return summed(logp, some.mask, shared, how)


def summed(logp: Array, mask: Array, shared: Array | None, how: Summed) -> Array:
    """The log-probabilities of tokens ``[B, T]`` as one number a response, as ``sequence_logp`` sums them."""
    if shared is None or how.alpha == 1:
        return reduce.sequences(logp, mask)
    return losses.length_desensitised_logp(logp, mask, shared, alpha=how.alpha)


def shared_tokens(first: SupervisedRows, second: SupervisedRows) -> Any:
    """The length of the shorter response of every pair ``[B]``, of NumPy's rows NumPy's."""
    of = np if isinstance(first.mask, np.ndarray) else jnp
    return of.minimum(*(some.mask.sum(axis=1).astype(np.int32) for some in (first, second)))


def scored(policy: Any, params: Any, table: SupervisedRows, shared: Array | None = None, how: Summed = PLAIN) -> Array:
    """``sequence_logp`` of a whole table, ``CHUNK`` rows at a time, without a gradient."""
    count = table.tokens.shape[0]

    def part(x: Any) -> Any:
        padded = jnp.pad(x, ((0, -count % CHUNK), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, CHUNK, *x.shape[1:])

    alone = policy.for_scores()
    found = jax.lax.map(lambda some: sequence_logp(alone, params, *some, how), jax.tree.map(part, (table, shared)))
    return jax.lax.stop_gradient(found.reshape(-1)[:count])


def scored_on_host(
    policy: Any, params: Any, table: SupervisedRows, shared: Any = None, how: Summed = PLAIN
) -> np.ndarray:
    """``scored`` of a table of NumPy arrays, of which the device sees ``CHUNK`` rows at a time."""
    score = jax.jit(partial(sequence_logp, policy.for_scores(), how=how), compiler_options=options_of())
    count, found = table.tokens.shape[0], []
    for begin in range(0, count, CHUNK):
        ids = np.minimum(np.arange(begin, begin + CHUNK), count - 1)  # the last chunk is filled with repeats
        found.append(np.asarray(score(params, *jax.tree.map(lambda x, at=ids: x[at], (table, shared)))))
    return np.concatenate(found)[:count]


def _mean(value: Array, tokens: Array) -> Array:
    return value / jnp.maximum(tokens, 1.0)


def sequence_kl(policy: Any, params: Any, reference: Any, some: SupervisedRows) -> Array:
    """``sum_t KL(ref || pi)`` over the next-token distributions along every response ``[B]``; no ``[B, T, V]``.

    The distributions of column ``t`` are those of token ``t + 1``: the mask moves one column to the left.
    """
    before = jnp.pad(some.mask[:, 1:], ((0, 0), (0, 1)))
    mine = policy.hidden(params, some.tokens, some.positions, some.segment_ids)
    its = policy.for_scores().hidden(reference, some.tokens, some.positions, some.segment_ids)
    terms = distill.chunked_forward_kl_loss(
        mine, lambda h: policy.unembed(params, h), its, lambda h: policy.unembed(reference, h), before
    )
    return reduce.sequences(terms.loss, before)


def own_weights(policy: Any, params: Any, some: SupervisedRows) -> Array:
    """``losses.preference.wpo_weights`` of every response ``[B]``."""
    frozen = jax.lax.stop_gradient(params)
    hidden = policy.for_scores().hidden(frozen, some.tokens, some.positions, some.segment_ids)
    logp, collision = logprobs.chunked(
        hidden, lambda h: policy.unembed(frozen, h), some.tokens, segment_ids=some.segment_ids,
        figure=logprobs.collision,
    )  # fmt: skip
    return losses.wpo_weights(logp, collision, some.mask)


def pair_arrays(
    policy: Any, params: Any, part: dict[str, Any], wanted: Sequence[str], reference: Any, how: Summed = PLAIN
) -> dict[str, Array]:
    """All that a loss on pairs may ask for, by name; what costs a pass of its own where it is ``wanted``."""
    found, shared = {}, shared_tokens(part["chosen"], part["rejected"])
    if "weights" in wanted:
        found["weights"] = own_weights(policy, params, part["chosen"]) * own_weights(policy, params, part["rejected"])
    for side in ("chosen", "rejected"):
        some = part[side]
        if f"{side}_kl" in wanted:
            found[f"{side}_kl"] = sequence_kl(policy, params, reference, some)
        found[f"{side}_logp"] = sequence_logp(policy, params, some, shared, how)
        found[f"{side}_tokens"] = jnp.sum(some.mask.astype(jnp.float32), axis=1)
        found[f"{side}_mean_logp"] = _mean(found[f"{side}_logp"], found[f"{side}_tokens"])
        found[f"ref_{side}_logp"] = part[f"ref_{side}"]
    return found | {"gold_mean_logp": found["chosen_mean_logp"]}


def single_arrays(
    policy: Any, params: Any, part: dict[str, Any], beta: float, how: Summed = PLAIN, valid: Array | None = None
) -> dict[str, Array]:
    """All that a loss on single judged responses may ask for, by name.

    ``kl``: the mean of ``logp - ref_logp`` of the batch, not below 0; ``shift``: the mean of the two kinds' mean
    rewards ``beta (logp - ref_logp)``. Both are of the batch and without a gradient. Differs from the papers in that
    KTO's uses mismatched responses and BCO's a running mean.

    Args:
      valid: rows that count in both, ``[B]``; None: all.
    """
    logp = sequence_logp(policy, params, part["response"], None, how)
    gap, good = jax.lax.stop_gradient(logp) - part["ref_response"], part["desirable"]
    counted = jnp.ones(good.shape, bool) if valid is None else valid
    ends = [beta * reduce.scalars(gap, good & counted), beta * reduce.scalars(gap, ~good & counted)]
    return {
        "logp": logp, "ref_logp": part["ref_response"], "desirable": good,
        "kl": jnp.maximum(reduce.scalars(gap, counted), 0.0), "shift": (ends[0] + ends[1]) / 2,
    }  # fmt: skip


def make_loss(policy: Any, loss: Any, wanted: tuple[str, ...], beta: float, how: Summed = PLAIN, flag: str = "--loss"):
    """The ``loss`` slot of ``Offline``: a sum of pairs over the pairs of the whole step.

    Args:
      flag: that names the loss. Of one that gives no ``PairTerms`` the slot raises UserError.
    """
    paired = "desirable" not in wanted

    def slot(params, extras, part, total):
        if paired:
            found = pair_arrays(policy, params, part, wanted, extras.get(REFERENCE), how)
        else:
            found = single_arrays(policy, params, part, beta)
        masks = [some.mask for some in part.values() if isinstance(some, SupervisedRows)]
        terms = named.of_kind(loss(*(found[name] for name in wanted)), PairTerms, flag, masks[0].shape[:1])
        value = jnp.sum(terms.loss) / total
        tokens = sum(jnp.sum(mask.astype(jnp.float32)) for mask in masks)
        aux = {f"pairs/{name}": jnp.sum(x) / total for name, x in terms.aux.items()}
        return value, aux | {"pairs/loss": value, "tokens/trained": tokens}

    return slot


def how_summed(settings: Any, wanted: Sequence[str]) -> Summed:
    """How responses are summed, by the flag.

    Raises:
      UserError: for a weight out of range, or one that the loss has no use for.
    """
    alpha = settings.length_desensitised
    if not 0 <= alpha <= 1:
        raise UserError(f"--length-desensitised {alpha} must lie in [0, 1]; 1 counts all tokens alike")
    if alpha < 1 and "chosen_logp" not in wanted:
        raise UserError(f"--length-desensitised {alpha} weighs sums over the responses of a pair, which --loss "
                        f"{settings.loss} does not take; choose dpo_loss, or drop the flag")  # fmt: skip
    return Summed(alpha=alpha)


def measure_of_gains(policy: Any, first: SupervisedRows, second: SupervisedRows, reference: Any):
    """The share of held-out pairs whose chosen response gained more over the reference, the margin in nats."""
    score = jax.jit(
        lambda params: (scored(policy, params, first), scored(policy, params, second)), compiler_options=options_of()
    )
    base = score(reference)

    def measure(params, key):
        now = score(params)
        gains = [np.asarray(a, np.float64) - np.asarray(b, np.float64) for a, b in zip(now, base, strict=True)]
        pairs = min(map(len, gains))  # responses of one kind alone make none
        logp = float(np.mean(now[0])) if len(now[0]) else math.nan
        return rows.of_margins(gains[0][:pairs] - gains[1][:pairs]) | {"eval/chosen_logp": logp}

    return measure


def build(settings: Settings) -> Plan:
    """One stage of minibatches of preferences; the reference scores all rows once, before the first step."""
    loss = named.with_settings(named.find(losses, settings.loss, "--loss"), settings.loss_args, "--loss-args", losses)
    single = "desirable" in named.arrays(loss)
    if set(named.arrays(loss)) & set(DRAWN):
        raise UserError(f"--loss {settings.loss} takes responses that are drawn while the policy trains, not rows of a "
                        f"file: jaxrl online-dpo --loss {settings.loss}")  # fmt: skip
    wanted = named.check_arrays(loss, SINGLE if single else PAIRED, f"--loss {settings.loss}")
    how = how_summed(settings, wanted)
    if settings.format == "unpaired" and not single and settings.data != rows.GENERATED:
        raise UserError(f"--format unpaired: --loss {settings.loss} takes pairs; choose kto_loss, bco_loss or "
                        "apo_zero_unpaired_loss")  # fmt: skip
    model = open_model(settings)
    fields = ("response",) if single else ("chosen", "rejected")
    source = rows.judged(settings, settings.format) if single else rows.pairs(settings, settings.format)
    hold_out = rows.held_out_of_both if single else rows.held_out
    kept, held = hold_out(source, settings.eval_rows, settings.data)
    size = min(settings.rows_per_step, len(kept))
    settings = in_epochs(settings, len(kept), size)
    tables = dict(zip(fields, rows.encoded(model, [*kept, *held], settings, *fields), strict=True))
    train = {name: jax.tree.map(lambda x: x[: len(kept)], table) for name, table in tables.items()}
    test = {name: jax.tree.map(lambda x: x[len(kept) :], table) for name, table in tables.items()}
    more = {"desirable": rows.labels(kept)} if single else {}
    on_host = settings.rows_in == "host"
    shared = None if single else shared_tokens(train["chosen"], train["rejected"])

    def extras(params, key):
        before = {REFERENCE: jax.tree.map(jnp.copy, params)} if {"chosen_kl", "rejected_kl"} & set(wanted) else {}
        if not on_host:
            before |= {f"ref_{name}": scored(model.policy, params, table, shared, how) for name, table in train.items()}
        return before

    beta = named.settings(loss).get("beta", 0.1)

    def counted(part):
        return jnp.asarray(part[fields[0]].tokens.shape[0], jnp.float32)

    whole = None if settings.loss in WHOLE_BATCH or {"kl", "shift"} & set(wanted) else counted
    slot = make_loss(model.policy, loss, wanted, beta, how, f"--loss {settings.loss}")
    method = Offline(
        rows=lambda extras: train | more | {name: x for name, x in extras.items() if name != REFERENCE},
        sampler=make_epochs(None),
        rows_per_step=size,
        loss=slot if whole is not None else lambda *given: slot(*given, jnp.asarray(size, jnp.float32)),
        tx=adamw(settings, settings.steps),
        max_grad_norm=settings.max_grad_norm or None,
        whole=whole,
    )
    if on_host:
        score = partial(scored_on_host, model.policy, model.params, shared=shared, how=how)
        known = {f"ref_{name}": score(table) for name, table in train.items()}
        method = rows.fed(method, train | jax.tree.map(np.asarray, more) | known, settings)
    if single:
        good = np.asarray([row.desirable for row in held])
        response = test["response"]
        ends = [jax.tree.map(lambda x, at=at: x[at], response) for at in (good, ~good)]
        test = dict(zip(("chosen", "rejected"), ends, strict=True))
    measure = measure_of_gains(model.policy, test["chosen"], test["rejected"], model.params)
    return Plan(lambda key: model.params, (Stage(method, settings.steps, extras),), measure, on_host=True, model=model)


def claim(results):  # a job claims nothing, and says so by having no text
    return open_claim("")
