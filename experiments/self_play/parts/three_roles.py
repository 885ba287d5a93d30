"""One step of three roles of one model: questions, answers to them and to those of a pool, judgements of both.

A place of a step has three rows that train: a proposal, an answer to a question of the pool, and a judgement of an
answer of the pool of answers. Beside them stand answers to the proposal and judgements of all these, which only pay.
The pool is the training table and the questions that joined it since; the pool of answers is what the solver was asked
and wrote so far. Between the three passes this process reads text and writes prompts, so any tokenizer and chat
template serves.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.self_play.parts import role_rewards
from experiments.self_play.parts.role_rewards import JUDGE, PROPOSER, SOLVER
from experiments.self_play.parts.roles import Roles
from jaxrl_llm import reduce
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.metrics.calibration import auroc
from jaxrl_llm.rollout import rollout_cost
from jaxrl_llm.run import parts as job
from jaxrl_llm.run.bench import problem_sets
from jaxrl_llm.types import Batch, Key, Metrics, Params, Rewards, TrainState, Trajectories, declared

NAMES = ("proposer", "solver", "judge")
ROWS = len(NAMES)  # of a place
EMPTY = -1  # fills the rows of questions, which are token ids
_SLACK = 8  # tokens by which a question or an answer may grow when it is encoded within a prompt
_SALT = 0x3A6E
JUDGED = 256  # held-out problems whose answers show what the judge is worth


class Pool(NamedTuple):
    """Questions that joined the training table, the oldest overwritten when there is no room."""

    questions: Int[Array, "M W"]
    joined: Int[Array, ""]  # so far


class Answers(NamedTuple):
    """What the judge was asked of answers of the solver, as left-padded prompts; the oldest overwritten likewise."""

    tokens: Int[Array, "M L"]
    valid: Bool[Array, "M L"]
    joined: Int[Array, ""]  # so far


class Text(NamedTuple):
    """What this process needs to read and write for the roles of a model."""

    model: job.Model
    roles: Roles
    chat: bool
    question: int  # columns of a question
    prompts: tuple[int, int, int]  # columns of the prompts of proposer, solver and judge
    responses: tuple[int, int, int]  # and of their responses


def text_of(
    found: Bench, roles: Roles, seeds: Sequence[str], *, chat: bool, question: int, answer: int, judgement: int
) -> Text:
    """The widths of everything that is written.

    Args:
      seeds: questions of the data; the longest one has room, also where ``question`` tokens are fewer.
      question: the most tokens of a proposal; answer, judgement: likewise.

    Raises:
      UserError: where the longest prompt and its response exceed the model's context.
    """
    tokenizer, most = found.model.tokenizer, found.model.config.max_positions

    def size(*prompts: str) -> int:
        return max(len(encode_prompt(tokenizer, prompt, chat=chat)) for prompt in prompts)

    columns = max(question, *(len(tokenizer.encode(seed)) for seed in seeds))
    room = columns + _SLACK
    prompts = (
        size(roles.propose(None), roles.propose("0")) + room,
        size(roles.solve("0")) + room,
        max(size(roles.judge_question("0")) + room, size(roles.judge_answer("0", "0")) + room + answer),
    )
    responses = question, answer, judgement
    if (needed := max(p + r for p, r in zip(prompts, responses, strict=True))) > most:
        raise UserError(
            f"prompt and response of a role take up to {needed} tokens with --question-tokens {question}, "
            f"--max-new-tokens {answer} and --judge-tokens {judgement}, the model's context is {most}; lower them"
        )
    return Text(found.model, roles, chat, columns, prompts, responses)


def encoded_questions(text: Text, questions: Sequence[str | None]) -> np.ndarray:
    """Token ids of questions, filled up with -1 ``[N, W]``; none where there is none or it is too long."""
    rows = np.full((len(questions), text.question), EMPTY, np.int32)
    for k, question in enumerate(questions):
        ids = text.model.tokenizer.encode(question) if question else []
        if len(ids) <= text.question:
            rows[k, : len(ids)] = ids
    return rows


def _read(text: Text, questions: np.ndarray) -> list[str]:
    return [text.model.tokenizer.decode(row[row >= 0].tolist()) for row in questions]


def _prompts(text: Text, prompts: Sequence[str], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded prompts; of one that is too long its end."""
    tokens = np.full((len(prompts), width), text.model.tokenizer.pad_id, np.int32)
    valid = np.zeros(tokens.shape, bool)
    for k, prompt in enumerate(prompts):
        ids = encode_prompt(text.model.tokenizer, prompt, chat=text.chat)[-width:]
        tokens[k, width - len(ids) :], valid[k, width - len(ids) :] = ids, True
    return tokens, valid


