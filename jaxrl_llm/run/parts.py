"""Parts of the main job: model, problems and scorer from settings, and the report at its end."""

import hashlib
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm.data import formats
from jaxrl_llm.data import problems as problem_tables
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain, countdown
from jaxrl_llm.data.token_bytes import token_bytes
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.distributed import hosts, rules
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed.model_parallel import on_mesh
from jaxrl_llm.distributed.ring import Parts
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import lora, quantised
from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import as_used, make_policy
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.io import weights
from jaxrl_llm.models.kernels.attention_kernels import (
    make_attend,
    make_cached,
    make_grouped,
    make_layout,
    make_parts,
    make_rows,
    make_sums,
    make_token_rows,
)
from jaxrl_llm.models.mlp import grouped_experts
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.slots import generate_in_slots
from jaxrl_llm.rollout.stop import StopStrings, make_stop_strings
from jaxrl_llm.rollout.strict import generate_strict
from jaxrl_llm.run.evaluate import Evaluation
from jaxrl_llm.tools import calls
from jaxrl_llm.train import checkpoint
from jaxrl_llm.train.skipped import check_rewards, name_of
from jaxrl_llm.types import Params, Policy, Problems, Rewards, Trajectories
from jaxrl_llm.verifiers import answers, code, gym, math, overlap, sql
from jaxrl_llm.verifiers import countdown as countdown_verifier
from jaxrl_llm.verifiers.pool import VerifierPool
from jaxrl_llm.verifiers.verdict import Verdict, Verifier

ModelName = Annotated[
    str, tyro.conf.arg(help=f"tiny, nano, nano_1, or a Hugging Face folder with model_type {', '.join(FAMILIES)}")
]
SHOWN_BAD_ROWS = 10
GYM = "reasoning_gym:"
TASKS = ("countdown", "chain")  # what ``load_problems`` generates; anything else is a file
Format = Literal[
    "plain", "prompts", "gsm8k", "math", "aime", "countdown", "humaneval", "mbpp", "spider", "bird", "hotpotqa", "nq",
    "calls",
]  # fmt: skip
EvalFormat = Literal["", Format]
VerifierName = Literal[
    "", "any", "exact", "number", "choice", "math", "countdown", "code", "sql", "f1", "research", "deep_research",
    "calls",
]  # fmt: skip
VERIFIERS: dict[str, Verifier] = {  # how the answers of a file may be compared
    "any": answers.verify_any,
    "exact": answers.verify_exact,
    "number": answers.verify_number,
    "choice": answers.verify_choice,
    "math": math.verify,
    "countdown": countdown_verifier.verify,
    "code": code.verify,
    "sql": sql.verify,
    "f1": overlap.verify_f1,
    "research": overlap.verify_research,
    "deep_research": overlap.verify_deep_research,
    "calls": calls.verify,
}
# which answer a response gives, right or wrong; the other verifiers judge what is no single answer to agree on
READS: dict[Verifier, Callable[[dict[str, Any], str], Any]] = {
    answers.verify_any: answers.read_any,
    answers.verify_exact: answers.read_exact,
    answers.verify_number: answers.read_number,
    answers.verify_choice: answers.read_choice,
    answers.verify_chain: answers.read_chain,
    math.verify: math.read,
}
NO_ANSWERS = (
    "--format prompts: the rows have no answers to judge by: give --reward MODULE:FUNCTION, or the folder of a reward "
    "model (train, ppo, online-dpo, eval), or rows with answers"
)


def verify_nothing(answer: dict[str, Any], response: str) -> Verdict:
    """What judges rows without answers where no reward was given: nothing can.

    Raises:
      UserError: always.
    """
    raise UserError(NO_ANSWERS)


def verifier_of(layout: str, name: str = "") -> Verifier:
    """What compares the answers of rows: the verifier of that name, else that of the layout."""
    chosen = name or formats.FORMATS[layout].verifier
    return VERIFIERS[chosen] if chosen else verify_nothing


class Model(NamedTuple):
    """A loaded model folder, and where its parameters and rows lie: one device without a mesh."""

    folder: pathlib.Path
    policy: Policy
    params: Params
    config: ModelConfig
    tokenizer: Tokenizer
    mesh: Mesh | None = None
    merged: bool = False  # an adapter was given: the weights are more than those of ``folder``, its base


