"""ToRL: rewards with a price on failed code, a calculator that answers expressions, and what of it is trained on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import torl
from experiments.agents.parts import arena as arenas
from experiments.agents.parts import calculator
from jaxrl_llm.advantages.group import group_normalized_advantages
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Rewards
from tests import close

ARENA = calculator.make_calculator(calls=1)


def _ids(text):
    return jnp.asarray([calculator.ALPHABET.index(c) for c in text], jnp.int32)


def test_worked_rewards():
    right, failed = jnp.array([True, True, False, False]), jnp.array([False, True, False, True])
    assert shaping.execution_rewards(right, failed).tolist() == [1.0, 0.5, -1.0, -1.5]
    assert shaping.execution_rewards(right, failed, penalty=0.0).tolist() == [1.0, 1.0, -1.0, -1.0]
    # plus and minus one train as one and zero do
    ids = jnp.zeros(4, jnp.int32)
    signed = group_normalized_advantages(shaping.execution_rewards(right, failed, penalty=0.0), ids, eps=0.0)
    close.assert_near(signed, group_normalized_advantages(right.astype(jnp.float32), ids, eps=0.0))
    with pytest.raises(ValueError, match="penalty=-1.0"):
        shaping.execution_rewards(right, failed, penalty=-1.0)
    with pytest.raises(ValueError, match="calls=-1"):
        calculator.make_env(calls=-1)


def test_the_calculator_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    written = rng.integers(0, len(calculator.ALPHABET), (400, 5))
    kinds = np.array([[1, 11, 1, 11, 1], [10, 3, 10, 3, 10]])
    written[:300] = kinds[0] + rng.integers(0, kinds[1], (300, 5))  # three of four are expressions
    value, fine = jax.jit(jax.vmap(calculator.calculate))(jnp.asarray(written, jnp.int32))
    for row, found, well in zip(written, value, fine, strict=True):
        text = "".join(calculator.ALPHABET[t] for t in row)
        assert bool(well) == (all(c.isdigit() for c in text[::2]) and all(c in "+-*" for c in text[1::2]))
        if well:
            assert int(found) == eval(f"({text[:3]}){text[3:]}") % 10


def test_episodes_by_hand():
    """A call, an error, a call that is no longer executed, an answer; the player who calls and believes succeeds."""
    step, alone = (jax.jit(calculator.make_env(calls=c).step) for c in (2, 0))

    def act(state, text):
        return step(state, jnp.pad(_ids(text), (0, 5 - len(text))), jnp.int32(len(text)))

    def shown(answer):
        return "".join(calculator.ALPHABET[t] for t in answer.tokens[: int(answer.count)])

    for i in range(5):
        task = {name: x[i] for name, x in ARENA.train.answers.items()}
        asked = "".join(calculator.ALPHABET[t] for t in ARENA.train.tokens[i])
        start = calculator.make_env(calls=2).reset(jax.random.key(0), task)
        first = act(start, asked[:5])
        assert shown(first)[1] == "=" and not bool(first.done) and float(first.reward) == 0.0
        value = int(shown(first)[0])
        # without calls nothing is ever shown: plain GRPO
        unseen = alone(start, _ids(asked[:5]), jnp.int32(5))
        assert int(unseen.count) == 0 and int(unseen.state.calls) == 0 and not bool(unseen.done)
        bad = act(first.state, "1+*23")
        assert shown(bad) == "!=" and int(bad.state.shown) == 10 and int(bad.state.calls) == 2
        ignored = act(bad.state, asked[:5])
        assert shown(ignored) == "" and int(ignored.state.shown) == 10
        for text, reward in (
            ("ABCDEFGHIJ"[value], 1.0),
            ("ABCDEFGHIJ"[value - 1], 0.0),
            ("1+" + "ABCDEFGHIJ"[value], 1.0),
        ):
            answer = act(ignored.state, text)
            assert bool(answer.done) and float(answer.reward) == reward


def test_what_the_tool_says_is_context_and_not_trained_on():
    tokens, ids = ARENA.train.tokens, jnp.arange(16, dtype=jnp.int32)
    roll = jax.jit(arenas.arena_episodes(ARENA, ARENA.train, group_size=4))
    # of a fresh decoder, whose calls are hardly ever expressions
    params, keys = ARENA.policy.init(jax.random.key(0)), sample_keys(jax.random.key(1), 0, ids, 4)
    rows = roll(params, tokens[ids], ARENA.train.valid[ids], keys, ids)
    shown, found = np.asarray(calculator.outputs(rows)), multi_turn.turns_of(rows)
    np.testing.assert_array_equal(multi_turn.shown(rows), shown)
    count = np.asarray(found.taken).sum(1) - np.asarray(found.done)
    assert (shown.sum(1) == 2 * (count > 0)).all() and shown.any()  # the first call is answered, by two tokens
    assert not (shown & np.asarray(rows.mask)).any() and not np.asarray(rows.sampler_logp)[shown].any()
    assert (np.asarray(rows.segment_ids)[shown] == 1).all()  # but it is read
    errors = (shown & (np.asarray(rows.tokens) == calculator.ERROR)).sum(1)
    np.testing.assert_array_equal(calculator.failed(rows), errors > 0)
    rewards = multi_turn.episode_rewards({}, rows)
    figures = {k: float(x) for k, x in calculator.figures(rows, rewards).items()}
    close.assert_near(figures["eval/code"], (count > 0).mean())
    close.assert_near(figures["eval/passed"], 1 - errors.sum() / (count > 0).sum())
    # the gradient: none where only what the tool said has an advantage
    estimate = builders.make_estimate(ARENA.policy, lambda rows, rewards: calculator.outputs(rows).astype(jnp.float32))
    rewards = Rewards(jnp.zeros(shown.shape[0]), jnp.ones(shown.shape[0], bool))
    assert not np.asarray(estimate(params, {}, rows, rewards).advantages).any()


@pytest.mark.slow
def test_the_behaviour_plays_without_gaps():
    arena = calculator.make_calculator(calls=2, code=1.0, skill=1.0, slips=0.0)
    rows = jax.jit(lambda key: arenas.play(arena, key, 8))(jax.random.key(0))
    for b in range(8):
        value = int(arena.train.answers["value"][rows.problem_ids[b]])
        text = "".join(calculator.ALPHABET[t] for t in rows.tokens[b])
        assert text.rstrip("_") == f"{text[:6]}{text[:5]}{value}={'ABCDEFGHIJ'[value]}"
        assert np.flatnonzero(rows.mask[b]).tolist() == [6, 7, 8, 9, 10, 13]
        assert np.asarray(rows.positions[b, :14]).tolist() == list(range(14)) and not bool(rows.truncated[b])
    train, held = ({tuple(map(int, row)) for row in x.tokens} for x in (arena.train, arena.heldout))
    assert len(train) == 512 and len(held) == 64 and not train & held


def test_the_arm_without_a_tool_begins_from_a_base_that_calls_nothing():
    """Four of ten episodes of the other base begin with a call; where nobody answers that is dead text."""
    given = arms.resolve(torl, arms.preset(torl, smoke=False, model=torl.Settings().model), ())
    assert {name: (s.calls, s.code) for name, s in given.items() if s.calls == 0} == {
        "no_tool": (0, 0.0), "unheard": (0, 0.4)
    }  # fmt: skip
    silent, other = (calculator.make_calculator(calls=2, code=given[name].code) for name in ("no_tool", "unheard"))
    for arena, calls in ((silent, False), (other, True)):
        rows = jax.jit(lambda key, arena=arena: arenas.play(arena, key, 16))(jax.random.key(0))
        first = np.asarray(rows.tokens[:, calculator.WRITTEN + 1])
        assert bool((first < calculator.FIRST_ANSWER).any()) is calls


def test_calls_that_nobody_answers_are_of_the_embedded_world(monkeypatch):
    """With rows of one's own both arms without calls would be one program, which is told of no tool."""
    opened = []
    monkeypatch.setattr(torl.multi_turn_plan, "hosted", lambda settings, **parts: opened.append(settings.calls))
    given = arms.resolve(torl, dataclasses.replace(torl.Settings(), data="rows.jsonl"), ())
    said = "^--data rows.jsonl: .* give --arm no_tool torl two_calls penalty outputs_too, without --calls$"
    with pytest.raises(UserError, match=said):
        torl.own(given["unheard"])
    for name in ("no_tool", "torl", "two_calls", "penalty", "outputs_too"):
        torl.own(given[name])
    assert opened == [0, 1, 2, 1, 1]