def _here(text: Text, function: Callable, shapes: Any, *arrays: Array) -> Any:
    """``function`` of NumPy arrays, called by this process in the middle of a compiled program."""

    def ask(*given):
        return jax.pure_callback(
            lambda *x: function(*map(np.asarray, x)), shapes, *given, vmap_method="sequential"
        )  # fmt: skip

    return meshes.around_callback(ask, text.model.mesh)(*arrays)


def _table(rows: int, width: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((rows, width), jnp.int32), jax.ShapeDtypeStruct((rows, width), jnp.bool_)


def _numbers(rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows,), jnp.float32)


class Asked(NamedTuple):
    """What was read of proposals."""

    questions: Int[Array, "P W"]
    form: Float[Array, " P"]
    sound: Float[Array, " P"]  # NaN where nobody knows


def proposing_prompts(text: Text, questions: Array, given: Array) -> tuple[Array, Array]:
    """Prompts of the proposer; a question to begin from where ``given``."""

    def write(rows, shown):
        texts = [q if yes else None for q, yes in zip(_read(text, rows), shown, strict=True)]
        return _prompts(text, [text.roles.propose(q) for q in texts], text.prompts[PROPOSER])

    return _here(text, write, _table(questions.shape[0], text.prompts[PROPOSER]), questions, given)


def read_proposals(text: Text, rows: Trajectories) -> Asked:
    """The questions that a proposer wrote."""

    def read(tokens, mask):
        said = job.responses(text.model.tokenizer, rows._replace(tokens=tokens, mask=mask))
        questions = encoded_questions(text, [text.roles.question(x) for x in said])
        # what is judged, answered and kept is what was encoded
        there = [text.roles.sound(q) if q else 0.0 for q in _read(text, questions)]
        form = [text.roles.forms[PROPOSER](x) for x in said]
        return Asked(questions, np.asarray(form, np.float32), np.asarray(there, np.float32))

    count = rows.tokens.shape[0]
    return _here(
        text, read, Asked(_table(count, text.question)[0], _numbers(count), _numbers(count)), rows.tokens, rows.mask
    )


def solving_prompts(text: Text, questions: Array) -> tuple[Array, Array]:
    """Prompts of the solver."""

    def write(rows):
        return _prompts(text, [text.roles.solve(q) for q in _read(text, rows)], text.prompts[SOLVER])

    return _here(text, write, _table(questions.shape[0], text.prompts[SOLVER]), questions)


class Answered(NamedTuple):
    """Prompts of the judge for answers, and what was read of these."""

    tokens: Int[Array, "N L"]
    valid: Bool[Array, "N L"]
    form: Float[Array, " N"]
    right: Float[Array, " N"]  # NaN where nobody knows


def judging_answers(text: Text, questions: Array, rows: Trajectories) -> Answered:
    """What the judge is asked of answers."""

    def write(asked, tokens, mask):
        said = job.responses(text.model.tokenizer, rows._replace(tokens=tokens, mask=mask))
        pairs = list(zip(_read(text, asked), said, strict=True))
        table = _prompts(text, [text.roles.judge_answer(*pair) for pair in pairs], text.prompts[JUDGE])
        form = [text.roles.forms[SOLVER](x) for x in said]
        right = [text.roles.right(*pair) for pair in pairs]
        return Answered(*table, np.asarray(form, np.float32), np.asarray(right, np.float32))

    count = questions.shape[0]
    shapes = Answered(*_table(count, text.prompts[JUDGE]), _numbers(count), _numbers(count))
    return _here(text, write, shapes, questions, rows.tokens, rows.mask)


