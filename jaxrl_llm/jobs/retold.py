"""A teacher of another vocabulary: it reads the student's responses as text, in its own tokens.

Both distributions are compared piece by piece, where the two tokenizations agree on the ends of a piece: by
``uld_loss``, which needs no token in common, or by ``gold_loss``, which matches those of equal text. Differs from TRL's
GOLDTrainer in that the end of a response is a piece, too, and in the mean over all pieces of a batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_llm import logprobs, losses, reduce
from jaxrl_llm.data.pieces import TwoTokenizers, equal_tokens, reread, two_tokenizers
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.problems import encode_problems
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.run import named, parts
from jaxrl_llm.train.methods.supervised import joined
from jaxrl_llm.types import Batch, Params, Policy, TokenTerms, Trajectories, declared

PIECES = ("student_log_probs", "teacher_log_probs", "mask", "student_ids", "teacher_ids")  # what a loss may take
CHUNK = 128  # pieces, and columns, whose distributions exist at once
TIMES = 2  # columns of a response in the teacher's tokens, for each of --max-new-tokens


class Reader(NamedTuple):
    """A teacher, and what it takes to show it the student's responses."""

    model: parts.Model
    two: TwoTokenizers
    prompts: Array  # [N, L], left-padded, by the teacher's tokenizer and template
    prompts_valid: Array
    own_columns: int  # of a response in the student's tokens
    columns: int  # and in the teacher's: what is longer loses its end
    student_ids: Array  # tokens of equal text, and the ends
    teacher_ids: Array


def make_reader(
    student: parts.Model, teacher: parts.Model, problems: Sequence[Problem], *, max_new_tokens: int, chat: bool
) -> Reader:
    """The reader of a teacher for the training problems.

    Raises:
      UserError: where the texts of tokens cannot be read, or prompt and response exceed the teacher's context.
    """
    two = two_tokenizers(student.tokenizer, teacher.tokenizer)
    table = encode_problems(teacher.tokenizer, problems, chat=chat)
    columns = TIMES * max_new_tokens
    if (width := table.tokens.shape[1] + columns) > teacher.config.max_positions:
        raise UserError(f"--teacher {teacher.folder}: prompts and {TIMES} tokens for each of --max-new-tokens "
                        f"{max_new_tokens} are {width}, its context has {teacher.config.max_positions}; lower "
                        "--max-new-tokens")  # fmt: skip
    own, other = equal_tokens(two.own_bytes, two.other_bytes)
    ids = [*own, student.tokenizer.eos_ids[0]], [*other, teacher.tokenizer.eos_ids[0]]
    return Reader(
        teacher, two, table.tokens, table.valid, max_new_tokens, columns, *(jnp.asarray(x, jnp.int32) for x in ids)
    )


def read_rows(reader: Reader, tokens: Any, mask: Any) -> dict[str, np.ndarray]:
    """Responses in the teacher's tokens ``[B, R]``, and both ends of their pieces ``[B, C, 2]``; empty ones are (0, 0).

    ``own_spans`` count the columns of ``tokens [B, T]``, ``other_spans`` those of the response ``[B, R]``.
    """
    tokens, mask = np.asarray(tokens), np.asarray(mask)
    rows = len(tokens)
    found = {
        "other_tokens": np.full((rows, reader.columns), reader.two.other.pad_id, np.int32),
        "other_valid": np.zeros((rows, reader.columns), bool),
        "own_spans": np.zeros((rows, reader.own_columns, 2), np.int32),
        "other_spans": np.zeros((rows, reader.own_columns, 2), np.int32),
    }
    for k in range(rows):
        (where,) = np.nonzero(mask[k])
        if not len(where):
            continue
        again = reread(reader.two, tokens[k, where].tolist(), most=reader.columns)
        found["other_tokens"][k, : len(again.tokens)] = again.tokens
        found["other_valid"][k, : len(again.tokens)] = True
        for place, (begin, end, start, stop) in enumerate(again.pieces):
            found["own_spans"][k, place] = where[begin], where[end - 1] + 1
            found["other_spans"][k, place] = start, stop
    return found


class Retold(NamedTuple):
    """Extras of a batch: rows of the table of problems, pieces of both readings, and what the other one reads."""

    problem_ids: Array  # [B]
    own_spans: Array  # [B, C, 2]
    other_spans: Array
    other_tokens: Array  # [B, S]
    other_valid: Array


def row_extras(reader: Reader) -> Callable[[Any, Trajectories, Any], dict[str, Array]]:
    """``read_rows`` inside a compiled program of one host, and the problems of the rows."""

    def read(trajectories: Trajectories) -> dict[str, Array]:
        rows = trajectories.tokens.shape[0]
        shapes = {"other_tokens": (rows, reader.columns), "other_valid": (rows, reader.columns)}
        shapes |= dict.fromkeys(("own_spans", "other_spans"), (rows, reader.own_columns, 2))
        kinds = {k: jax.ShapeDtypeStruct(x, bool if k == "other_valid" else jnp.int32) for k, x in shapes.items()}
        return jax.pure_callback(partial(read_rows, reader), kinds, trajectories.tokens, trajectories.mask)

    if (mesh := reader.model.mesh) is not None:  # a callback is of the first device alone, and what follows of all
        everywhere = partial(jax.lax.with_sharding_constraint, shardings=meshes.replicated(mesh))
        alone, read = read, lambda trajectories: everywhere(alone(everywhere(trajectories)))

    def of_rows(extras: Any, trajectories: Trajectories, rewards: Any) -> dict[str, Array]:
        return Retold(problem_ids=trajectories.problem_ids, **read(trajectories))._asdict()

    return of_rows


