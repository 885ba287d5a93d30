"""A telephone company and a user with a phone in hand: an arena in which both sides have tools.

The user's message is what does not work, ``S`` service, ``D`` fast mobile data or ``M`` picture messages, and then the
line, home or abroad, and gigabytes wanted (``Mbf2``), or dots by a user who holds these back until asked. An action is
three tokens. *Words*: ``mo.`` (which line?), ``ml.`` (where are you?), ``mg.`` (how many gigabytes?), ``me.``
(good-bye). *The user's own tools*, which the agent can only ask for: ``?s.`` ``?d.`` ``?m.`` read the settings of
service, data and messages and say the first that is wrong, ``?x.`` tries what does not work; ``!p.`` ``!d.`` ``!r.``
``!t.`` ``!w.`` turn airplane mode, data, roaming, data saver, Wi-Fi calling (a right one goes wrong), ``!s.`` seats the
SIM card, ``!v.`` ends a slow VPN, ``!g.`` grants a permission, ``!n.`` resets the access point at the next ``!b.``
(reboot), ``!y.`` pays what is asked for. *The agent's tools*, on the database of three lines ``a b c``: ``Las`` ``Lar``
``Lau`` look up status, roaming and used data, ``Ba.`` asks to pay an overdue bill, ``Ra.`` resumes a line, ``Ea.``
enables roaming, ``Fa2`` adds gigabytes, ``T..`` hands over to a human and ends the talk. The answer is one token: what
was asked for, ``k`` for nothing, ``+`` or ``-`` whether it works now, ``=`` by a tool that did it, ``!`` by one that
could not.

Rules, which no tool knows: a line is resumed only when its bill is paid and its contract runs, at most two gigabytes
are added, and a human is called only for a locked SIM card or an ended contract. Who breaks one earns nothing, whatever
the end. Else good-bye pays 1 where the database is what it should be and the phone does what the user wants; some users
want more as soon as the first thing works. The world is tau2-bench's telecom in small; with its files:
``desks.desk``.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import retail
from jaxrl_llm import reduce
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env
from jaxrl_llm.types import Key, Problems, Trajectories

LINES, LIMIT, MOST_GB = 3, 2, 3  # LIMIT: gigabytes that may be added
MOST_FAULTS, TURNS = 3, 22  # of a problem; a plan has 3 to 21 turns
ALPHABET = "_SDMmLBREFT?!.+-=kabchf123olexpdrsntvwguy"  # the first is padding
_AT = {c: i for i, c in enumerate(ALPHABET)}
SETTINGS = "pslndrvtwg"  # of the phone, each right or wrong; l: the SIM card is locked
_SET = {c: i for i, c in enumerate(SETTINGS)}
READ = {"s": "psln", "d": "drvt", "m": "wg"}  # what the user sees at once
TURNED, MENDED, SEARCHES = "pdrtw", "svg", "pdrsb"  # settings that are turned, that only get right; who look for a line
SERVICE, DATA, PICTURES = range(3)
ACTIVE, OVERDUE, ENDED = range(3)  # status of a line: the last two are suspended
NO_BILL, UNPAID, ASKED, PAID = range(4)


class Call(NamedTuple):
    """Database and phone, what the user wants and has said, what the agent has seen and done."""

    status: Int[Array, " E"]
    bill: Int[Array, " E"]
    roams: Bool[Array, " E"]
    used: Bool[Array, " E"]  # all of its data
    added: Int[Array, " E"]  # gigabytes
    wrong: Bool[Array, " S"]  # settings of the phone
    reset: Bool[Array, ""]  # at the next reboot
    served: Bool[Array, ""]  # the line was active when the phone last looked
    abroad: Bool[Array, ""]
    line: Int[Array, ""]
    amount: Int[Array, ""]
    issue: Int[Array, ""]  # now
    final: Int[Array, ""]  # and in the end
    open: Bool[Array, ""]
    human: Bool[Array, ""]  # only a human can help
    gold_status: Int[Array, " E"]
    gold_bill: Int[Array, " E"]
    gold_roams: Bool[Array, " E"]
    gold_added: Int[Array, " E"]
    told: Bool[Array, " 3"]  # line, place, amount
    read: Bool[Array, " 3"]  # the settings of service, data, messages as they are now
    looked: Bool[Array, " 3"]  # status, roaming, data of the user's line
    tried: Bool[Array, ""]  # whether it works now was said
    broken: Bool[Array, ""]  # a rule


def encode(text: str) -> list[int]:
    """One token a character."""
    return [_AT[c] for c in text]


# --- problems

# what may be wrong, alone in its group: settings of the phone; o a bill, c a contract, x e f roaming of the phone, the
# line, both, u data used up
OF_ISSUE = (("p", "sl", "n", "oc"), ("p", "d", "xef", "v", "t", "u"), ("p", "sl", "n", "d", "xef", "u", "w", "g"))
OWN = (OF_ISSUE[0], ("d", "xef", "v", "t", "u"), ("w", "g"))  # one of which a problem of this issue has
RARE = 0.3  # chance of the second of a group that only a human mends


def _faults(rng: np.random.Generator, first: int, final: int, most: int) -> str:
    """What is wrong, one letter each; the second of a group of two is rare, and never where the user wants more."""
    count, wanted = int(rng.integers(1, most + 1)), [str(rng.choice(OWN[final]))]
    if first != final:
        wanted.append(str(rng.choice(OF_ISSUE[first])))
    others = [g for g in OF_ISSUE[final] if g not in wanted]
    more = rng.permutation(len(others))[: max(0, count - len(wanted))]
    found = ""
    for group in dict.fromkeys([*wanted, *(others[k] for k in more)]):
        rare = group in ("sl", "oc")
        second = rare and first == final == SERVICE and rng.random() < RARE
        found += group[int(second)] if rare else str(rng.choice(list(group)))
    return found.replace("o", "c") if "l" in found else found


def _drawn(rng: np.random.Generator, openly: bool, fickle: float, most: int) -> tuple[str, dict[str, np.ndarray], int]:
    """A prompt, what lies behind it, and its level."""
    final = int(rng.integers(0, 3))
    turns = final != SERVICE and not openly and rng.random() < fickle
    first = SERVICE if turns else final
    wrong = _faults(rng, first, final, max(most, 2) if turns else most)
    line, amount = int(rng.integers(0, LINES)), int(rng.integers(1, MOST_GB + 1))
    roaming = set(wrong) & set("xef")
    abroad = bool(roaming) or bool(rng.random() < 0.3)
    status = rng.integers(0, 3, LINES)
    status[line] = OVERDUE if "o" in wrong else ENDED if "c" in wrong else ACTIVE
    bill = np.where(status == ACTIVE, NO_BILL, UNPAID)
    roams, used = rng.random(LINES) < 0.5, rng.random(LINES) < 0.5
    used[line] = "u" in wrong
    roams[line] = not roaming & set("ef") if abroad else roams[line]
    settings = np.array([c in wrong for c in SETTINGS])
    settings[_SET["r"]] = bool(roaming & set("xf")) if abroad else rng.random() < 0.5  # at home it does not matter
    gold = {"status": status.copy(), "bill": bill.copy(), "roams": roams.copy(), "added": np.zeros(LINES, int)}
    if "o" in wrong:
        gold["status"][line], gold["bill"][line] = ACTIVE, PAID
    gold["roams"][line] |= abroad and bool(roaming & set("ef"))
    gold["added"][line] = min(amount, LIMIT) if "u" in wrong else 0
    said = f"{'abc'[line]}{'f' if abroad else 'h'}{amount}" if openly else "..."
    found = {
        "status": status, "bill": bill, "roams": roams, "used": used, "wrong": settings, "abroad": abroad, "line": line,
        "amount": amount, "issue": first, "final": final, "open": openly, "human": bool(set(wrong) & set("lc")),
    } | {f"gold_{name}": x for name, x in gold.items()}  # fmt: skip
    return "SDM"[first] + said, {name: np.asarray(x) for name, x in found.items()}, len(wrong) - 1


def problems(count: int, seed: int, *, openly: bool, fickle: float = 0.2, most: int = MOST_FAULTS) -> Problems:
    """Calls for help; ``level`` is how many things are wrong, less one.

    Args:
      openly: the prompt says everything, and nobody wants more.
      fickle: share of the users who want data or pictures and first say that they have no service.
      most: things that are wrong with one phone and its line.
    """
    rng = np.random.default_rng(seed)
    drawn = [_drawn(rng, openly, fickle, most) for _ in range(count)]
    stacked = {name: np.stack([found[name] for _, found, _ in drawn]) for name in drawn[0][1]}
    answers = {name: jnp.asarray(x, jnp.bool_ if x.dtype == bool else jnp.int32) for name, x in stacked.items()}
    tokens = jnp.asarray([encode(prompt) for prompt, _, _ in drawn], jnp.int32)
    return Problems(tokens, jnp.ones(tokens.shape, bool), answers, jnp.asarray([x for _, _, x in drawn], jnp.int32))


# --- the phone and the database


def works(state: Call, issue: Array) -> Bool[Array, ""]:
    """Whether the phone does what is asked of it."""
    is_wrong = {name: state.wrong[k] for name, k in _SET.items()}
    line = state.line
    service = state.served & ~(is_wrong["p"] | is_wrong["s"] | is_wrong["l"] | is_wrong["n"])
    roams = ~state.abroad | (~is_wrong["r"] & state.roams[line])
    data = service & ~is_wrong["d"] & roams & (~state.used[line] | (state.added[line] > 0))
    fast, pictures = ~(is_wrong["v"] | is_wrong["t"]), ~(is_wrong["w"] | is_wrong["g"])
    return jnp.where(issue == SERVICE, service, data & jnp.where(issue == DATA, fast, pictures))


def _seen(state: Call) -> Array:
    """The first wrong setting of each part of the phone, as a token, or ``k``."""
    shown = []
    for part in READ.values():
        found = jnp.asarray(_AT["k"], jnp.int32)
        for c in reversed(part):
            bad = state.wrong[_SET[c]] & (state.abroad if c == "r" else True)
            found = jnp.where(bad, _AT[c], found).astype(jnp.int32)
        shown.append(found)
    return jnp.stack(shown)


def _one_of(token: Array, letters: str) -> Array:
    return jnp.any(token == jnp.asarray(encode(letters), jnp.int32))


class _User(NamedTuple):
    """What a user did with the phone."""

    wrong: Array
    reset: Array
    served: Array
    bill: Array
    read: Array
    acts: Array  # with the phone
    paid: Array


def _user_acts(state: Call, letter: Array, acts: Array) -> _User:
    """The user's tools: they change the phone, and a bill that was asked for is paid."""
    letters = jnp.asarray(encode(SETTINGS), jnp.int32)
    here = acts & (letters == letter)
    turned = jnp.asarray([c in TURNED for c in SETTINGS])
    mended = jnp.asarray([c in MENDED for c in SETTINGS])
    wrong = jnp.where(here & turned, ~state.wrong, state.wrong & ~(here & mended))
    boots = acts & (letter == _AT["b"])
    wrong &= ~(boots & state.reset & (letters == _AT["n"]))
    resets = acts & (letter == _AT["n"])
    owner = jnp.arange(LINES, dtype=jnp.int32) == state.line
    pays = acts & (letter == _AT["y"]) & (state.bill == ASKED) & owner
    moved = acts & jnp.stack([_one_of(letter, part.replace("l", "b")) for part in READ.values()])
    return _User(
        wrong=wrong, reset=(state.reset | resets) & ~boots,
        served=jnp.where(acts & _one_of(letter, SEARCHES), state.status[state.line] == ACTIVE, state.served),
        bill=jnp.where(pays, PAID, state.bill).astype(jnp.int32), read=state.read & ~moved,
        acts=acts & (letter != _AT["y"]), paid=jnp.any(pays),
    )  # fmt: skip