def judging_questions(text: Text, questions: Array) -> tuple[Array, Array]:
    """What the judge is asked of questions."""

    def write(rows):
        return _prompts(text, [text.roles.judge_question(q) for q in _read(text, rows)], text.prompts[JUDGE])

    return _here(text, write, _table(questions.shape[0], text.prompts[JUDGE]), questions)


def read_scores(text: Text, rows: Trajectories) -> tuple[Array, Array]:
    """Scores of judgements, NaN without one, and their form."""

    def read(tokens, mask):
        said = job.responses(text.model.tokenizer, rows._replace(tokens=tokens, mask=mask))
        scores = [text.roles.score(x) for x in said], [text.roles.forms[JUDGE](x) for x in said]
        return tuple(np.asarray(x, np.float32) for x in scores)

    count = rows.tokens.shape[0]
    return _here(text, read, (_numbers(count), _numbers(count)), rows.tokens, rows.mask)


def framed(rows: Trajectories, *, prompt: int, response: int, of_response: int) -> Trajectories:
    """Rows with wider prompts and responses: padding in front and behind, so that rows of all roles make one batch.

    Args:
      of_response: columns of the response in ``rows``.
    """
    before, after = prompt + of_response - rows.tokens.shape[1], response - of_response
    wide = ("tokens", "segment_ids", "positions", "mask", "sampler_logp")
    padded = {name: jnp.pad(getattr(rows, name), ((0, 0), (before, after))) for name in wide}
    return rows._replace(**padded, extras={})


def empty_pool(columns: int, room: int) -> Pool:
    """A pool for ``room`` questions that nothing has joined."""
    return Pool(jnp.full((room, columns), EMPTY, jnp.int32), jnp.zeros((), jnp.int32))


def joined_by(pool: Pool, questions: Int[Array, "P W"], which: Bool[Array, " P"]) -> Pool:
    """The pool after some of the questions joined it, each in the place of the oldest one."""
    places, joined = _places(pool.questions.shape[0], pool.joined, which)
    return Pool(pool.questions.at[places].set(questions, mode="drop"), joined)


def _places(room: int, joined: Array, which: Bool[Array, " P"]) -> tuple[Array, Array]:
    """Where rows that join go, those that do not beyond the last place; and how many have joined then."""
    order = joined + jnp.cumsum(which.astype(jnp.int32)) - 1
    then = joined + jnp.sum(which.astype(jnp.int32))
    # of more than there is room for the last ones stay
    return jnp.where(which & (order >= then - room), order % room, room), then


def no_answers(columns: int, room: int) -> Answers:
    """A pool for ``room`` answers, of prompts of so many tokens, that nothing has joined."""
    shape = room, columns
    return Answers(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros((), jnp.int32))


def answered_by(pool: Answers, tokens: Int[Array, "P L"], valid: Bool[Array, "P L"]) -> Answers:
    """The pool after these answers joined it, each in the place of the oldest one."""
    places, joined = _places(pool.tokens.shape[0], pool.joined, jnp.ones(tokens.shape[0], bool))
    kept = (x.at[places].set(new, mode="drop") for x, new in ((pool.tokens, tokens), (pool.valid, valid)))
    return Answers(*kept, joined)


def of_pool(pool: Answers, tokens: Int[Array, "P L"], valid: Bool[Array, "P L"], keys: Key) -> tuple[Array, Array]:
    """What the judge trains on: uniform draws, with repeats, from the pool and the answers of this step together.

    From "MAE", arXiv:2510.23595, section 3, with its code: pairs of questions and answers are the judge's data.
    """
    size = tokens.shape[0]
    filled = jnp.minimum(pool.joined, pool.tokens.shape[0])
    place = jax.vmap(lambda key: jax.random.randint(key, (), 0, size + filled))(keys)
    ours, old = jnp.minimum(place, size - 1), jnp.maximum(place - size, 0)
    here = (place < size)[:, None]
    return jnp.where(here, tokens[ours], pool.tokens[old]), jnp.where(here, valid[ours], pool.valid[old])