class Tables(NamedTuple):
    """Train and held-out problems as text and as token tables, and the verifier of the task."""

    train: list[Problem]
    heldout: list[Problem]
    train_table: Problems
    heldout_table: Problems
    verifier: Verifier
    heldout_verifier: Verifier | None = None  # where held-out rows have one of their own


CacheNumbers = Literal["", "int8", "float8_e4m3fn"]


def policy_maker(
    mesh: Mesh | None, *, rollout_cache: CacheNumbers = "", attention: str = "xla"
) -> Callable[..., Policy]:
    """``models.decoder.make_policy`` for one device or for a mesh, with the arguments that are left."""
    few = jnp.dtype(rollout_cache) if rollout_cache else None
    make, attend_fn = partial(make_policy, cache_dtype=few, layout=make_layout(attention)), make_attend(attention)
    kernels = {
        "cached_fn": make_cached(attention), "rows_fn": make_rows(attention), "sums_fn": make_sums(attention),
        "token_rows": make_token_rows(attention),
    }  # fmt: skip
    grouped_fn = make_grouped(attention)
    if mesh is None:
        return partial(make, attend_fn=attend_fn, experts_fn=partial(grouped_experts, grouped_fn=grouped_fn), **kernels)
    otherwise = None if attend_fn is attend else attend
    return partial(
        make, **on_mesh(mesh, attend_fn, grouped_fn, otherwise, **kernels, parts=Parts(*make_parts(attention)))
    )


def _merged(
    params: Params, spec: lora.Lora, adapter: dict[str, jax.Array], config: ModelConfig, compute_dtype: Any
) -> Params:
    """An adapter in its base, whose weights stay where they lie; the sums are of float32 and rounded once."""
    merge = jax.jit(
        lambda base, adapter: as_used(config, lora.merge(base, adapter, spec.scale), compute_dtype),
        donate_argnums=0,
        out_shardings=jax.tree.map(lambda x: x.sharding, params),
    )
    # arrays of the host, the same on all of several
    return merge(params, jax.tree.map(np.asarray, adapter))


def load_model(
    name: str,
    *,
    mesh: Mesh | None = None,
    rollout_cache: CacheNumbers = "",
    compute_dtype: Any = jnp.float32,
    remat: bool = False,
    attention: str = "xla",
    frozen: bool = False,
    judges: bool = False,
    flag: str = "--model",
) -> Model:
    """Loads a bundled model, a Hugging Face folder, or that of an adapter in PEFT's format, merged into its base.

    Args:
      mesh: where its parameters and activations lie; None: on the default device.
      rollout_cache: what keys and values are kept as; empty: the compute dtype.
      compute_dtype, remat: as in ``models.decoder.make_policy``.
      attention: as in ``models.kernels.attention_kernels.make_attend``.
      frozen: its weights never train, or without float32 masters: they are kept as ``models.io.weights.as_computed``
        says, an adapter merged into them as well.
      judges: as in ``models.io.weights.pretrained``.
      flag: that names it.

    Raises:
      UserError: when the folder is unreadable, unsupported, or the tokenizer does not fit the model.
    """
    given = pathlib.Path(name)
    try:
        folder = lora.base_of(given) if given.is_dir() else weights.bundled(name)
        tokenizer = tokenizers.load(given, base=folder) if given.is_dir() else tokenizers.load(folder)
        merged = given.is_dir() and folder != given
        policy, params, config = weights.pretrained(
            folder,
            compute_dtype=compute_dtype,
            remat=remat,
            make=policy_maker(mesh, rollout_cache=rollout_cache, attention=attention),
            # on a mesh its weights go straight to their devices
            shardings=None if mesh is None else partial(rules.shardings, mesh=mesh),
            frozen=frozen and not merged,  # a sum in float32 is rounded once
            judges=judges,
        )
        if merged:
            params = _merged(params, *lora.load(given, config), config, compute_dtype if frozen else jnp.float32)
    except UserError:
        raise
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{flag} {name}: {error}") from error
    if broken := checkpoint.not_finite(params):
        raise UserError(f"{flag} {name}: {broken} holds values that are no finite numbers; get the weights again")
    try:
        tokenizer = tokenizers.fitted(tokenizer, config.padded_vocab_size)
    except UserError as error:
        raise UserError(f"{flag} {name}: {error}") from error
    return Model(folder, policy, params, config, tokenizer, mesh, merged)