class _Tool(NamedTuple):
    """What the agent's tool did to the database."""

    status: Array
    bill: Array
    roams: Array
    added: Array
    looked: Array
    answer: Array
    did: Array
    wrote: Array
    broke: Array  # a rule


def _tool_acts(state: Call, action: Array) -> _Tool:
    """The agent's tools: they change the database and nothing else."""
    at = jnp.clip(action[1] - _AT["a"], 0, LINES - 1)
    there, dot = _one_of(action[1], "abc"), action[2] == _AT["."]
    here = jnp.arange(LINES, dtype=jnp.int32) == at
    field = action[2] == jnp.asarray(encode("sru"), jnp.int32)
    looks = there & (action[0] == _AT["L"]) & jnp.any(field)
    asks = there & dot & (action[0] == _AT["B"]) & (state.bill[at] == UNPAID)
    resumes = there & dot & (action[0] == _AT["R"]) & (state.status[at] != ACTIVE)
    enables = there & dot & (action[0] == _AT["E"]) & ~state.roams[at]
    gigabytes = action[2] - _AT["1"] + 1
    refuels = there & (action[0] == _AT["F"]) & (gigabytes >= 1) & (gigabytes <= MOST_GB)
    added = jnp.where(here & refuels, jnp.minimum(state.added + gigabytes, 2 * MOST_GB), state.added)
    owes = (state.bill[at] == UNPAID) | (state.bill[at] == ASKED) | (state.status[at] == ENDED)
    spent = state.used[at] & (state.added[at] == 0)
    status = jnp.asarray(encode("koc"), jnp.int32)[state.status[at]]
    found = jnp.stack([
        status, jnp.where(state.roams[at], _AT["k"], _AT["r"]), jnp.where(spent, _AT["u"], _AT["k"])
    ]).astype(jnp.int32)  # fmt: skip
    wrote = asks | resumes | enables | refuels
    return _Tool(
        status=jnp.where(here & resumes, ACTIVE, state.status).astype(jnp.int32),
        bill=jnp.where(here & asks, ASKED, state.bill).astype(jnp.int32), roams=state.roams | (here & enables),
        added=added.astype(jnp.int32), looked=state.looked | (looks & field & (at == state.line)),
        answer=jnp.where(looks, jnp.sum(jnp.where(field, found, 0)), jnp.where(wrote, _AT["="], _AT["!"])),
        did=looks | wrote, wrote=wrote,
        broke=(resumes & owes) | (refuels & (state.added[at] + gigabytes > LIMIT)),
    )  # fmt: skip


