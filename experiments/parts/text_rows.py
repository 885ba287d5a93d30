"""What worlds of one's own rows share: a loaded model as the decoder of strings, tables of token rows, a judge.

Prompts are ``[N, P]`` with ``strings.PAD`` before them, responses ``[N, T]`` with the end token behind them, as
``strings.make_world`` wants them. Prompts are held out by their hash, and while a plan measures, prompts and pairs are
drawn from those alone.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from experiments.parts import rating_judge, strings
from jaxrl_llm import reduce
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.data import problems as problem_tables
from jaxrl_llm.data.chat import encode_answer
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.own import own
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.jobs import rows as job_rows
from jaxrl_llm.losses.reward import bradley_terry_loss
from jaxrl_llm.models import heads
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import flags, lora_state, options, parts, rated
from jaxrl_llm.train import offline
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.online import model_part
from jaxrl_llm.train.plan import Plan, tabled
from jaxrl_llm.types import Key, Params, Policy


@dataclasses.dataclass(frozen=True)
class Settings(rating_judge.Settings):
    """Flags of rows of one's own: prompts with a preferred and another response."""

    # FILE.jsonl, FILE.json, FILE.csv, FILE.parquet, FOLDER[:SPLIT] saved by datasets, tfds:NAME; empty: embedded
    data: str = ""
    # plain: prompt, chosen, rejected; unpaired: prompt, completion, label; scores: prompt, completions, scores
    format: Literal["plain", "hh-rlhf", "ultrafeedback", "tldr", "unpaired", "scores"] = "plain"
    chat: bool = False  # prompts become a user's message, by the model's chat template
    bad_rows: int = 0  # unreadable rows of a file that may be left out
    max_prompt_tokens: int = 512  # rows with a longer prompt are left out
    max_new_tokens: int = 256  # columns of a response; rows with a longer one are left out
    scorer: str = ""  # MODULE:FUNCTION of (prompt, response) to a number; empty: a reward model trained on the rows
    scorer_steps: int = 200  # of that reward model
    # FOLDER of a language model that says whether a response is good, or of a reward model, in the place of both
    judge_model: str = ""


JUDGES = ("scorer", "rater", "judge_model")  # one alone takes the place of the truth
COMPILED = 1e8  # parameters of a model whose measurement is one program: it holds the judge's weights as constants


class Table(NamedTuple):
    """Pairs as token rows."""

    prompts: Int[Array, "N P"]
    chosen: Int[Array, "N T"]
    rejected: Int[Array, "N T"]


class Replies(NamedTuple):
    """Two replies to each prompt, the first of them preferred."""

    prompts: Int[Array, "N P"]
    first: Int[Array, "N T"]
    second: Int[Array, "N T"]


class Rows(NamedTuple):
    """A model and its rows; ``now()`` is the table to draw from, that of held-out prompts while something measures."""

    model: parts.Model
    train: Table
    heldout: Table
    now: Callable[[], Table]
    measuring: Callable[[], contextlib.AbstractContextManager[None]]
    sources: tuple[Any, ...] = ()  # the rows behind both tables, training ones first
    loaded: parts.Model | None = None  # where ``model`` is an adapter alone: the model with its base


def pairs_of(settings: Any) -> list[Any]:
    """The preference pairs of ``--data``."""
    return job_rows.pairs(settings, settings.format)


def opened(settings: Any, kind: type = Settings, read: Callable[[Any], Sequence[Any]] = pairs_of) -> Rows:
    """The model and the rows of the settings; equal settings share them.

    Args:
      kind: the flags of rows, which tell one set from another.
      read: ``settings -> rows`` with ``prompt``, ``chosen`` and ``rejected``.

    Raises:
      UserError: for a folder, a source or rows that do not serve.
    """
    fields = (*options.OF_MODEL, *(f.name for f in dataclasses.fields(kind)))
    return _opened(tuple((name, getattr(settings, name)) for name in fields if hasattr(settings, name)), read)