def note_messages(problems: Sequence[Problem], data: str) -> list[str]:
    """What to say, in at most one line, of prompts that are messages where ``--chat`` is not given."""
    messages = sum(not isinstance(problem.prompt, str) for problem in problems)
    if not messages:
        return []
    if messages == len(problems):
        return [f"the prompts of {data} are messages: they go through the chat template of the model, as with --chat"]
    texts = len(problems) - messages
    return [f"{messages} prompts of {data} are messages and go through the chat template, {texts} are text and do not; "
            "give --chat for all"]  # fmt: skip


def check_generated(
    data: str, prefix: str = "-", *, layout: str = "plain", verifier: str = "", bad_rows: int = 0
) -> None:
    """Refuses flags of rows of one's own where problems are generated, which have one layout and one verifier.

    Args:
      prefix: of the flags that give them.

    Raises:
      UserError: naming the flag.
    """
    for name, value in (("format", layout), ("verifier", verifier), ("bad-rows", bad_rows)):
        if value not in ("plain", "", 0):
            raise UserError(f"{prefix}-{name} {value} is of rows of your own, and {prefix}-data {data} is generated: "
                            f"give {prefix}-data FILE with it, or drop {prefix}-{name}")  # fmt: skip


def load_problems(
    data: str,
    *,
    train: int,
    heldout: int,
    seed: int,
    verifier: str = "",
    layout: str = "plain",
    bad_rows: int = 0,
    chat: bool = True,
    evaluated: Sequence[Problem] | None = None,
) -> tuple[list[Problem], list[Problem], Verifier]:
    """Train and held-out problems of ``countdown``, ``chain`` or a source of rows (10 % held out by hash).

    Args:
      verifier: a name in ``VERIFIERS``, for the answers of a file; empty: that of the layout.
      layout: a name in ``formats.FORMATS``: what the columns of a file mean.
      bad_rows: how many rows of a file may be unreadable.
      chat: prompts that are text go through the chat template too; where they do not, rows of both kinds are noted.
      evaluated: rows of ``load_evaluated``, which are the held-out ones then: no other row is held out.
    """
    if evaluated is None and (data in TASKS or data.startswith(GYM)):
        check_generated(data, layout=layout, verifier=verifier if data in TASKS else "", bad_rows=bad_rows)
    if data == "countdown":
        # two-number problems are few: three and four numbers fill the tables
        make = partial(problem_tables.make_split, countdown, levels=(3, 4))
        verify: Verifier = countdown_verifier.verify
    elif data == "chain":
        make, verify = partial(problem_tables.make_split, chain), answers.verify_chain
    elif data.startswith(GYM):
        rows, held = gym_problems(data, train=train, heldout=heldout, seed=seed)
        return rows, held if evaluated is None else list(evaluated), VERIFIERS[verifier] if verifier else gym.verify
    else:
        found = read_rows(data, layout=layout, bad_rows=bad_rows, chat=chat)
        verify = verifier_of(layout, verifier)
        if evaluated is not None:
            return apart_from(found, evaluated, data), list(evaluated), verify
        rows, held = problem_tables.hash_split(found, lambda row: row.identity, data, give="distinct prompts")
        if len(held) < heldout:
            fewer = f"--eval-problems {heldout}: {data} has only {len(held)} held out (10 % by hash); all are used"
            warnings.warn(fewer, stacklevel=2)
        return rows, problem_tables.evenly(held, heldout), verify
    # the same held-out problems for every seed
    held = list(evaluated) if evaluated is not None else make(split="heldout", n=heldout, seed=0)
    return make(split="train", n=train, seed=seed), held, verify


