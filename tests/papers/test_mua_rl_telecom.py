"""MUA-RL's telephone company: what both sides' tools do and cannot reach, its rules, plans, users and a smoke run."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import mua_rl
from experiments.agents.parts import retail, telecom
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, cli
from tests import close
from tests.papers.test_mua_rl import talk

ENV = telecom.make_env()
STEP = jax.jit(ENV.step)
CALL = {
    "status": jnp.array([0, 0, 2]), "bill": jnp.array([0, 0, 1]), "roams": jnp.array([False, True, False]),
    "used": jnp.array([True, False, False]), "wrong": jnp.zeros(10, bool), "abroad": jnp.array(False),
    "line": jnp.int32(1), "amount": jnp.int32(3), "issue": jnp.int32(0), "final": jnp.int32(0),
    "open": jnp.array(False), "human": jnp.array(False),
}  # fmt: skip


def _task(issue, wrong="", *, gold=None, **more):
    """A call of the user of line b: settings of the phone that are wrong, other fields, and gold where it differs."""
    settings = jnp.asarray([c in wrong for c in telecom.SETTINGS])
    asked = jnp.int32("SDM".index(issue))
    task = CALL | {"wrong": settings, "issue": asked, "final": asked} | {k: jnp.asarray(x) for k, x in more.items()}
    right = {name: task[name] for name in ("status", "bill", "roams")} | {"added": jnp.zeros(3, jnp.int32)}
    right |= {name: jnp.asarray(x) for name, x in (gold or {}).items()}
    return task | {f"gold_{name}": x for name, x in right.items()}


OVERDUE = _task("S", status=[0, 1, 2], bill=[0, 1, 1], gold={"status": [0, 0, 2], "bill": [0, 3, 1]})
ENDED = _task("S", status=[0, 2, 2], bill=[0, 1, 1], human=True)
USED = _task("D", used=[True, True, False], gold={"added": [0, 2, 0]})
ROAMING = _task("D", "r", abroad=True, roams=[False, False, False], gold={"roams": [False, True, False]})
MORE = _task("S", "pw") | {"final": jnp.int32(2)}


_talk = partial(talk, telecom, STEP)


@pytest.mark.parametrize(
    ("task", "actions", "told", "paid"),
    [
        (_task("S", "p"), "mo. ?s. !p. me.", "bp+k", 1.0),
        (_task("S", "p"), "!p. !p. ?x. me.", "+--k", 0.0),  # turned back
        (_task("S", "p"), "me.", "k", 0.0),
        (_task("S", "p"), "T..", "!", 0.0),  # a human is called needlessly
        (_task("S", "sn"), "?s. !s. ?s. !n. ?s. !b. ?s. me.", "s-n-n+kk", 1.0),  # reset at the reboot alone
        (_task("S", "l", human=True), "?s. T..", "l!", 1.0),
        (_task("S", "l", human=True), "!s. !b. me.", "--k", 0.0),
        (OVERDUE, "mo. ?s. Lbs Bb. !y. Rb. !b. me.", "bko===+k", 1.0),
        (OVERDUE, "Bb. !y. Rb. me.", "===k", 0.0),  # the phone has not looked for the line
        (OVERDUE, "Bb. !y. !b. me.", "==-k", 0.0),  # paid and not resumed
        (OVERDUE, "!y. Rb. Bb. !y. !b. me.", "!===+k", 0.0),  # resumed before it was paid: the end is right
        (OVERDUE, "Bb. Rb. !y. !b. me.", "===+k", 0.0),  # while the payment was under way
        (OVERDUE, "Bb. !y. Rb. !b. Rc. me.", "===+=k", 0.0),  # another's line
        (OVERDUE, "Bb. Bb. Ba. Ra. Eb.", "=!!!!", None),  # nothing to ask for, to resume, to enable
        (ENDED, "Lbs T..", "c!", 1.0),
        (ENDED, "Bb. !y. T..", "==!", 1.0),  # a bill may be paid
        (ENDED, "Bb. !y. Rb. !b. me.", "===+k", 0.0),
        (ENDED, "Rb. T..", "=!", 0.0),
        (USED, "mo. Lbu mg. Fb2 ?x. me.", "bu3=+k", 1.0),  # wants three, may have two
        (USED, "Fb1 Fb1 me.", "==k", 1.0),
        (USED, "Fb3 me.", "=k", 0.0),
        (USED, "Fb2 Fb1 me.", "==k", 0.0),
        (USED, "Fb1 ?x. me.", "=+k", 0.0),  # it works, with less than the user wants
        (USED, "Fa2 me.", "=k", 0.0),
        (ROAMING, "ml. ?d. !r. Lbr Eb. ?x. me.", "fr-r=+k", 1.0),
        (ROAMING, "!r. me.", "-k", 0.0),
        (ROAMING, "Eb. me.", "=k", 0.0),
        (_task("D", "vt"), "?d. !v. ?d. !t. me.", "v-t+k", 1.0),
        (_task("D", "r"), "ml. ?d. ?x. me.", "hk+k", 1.0),  # at home it does not matter
        (_task("M", "wg"), "?m. !w. ?m. !g. me.", "w-g+k", 1.0),
        (_task("M", "vt"), "me.", "k", 1.0),  # slow data carry pictures
        (MORE, "!p. mo. ?m. !w. me.", "+Mw+k", 1.0),  # says so at the next word, whatever that is
        (MORE, "!p. !w. !w. me.", "+M+k", 1.0),
        (MORE, "!p. me. me.", "+Mk", 0.0),
        (_task("S", "p") | {"open": jnp.array(True)}, "mo. ml. mg. !p. me.", "kkk+k", 1.0),
        (_task("S", "p"), "!l. ?p. La. Fb. === Lbs", "!!!!!k", None),
    ],
)  # fmt: skip
def test_talks(task, actions, told, paid):
    assert _talk(task, actions) == (told, paid)


PHONE, DATABASE = {"wrong", "reset", "served"}, {"status", "roams", "added"}
COUNT = 512
SAID = {"told", "read", "looked", "tried", "issue"}


def test_each_side_reaches_its_own_state_alone():
    """From states of random talks: whatever the user is asked for leaves the database, and the other way round."""
    starts = telecom.problems(COUNT, 5, openly=False).answers
    key, every = jax.random.key(3), jnp.asarray([telecom.encode(text) for text in telecom.ANY], jnp.int32)

    def wander(task, key):
        def turn(state, k):
            after = ENV.step(state, telecom.anything(k), jnp.int32(3)).state
            return after, None

        return jax.lax.scan(turn, ENV.reset(key, task), jax.random.split(key, 6))[0]

    states = jax.jit(jax.vmap(wander))(starts, jax.random.split(key, COUNT))
    one = jax.vmap(lambda state, action: ENV.step(state, action, jnp.int32(3)).state, in_axes=(None, 0))
    after = jax.jit(jax.vmap(one, in_axes=(0, None)))(states, every)
    seen = {"!": set(), "tools": set()}
    for name in telecom.Call._fields:
        before, now = (np.asarray(getattr(x, name)) for x in (states, after))
        moved = (now != np.broadcast_to(np.expand_dims(before, 1), now.shape)).reshape(COUNT, len(telecom.ANY), -1)
        for k, text in enumerate(telecom.ANY):
            if moved[:, k].any():
                seen["!" if text[0] in "m?!" else "tools"].add(name)
                allowed = SAID | (PHONE if text[0] == "!" else set() if text[0] in "m?T" else DATABASE | {"broken"})
                assert name in allowed | {"bill"}, (name, text)
        if name == "bill":  # the one that both sides move: the agent asks, the user pays what is asked for
            old = np.broadcast_to(before[:, None], now.shape)
            asks = np.asarray([text[0] == "B" for text in telecom.ANY])[None, :, None]
            pays = np.asarray([text == "!y." for text in telecom.ANY])[None, :, None]
            change = old != now
            assert (asks & (now == telecom.ASKED) | pays & (old == telecom.ASKED) & (now == telecom.PAID))[change].all()
    assert seen["!"] >= PHONE | {"bill"} and seen["tools"] >= DATABASE | {"bill", "broken"}


def _play(behave, task, key, turns):
    def turn(carry, k):
        state, alive = carry
        answer = ENV.step(state, behave(state, k), jnp.int32(3))
        return (answer.state, alive & ~answer.done), (jnp.where(alive, answer.reward, 0.0), alive)

    start = ENV.reset(key, task), jnp.ones((), bool)
    paid, alive = jax.lax.scan(turn, start, jax.random.split(key, turns))[1]
    return jnp.sum(paid), jnp.sum(alive.astype(jnp.int32))


def _all(behave, problems, turns=telecom.TURNS):
    keys = jax.random.split(jax.random.key(1), problems.tokens.shape[0])
    return map(np.asarray, jax.jit(jax.vmap(lambda t, k: _play(behave, t, k, turns)))(problems.answers, keys))


def test_a_plan_of_what_was_said_always_succeeds_and_nothing_or_anything_does_not():
    arena = telecom.make_telecom(skill=1.0)
    for problems in (arena.train, arena.heldout, telecom.problems(2000, 9, openly=False)):
        paid, turns = _all(lambda state, _: telecom.expert(state), problems)
        assert paid.min() == paid.max() == 1.0 and turns.max() < telecom.TURNS
        levels = np.bincount(np.asarray(problems.level))
        assert levels.shape == (telecom.MOST_FAULTS,) and levels.min() > 2
    harder = telecom.problems(1000, 4, openly=False, most=5)
    assert _all(lambda state, _: telecom.expert(state), harder, turns=26).__next__().min() == 1.0
    assert np.asarray(harder.level).max() == 4 and {0, 1, 2} == set(np.asarray(harder.answers["issue"]).tolist())
    held = telecom.problems(1000, 9, openly=False)
    nothing, _ = _all(lambda *_: jnp.asarray(telecom.encode("me."), jnp.int32), held)
    anything, _ = _all(lambda _, key: telecom.anything(key), held)
    assert nothing.max() == 0.0 and anything.mean() < 0.02
    # what only a human helps with, what is wanted later, and every setting and line are among the problems
    asked = {name: np.asarray(x) for name, x in held.answers.items()}
    assert 0.04 < asked["human"].mean() < 0.2 and 0.05 < (asked["issue"] != asked["final"]).mean() < 0.25
    assert asked["wrong"].any(0).all() and (asked["gold_added"] == 2).any(0).all()
    works = jax.vmap(lambda t: telecom.works(ENV.reset(jax.random.key(0), t), t["issue"]))(held.answers)
    assert not np.asarray(works).any()


def test_only_those_who_hold_back_want_more_and_the_open_say_everything():
    for openly in (False, True):
        problems = telecom.problems(300, 6, openly=openly)
        said = ["".join(telecom.ALPHABET[t] for t in row) for row in np.asarray(problems.tokens)]
        asked = {name: np.asarray(x) for name, x in problems.answers.items()}
        for k, text in enumerate(said):
            rest = f"{'abc'[asked['line'][k]]}{'hf'[int(asked['abroad'][k])]}{asked['amount'][k]}"
            assert text == "SDM"[asked["issue"][k]] + (rest if openly else "...")
        assert (asked["issue"] != asked["final"]).any() == (not openly)
    again = telecom.problems(300, 6, openly=True)
    np.testing.assert_array_equal(again.tokens, problems.tokens)


def test_writing_and_undoing_is_the_same_situation():
    start = ENV.reset(jax.random.key(0), OVERDUE)

    def after(*actions):
        state = start
        for text in actions:
            state = STEP(state, jnp.asarray(telecom.encode(text), jnp.int32), jnp.int32(3)).state
        return int(ENV.identity(state))

    assert after("!d.", "!d.") == after("?s.", "Lbs") == after()
    assert len({after(), after("!d."), after("Bb."), after("Rb."), after("Fb1"), after("!n.")}) == 6


def test_a_bonus_for_calls_is_for_the_agents_tools():
    eager = telecom.make_env(bonus=0.1)
    for text, paid in (("Lbs", 0.1), ("Bb.", 0.1), ("Eb.", 0.0), ("!p.", 0.0), ("?s.", 0.0), ("mo.", 0.0)):
        answer = eager.step(
            eager.reset(jax.random.key(0), OVERDUE), jnp.asarray(telecom.encode(text), jnp.int32), jnp.int32(3)
        )  # fmt: skip
        close.assert_near(answer.reward, paid, magnitude=0)


def test_the_arms_of_the_file_train_in_the_domain_that_is_named():
    settings = mua_rl.Settings(domain="telecom")
    setup = mua_rl.embedded(settings)
    assert setup.tasks.policy is telecom.make_telecom().policy
    assert setup.measure.args[0] is telecom.make_telecom() and setup.measure.keywords["figures"] is telecom.figures
    for users in (retail.holding_back, retail.outspoken):
        changed = arms.resolve(mua_rl, settings, ("mua_rl" if users is retail.holding_back else "static",))
        (resolved,) = changed.values()
        np.testing.assert_array_equal(mua_rl.embedded(resolved).tasks.train.tokens, users(telecom.requests).tokens)
    assert mua_rl.embedded(mua_rl.Settings()).measure.args[0] is retail.make_retail()
    with pytest.raises(UserError, match="--domain"):
        cli.run(mua_rl, ["--plan", "--domain", "airline"])


@pytest.mark.slow
def test_smoke_run(tmp_path):
    found = cli.run(mua_rl, ["--smoke", "--domain", "telecom", "--arm", "mua_rl", "static", "--out", str(tmp_path)])
    for arm in found.arms.values():
        assert arm.settings["domain"] == "telecom" and np.isfinite(arm.metrics["loss/total"]).all()
        more = {f"eval/pass1_faults{k}" for k in range(1, telecom.MOST_FAULTS + 1)}
        assert set(mua_rl.METRICS) | more <= set(arm.metrics)