def of_step(pool: Answers, tokens: Int[Array, "P L"], valid: Bool[Array, "P L"], keys: Key) -> tuple[Array, Array]:
    """What the judge trains on where there is no pool: the answers of this step."""
    return tokens, valid


def drawn_questions(pool: Pool, seeds: Int[Array, "P W"], total: int, keys: Key) -> tuple[Array, Array]:
    """Uniform draws from the table and the pool together: ``(questions [P, W], which are of the table [P])``.

    Args:
      seeds: uniform draws from the table, which has ``total`` questions.
    """
    filled = jnp.minimum(pool.joined, pool.questions.shape[0])

    def one(key):
        first, second = jax.random.split(key)
        share = filled / (total + filled)
        return jax.random.uniform(first) < share, jax.random.randint(second, (), 0, jnp.maximum(filled, 1))

    new, place = jax.vmap(one)(keys)
    return jnp.where(new[:, None], pool.questions[place], seeds), ~new


def seed_questions(settings: OnlineSettings, roles: Roles, *, heldout: bool = False) -> list[str]:
    """The question in every prompt of the training table, or of the held-out problems.

    Raises:
      UserError: for a conversation, which is no single question.
    """
    prompts = [problem.prompt for problem in problem_sets(settings)[int(heldout)]]
    if wrong := [k for k, prompt in enumerate(prompts) if not isinstance(prompt, str)]:
        raise UserError(f"row {wrong[0]} is a conversation, and this method writes questions; give text")
    return [roles.posed(prompt) for prompt in prompts]


@lru_cache(maxsize=4)
def asked_as_solver(roles: Callable[[], Roles]) -> Callable[[OnlineSettings], Bench]:
    """The bench whose held-out problems are asked as the solver is: what trains is what is measured.

    Equal roles give the same function, so that arms share the program of their measurement.
    """

    def opened(settings: OnlineSettings) -> Bench:
        found, voices = recipes.bench(settings), roles()
        asked = [
            problem._replace(prompt=voices.solve(question))
            for problem, question in zip(
                problem_sets(settings)[1], seed_questions(settings, voices, heldout=True), strict=True
            )
        ]
        encode = partial(tables.encode_problems, found.model.tokenizer, asked, chat=settings.chat)
        width = max(encode().tokens.shape[1], found.heldout.tokens.shape[1])
        if width + settings.max_new_tokens > (most := found.model.config.max_positions):
            raise UserError(
                f"held-out questions, asked as the solver is, take {width} tokens with --max-new-tokens "
                f"{settings.max_new_tokens} for the answer, the model's context is {most}; lower it, or drop long rows"
            )
        table = encode(prompt_tokens=width)
        return found._replace(heldout=found.heldout._replace(tokens=table.tokens, valid=table.valid))

    return opened


def _several(keys: Key, number: int) -> Key:
    """So many keys of each key ``[P, number]``."""
    salted = jax.vmap(lambda key: jax.random.fold_in(key, _SALT))(keys)
    return jax.vmap(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(number)))(salted)


class Earned(NamedTuple):
    """Extras of rows and batches: the role of each row, and what it earns."""

    role: Int[Array, " B"]
    earned: Float[Array, " B"]


class Placed(NamedTuple):
    """Extras of rows and batches: what is known of the place of each row, at its three rows alike."""

    joins: Bool[Array, " B"]
    sound: Float[Array, " B"]
    quality: Float[Array, " B"]
    solvable: Float[Array, " B"]
    answer: Float[Array, " B"]
    solved: Float[Array, " B"]
    verdict: Float[Array, " B"]
    unread: Float[Array, " B"]


class Posed(NamedTuple):
    """Extras of rows: the question that the proposer of its place wrote."""

    question: Int[Array, "B W"]


class Judged(NamedTuple):
    """Extras of rows: what the judge was asked of the answer of each place."""

    judged_tokens: Int[Array, "B L"]
    judged_valid: Bool[Array, "B L"]


class Pooled(NamedTuple):
    """Extras of a state: questions that joined, and answers to be judged again."""

    pool: Pool
    answers: Answers