def gym_problems(data: str, *, train: int, heldout: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Problems of ``reasoning_gym:FAMILY``; the held-out ones are the same for every seed and train nobody.

    Raises:
      UserError: as ``verifiers.gym.problems``, or where the family has no other problems than the held-out ones.
    """
    held = _gym_drawn(data, heldout, 1)
    measured = {problem.identity for problem in held}
    # a family draws its item i from its seed + i: seeds that lie close to one another give the same problems
    drawn = _gym_drawn(data, train, (seed + 1) << 24)
    rows = [problem for problem in drawn if problem.identity not in measured]
    if not rows:
        raise UserError(f"--data {data}: all {train} problems drawn are held-out ones; lower --eval-problems")
    return rows, held


def gym_heldout(data: str, *, most: int, verifier: str = "") -> tuple[list[Problem], Verifier]:
    """So many held-out problems of ``reasoning_gym:FAMILY``, those of ``gym_problems``, and what judges them."""
    return _gym_drawn(data, most, 1), VERIFIERS[verifier] if verifier else gym.verify


def _gym_drawn(data: str, count: int, seed: int) -> list[Problem]:
    family = data.removeprefix(GYM)
    found = gym.problems(family, count, seed)
    return [
        Problem(family, prompt, solution or "", answer, 0, prompt)
        for prompt, solution, answer in zip(found.prompts, found.solutions, found.answers, strict=True)
    ]


def apart_from(rows: Sequence[Problem], evaluated: Sequence[Problem], data: str) -> list[Problem]:
    """Rows to train on: those that are not measured on; how many are left out is said.

    Raises:
      UserError: where none is left.
    """
    measured = {row.identity for row in evaluated}
    kept = [row for row in rows if row.identity not in measured]
    if not kept:
        raise UserError(f"--data {data}: every row is a row of --eval-data too; give other rows to train on, or drop "
                        "--eval-data")  # fmt: skip
    if left := len(rows) - len(kept):
        warnings.warn(f"{data}: {left} of {len(rows)} rows are rows of --eval-data and do not train", stacklevel=3)
    return kept


def load_evaluated(
    data: str, *, most: int, layout: str, verifier: str = "", bad_rows: int = 0, chat: bool = True
) -> tuple[list[Problem], Verifier]:
    """Rows of ``--eval-data``, at most so many, all of them measured on; and the verifier of their answers.

    Raises:
      UserError: for a source that cannot be read.
    """
    if data in TASKS:
        _, held, verify = load_problems(data, train=1, heldout=most, seed=0)
        return held, verify
    if data.startswith(GYM):
        return gym_heldout(data, most=most, verifier=verifier)
    try:
        rows = read_rows(data, layout=layout, bad_rows=bad_rows, chat=chat)
    except UserError as error:
        raise type(error)(str(error).replace("--data ", "--eval-data ", 1)) from error
    rows = problem_tables.once(rows)
    if len(rows) > most:
        warnings.warn(f"--eval-problems {most}: so many of {len(rows)} rows of {data} are measured on", stacklevel=2)
    return problem_tables.evenly(rows, most), verifier_of(layout, verifier)


def read_rows(data: str, *, layout: str, bad_rows: int, chat: bool = True) -> list[Problem]:
    """All problems of a source of rows; of unreadable ones that may be left out it is said which.

    Raises:
      UserError: for a source that cannot be read.
    """
    found, bad = formats.read_problems(data, layout=layout, bad_rows=bad_rows)
    if bad:
        shown = "; ".join(f"{row.where}: {row.reason}" for row in bad[:SHOWN_BAD_ROWS])
        more = ", the first of them" if len(bad) > SHOWN_BAD_ROWS else ""
        warnings.warn(f"{data}: {len(bad)} of {len(found) + len(bad)} rows left out{more}: {shown}", stacklevel=3)
    if told := [] if chat else note_messages(found, data):
        warnings.warn(told[0], stacklevel=3)
    return found


def make_tables(
    model: Model,
    problems: tuple[list[Problem], list[Problem], Verifier],
    *,
    prompt_tokens: int,
    max_new_tokens: int,
    chat: bool = False,
    heldout_verifier: Verifier | None = None,
) -> Tables:
    """Encodes both splits to one width; checks that prompt and response fit the model's context.

    Args:
      chat: a prompt that is text becomes the message of a user, by the model's chat template.

    Raises:
      UserError: where they do not fit, and for rows with several right texts, as ``check_several``.
    """
    train, heldout, verifier = problems
    if heldout_verifier in (None, verifier):
        check_several(verifier, [*train, *heldout])
    else:
        check_several(verifier, train)
        check_several(heldout_verifier, heldout)
    width = prompt_tokens or None
    both = problem_tables.encode_problems(model.tokenizer, [*train, *heldout], prompt_tokens=width, chat=chat)
    columns = both.tokens.shape[1]
    if columns + max_new_tokens > model.config.max_positions:
        raise UserError(
            f"prompts of {columns} tokens and --max-new-tokens {max_new_tokens} exceed the model's context of "
            f"{model.config.max_positions}; lower one of them"
        )
    split = len(train)
    return Tables(
        train,
        heldout,
        jax.tree.map(lambda x: x[:split], both),
        jax.tree.map(lambda x: x[split:], both),
        verifier,
        heldout_verifier,
    )


def _stop_strings(model: Model, stop: Sequence[str]) -> StopStrings:
    """Over the model's vocabulary; UserError for a text that no response has, as a special token stands for it."""
    texts = token_bytes(model.tokenizer)
    for text in stop:
        for token in model.tokenizer.encode(text):
            if not texts[token] and token not in model.tokenizer.eos_ids:
                raise UserError(
                    f"--stop {text!r} holds the special token {token}, which is no text of a response: it would never "
                    "be found; drop it, or name the token in eos_token_id of generation_config.json"
                )
    return make_stop_strings(stop, texts, vocab_size=model.config.padded_vocab_size)


def make_rollout(
    model: Model,
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    stop: Sequence[str] = (),
    slots: int = 0,
    cache_stages: int = 1,
    row_stages: int = 1,
    few_bits: str = "",
    strict: Callable[..., tuple[Array, Array]] | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    early_exit: bool = True,
    greedy_last: bool = False,
) -> Callable[..., Trajectories]:
    """The ``rollout`` slot for a loaded model.

    Args:
      stop: texts that end a response beside the end ids; a response keeps them, and so do its tokens.
      slots: responses that decode at once, see ``rollout.slots``; 0: all of them, in lock-step. The samples are alike.
      cache_stages, row_stages: of rollouts in lock-step, see ``rollout.generate``.
      few_bits: one of ``quantised.TYPES``: the rollout reads a copy of the weights in it; empty: the weights.
      strict: the trainer's scoring function, which then samples, see ``rollout.strict``; None: the cache does.
      greedy_last: the last response of every group takes the likeliest token each time.
      top_p, top_k, min_p: what may be drawn, see ``rollout.sample``; log-probabilities are those of all tokens.
      early_exit: of rollouts in lock-step, see ``rollout.generate``.
    """
    found = _stop_strings(model, stop) if stop else None
    among = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    in_stages = partial(generate, cache_stages=cache_stages, row_stages=row_stages, early_exit=early_exit, **among)
    decode = partial(generate_in_slots, slots=slots, **among) if slots else in_stages
    if strict is not None:
        decode = partial(generate_strict, score=strict)

    def rollout(params, tokens, valid, keys, problem_ids):
        if few_bits:
            params = quantised.quantise(model.config, params, few_bits)
        heat: Any = temperature
        if greedy_last:
            last = jnp.arange(tokens.shape[0] * group_size, dtype=jnp.int32) % group_size == group_size - 1
            heat = jnp.where(last, 0.0, jnp.float32(temperature))
        return decode(
            model.policy, params, tokens, valid, keys, group_size=group_size, max_new_tokens=max_new_tokens,
            eos_ids=model.tokenizer.eos_ids, pad_id=model.tokenizer.pad_id, temperature=heat,
            problem_ids=problem_ids, stop=found,
        )  # fmt: skip

    return rollout


def refuse_mesh(model: Model, why: str) -> None:
    """Raises UserError where a method that cannot be split over devices meets a model that is."""
    if model.mesh is not None:
        raise UserError(f"--mesh: this method runs on one device ({why}); drop the flag")


def split_rows(rollout: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """The same rollout with its rows divided over the mesh; prompts that do not divide are run by every device."""
    if mesh is None:
        return rollout

    def split(params, tokens, valid, keys, problem_ids):
        if tokens.shape[0] % meshes.batch_parts(mesh):
            return rollout(params, tokens, valid, keys, problem_ids)
        tokens, valid, keys, problem_ids = rules.constrain_batch((tokens, valid, keys, problem_ids), mesh)
        return rules.constrain_batch(rollout(params, tokens, valid, keys, problem_ids), mesh)

    return split


def handed_over(rollout: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """The same rollout with its rows divided over another mesh at the end, that of training, where they divide."""

    def run(params, tokens, valid, keys, problem_ids):
        rows = rollout(params, tokens, valid, keys, problem_ids)
        return rows if rows.tokens.shape[0] % meshes.batch_parts(mesh) else rules.constrain_batch(rows, mesh)

    return run


def digest(problems: tuple[list[Problem], list[Problem], Verifier]) -> str:
    """A hash of the prompts and answers of both splits: a resumed run must meet the same ones."""
    rows = [[(p.prompt, p.answer) for p in split] for split in problems[:2]]
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


def bucket(size: int, least: int) -> int:
    """``size`` filled up to ``least``, twice, three times, four, six, eight ... times that: so few shapes are compiled.

    >>> [bucket(size, 64) for size in (1, 65, 150, 300, 400)]
    [64, 128, 192, 384, 512]
    """
    whole = least * (1 << max(0, (-(-size // least) - 1).bit_length()))
    less = 3 * whole // 4  # of two halves, one and a half
    return less if whole > 2 * least and size <= less else whole


def responses(tokenizer: Tokenizer, trajectories: Trajectories) -> list[str]:
    """The text of every response, end token and padding left out."""
    tokens, mask = np.asarray(trajectories.tokens), np.asarray(trajectories.mask)
    ends = np.isin(tokens, tokenizer.eos_ids)
    return [tokenizer.decode(row[keep].tolist()) for row, keep in zip(tokens, mask & ~ends, strict=True)]


def needs_pool(verifier: Verifier) -> bool:
    """Whether a verifier runs code of others, which may hang: its module has the ``prepare`` of pool workers."""
    return hasattr(sys.modules[verifier.__module__], "prepare")


def make_pool(verifier: Verifier) -> VerifierPool | None:
    """The processes of a verifier that runs code of others, one a spare core; None where this process can judge."""
    if not needs_pool(verifier):
        return None
    return VerifierPool(workers=max(1, (os.cpu_count() or 1) - 1), timeout_s=pool_timeout_s(verifier))


def shared_pool(*verifiers: Verifier) -> VerifierPool | None:
    """One pool for those of the verifiers that need one, with the longest of their times."""
    return next(
        (make_pool(v) for v in sorted(verifiers, key=pool_timeout_s, reverse=True) if needs_pool(v)), None
    )  # fmt: skip


def pool_timeout_s(verifier: Verifier) -> float:
    """How long one item may take in a pool: what the verifier's module says, else 2 seconds."""
    return getattr(sys.modules[verifier.__module__], "TIMEOUT_S", 2.0)


def check_several(verifier: Verifier, problems: Sequence[Problem]) -> None:
    """Raises UserError for rows with several right texts, of which the verifier compares none."""
    if verifier in READS and (several := [p for p in problems if isinstance(p.answer.get("value"), list | tuple)]):
        raise UserError(
            f"{name_of(verifier)} compares one answer, and {len(several)} rows have lists of right ones, as "
            f"{several[0].answer['value']!r:.60}: give --verifier f1, or one answer a row"
        )


def check_compared(verifier: Verifier, problems: Sequence[Problem]) -> None:
    """Raises UserError where no response could be right: without a verifier, and as ``check_several``."""
    if verifier is verify_nothing:
        raise UserError(NO_ANSWERS)
    check_several(verifier, problems)


def make_judge(
    tokenizer: Tokenizer, problems: Sequence[Problem], verifier: Verifier, pool: VerifierPool | None = None
) -> Callable[..., Rewards]:
    """Decodes each response of trajectories of NumPy arrays and asks the verifier: ``Rewards`` of NumPy arrays.

    The judge takes what reward models said of the rows as its second argument, where the verifier is of some.

    Args:
      pool: processes that judge; None: this one does.

    Raises:
      UserError: for rows with several right texts, of which the verifier compares none.
    """
    models = models_of(verifier)
    check_several(verifier, problems)

    def judge(rows, rated=None):
        texts = responses(tokenizer, rows)
        given = [problems[i].answer for i in rows.problem_ids]
        each = None
        if names := parts_of(verifier):
            known = [{name: float(rated[name][k]) for name in models} for k in range(len(texts))]
            verdicts, each = zip(*map(verifier.each, given, texts, known), strict=True) if texts else ((), ())
        elif pool is None:
            verdicts = [verifier(answer, text) for answer, text in zip(given, texts, strict=True)]
        else:
            verdicts = pool.judge(verifier, given, texts).verdicts
        value, valid = np.array([v.value for v in verdicts], np.float32), np.array([v.valid for v in verdicts], bool)
        if each is None:
            return Rewards(value, valid)
        columns = np.array(each, np.float32).reshape(-1, len(names)).T
        return Rewards(value, valid, dict(zip(names, columns, strict=True)))

    return judge


def parts_of(verifier: Verifier) -> tuple[str, ...]:
    """The names of the rewards of which a verifier's is the sum (``method.own_rewards``); none where it is one."""
    return getattr(verifier, "parts", ())


def models_of(verifier: Verifier) -> tuple[str, ...]:
    """The folders of reward models whose rewards a verifier adds up, see ``run.rated``."""
    return getattr(verifier, "models", ())


def make_scorer(
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    verifier: Verifier,
    pool: VerifierPool | None = None,
    rate: Callable[[Trajectories], dict[str, np.ndarray]] | None = None,
) -> Callable[[Trajectories], Rewards]:
    """Host scorer: ``make_judge`` for what a rollout returned; of several hosts each judges its share of the rows.

    It raises UserError for a reward that is valid and not finite.

    Args:
      rate: what reward models say of all rows, on the devices of all hosts together.
    """
    judge = make_judge(tokenizer, problems, verifier, pool)

    def score(trajectories):
        rows = hosts.gathered(trajectories)
        rated = {} if rate is None else rate(rows)

        def share(part: slice) -> Rewards:
            return judge(*jax.tree.map(lambda x: x[part], (rows, rated)))

        rewards = jax.tree.map(jnp.asarray, hosts.split_work(len(rows.tokens), share))
        check_rewards(rewards, rows.problem_ids, name_of(verifier))  # on every host alike
        return rewards

    return score


def make_callback(
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    verifier: Verifier,
    pool: VerifierPool | None = None,
    *,
    mesh: Mesh | None = None,
) -> Callable[[Any, Trajectories], Rewards]:
    """``score(answers, trajectories)`` inside a compiled program of one host, which waits for this process's verdicts.

    For methods whose next samples depend on the verifier; where only the update does, ``make_scorer`` waits less.
    """
    judge = make_judge(tokenizer, problems, verifier, pool)

    def score(answers, trajectories):
        rows, names = trajectories.tokens.shape[0], parts_of(verifier)
        number = jax.ShapeDtypeStruct((rows,), jnp.float32)
        shapes = Rewards(number, jax.ShapeDtypeStruct((rows,), jnp.bool_), dict.fromkeys(names, number) or None)
        seen = {name: getattr(trajectories, name) for name in ("tokens", "mask", "problem_ids")}

        def answer(arrays):
            found = judge(trajectories._replace(**{name: np.asarray(x) for name, x in arrays.items()}))
            check_rewards(found, arrays["problem_ids"], name_of(verifier))
            return found

        return jax.pure_callback(answer, shapes, seen, vmap_method="sequential")

    return meshes.around_callback(score, mesh)


def side_by_side(tokenizer: Tokenizer, problems: Sequence[Problem], before: Evaluation, after: Evaluation, n: int = 4):
    """The first generations of ``n`` held-out problems before and after: ``[(prompt, before, after)]``."""

    def text(row: np.ndarray) -> str:
        return tokenizer.decode([int(i) for i in row if int(i) not in tokenizer.eos_ids])

    return [(problems[i].prompt, text(before.first[i]), text(after.first[i])) for i in range(min(n, len(problems)))]
