"""Supervised fine-tuning on the responses of a file, on all answers of its conversations, or on generated solutions.

Run: jaxrl sft --model DIR --data FILE.jsonl [--format gsm8k] [--chat] [--lora 16]
     jaxrl sft --model DIR --data FILE.jsonl --format messages --max-new-tokens 2048

On a model's own right responses (rejection sampling), or on all of them (simple self-distillation, arXiv:2604.01193):
     jaxrl eval --model DIR --data FILE.jsonl --samples 8 --responses own.jsonl
     jaxrl sft --model DIR --data own.jsonl --format unpaired [--keep all]
"""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_llm import logprobs
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.experiment.claims import open_claim
from jaxrl_llm.experiment.recipes import job
from jaxrl_llm.jobs import rows
from jaxrl_llm.run import flags, options
from jaxrl_llm.run.method import adamw, in_epochs
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.train.plan import Plan, Stage


@dataclasses.dataclass(frozen=True)
class Settings(rows.RowSettings):
    """Next-token loss on responses, a mean over their tokens."""

    # the columns of a file; the response is the worked solution, else the answer; messages: conversations, of whose
    # tokens --max-new-tokens bounds the number; unpaired: prompt, completion, label, as jaxrl eval --responses writes
    format: Literal[job.Format, "messages", "unpaired"] = "plain"
    keep: Literal["right", "all"] = "right"  # of unpaired rows: those with label true, or all


EMBEDDED = {"steps": 60, "eval_every": 30, "learning_rate": 3e-4, "max_new_tokens": 96, "train_rows": 1024}
SMOKE = {"steps": 2, "eval_every": 2, "rows_per_step": 4, "train_rows": 64, "eval_rows": 8}
ARMS = {"sft": {}}
METRICS = ("eval/loss", "eval/token_accuracy")
SEEDS, EXPORT = 1, "always"
CHUNK = 128  # columns whose distributions exist at once


def _likeliest(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.float32)  # exact: no vocabulary has 2**24 tokens


def sums_of_rows(policy, params, some: SupervisedRows) -> tuple[Array, Array, Array]:
    """Of the responses of rows: nats, tokens that the model would have said, and all tokens; no ``[B, T, V]``."""
    hidden = policy.hidden(params, some.tokens, some.positions, some.segment_ids)
    logp, said = logprobs.chunked(
        hidden, lambda h: policy.unembed(params, h), some.tokens, segment_ids=some.segment_ids, figure=_likeliest,
        chunk=CHUNK,
    )  # fmt: skip
    right = jnp.where(some.mask, said == some.tokens.astype(jnp.float32), False)
    return jnp.sum(jnp.where(some.mask, -logp, 0.0)), jnp.sum(right), jnp.sum(some.mask)


def measure_of_rows(policy, held: SupervisedRows, *, chunk: int = 32):
    """``eval/loss`` in nats a token and the share of tokens that the model would have said, on held-out rows."""
    part = jax.jit(partial(sums_of_rows, policy), compiler_options=options_of())

    def measure(params, key):
        count, sums = held.tokens.shape[0], np.zeros(3)
        for begin in range(0, count, chunk):
            # the last chunk is filled with rows that do not count, so that one shape serves all
            ids = np.arange(begin, begin + min(chunk, count))
            some = jax.tree.map(lambda x, at=ids: x[np.minimum(at, count - 1)], held)
            some = some._replace(mask=some.mask & jnp.asarray(ids < count)[:, None])
            sums += np.asarray(part(params, some), np.float64)
        return {"eval/loss": np.float64(sums[0] / sums[2]), "eval/token_accuracy": np.float64(sums[1] / sums[2])}

    return measure


def build(settings: Settings) -> Plan:
    """One stage of minibatches of the rows."""
    if settings.format != "unpaired":
        flags.check_default(settings, ("keep",), "belongs to --format unpaired: give it")
    model = options.open_model(settings)  # whose weights nobody else has
    spoken = settings.format == "messages"
    found = rows.dialogues(settings) if spoken else rows.texts(settings, settings.format)
    kept, held = rows.held_out(found, settings.eval_rows, settings.data)
    if spoken:
        train, test = rows.encoded_dialogues(model, kept, held, settings)
    else:
        (table,) = rows.encoded(model, [*kept, *held], settings, "response")
        train, test = (
            jax.tree.map(lambda x, part=part: x[part], table) for part in (slice(len(kept)), slice(len(kept), None))
        )
    size = min(settings.rows_per_step, train.tokens.shape[0])
    settings = in_epochs(settings, train.tokens.shape[0], size)
    tx = adamw(settings, settings.steps)
    epochs = make_epochs(None)
    method = supervised.make_supervised(model.policy, train, rows_per_step=size, tx=tx, sampler=epochs)
    method = rows.fed(method._replace(max_grad_norm=settings.max_grad_norm or None), train, settings)
    return Plan(lambda key: model.params, (Stage(method, settings.steps),), measure_of_rows(model.policy, test),
                on_host=True, model=model, gives=True)  # fmt: skip


def claim(results):  # a job claims nothing, and says so by having no text
    return open_claim("")