def _right(state: Call, hands_over: Array) -> Array:
    """Whether the talk may end so; what was paid does not matter where only a human can help."""
    same = jnp.all((state.status == state.gold_status) & (state.roams == state.gold_roams))
    same &= jnp.all(state.added == state.gold_added)
    paid = jnp.all(state.bill == state.gold_bill)
    solved = ~state.human & paid & works(state, state.final)
    return same & ~state.broken & jnp.where(hands_over, state.human, solved)


def _step(state: Call, action: Array, count: Array, *, bonus: float = 0.0) -> Answered:
    second, dot = action[1], action[2] == _AT["."]
    talks = (action[0] == _AT["m"]) & dot & _one_of(second, "olge")
    asks = (action[0] == _AT["?"]) & dot & _one_of(second, "sdmx")
    acts = (action[0] == _AT["!"]) & dot & _one_of(second, TURNED + MENDED + "nby")
    hands_over = (action[0] == _AT["T"]) & dot & (second == _AT["."])
    heard = talks | asks | acts
    # who has got the first thing and wants more says so at the next word, whatever it is
    turns = heard & (state.issue != state.final) & works(state, state.issue)
    user, tool = _user_acts(state, second, acts & ~turns), _tool_acts(state, action)
    told = talks & ~turns & ~state.open & (second == jnp.asarray(encode("olg"), jnp.int32))
    read = asks & ~turns & (second == jnp.asarray(encode("sdm"), jnp.int32))
    after = state._replace(
        status=tool.status, roams=tool.roams, added=tool.added, looked=tool.looked, broken=state.broken | tool.broke,
        bill=jnp.where(heard, user.bill, tool.bill).astype(jnp.int32), wrong=user.wrong, reset=user.reset,
        served=user.served, told=state.told | told, read=user.read | read,
        issue=jnp.where(turns, state.final, state.issue).astype(jnp.int32),
    )  # fmt: skip
    tries = asks & (second == _AT["x"])
    after = after._replace(tried=(state.tried & ~turns & ~tool.wrote & ~user.paid) | ((user.acts | tries) & ~turns))
    it_works = jnp.where(works(after, after.issue), _AT["+"], _AT["-"])
    said = jnp.stack([_AT["a"] + state.line, jnp.where(state.abroad, _AT["f"], _AT["h"]), _AT["1"] + state.amount - 1])
    words = jnp.where(jnp.any(told), jnp.sum(jnp.where(told, said, 0)), _AT["k"])
    words = jnp.where(jnp.any(read), jnp.sum(jnp.where(read, _seen(state), 0)), words)
    words = jnp.where(user.acts | tries, it_works, words)
    words = jnp.where(acts & ~user.acts, jnp.where(user.paid, _AT["="], _AT["!"]), words)
    words = jnp.where(turns, _AT["S"] + state.final, words)
    over = (talks & (second == _AT["e"]) & ~turns) | hands_over
    return Answered(
        state=after,
        tokens=jnp.where(heard, words, tool.answer).astype(jnp.int32)[None],
        count=jnp.int32(1),
        reward=(over & _right(after, hands_over)).astype(jnp.float32) + bonus * tool.did.astype(jnp.float32),
        done=over,
        valid=jnp.ones((), bool),
    )


