"""On-policy distillation: the student's own responses, pulled towards one teacher or the mean of several.

Run: jaxrl distil --model STUDENT --teacher DIR [--teacher DIR2] --data FILE.jsonl [--loss reverse_kl]

Models of one vocabulary may be filled up to different widths (Qwen2.5 has 151,936 rows up to 3B and 152,064 from 7B
on): distributions are those over the rows that all have, and a token that one of them has not trains nothing.

No answers are needed: ``--format prompts``.

A teacher of another vocabulary reads the responses in its own tokens: ``--loss gold_loss`` or ``uld_loss``
(``jobs.retold``).

``--teacher self`` is the model that was loaded, shown a problem's worked solution before the prompt: self-distillation
(``--loss sdft_loss`` or ``sdpo_loss``). Differs from SDFT and SDPO in that this teacher does not move with the policy,
and from SDPO in that it is shown the problem's solution, not a right response of the group.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm import losses, reduce
from jaxrl_llm.data.pieces import same_vocabulary
from jaxrl_llm.data.problems import encode_problems
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.claims import open_claim
from jaxrl_llm.jobs import retold, scoring
from jaxrl_llm.jobs.scoring import DrawnSettings
from jaxrl_llm.losses import distill
from jaxrl_llm.run import bench, named, parts
from jaxrl_llm.run.method import adamw, in_epochs
from jaxrl_llm.train.methods.builders import make_estimate, score_tokens
from jaxrl_llm.train.methods.supervised import joined
from jaxrl_llm.train.plan import Plan
from jaxrl_llm.types import Batch, Key, Params, Policy, Rewards, TokenTerms, Trajectories, declared


@dataclasses.dataclass(frozen=True)
class Settings(DrawnSettings):
    """Every update draws prompts, samples a response to each, and moves it towards the teachers' distributions."""

    # Hugging Face folders, tiny or nano; self: the loaded model, shown the solution. One teacher may have a vocabulary
    # of its own, for gold_loss and uld_loss
    teacher: tuple[str, ...] = ()
    # reverse_kl, forward_kl: of whole distributions, some columns at a time; top_k: over the student's likeliest;
    # sampled: of the sampled tokens alone; or a function of jaxrl_llm.losses of whole distributions, or of sampled
    # tokens (sdft_loss, sdpo_loss, jsd_loss, gold_loss, iw_opd_loss ...), or MODULE:FUNCTION, which gets whole rows
    loss: str = "reverse_kl"
    loss_args: tuple[str, ...] = ()  # settings of such a function, for example beta=0.5
    top: int = 64  # tokens of top_k
    # samples from weights in few bits, made anew at every step; they train as samples of the weights themselves, but
    # for a loss that takes old_logp, the sampler's (iw_opd_loss)
    rollout_weights: Literal["", "int8", "int4", "float8_e4m3fn"] = ""
    learning_rate: float = 1e-5
    group_size: int = 1


EMBEDDED = scoring.EMBEDDED | {"teacher": ("tiny",)}
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "max_new_tokens": 6, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 2,
}  # fmt: skip
ARMS = {"distil": {}}
METRICS = ("eval/accuracy", "eval/tokens", "distil/kl")
SEEDS, EXPORT = 1, "always"
CHUNK = 128  # columns whose distributions exist at once
SHORT = ("reverse_kl", "forward_kl", "top_k", "sampled")
SELF = "self"
LOGITS = ("student_logits", "teacher_logits", "student_log_probs", "teacher_log_probs")  # [B, T, V]
OFFERED = (*LOGITS, "student_ids", "teacher_ids", "logp", "teacher_logp", "old_logp", "mask")


class Shown(NamedTuple):
    """Left-padded prompts of the training problems that a teacher reads in place of the student's."""

    tokens: Array  # [N, L]
    valid: Array
    response: int  # columns of a response


class Teacher(NamedTuple):
    """A model, and what it is shown; None: what the student sees. A reader where its vocabulary is another."""

    model: parts.Model
    shown: Shown | None = None
    reader: retold.Reader | None = None