@lru_cache(maxsize=2)
def _opened(identity: tuple[tuple[str, Any], ...], read: Callable[[Any], Sequence[Any]]) -> Rows:
    settings = SimpleNamespace(**dict(identity))
    least = {"max_prompt_tokens": 1, "max_new_tokens": 2, "scorer_steps": 1, "bad_rows": 0}
    for name, lowest in least.items():
        if hasattr(settings, name) and getattr(settings, name) < lowest:
            raise UserError(f"{flags.spell(name)} {getattr(settings, name)} must be at least {lowest}")
    model = loaded = options.open_model(settings)
    if settings.lora:
        if model.config.num_parameters >= COMPILED and not lora_state.hoists():
            raise UserError(
                f"--lora {settings.lora}: {model.config.num_parameters:.2g} weights of the base are too many to be "
                "written into a program; set JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1, with which they are given to it"
            )
        model = lora_state.adapter_alone(model)
    found = read(settings)
    (train, kept), (heldout, held) = (
        _table(model, part, settings) for part in job_rows.held_out(found, len(found), settings.data)
    )
    both = [train, heldout]
    width = max(table.prompts.shape[1] for table in both)
    if width + settings.max_new_tokens > model.config.max_positions:
        raise UserError(
            f"prompts of {width} tokens and --max-new-tokens {settings.max_new_tokens} exceed the model's context of "
            f"{model.config.max_positions}; lower --max-prompt-tokens or --max-new-tokens"
        )
    train, heldout = (table._replace(prompts=_widened(table.prompts, width)) for table in both)
    place = [train]

    @contextlib.contextmanager
    def measuring() -> Iterator[None]:
        place[0] = heldout
        try:
            yield
        finally:
            place[0] = train

    return Rows(model, train, heldout, lambda: place[0], measuring, (*kept, *held), loaded)


def too_long(columns: int, model: parts.Model) -> UserError:
    """What to do where rows exceed the context of a model."""
    return UserError(f"rows of {columns} tokens exceed the model's context of {model.config.max_positions}; lower "
                     "--max-prompt-tokens or --max-new-tokens")  # fmt: skip


def _widened(prompts: Array, width: int) -> Array:
    return jnp.pad(prompts, ((0, 0), (width - prompts.shape[1], 0)), constant_values=strings.PAD)


def _table(model: parts.Model, pairs: Sequence[Any], settings: Any) -> tuple[Table, list[Any]]:
    """The pairs that fit, as tokens and as they are.

    Raises:
      UserError: where none fits.
    """
    tokenizer, room = model.tokenizer, settings.max_new_tokens - 1
    asked = [Problem("rows", pair.prompt, "", {}, 0, str(k)) for k, pair in enumerate(pairs)]
    table = problem_tables.encode_problems(tokenizer, asked, answers=problem_tables.no_answers, chat=settings.chat)
    sizes = ([len(encode_answer(tokenizer, pair.prompt, getattr(pair, name), chat=settings.chat)) for pair in pairs]
             for name in ("chosen", "rejected"))  # fmt: skip
    longest = np.maximum(*map(np.asarray, sizes))
    lengths = np.asarray(table.valid).sum(1)
    fits = np.flatnonzero((longest <= room) & (lengths <= settings.max_prompt_tokens))
    if not len(fits):
        raise UserError(
            f"--data {settings.data}: no row has a prompt of at most {settings.max_prompt_tokens} tokens and responses "
            f"of at most {room}; raise --max-prompt-tokens or --max-new-tokens"
        )
    if left := len(pairs) - len(fits):
        print(f"{settings.data}: {left} of {len(pairs)} rows are longer than --max-prompt-tokens or --max-new-tokens "
              "and left out", flush=True)  # fmt: skip
    width = int(lengths[fits].max())
    prompts = jnp.where(table.valid, table.tokens, strings.PAD)[fits, table.tokens.shape[1] - width :]
    said = []
    for name in ("chosen", "rejected"):
        texts = [getattr(pairs[k], name) for k in fits]
        tokens, valid = encode_responses(
            tokenizer, texts, width=settings.max_new_tokens, prompts=[pairs[k].prompt for k in fits], chat=settings.chat
        )
        said.append(jnp.where(valid, tokens, tokenizer.eos_ids[0]).astype(jnp.int32))
    return Table(prompts.astype(jnp.int32), *said), [pairs[k] for k in fits]