def _reset(key: Key, task: dict[str, Array]) -> Call:
    no = jnp.zeros((), bool)
    return Call(
        **task, added=jnp.zeros(LINES, jnp.int32), reset=no, served=task["status"][task["line"]] == ACTIVE,
        told=jnp.broadcast_to(task["open"], (3,)), read=jnp.zeros(3, bool), looked=jnp.zeros(3, bool), tried=no,
        broken=no,
    )  # fmt: skip


def _identity(state: Call) -> Array:
    parts = [state.status, state.bill, state.roams, state.added, state.wrong, state.reset[None], state.served[None]]
    values = jnp.concatenate([part.astype(jnp.int32) for part in parts])
    places = np.array([pow(31, k, 2**31 - 1) for k in range(values.shape[0])], np.int32)
    return jnp.sum(values * jnp.asarray(places))


@lru_cache(maxsize=4)
def make_env(*, bonus: float = 0.0) -> Env:
    """The company; ``bonus`` is paid for every call that a tool of the agent could answer."""
    return Env(_reset, lambda *given: _step(*given, bonus=bonus), _identity, action_tokens=3, observation_tokens=1)


# --- who imitates, and who plays


def _act(text: str, *, line: Array | None = None, last: Array | None = None) -> Array:
    """An action; a line or a last token that is only known in the episode stands where the text has a dot."""
    first, second, third = encode(text)
    at = second if line is None else _AT["a"] + line
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in (first, at, third if last is None else last)])