def open_teachers(settings: Settings, student: parts.Model) -> list[Teacher]:
    """The teachers, on the student's mesh.

    Raises:
      UserError: without one, for several of which one has another vocabulary, or for problems without the solutions
        that a teacher is shown.
    """
    if not settings.teacher:
        raise UserError("--teacher names no model; give the folder of a model, or self")
    found = []
    for name in settings.teacher:
        if name == SELF:
            found.append(Teacher(student, shown_solutions(settings, student)))
            continue
        model = parts.load_model(name, mesh=student.mesh, compute_dtype=jnp.dtype(settings.compute), frozen=True)
        if same_vocabulary(student.tokenizer, model.tokenizer):
            found.append(Teacher(model))
            continue
        if len(settings.teacher) > 1:
            raise UserError(f"--teacher {name} has another vocabulary than the student, and distributions of several "
                            "teachers are averaged token by token; give it alone")  # fmt: skip
        reader = retold.make_reader(
            student, model, bench.problem_sets(settings)[0], max_new_tokens=settings.max_new_tokens, chat=settings.chat
        )
        found.append(Teacher(model, reader=reader))
    return found


def shown_solutions(settings: Settings, student: parts.Model) -> Shown:
    """Every training problem with its worked solution before the prompt.

    Raises:
      UserError: for rows without a solution, or prompts that do not fit the context with it.
    """
    problems = recipes.solved_problems(settings)
    if any(not isinstance(problem.prompt, str) for problem in problems):
        raise UserError("--teacher self writes the solution before a prompt, and these prompts are conversations; give "
                        "rows whose prompt is text")  # fmt: skip
    both = [problem._replace(prompt=f"{problem.solution}\n\n{problem.prompt}") for problem in problems]
    table = encode_problems(student.tokenizer, both, chat=settings.chat)
    columns = table.tokens.shape[1] + settings.max_new_tokens
    if columns > student.config.max_positions:
        raise UserError(f"--teacher self: solution, prompt and --max-new-tokens are {columns} tokens, the context has "
                        f"{student.config.max_positions}; lower --max-new-tokens")  # fmt: skip
    return Shown(table.tokens, table.valid, settings.max_new_tokens)


class OfProblems(NamedTuple):
    """Extras of a batch: rows of the table of problems."""

    problem_ids: Array


def shared_rows(policy: Policy, params: Any, hidden: Array, teachers: Sequence[Teacher]) -> int:
    """How many tokens' logits all of the models have: of one vocabulary, they may be filled up to different widths."""
    own = jax.eval_shape(policy.unembed, params, hidden).shape[-1]
    return min(own, *(teacher.model.config.padded_vocab_size for teacher in teachers))


def cut(unembed: Callable[[Array], Array], size: int) -> Callable[[Array], Array]:
    """The same logits of the first ``size`` tokens alone."""

    def first(hidden: Array) -> Array:
        logits = unembed(hidden)
        return logits if logits.shape[-1] == size else logits[..., :size]

    return first


def known_to_all(batch: Batch, size: int) -> Batch:
    """The batch without the tokens that not all of the models have: rows behind the vocabulary, which say nothing."""
    mask = batch.mask & (batch.tokens < size)
    return batch._replace(mask=mask, total=reduce.denominator(mask, mode="token_mean"))


def seen(teacher: Teacher, batch: Batch) -> Any:
    """The rows as a teacher reads them: with its own prompts, where it has some, before the same responses."""
    if teacher.shown is None:
        last = teacher.model.config.padded_vocab_size - 1  # in place of a token that it has not, which is masked
        return batch._replace(tokens=jnp.minimum(batch.tokens, last))
    shown, ids = teacher.shown, declared(OfProblems, batch.extras).problem_ids
    there = batch.segment_ids[:, -shown.response :] > 0
    return joined(shown.tokens[ids], shown.valid[ids], batch.tokens[:, -shown.response :], there)


def aligned(teacher: Teacher, said: Array, batch: Batch) -> Array:
    """What is said of columns of ``seen``, in those of the batch, from the last column of a prompt on."""
    if teacher.shown is None:
        return said
    kept = teacher.shown.response + 1
    before = batch.tokens.shape[1] - kept
    return jnp.pad(said[:, -kept:], ((0, 0), (before, 0), *((0, 0),) * (said.ndim - 2)))


def _mixture(teachers: list[Teacher]) -> tuple[Callable[[Any, int], Array], Any]:
    """``((hidden, rows) -> logits, hidden)`` of the mean of the teachers' distributions; hidden states side by side.

    ``rows`` are those of the vocabulary, see ``shared_rows``.
    """
    models = [teacher.model for teacher in teachers]
    sizes = [model.config.hidden_size for model in models]

    def unembed(hidden: Array, rows: int) -> Array:
        begin, logp = 0, []
        for model, size in zip(models, sizes, strict=True):
            part = jax.lax.dynamic_slice_in_dim(hidden, begin, size, axis=-1)
            logits = cut(partial(model.policy.unembed, model.params), rows)(part)
            logp.append(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1))
            begin += size
        return jax.nn.logsumexp(jnp.stack(logp), axis=0) - jnp.log(jnp.float32(len(logp)))

    def hidden(batch: Batch) -> Array:
        each = []
        for teacher in teachers:
            read, model = seen(teacher, batch), teacher.model
            states = model.policy.hidden(model.params, read.tokens, read.positions, read.segment_ids)
            each.append(aligned(teacher, states.astype(jnp.float32), batch))
        return jnp.concatenate(each, axis=-1)

    return unembed, hidden


