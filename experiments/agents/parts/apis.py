"""A small database behind an interface of calls, as an arena: what counts are tests on the state that is left.

Three records ``a b c`` hold a value ``0..3`` each. The prompt ``Cac`` asks for one of: copy ``a`` to ``c``, swap them
(``Sac``), one more in ``a`` (``Ia.``), clear ``a`` (``Da.``, which leaves 0). The values are hidden. An action is one
call of three tokens: ``l..`` logs in, ``sa.`` shows a record, ``wa3`` writes one, ``xa.`` clears one, ``f..`` says that
the task is done. It is answered by one token: the value, ``=`` when it was executed, ``!`` when it failed, as it was
not written like that or nobody had logged in. The episode ends with ``f..`` or with the last turn, which pays the share
of tests that pass: every record to change holds what it should; and nothing else was touched, and the agent said that
it is done.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.agents.parts import arena as arenas
from jaxrl_llm import reduce
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env
from jaxrl_llm.types import Key, Problems, Rewards, Trajectories

RECORDS, VALUES, VARIANTS, TURNS = 3, 4, 3, 7  # TURNS: a shortest plan has 3 to 6
ALPHABET = "_CSIDabc0123lswxf=!."  # the first is padding
_AT = {c: i for i, c in enumerate(ALPHABET)}
FAILED, NO_CALL = -0.1, -0.2  # what a call that failed, and a turn without a call, take off the return


class Desk(NamedTuple):
    """The database and what has happened to it; ``gold`` is what the task should leave."""

    records: Int[Array, " E"]
    gold: Int[Array, " E"]
    changes: Bool[Array, " E"]  # records that the task changes
    needed: Bool[Array, " E"]  # to be shown before anyone could know what to write
    seen: Bool[Array, " E"]
    inside: Bool[Array, ""]  # logged in
    left: Int[Array, ""]  # turns


def encode(text: str) -> list[int]:
    """One token a character."""
    return [_AT[c] for c in text]


def held_back(job: str, x: int, y: int, records: Int[np.ndarray, " E"]) -> bool:
    """Whether a task is to be measured, by the instruction and by what has to be looked at, nothing else.

    To swap is to see both records: a third of the pairs of values is held back. To copy, or to add one, is to see the
    first: a quarter is. To clear is to see nothing: it is trained alone. What an instruction holds back another one
    trains.
    """
    if job == "S":
        return bool((records[y] - records[x]) % VALUES == 1 + (x + y) % (VALUES - 1))
    return job != "D" and bool(records[x] == (x + (y if job == "C" else 1)) % VALUES)


def problems(scenarios: int, variants: int, seed: int, *, measured: bool) -> Problems:
    """Scenarios (an instruction) one after the other, each with ``variants`` databases; ``level`` numbers them.

    Args:
      measured: databases of the part that is ``held_back``, and no ``D``, else of the other part.
    """
    jobs = "CSI" if measured else "CSID"
    rng = np.random.default_rng(seed)
    tokens, answers = [], {"records": [], "gold": [], "needed": []}
    for _ in range(scenarios):
        job, (x, y) = jobs[rng.integers(len(jobs))], rng.permutation(RECORDS)[:2].tolist()
        text = f"{job}{'abc'[x]}{'abc'[y] if job in 'CS' else '.'}"
        for _ in range(variants):
            records = rng.permutation(VALUES)[:RECORDS]
            # to clear a record that holds 0 would leave nothing to do
            while held_back(job, x, y, records) != measured or (job == "D" and records[x] == 0):
                records = rng.permutation(VALUES)[:RECORDS]
            gold, needed = records.copy(), np.zeros(RECORDS, bool)
            gold[x] = {"C": records[x], "S": records[y], "I": (records[x] + 1) % VALUES, "D": 0}[job]
            gold[y] = records[x] if job in "CS" else records[y]
            needed[x], needed[y] = job != "D", job == "S"
            tokens.append(encode(text))
            for name, value in (("records", records), ("gold", gold), ("needed", needed)):
                answers[name].append(value)
    table = {
        name: jnp.asarray(np.stack(rows), bool if name == "needed" else jnp.int32) for name, rows in answers.items()
    }
    level = jnp.repeat(jnp.arange(scenarios, dtype=jnp.int32), variants)
    prompts = jnp.asarray(tokens, jnp.int32)
    return Problems(prompts, jnp.ones(prompts.shape, bool), table, level)


def _step(state: Desk, action: Array, count: Array) -> Answered:
    record, value, dot = action[1] - _AT["a"], action[2] - _AT["0"], action == _AT["."]
    verb = {c: action[0] == _AT[c] for c in "lswxf"}
    named, valued = (record >= 0) & (record < RECORDS), (value >= 0) & (value < VALUES)
    logs_in, ends = verb["l"] & dot[1] & dot[2], verb["f"] & dot[1] & dot[2]
    reads, clears = verb["s"] & named & dot[2] & state.inside, verb["x"] & named & dot[2] & state.inside
    writes = verb["w"] & named & valued & state.inside
    called, executed = jnp.any(jnp.stack(list(verb.values()))), logs_in | ends | reads | clears | writes
    here = jnp.arange(RECORDS, dtype=jnp.int32) == record
    after = state._replace(
        records=jnp.where(here & (writes | clears), jnp.where(clears, 0, value), state.records).astype(jnp.int32),
        seen=state.seen | (here & reads),
        inside=state.inside | logs_in,
        left=state.left - 1,
    )
    penalty = jnp.where(executed, 0.0, jnp.where(called, FAILED, NO_CALL))
    over = ends | (after.left <= 0)
    shown = jnp.where(reads, _AT["0"] + state.records[jnp.clip(record, 0, RECORDS - 1)], _AT["="])
    shown = jnp.where(executed, shown, _AT["!"]).astype(jnp.int32)
    return Answered(
        state=after,
        tokens=shown[None],
        count=jnp.int32(1),
        reward=(jnp.where(over, passed(after, ends), 0.0) + penalty).astype(jnp.float32),
        done=over,
        valid=jnp.ones((), bool),
    )


def passed(state: Desk, said_done: Bool[Array, ""]) -> Float[Array, ""]:
    """Share of tests that pass: one for each record to change, one for saying that it is done and touching no other."""
    changes, right = state.changes, state.records == state.gold
    good = jnp.sum((changes & right).astype(jnp.float32)) + (jnp.all(changes | right) & said_done).astype(jnp.float32)
    return good / (jnp.sum(changes.astype(jnp.float32)) + 1.0)


def _reset(key: Key, task: dict[str, Array]) -> Desk:
    nothing = jnp.zeros((RECORDS,), bool)
    changes = task["records"] != task["gold"]
    return Desk(task["records"], task["gold"], changes, task["needed"], nothing, jnp.zeros((), bool), jnp.int32(TURNS))


def _identity(state: Desk) -> Array:
    places = VALUES ** jnp.arange(RECORDS, dtype=jnp.int32)
    return jnp.sum(state.records * places) * 2 + state.inside.astype(jnp.int32)


ENV = Env(_reset, _step, _identity, action_tokens=3, observation_tokens=1)


def expert(state: Desk) -> Int[Array, " 3"]:
    """The call of a shortest plan that looks before it writes."""
    unknown, wrong = state.needed & ~state.seen, state.records != state.gold
    read, write = jnp.argmax(unknown), jnp.argmax(wrong)

    def call(verb: str, record: Array | None = None, value: Array | None = None) -> Array:
        first = _AT["."] if record is None else _AT["a"] + record
        second = _AT["."] if value is None else _AT["0"] + value
        return jnp.stack([jnp.asarray(x, jnp.int32) for x in (_AT[verb], first, second)])

    to_write = jnp.where(jnp.any(state.needed), call("w", write, state.gold[write]), call("x", write))
    onward = jnp.where(jnp.any(unknown), call("s", read), jnp.where(jnp.any(wrong), to_write, call("f")))
    return jnp.where(state.inside, onward, call("l")).astype(jnp.int32)


def anything(key: Key) -> Int[Array, " 3"]:
    """A call at random, written as it should be."""
    verb, record, value = jax.random.randint(key, (3,), 0, jnp.asarray([5, RECORDS, VALUES], jnp.int32))
    first = jnp.where((verb == 0) | (verb == 4), _AT["."], _AT["a"] + record)
    return jnp.stack([_AT["l"] + verb, first, jnp.where(verb == 2, _AT["0"] + value, _AT["."])]).astype(jnp.int32)


@lru_cache(maxsize=8)
def make_apis(*, skill: float = 0.8) -> arenas.Arena:
    """A decoder of two layers, 512 tasks to train on, 64 scenarios of 3 variants to be measured on.

    What the expert says and is answered in a task that is measured it says and is answered in none that trains.

    Args:
      skill: chance that the behaviour to imitate makes the right call; else it makes any.
    """
    behave = arenas.skilled(expert, anything, skill)
    with jax.ensure_compile_time_eval():  # also where what uses the tables is traced
        tasks = problems(512, 1, 0, measured=False), problems(64, VARIANTS, 1, measured=True)
    return arenas.make_arena(ENV, *tasks, behave, words=len(ALPHABET), turns=TURNS)


def completed(turns: multi_turn.Turns) -> Bool[Array, " B"]:
    """Episodes after which every test passes."""
    return jnp.any(turns.reward > 0.999, axis=1)


def returns(answers: dict[str, Array], rows: Trajectories) -> Rewards:
    """The ``score`` slot: tests that pass less what failed calls cost, not below 0."""
    found = multi_turn.episode_rewards(answers, rows)
    return found._replace(value=jnp.maximum(found.value, 0.0))


def figures(held: Problems, rows: Trajectories) -> dict[str, Array]:
    """Tasks completed, scenarios of which all variants are, the return."""
    turns = multi_turn.turns_of(rows)
    whole, samples = completed(turns), rows.tokens.shape[0] // held.tokens.shape[0]
    together = jnp.all(whole.reshape(-1, VARIANTS, samples), axis=1).reshape(-1)
    return {
        "eval/completed": reduce.scalars(whole.astype(jnp.float32)),
        "eval/scenarios": reduce.scalars(together.astype(jnp.float32)),
        "eval/return": reduce.scalars(returns({}, rows).value),
        "eval/turns": reduce.scalars(jnp.sum(turns.taken.astype(jnp.float32), axis=1)),
    }