def world_maker(rows: Rows, settings: Any) -> Callable[..., strings.World]:
    """``strings.make_world`` whose decoder is the loaded model: of the sizes asked for it takes the lengths."""
    model = rows.model
    policy = model.policy._replace(
        hidden=jax.jit(model.policy.hidden), unembed=jax.jit(model.policy.unembed), init=lambda key: fresh(model, key)
    )

    def make(vocabulary: int, prompt_tokens: int, response_tokens: int, **sizes: Any) -> strings.World:
        return strings.World(
            policy, prompt_tokens, response_tokens, model.tokenizer.eos_ids[0], start=lambda: model.params,
            rate=settings.learning_rate, ends=tuple(model.tokenizer.eos_ids),
        )  # fmt: skip

    return make


def fresh(model: parts.Model, key: Key) -> Params:
    """What a decoder made on the spot is in an embedded world: a copy of the loaded weights, each seed its own."""
    return jax.tree.map(jnp.copy, model.params)


def numbers_of(rows: Rows) -> Callable[[Array], Array]:
    """The row of every prompt in the training and the held-out table together, ``[N]``."""
    return finder(jnp.concatenate([rows.train.prompts, rows.heldout.prompts]))


def finder(table: Int[Array, "N P"]) -> Callable[[Array], Array]:
    """``prompts -> [N]``: the first row of the table that is the same."""
    width = table.shape[1]
    weights = jax.random.randint(jax.random.key(1), (width,), 1, 2**30, jnp.int32) * 2 + 1

    def marks(prompts: Array) -> Array:
        return jnp.sum((prompts[:, -width:] + 7) * weights[None, :], axis=1)  # wraps around, as a hash does

    known = marks(table)
    return lambda prompts: jnp.argmax(marks(prompts)[:, None] == known[None, :], axis=1)


def make_gold(rows: Rows, settings: Any) -> Callable[[Array, Array], Array]:
    """``gold(prompts, responses) -> [N]``: what the truth of an embedded world is: ``--scorer``, or a reward model.

    The reward model is trained by Bradley-Terry on the training rows from the loaded weights, once, and says how many
    held-out pairs it orders rightly. With ``--judge-model`` a language model of the same tokenizer is asked, or a
    reward model (``run.rated``), with ``--rater`` one of any behind an address.

    Raises:
      UserError: for a judge that cannot be loaded, or that reads other tokens.
    """
    given = [f"{flags.spell(name)} {getattr(settings, name)}" for name in JUDGES if getattr(settings, name)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} both judge: drop one")
    if settings.rater_model and not settings.rater:
        raise UserError(f"--rater-model {settings.rater_model} is a name at an address: give --rater ADDRESS with it, "
                        "or a folder as --judge-model")  # fmt: skip
    if settings.scorer:
        return _by_function(rows.model, settings.scorer)
    if settings.rater:
        return _by_texts(rows.model, rating_judge.make(settings))
    if settings.judge_model:
        folder = pathlib.Path(settings.judge_model)
        return (_by_reward_model if folder.is_dir() and weights.is_judge(folder) else _by_model)(rows, settings)
    score, read = _reader(rows, settings, rows.model.policy)

    @lru_cache(maxsize=1)
    def trained() -> Params:
        with jax.core.eval_context():
            params = fit_pairs(score, rows, settings)
            held = rows.heldout
            right = read(params, held.prompts, held.chosen) > read(params, held.prompts, held.rejected)
            print(f"judge: a reward model that orders {float(jnp.mean(right.astype(jnp.float32))):.2f} of "
                  f"{len(right)} held-out pairs rightly", flush=True)  # fmt: skip
        return params

    return lambda prompts, responses: read(trained(), prompts, responses)