def teacher_logp(teachers: list[Teacher], batch: Batch, temperature: float) -> Array:
    """The log of the mean of the teachers' probabilities of the sampled tokens ``[B, T]``."""
    each = []
    for teacher in teachers:
        model = teacher.model
        logp, _ = score_tokens(model.policy.for_scores(), model.params, seen(teacher, batch), temperature=temperature)
        each.append(aligned(teacher, logp, batch))
    return jax.lax.stop_gradient(jax.nn.logsumexp(jnp.stack(each), axis=0) - jnp.log(jnp.float32(len(each))))


def _earlier(x: Array) -> Array:
    """Of token ``t + 1`` at column ``t``, where the distribution lies from which it was drawn."""
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))


def _later(x: Array) -> Array:
    """Back to the column of the token."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))


def named_terms(settings: Settings, policy: Policy, teachers: list[Teacher]) -> Callable[[Any, Batch], TokenTerms]:
    """``(params, batch) -> TokenTerms`` of a public loss: of sampled tokens, or of whole distributions.

    Distributions exist ``CHUNK`` columns at a time, but for a function of one's own, which may look from column to
    column and gets whole rows ``[B, T, V]``.

    Raises:
      UserError: for a function that takes what this command has not.
    """
    loss = named.with_settings(named.find(losses, settings.loss, "--loss"), settings.loss_args, "--loss-args", losses)
    wanted = named.check_arrays(loss, OFFERED, f"--loss {settings.loss}")
    unembed, hidden_of = _mixture(teachers)
    whole, heat = bool(set(wanted) & set(LOGITS)), settings.temperature

    def terms(params: Any, batch: Batch) -> TokenTerms:
        found = {"old_logp": batch.sampler_logp, "mask": batch.mask}
        if "logp" in wanted:
            found["logp"], _ = score_tokens(policy, params, batch, temperature=heat)
        if "teacher_logp" in wanted:
            found["teacher_logp"] = teacher_logp(teachers, batch, heat)
        if not whole:
            given = loss(*(found[name] for name in wanted))
            return named.of_kind(given, TokenTerms, f"--loss {settings.loss}", batch.mask.shape)
        mask, names = _earlier(found.pop("mask")), tuple(found)
        ids = jnp.arange(teachers[0].model.tokenizer.vocab_size, dtype=jnp.int32)

        mine = policy.hidden(params, batch.tokens, batch.positions, batch.segment_ids)
        rows = shared_rows(policy, params, mine, teachers)
        student = cut(partial(policy.unembed, params), rows)

        def of_columns(keep, mine, other, *more):
            logits = {"student": student(mine) / heat, "teacher": unembed(other, rows) / heat}
            logits["teacher"] = jax.lax.stop_gradient(logits["teacher"])
            offered = dict(zip(names, more, strict=True)) | {"mask": keep, "student_ids": ids, "teacher_ids": ids}
            for who, x in logits.items():
                offered |= {f"{who}_logits": x, f"{who}_log_probs": jax.nn.log_softmax(x, axis=-1)}
            return named.of_kind(loss(*(offered[name] for name in wanted)), TokenTerms, f"--loss {settings.loss}")

        beside = (mine, jax.lax.stop_gradient(hidden_of(batch)), *map(_earlier, found.values()))
        chunk = mask.shape[1] if ":" in settings.loss else CHUNK
        return jax.tree.map(_later, distill.chunked_terms(of_columns, mask, *beside, chunk=chunk))

    return terms


def make_terms(
    settings: Settings, policy: Policy, teachers: list[Teacher], size: int = 0
) -> Callable[[Any, Batch], TokenTerms]:
    """``(params, batch) -> TokenTerms`` of the chosen divergence; ``size`` of the student's vocabulary without padding.

    The distributions of column ``t`` are those of token ``t + 1``: the mask moves one column to the left.
    """
    if (reader := teachers[0].reader) is not None:
        return retold.make_terms(settings, policy, reader, size)
    if settings.loss not in SHORT:
        return named_terms(settings, policy, teachers)
    if settings.loss_args:
        raise UserError(f"--loss-args {' '.join(settings.loss_args)} are of a function of jaxrl_llm.losses; --loss "
                        f"{settings.loss} has none")  # fmt: skip
    if settings.loss == "sampled":

        def sampled(params, batch):
            logp, _ = score_tokens(policy, params, batch, temperature=settings.temperature)
            return distill.sampled_reverse_kl_loss(
                logp, teacher_logp(teachers, batch, settings.temperature), batch.mask
            )

        return sampled
    unembed, hidden_of = _mixture(teachers)

    def whole(params, batch):
        before = _earlier(batch.mask)
        mine = policy.hidden(params, batch.tokens, batch.positions, batch.segment_ids)
        other = jax.lax.stop_gradient(hidden_of(batch))
        rows = shared_rows(policy, params, mine, teachers)
        student, teacher = cut(partial(policy.unembed, params), rows), partial(unembed, rows=rows)
        if settings.loss == "top_k":

            def likeliest(keep, mine, other):
                logits = (x / settings.temperature for x in (student(mine), teacher(other)))
                return distill.top_k_distillation_loss(*logits, keep, k=settings.top)

            terms = distill.chunked_terms(likeliest, before, mine, other, chunk=CHUNK)
        else:
            chosen = {"reverse_kl": distill.chunked_reverse_kl_loss, "forward_kl": distill.chunked_forward_kl_loss}
            terms = chosen[settings.loss](
                mine, student, other, teacher, before,
                temperature=settings.temperature, chunk=CHUNK,
            )  # fmt: skip
        return jax.tree.map(_later, terms)

    return whole


def problem_ids(extras: Any, trajectories: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """Which problem every row answers: a teacher may be shown more of it."""
    return OfProblems(trajectories.problem_ids)._asdict()


def build(settings: Settings) -> Plan:
    """One online stage without rewards: the loss asks the teachers."""
    found = recipes.bench(settings)
    settings = in_epochs(settings, found.train.tokens.shape[0], settings.prompts_per_step)
    policy = found.model.policy
    teachers = open_teachers(settings, found.model)
    terms_of, reader = make_terms(settings, policy, teachers, found.model.config.vocab_size), teachers[0].reader
    read = problem_ids if reader is None else retold.row_extras(reader)

    def nothing(trajectories, rewards):
        return jnp.zeros(trajectories.mask.shape, jnp.float32)

    def loss(params, batch):
        terms = terms_of(params, batch)
        value = reduce.tokens(terms.loss, batch.mask, total=batch.total)
        return value, {
            "distil/kl": reduce.tokens(terms.loss, batch.mask),  # of these rows, which may be a part of the step
            "tokens/trained": jnp.sum(batch.mask.astype(jnp.float32)),
        }

    def unjudged(answers, trajectories):
        count = trajectories.tokens.shape[0]
        return Rewards(jnp.zeros((count,), jnp.float32), jnp.ones((count,), bool))

    estimated = make_estimate(policy, nothing, temperature=settings.temperature, row_extras=read)
    known = min(teacher.model.config.padded_vocab_size for teacher in teachers)
    changed = partial(known_to_all, size=known) if known < found.model.config.padded_vocab_size else None
    changed = changed if reader is None else retold.of_pieces
    online = recipes.make_online(
        settings,
        found,
        estimate=estimated if changed is None else lambda *given: changed(estimated(*given)),
        loss=loss,
        score=unjudged,
        tx=adamw(settings, settings.steps),
    )
    plan = recipes.one_stage(settings, found, online)
    if settings.format == "prompts":  # without answers nothing is right or wrong
        rollout = jit_sampling(recipes.rollout_of(settings, found, group_size=settings.eval_samples, measured=True))
        plan = plan._replace(measure=partial(lengths, settings, found, rollout, partial(unjudged, {})))
    return plan._replace(on_host=True, host_score=None if found.score is not None else partial(unjudged, {}))


def lengths(settings: Settings, found: bench.Bench, rollout: Any, score: Any, params: Params, key: Key) -> dict:
    """What a measurement says of responses that nobody judges."""
    measured = recipes.measure_on_host(rollout, found.heldout, score, settings.eval_samples, params, key)
    return {"eval/tokens": measured["eval/tokens"]}


def claim(results):  # a job claims nothing, and says so by having no text
    return open_claim("")