def rollout_of_roles(settings: Any, found: Bench, text: Text, seeds: Sequence[str]) -> Callable[..., Trajectories]:
    """The ``rollout`` slot: what ``acting`` gives and drawn rows of the table to three rows a place.

    Its extras say which role a row has (``role``), what it earns (``earned``), and of each place, at its three rows
    alike, what ``figures`` and ``remember`` need.
    """
    count, size = settings.difficulty_samples, settings.prompts_per_step
    rollouts = [
        recipes.rollout_of(dataclasses.replace(settings, max_new_tokens=new), found, group_size=1)
        for new in text.responses
    ]
    table = jnp.asarray(encoded_questions(text, seeds))
    known, answers = curricula.train_score(found), found.train.answers
    widest = {"prompt": max(text.prompts), "response": max(text.responses)}

    def truth(answered: Answered, solved: Trajectories, from_table: Array) -> Array:
        """Whether answers are right: as read from the question, else by the data for questions of the table."""
        first = jax.tree.map(lambda x: x[:size], solved)
        rewards = known(jax.tree.map(lambda x: x[first.problem_ids], answers), first)
        ours = jnp.where(rewards.valid & from_table, (rewards.value > 0.5).astype(jnp.float32), jnp.nan)
        return jnp.where(
            jnp.isnan(answered.right), jnp.pad(ours, (0, size * count), constant_values=jnp.nan), answered.right
        )

    def rollout(actor, tokens, valid, keys, ids):
        params, pool, keys = actor["model"], actor["pool"], keys.reshape(size, ROWS)
        draws = _several(keys[:, SOLVER], 5)
        begin, _ = drawn_questions(pool, table[ids], len(seeds), draws[:, 0])
        shown = jax.vmap(partial(jax.random.bernoulli, p=settings.reference_share))(draws[:, 1])
        posed = rollouts[PROPOSER](params, *proposing_prompts(text, begin, shown), keys[:, PROPOSER], ids)
        asked = read_proposals(text, posed)
        theirs, from_table = drawn_questions(pool, table[ids], len(seeds), draws[:, 2])
        questions = jnp.concatenate([theirs, jnp.repeat(asked.questions, count, axis=0)])
        places = jnp.concatenate([ids, jnp.repeat(ids, count)])
        solving = jnp.concatenate([keys[:, SOLVER], _several(keys[:, PROPOSER], count).reshape(-1)])
        solved = rollouts[SOLVER](params, *solving_prompts(text, questions), solving, places)
        answered = judging_answers(text, questions, solved)
        doubts = judging_questions(text, asked.questions)
        doubted = _several(keys[:, JUDGE], count + 2)
        judging = jnp.concatenate([doubted[:, 1], doubted[:, 2:].reshape(-1), doubted[:, 0], keys[:, JUDGE]])
        fresh = answered.tokens[:size], answered.valid[:size]
        again = settings.judged(actor["answers"], *fresh, draws[:, 4])
        given = (jnp.concatenate(x) for x in zip((answered.tokens, answered.valid), doubts, again, strict=True))
        judged = rollouts[JUDGE](params, *given, judging, jnp.concatenate([places, ids, ids]))
        scores, form = read_scores(text, judged)
        said = role_rewards.normalised(scores)
        right = truth(answered, solved, from_table)
        paid = settings.verdicts(said[: size * (1 + count)], right, draws[0, 3])
        solvable = jnp.mean(paid[size:].reshape(size, count), axis=1)
        quality, there = said[size * (1 + count) : size * (2 + count)], jnp.any(asked.questions >= 0, axis=1)
        bar = {"threshold": settings.threshold}
        earned = (
            role_rewards.proposer_rewards(
                quality, solvable, asked.form, there, difficulty=settings.difficulty, **bar
            ),
            role_rewards.solver_rewards(paid[:size], answered.form[:size]),
            form[size * (2 + count) :],
        )  # fmt: skip
        joins = role_rewards.accepted(quality, there, **bar)
        first, last = slice(size), slice(size * (2 + count), None)
        rows = [
            framed(one, of_response=new, **widest)
            for one, new in zip(
                (posed, *(jax.tree.map(lambda x, a=a: x[a], one) for one, a in ((solved, first), (judged, last)))),
                text.responses,
                strict=True,
            )
        ]
        place = Placed(
            joins=joins, sound=asked.sound, quality=quality, solvable=solvable, answer=right[:size],
            solved=jnp.mean(right[size:].reshape(size, count), axis=1), verdict=said[:size],
            unread=jnp.isnan(scores[:size]).astype(jnp.float32),
        )._asdict() | Posed(asked.questions)._asdict() | Judged(*fresh)._asdict()  # fmt: skip
        each = jnp.repeat(_spent(size, count, posed, solved, judged) / ROWS, ROWS)
        written = jnp.full(each.shape, (5 + 2 * count) / ROWS)
        return rollout_cost.with_cost(_side_by_side(rows, jnp.stack(earned, axis=1), place), written, each)

    return rollout