def _reader(rows: Rows, settings: Any, policy: Policy) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """``(params, prompts, responses) -> [N]`` of a reward model ``{"model", "head"}``: at once, and in pieces."""
    world = world_maker(rows, settings)(0, rows.train.prompts.shape[1], rows.train.chosen.shape[1])

    @jax.jit
    def score(params: Params, prompts: Array, responses: Array) -> Array:
        whole = strings.whole(world, prompts, responses)
        return heads.rewards_of(policy, params["model"], params["head"], whole)

    def read(params: Params, prompts: Array, responses: Array) -> Array:
        return strings.in_pieces(world, partial(score, params), prompts, responses)

    return score, read


QUESTION = "\n\nIs this a good response? Answer Yes or No: "
SAME = ("Yes", "No", QUESTION, "Say it kindly: 3,600 is 60 * 60.")  # texts that a judge must read as the policy does


def _same_tokens(judge: parts.Model, model: parts.Model, settings: Any) -> None:
    if any(judge.tokenizer.encode(text) != model.tokenizer.encode(text) for text in SAME):
        raise UserError(
            f"--judge-model {settings.judge_model} reads other tokens than --model {settings.model}: take a model of "
            "the same family, or --scorer MODULE:FUNCTION"
        )


def _by_reward_model(rows: Rows, settings: Any) -> Callable[[Array, Array], Array]:
    """What its head says at the end of prompt and response, as it was trained."""
    found = rated.load_reward_model(
        settings.judge_model, mesh=rows.model.mesh, compute=settings.compute, attention=settings.attention,
        flag="--judge-model",
    )  # fmt: skip
    _same_tokens(found.model, rows.model, settings)
    columns = rows.train.prompts.shape[1] + rows.train.chosen.shape[1]
    if columns > found.model.config.max_positions:
        raise too_long(columns, found.model)
    return partial(_reader(rows, settings, found.model.policy)[1], {"model": found.model.params, "head": found.head})


def _by_model(rows: Rows, settings: Any) -> Callable[[Array, Array], Array]:
    """How much likelier the judge finds ``Yes`` than ``No`` behind prompt, response and ``QUESTION``."""
    model = rows.model
    judge = parts.load_model(settings.judge_model)
    asked, yes, no = (judge.tokenizer.encode(text) for text in (QUESTION, "Yes", "No"))
    _same_tokens(judge, model, settings)
    columns = rows.train.prompts.shape[1] + rows.train.chosen.shape[1] + len(asked)
    if columns > judge.config.max_positions:
        raise too_long(columns, judge)
    end, question = model.tokenizer.eos_ids[0], jnp.asarray(asked, jnp.int32)

    @jax.jit
    def score(params: Params, prompts: Array, responses: Array) -> Array:
        said = strings.counted(responses, end) & (responses != end)
        suffix = jnp.broadcast_to(question[None, :], (prompts.shape[0], len(asked)))
        real = jnp.concatenate([prompts != strings.PAD, said, jnp.ones(suffix.shape, bool)], axis=1).astype(jnp.int32)
        tokens = jnp.where(real > 0, jnp.concatenate([prompts, responses, suffix], axis=1), end)
        positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
        hidden = judge.policy.hidden(params, tokens, positions, real)[:, -1]
        logits = judge.policy.unembed(params, hidden)
        return logits[:, yes[0]] - logits[:, no[0]]

    world = world_maker(rows, settings)(0, rows.train.prompts.shape[1], rows.train.chosen.shape[1])
    return lambda prompts, responses: strings.in_pieces(world, partial(score, judge.params), prompts, responses)