def _at_ends(x: Array, spans: Array, columns: int) -> Array:
    """What is said of pieces ``[B, C]`` in the column of the last token of each, ``[B, columns]``; 0 elsewhere."""
    used = spans[..., 1] > spans[..., 0]
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    zeros = jnp.zeros((x.shape[0], columns), jnp.float32)
    return zeros.at[rows, spans[..., 1] - 1].add(jnp.where(used, x.astype(jnp.float32), 0.0))


def of_pieces(batch: Batch) -> Batch:
    """The batch with its pieces in place of its tokens: the mask is true at the last token of each."""
    spans = declared(Retold, batch.extras).own_spans
    ends = _at_ends(jnp.ones(spans.shape[:2]), spans, batch.mask.shape[1]) > 0
    mask = batch.mask & ends
    return batch._replace(mask=mask, total=reduce.denominator(mask, mode="token_mean"))


def _said(policy: Policy, params: Params, rows: Any, spans: Array, *, temperature: float, size: int, chunk: int):
    """``(hidden [B, C, D], logp [B, C])`` of pieces ``[B, C, 2]``: what says their last token, and of those before it.

    Log-probabilities are formed ``chunk`` columns at a time.
    """
    hidden = policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
    logp, _ = logprobs.chunked(
        hidden, lambda h: policy.unembed(params, h)[..., :size], rows.tokens,
        temperature=temperature, chunk=chunk, segment_ids=rows.segment_ids,
    )  # fmt: skip
    before = jnp.maximum(spans[..., 1] - 2, 0)  # the column before the last token produces it
    return jnp.take_along_axis(hidden, before[..., None], axis=1), losses.span_log_probs(logp, spans)


def make_terms(
    settings: Any, policy: Policy, reader: Reader, size: int, *, chunk: int = CHUNK
) -> Callable[[Any, Batch], TokenTerms]:
    """``(params, batch) -> TokenTerms`` of a loss on the distributions of both over pieces of text.

    A function of one's own sees all pieces of the rows at once, those of this package ``chunk`` of them.

    Args:
      size: of the student's vocabulary, without padding.
      chunk: pieces whose distributions exist at once.

    Raises:
      UserError: for a loss that compares token by token.
    """
    flag = f"--loss {settings.loss}"
    known = ":" in settings.loss or hasattr(losses, settings.loss)
    function = named.find(losses, settings.loss, "--loss") if known else None
    if function is None or not {"student_log_probs", "teacher_log_probs"} <= set(named.arrays(function)):
        raise UserError(f"{flag} compares token by token, and --teacher {reader.model.folder} has another vocabulary; "
                        "choose gold_loss or uld_loss, or a teacher of the student's family")  # fmt: skip
    loss = named.with_settings(function, settings.loss_args, "--loss-args", losses)
    wanted = named.check_arrays(loss, PIECES, flag)
    teacher, heat = reader.model, settings.temperature
    width, wide = reader.prompts.shape[1], teacher.config.vocab_size

    def terms(params: Any, batch: Batch) -> TokenTerms:
        ids, own, other, tokens, valid = declared(Retold, batch.extras)
        rows = joined(reader.prompts[ids], reader.prompts_valid[ids], tokens, valid)
        used = own[..., 1] > own[..., 0]
        placed = jnp.where(used[..., None], other + width, 0)
        student = _said(policy, params, batch, own, temperature=heat, size=size, chunk=chunk)
        told = _said(teacher.policy, teacher.params, rows, placed, temperature=heat, size=wide, chunk=chunk)

        def merged(unembed, hidden, before, keep):
            said = jax.nn.log_softmax(unembed(hidden).astype(jnp.float32) / heat, axis=-1) + before[..., None]
            return jnp.where(keep[..., None], said, -jnp.inf)

        def of_pieces(keep, hidden, before, other_hidden, other_before):
            offered = {
                "student_log_probs": merged(lambda h: policy.unembed(params, h)[..., :size], hidden, before, keep),
                "teacher_log_probs": merged(
                    lambda h: teacher.policy.unembed(teacher.params, h)[..., :wide], other_hidden, other_before, keep
                ),
                "mask": keep, "student_ids": reader.student_ids, "teacher_ids": reader.teacher_ids,
            }  # fmt: skip
            offered["teacher_log_probs"] = jax.lax.stop_gradient(offered["teacher_log_probs"])
            return named.of_kind(loss(*(offered[name] for name in wanted)), TokenTerms, flag)

        at_once = own.shape[1] if ":" in settings.loss else chunk
        found = losses.chunked_terms(of_pieces, used, *student, *jax.lax.stop_gradient(told), chunk=at_once)
        return jax.tree.map(lambda x: _at_ends(x, own, batch.mask.shape[1]), found)

    return terms