def expert(state: Call) -> Int[Array, " 3"]:
    """The action of a plan that keeps the rules, by somebody who knows only what was said and looked up."""
    line, wants_data, wants_pictures = state.line, state.issue != SERVICE, state.issue == PICTURES
    seen = _seen(state)
    of_user = jnp.stack([jnp.asarray(_AT["!"], jnp.int32), jnp.zeros((), jnp.int32), jnp.asarray(_AT["."], jnp.int32)])

    def asked(token: Array) -> Array:
        return of_user.at[1].set(token)

    status, bill = state.status[line], state.bill[line]
    spent = state.used[line] & (state.added[line] == 0)
    amount = _AT["1"] - 1 + jnp.minimum(state.amount, LIMIT)
    plan = [  # what is done where a condition holds, the first that does
        (state.tried & works(state, state.issue), _act("me.")),
        (~state.told[0], _act("mo.")),
        (~state.read[0], _act("?s.")),
        (seen[0] == _AT["l"], _act("T..")),
        ((seen[0] == _AT["n"]) & state.reset, _act("!b.")),
        (seen[0] != _AT["k"], asked(seen[0])),
        (~state.looked[0], _act("L.s", line=line)),
        (status == ENDED, _act("T..")),
        ((status == OVERDUE) & (bill == UNPAID), _act("B..", line=line)),
        ((status == OVERDUE) & (bill == ASKED), _act("!y.")),
        (status == OVERDUE, _act("R..", line=line)),
        (~state.served, _act("!b.")),
        (wants_data & ~state.read[1], _act("?d.")),
        (wants_data & (seen[1] != _AT["k"]), asked(seen[1])),
        (wants_data & ~state.told[1], _act("ml.")),
        (wants_data & state.abroad & ~state.looked[1], _act("L.r", line=line)),
        (wants_data & state.abroad & ~state.roams[line], _act("E..", line=line)),
        (wants_data & ~state.looked[2], _act("L.u", line=line)),
        (wants_data & spent & ~state.told[2], _act("mg.")),
        (wants_data & spent, _act("F..", line=line, last=amount)),
        (wants_pictures & ~state.read[2], _act("?m.")),
        (wants_pictures & (seen[2] != _AT["k"]), asked(seen[2])),
    ]  # fmt: skip
    chosen = _act("me.")
    for holds, action in reversed(plan):
        chosen = jnp.where(holds, action, chosen)
    return chosen