def _spent(size: int, count: int, posed: Trajectories, solved: Trajectories, judged: Trajectories) -> Array:
    """Tokens that were written for each place ``[P]``."""
    tokens = [rollout_cost.response_tokens(rows) for rows in (posed, solved, judged)]
    answers = size * (1 + count)
    extra = tokens[1][size:].reshape(size, count), tokens[2][size:answers].reshape(size, count)
    alone = tokens[0] + tokens[1][:size] + tokens[2][:size] + jnp.sum(tokens[2][answers:].reshape(2, size), axis=0)
    return alone + sum(jnp.sum(x, axis=1) for x in extra)


def _side_by_side(rows: Sequence[Trajectories], earned: Array, place: dict[str, Array]) -> Trajectories:
    """The three rows of each place beside each other; what is known of a place is at each of them."""
    size = earned.shape[0]

    def beside(*columns):
        return jnp.stack(columns, axis=1).reshape(size * ROWS, *columns[0].shape[1:])

    extras = {name: jnp.repeat(x, ROWS, axis=0) for name, x in place.items()}
    extras |= Earned(jnp.tile(jnp.arange(ROWS, dtype=jnp.int32), size), earned.reshape(-1))._asdict()
    places = jnp.repeat(jnp.arange(size, dtype=jnp.int32), ROWS)
    return jax.tree.map(beside, *rows)._replace(group_ids=places, extras=extras)


def score(trained: Callable[[Array], Array], answers: Any, rows: Trajectories) -> Rewards:
    """The ``score`` slot: what was earned, of the roles that train."""
    role, earned = declared(Earned, rows.extras)
    return Rewards(earned, trained(role))


def role_advantages(advantages: Callable[..., Array], trained: Callable[[Array], Array]) -> Callable[..., Array]:
    """The ``advantages`` of ``make_estimate``: what a row earned at each of its tokens, less a baseline."""

    def estimate(rows, rewards):
        role = declared(Earned, rows.extras).role
        mask = rows.mask & trained(role)[:, None]
        return advantages(jnp.broadcast_to(rewards.value[:, None], mask.shape), role, mask)

    return estimate


