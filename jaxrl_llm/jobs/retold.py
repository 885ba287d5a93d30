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

from jaxrl_llm import losses, reduce
from jaxrl_llm.data.pieces import TwoTokenizers, equal_tokens, reread, two_tokenizers
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.problems import encode_problems
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.run import named, parts
from jaxrl_llm.train.methods.supervised import joined
from jaxrl_llm.types import Batch, Params, Policy, TokenTerms, Trajectories, declared

PIECES = ("student_log_probs", "teacher_log_probs", "mask", "student_ids", "teacher_ids")  # what a loss may take
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


def merged(policy: Policy, params: Params, rows: Any, spans: Array, *, temperature: float, size: int) -> Array:
    """``losses.merged_log_probs`` of rows ``[B, T]`` and pieces ``[B, C, 2]`` of their columns: ``[B, C, size]``."""
    hidden = policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
    # of the tokens that follow: column t stands for token t + 1, and so do the spans
    logits = policy.unembed(params, hidden)[..., :size] / temperature
    following = jnp.pad(rows.tokens[:, 1:], ((0, 0), (0, 1)))
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), following[..., None], axis=-1)[..., 0]
    return losses.merged_log_probs(logits, logp, spans - 1)


def make_terms(settings: Any, policy: Policy, reader: Reader, size: int) -> Callable[[Any, Batch], TokenTerms]:
    """``(params, batch) -> TokenTerms`` of a loss on the distributions of both over pieces of text.

    Args:
      size: of the student's vocabulary, without padding.

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
    width = reader.prompts.shape[1]

    def terms(params: Any, batch: Batch) -> TokenTerms:
        ids, own, other, tokens, valid = declared(Retold, batch.extras)
        rows = joined(reader.prompts[ids], reader.prompts_valid[ids], tokens, valid)
        used = own[..., 1] > own[..., 0]
        placed = jnp.where(used[..., None], other + width, 0)
        said = merged(teacher.policy, teacher.params, rows, placed, temperature=heat, size=teacher.config.vocab_size)
        offered = {
            "student_log_probs": merged(policy, params, batch, own, temperature=heat, size=size),
            "teacher_log_probs": jax.lax.stop_gradient(said), "mask": used,
            "student_ids": reader.student_ids, "teacher_ids": reader.teacher_ids,
        }  # fmt: skip
        found = loss(*(offered[name] for name in wanted))
        return jax.tree.map(lambda x: _at_ends(x, own, batch.mask.shape[1]), found)

    return terms