ANY = tuple(  # every action written as it should be but those that name gigabytes
    [f"m{x}." for x in "olge"] + [f"?{x}." for x in "sdmx"] + [f"!{x}." for x in TURNED + MENDED + "nby"]
    + [f"L{line}{x}" for line in "abc" for x in "sru"] + [f"{verb}{line}." for verb in "BRE" for line in "abc"]
    + [f"F{line}{x}" for line in "abc" for x in "123"] + ["T.."]
)  # fmt: skip


def anything(key: Key) -> Int[Array, " 3"]:
    """An action at random, written as it should be."""
    return jnp.asarray([encode(text) for text in ANY], jnp.int32)[jax.random.randint(key, (), 0, len(ANY), jnp.int32)]


def asked(calls: Problems) -> Int[np.ndarray, " N"]:
    """What a call is about, as one number: what the expert says and hears in it, whoever calls, and how.

    So what nobody has to know makes no difference: other lines, the place of who has no service, gigabytes where data
    are left, what else is wrong where only a human can help.
    """

    def heard(task: dict[str, Array]) -> Int[Array, " W"]:
        def turn(carry: tuple[Call, Array], _: None) -> tuple[tuple[Call, Array], Array]:
            state, alive = carry
            action = expert(state)
            answer = _step(state, action, jnp.int32(3))
            tokens = jnp.where(alive, jnp.concatenate([action, answer.tokens]), 0)
            return (answer.state, alive & ~answer.done), tokens

        start = _reset(jax.random.key(0), task | {"open": jnp.zeros((), bool)}), jnp.ones((), bool)
        return jax.lax.scan(turn, start, None, length=TURNS)[1].reshape(-1)

    first = np.asarray(calls.answers["issue"])[:, None]  # all that who holds back says at once
    number = np.zeros(len(first), np.uint64)
    for column in np.concatenate([first, np.asarray(jax.jit(jax.vmap(heard))(calls.answers))], axis=1).T:
        number = number * np.uint64(0x100000001B3) + column.astype(np.uint64)
    return number.view(np.int64)


def requests(count: int, seed: int, *, openly: bool, measured: bool = False) -> Problems:
    """``problems`` for training, or such as are about what none of these is about, whoever calls, and how."""
    with jax.ensure_compile_time_eval():  # also where what uses the table is traced
        drawn = problems(16 * count, seed, openly=openly)
        return arenas.first_of(drawn, arenas.held_by_hash(asked(drawn)) == measured, count)


@lru_cache(maxsize=4)
def make_telecom(*, skill: float = 0.8) -> arenas.Arena:
    """``retail.desk_arena`` of the telephone company; users who hold back may want more.

    Args:
      skill: chance that the behaviour to imitate does the right thing; else it does anything.
    """
    behave = arenas.skilled(expert, anything, skill)
    return retail.desk_arena(make_env(), requests, behave, words=len(ALPHABET), turns=TURNS)


to_train = partial(retail.to_train, draw=requests, make=make_env)


def figures(held: Problems, rows: Trajectories) -> dict[str, Array]:
    """As of the shop, and pass^1 by how many things are wrong (``eval/pass1_faults1``, ...).

    ``eval/fickle`` is success where the user wants more.
    """
    fickle = held.answers["issue"] != held.answers["final"]
    shown = retail.figures(held._replace(level=jnp.where(fickle, 2, 0).astype(jnp.int32)), rows)
    samples = rows.tokens.shape[0] // held.tokens.shape[0]
    success = (multi_turn.episode_rewards({}, rows).value > 0.5).reshape(-1, samples)
    share = jnp.mean(success.astype(jnp.float32), axis=1)
    return shown | {f"eval/pass1_faults{k + 1}": reduce.scalars(share, held.level == k) for k in range(MOST_FAULTS)}