def row_extras(extras: dict[str, Any], rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """What ``figures`` reads."""
    role = declared(Earned, rows.extras).role
    return declared(Placed, rows.extras)._asdict() | Earned(role, rewards.value)._asdict()


def _mean(values: Array, where: Array) -> Array:
    """A mean over some rows; NaN, which curves leave out, over none."""
    where = where & ~jnp.isnan(values)
    found = reduce.scalars(jnp.where(where, values, 0.0), where)
    return jnp.where(jnp.any(where), found, jnp.nan)


def figures(batch: Batch, metrics: Metrics) -> Metrics:
    """What each role earns and how far its advantages spread; what joined the pool; what the judge's word is worth.

    ``pool/`` is of the questions that joined in this step: the share that poses nothing, and how often they are solved,
    in truth, where the truth is known.
    """
    (every, earned), place = declared(Earned, batch.extras), declared(Placed, batch.extras)
    first = every == PROPOSER
    joins, at = first & place.joins, {}
    for role, name in enumerate(NAMES):
        mask = batch.mask & (every == role)[:, None]
        size = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
        spread = jnp.sqrt(jnp.sum(jnp.where(mask, batch.advantages, 0.0) ** 2) / size)
        at |= {f"{name}/reward": _mean(earned, every == role), f"{name}/spread": spread}
    return at | {
        "proposer/quality": _mean(place.quality, first),
        "proposer/judged_solvable": _mean(place.solvable, first),
        "proposer/sound": _mean(place.sound, first),
        "pool/joined": reduce.scalars(joins.astype(jnp.float32), first),
        "pool/unsound": _mean(1.0 - place.sound, joins),
        "pool/solved": _mean(place.solved, joins),
        "solver/unread": _mean(place.unread, first),
        "solver/right": _mean(place.answer, first),
    }


def remember(state: TrainState, batch: Any, rows: Trajectories, rewards: Any) -> dict[str, Any]:
    """The ``remember`` slot: questions that were good enough join the pool, and all answers that of the judge."""
    first = slice(PROPOSER, None, ROWS)
    question, joins = declared(Posed, rows.extras).question, declared(Placed, rows.extras).joins
    pool, answers = declared(Pooled, state.extras)
    more = (x[first] for x in declared(Judged, rows.extras))
    return state.extras | Pooled(joined_by(pool, question[first], joins[first]), answered_by(answers, *more))._asdict()


def acting(state: TrainState) -> dict[str, Any]:
    """The ``actor`` slot: the model and the pools it asks from."""
    return {"model": state.params} | declared(Pooled, state.extras)._asdict()


@lru_cache(maxsize=8)
def pool_extras(columns: int, judged: int, room: int) -> Callable[[Params, Key], dict[str, Any]]:
    """The ``extras`` of a stage: empty pools for so many questions, and prompts of the judge, of so many tokens."""
    return lambda params, key: Pooled(empty_pool(columns, room), no_answers(judged, room))._asdict()


def measure_of_judge(settings: Any) -> Callable[[Params, Key], dict[str, Array]]:
    """``eval/auc``: how often the judge puts a right answer to a held-out question above a wrong one, ties half.

    ``eval/unread``: judgements without a score. The answers are the model's own, one to each question.
    """
    lengths = settings.question_tokens, settings.judge_tokens
    return _measure(recipes.bench_identity(settings), settings.voices, *lengths, settings.temperature)


@lru_cache(maxsize=4)
def _measure(identity: tuple, roles: Callable[[], Roles], question: int, judgement: int, temperature: float):
    settings = OnlineSettings(**dict(identity), temperature=temperature)
    found, voices = asked_as_solver(roles)(settings), roles()
    asked = seed_questions(settings, voices, heldout=True)[:JUDGED]
    lengths = {"question": question, "answer": settings.max_new_tokens, "judgement": judgement}
    text = text_of(found, voices, asked, chat=settings.chat, **lengths)
    questions = jnp.asarray(encoded_questions(text, asked))
    held = jax.tree.map(lambda x: x[: len(asked)], found.heldout)
    answering, judging = (
        recipes.rollout_of(dataclasses.replace(settings, max_new_tokens=new), found, group_size=1, measured=True)
        for new in (settings.max_new_tokens, judgement)
    )
    ids = jnp.arange(len(asked), dtype=jnp.int32)

    @jax.jit
    def played(params, key):
        keys = jax.random.split(key, 2 * len(asked))
        rows = answering(params, held.tokens, held.valid, keys[: len(asked)], ids)
        given = judging_answers(text, questions, rows)
        return rows, read_scores(text, judging(params, given.tokens, given.valid, keys[len(asked) :], ids))[0]

    def measure(params, key):
        rows, scores = played(params, key)
        rewards = found.heldout_score(rows) if found.score is None else found.score(held.answers, rows)
        right = rewards.valid & (rewards.value > 0.5)
        area = auroc(role_rewards.normalised(scores), right, rewards.valid)
        return {"eval/auc": area, "eval/unread": reduce.scalars(jnp.isnan(scores).astype(jnp.float32))}

    return measure