def fit_pairs(score: Callable[[Params, Array, Array], Array], rows: Rows, settings: Any) -> Params:
    """A reward model ``{"model", "head"}`` of the training rows."""
    width = rows.model.config.hidden_size
    first = {
        "model": jax.tree.map(jnp.copy, rows.model.params),
        "head": heads.init_head(width, jax.random.key(11), scale=width**-0.5),
    }

    def loss(params, extras, batch):
        prompts, *both = batch
        found = score(params, jnp.tile(prompts, (2, 1)), jnp.concatenate(both))
        return reduce.scalars(bradley_terry_loss(*jnp.split(found, 2)).loss), {}

    count = min(32, rows.train.prompts.shape[0])
    method = Offline(tabled, make_epochs(None), count, loss, optax.adam(settings.learning_rate))
    state = offline.init_state(method, first, jax.random.key(12), extras={"rows": tuple(rows.train)})
    return offline.make_run(method, settings.scorer_steps)(jax.tree.map(jnp.copy, state))[0].params


def _by_function(model: parts.Model, name: str) -> Callable[[Array, Array], Array]:
    judge = own(name, "--scorer")

    def scores(cases: Sequence[tuple[str, str]]) -> list[float]:
        said = [float(judge(*case)) for case in cases]
        for value in said:
            if not np.isfinite(value):
                raise UserError(f"--scorer {name} gave {value}, which is no finite number")
        return said

    return _by_texts(model, scores)


def make_texts(model: parts.Model) -> Callable[[Any, Any], list[tuple[str, str]]]:
    """``(prompts, responses) -> [(prompt, response), ...]`` as texts, without what stands around either."""
    tokenizer = model.tokenizer

    def read(prompts: Any, responses: Any) -> list[tuple[str, str]]:
        ends = set(tokenizer.eos_ids)
        cases = []
        for prompt, response in zip(np.asarray(prompts), np.asarray(responses), strict=True):
            stop = next((k for k, token in enumerate(response) if int(token) in ends), len(response))
            text = tokenizer.decode([int(t) for t in prompt if t != strings.PAD])
            cases.append((text, tokenizer.decode(response[:stop].tolist())))
        return cases

    return read


def _by_texts(
    model: parts.Model, scores: Callable[[Sequence[tuple[str, str]]], list[float]]
) -> Callable[[Array, Array], Array]:
    """A judge of pairs of prompt and response as texts, asked from inside compiled programs too."""
    read = make_texts(model)

    def asked(prompts: Any, responses: Any) -> np.ndarray:
        return np.asarray(scores(read(prompts, responses)), np.float32)

    def gold(prompts: Array, responses: Array) -> Array:
        shape = jax.ShapeDtypeStruct((prompts.shape[0],), jnp.float32)
        return jax.pure_callback(asked, shape, prompts, responses, vmap_method="sequential")

    return gold


def exported(rows: Rows, params: Params) -> tuple[parts.Model, Params] | None:
    """The model and the weights to write into a folder, with an adapter those of its base beside it.

    They are the part ``policy`` of the parameters, the part ``judge`` where a judge alone is trained, or all of them;
    None where that is no model of these rows, as of an arm with numbers of its own beside the weights.
    """
    policy = next((params[name] for name in ("policy", "judge") if name in params), model_part(params))
    if jax.tree.structure(policy) != jax.tree.structure(rows.model.params):
        return None
    if rows.loaded is None or rows.loaded.params.keys() == rows.model.params.keys():
        return rows.model, policy
    return rows.loaded, rows.loaded.params | {lora_state.PART: policy}


def finish(rows: Rows) -> Callable[[Plan], Plan]:
    """A plan over these rows runs on the host, is measured on prompts that are held out, and leaves a model."""
    whole = rows.model.config.num_parameters < COMPILED

    @lru_cache(maxsize=64)
    def measured(measure: Callable[..., Any]) -> Callable[..., Any]:
        def on_heldout(params: Params, key: Key) -> dict[str, Array]:
            with rows.measuring():
                return measure(params, key)

        return jax.jit(on_heldout) if whole else on_heldout

    return lambda plan: plan._replace(
        on_host=True, measure=measured(plan.measure), exported=plan.exported or partial(exported, rows)
    )
