"""DeepResearcher: rewards by hand, a reading agent that stops early, and the noisy web its experiment plays in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import deepresearcher
from experiments.agents.parts import arena as arenas
from experiments.agents.parts import closed_book, multi_hop, noisy_web
from jaxrl_llm.advantages.group import group_normalized_advantages
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rewards import shaping
from jaxrl_llm.run import parts
from jaxrl_llm.tools.endpoints import Unanswered
from jaxrl_llm.verifiers import overlap
from tests import close
from tests.models_for_tests import byte_model


def test_worked_examples():
    assert overlap.verify_deep_research({"value": "red cat"}, "<answer>the red, red cat</answer>").value == 0.8
    assert overlap.verify_deep_research({"value": ["dog", "Red cat"]}, "so <answer>red cat!</answer>").value == 1.0
    assert overlap.verify_deep_research({"value": "red cat"}, "<answer>blue</answer>").value == 0.0
    for broken in ("red cat", "<answer>red cat", "<answer>a</answer><answer>red cat</answer>"):
        assert overlap.verify_deep_research({"value": "red cat"}, broken).value == -1.0, broken
    score, formed = jnp.array([0.8, 0.0, 1.0]), jnp.array([True, True, False])
    found = shaping.graded_rewards(score, formed, wrong_reward=0.0, malformed_reward=-1.0)
    close.assert_near(found, [0.8, 0.0, -1.0], magnitude=0)


def test_gradient():
    mask = jnp.asarray([[True, False, True], [False, True, True]])
    ids, same = jnp.zeros(2, jnp.int32), jnp.array([0.8, 0.8])

    def slope(rewards):
        own = jnp.where(mask, group_normalized_advantages(rewards, ids)[:, None], 0.0)
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)

        def loss(logits):
            logp = jax.nn.log_softmax(logits, axis=2)[:, :, 1]
            return jnp.sum(clipped_policy_loss(logp, jax.lax.stop_gradient(logp), own, mask).loss)

        return np.abs(np.asarray(jax.grad(loss)(logits))).max(axis=2) > 0

    # nothing at what the tools said; nothing anywhere where all rollouts earn the same
    np.testing.assert_array_equal(slope(jnp.array([0.8, -1.0])), mask)
    assert not slope(same).any()


def _reader(text, goal):
    best, most = 0, 0
    for k, segment in enumerate(text):
        shared = sum(word in segment for word in goal)
        if not shared:
            break
        if shared > most:
            best, most = k, shared
    return best, most == len(goal)


def test_the_reading_agent_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    texts, goals = rng.integers(1, 7, (60, 3, 4)), rng.integers(1, 7, (60, 2))
    given = jnp.asarray(texts, jnp.int32), jnp.asarray(goals, jnp.int32)
    found = jax.vmap(noisy_web.read_on)(*given)
    expected = [_reader(text.tolist(), goal.tolist()) for text, goal in zip(texts, goals, strict=True)]
    assert list(zip(*(x.tolist() for x in found), strict=True)) == expected
    assert 10 < sum(there for _, there in expected) < 55


def _play(env, step, task, key, act):
    state, said = env.reset(key, task), []
    for turn in range(6):
        action = jnp.asarray(act(state, turn), jnp.int32)
        answer = step(state, action, jnp.int32(3))
        said.append((action.tolist(), answer.tokens.tolist()))
        state = answer.state
        if bool(answer.done):
            return float(answer.reward), said
    return None, said


@pytest.fixture(scope="module")
def following():
    return jax.jit(noisy_web.next_action)


def test_who_searches_and_reads_succeeds(following):
    problems = noisy_web.problems(6, 3, (1, 2))
    env = noisy_web.make_env(turns=6, astray=0.0, failing=0.0)
    step, key = jax.jit(env.step), jax.random.key(0)
    for b in range(6):
        task = jax.tree.map(lambda x, b=b: x[b], problems.answers)
        reward, said = _play(env, step, task, key, lambda state, turn: following(state))
        assert reward == 1.0 and len(said) == 2 * int(problems.level[b]) + 1
        assert all(bool(noisy_web.well_formed(jnp.asarray(action))) for action, _ in said)
        # the notes say what is known: the last ones are the answer, and nothing is asked any more
        assert said[-2][1][3:5] == said[-1][0][1:] and said[-2][1][5:] == [multi_hop.DOT, multi_hop.EQUALS]
    broken = jnp.asarray([[noisy_web.OPEN, multi_hop.ENTITY, multi_hop.RELATION], [noisy_web.SEARCH, 0, 5]])
    assert not np.asarray(noisy_web.well_formed(broken)).any()


@pytest.mark.slow
def test_a_single_action_can_only_answer():
    """The arm without search: whatever is no answer ends the episode, malformed and without any F1."""
    arena = noisy_web.make_noisy_web()
    assert arenas.shortened(arena, 6) is arena
    short = arenas.shortened(arena, 1)
    with pytest.raises(UserError, match=r"--turns 7 must lie in \[1, 6\]"):
        arenas.shortened(arena, 7)
    assert short.turns == 1 and short.new_tokens == 3 + 7 and short.policy is arena.policy
    rows = jax.jit(lambda key: arenas.play(short, key, 40))(jax.random.key(0))
    first = np.asarray(rows.tokens)[:, noisy_web.NOTES]
    np.testing.assert_array_equal(np.asarray(rows.truncated), first != multi_hop.ANSWER)
    assert (np.asarray(rows.mask).sum(1) == 3).all() and 0 < (first == multi_hop.ANSWER).sum() < 40


def test_the_web_is_noisy(following):
    problems = noisy_web.problems(2, 3, (1,))
    task = jax.tree.map(lambda x: x[0], problems.answers)
    lost = noisy_web.make_env(turns=6, astray=1.0, failing=0.0)
    reward, said = _play(lost, jax.jit(lost.step), task, jax.random.key(0), lambda state, turn: following(state))
    titles = [tokens[1] for _, tokens in said]
    assert reward is None and multi_hop.ENTITY + int(task["start"]) not in titles
    dead = noisy_web.make_env(turns=6, astray=0.0, failing=1.0)
    reward, said = _play(dead, jax.jit(dead.step), task, jax.random.key(0), lambda state, turn: following(state))
    assert reward is None and [tokens[:3] for _, tokens in said[1::2]] == [[0, 0, 0]] * 3
    # without the reading agent a page helps only where its first segment is the right one
    plain = noisy_web.make_env(noisy_web.first_segment, turns=6, astray=0.0, failing=0.0)
    reward, said = _play(plain, jax.jit(plain.step), task, jax.random.key(0), lambda state, turn: following(state))
    first = int(task["order"][task["start"], 0])
    assert (reward == 1.0) == (first == int(task["relations"][0]))
    assert said[1][1][0] == multi_hop.RELATION + first


def _asked(prompt, value):
    return Problem("rows", prompt, "", {"value": value}, 0, prompt)


TOWER, WEATHER, YES = _asked("Where?", ["Eiffel Tower"]), _asked("The weather today?", "rain"), _asked("Is it?", "yes")


def test_what_is_known_by_heart_does_not_train(capsys):
    said = {
        "Where?": ["No idea", "the Eiffel tower!"],
        "The weather today?": ["a train", "sun"],
        "Is it?": ["yes, or no"],
    }

    def answers(problems):
        return [said[problem.prompt] for problem in problems]

    assert closed_book.unknown([TOWER, WEATHER, YES], answers) == [WEATHER, YES]  # "train" does not say "rain"
    assert "1 of 3 questions are known without tools" in capsys.readouterr().out
    with pytest.raises(
        UserError, match="all 1 questions are known without tools; give harder rows, or --closed-book 0"
    ):
        closed_book.unknown([TOWER], answers)


def test_questions_that_a_judge_finds_unsuitable_do_not_train():
    def chat(messages, draw=0):
        return " Yes, it changes" if "weather" in messages[0]["content"] else "NO"

    assert closed_book.suitable([TOWER, WEATHER, YES], chat) == [TOWER, YES]

    def refusing(messages, draw=0):
        if "weather" in messages[0]["content"]:
            raise Unanswered("not this one")
        return "NO"

    assert closed_book.suitable([TOWER, WEATHER, YES], refusing) == [TOWER, YES]
    with pytest.raises(UserError, match="--reader finds all 1 questions unsuitable"):
        closed_book.suitable([WEATHER], chat)


def test_the_model_that_trains_is_asked_without_tools(tmp_path):
    model = parts.load_model(str(byte_model(tmp_path)))
    found = closed_book.make_answers(model, tries=3, max_new_tokens=4)([TOWER, WEATHER])
    assert list(map(len, found)) == [3, 3] and all(len(text) <= 4 for texts in found for text in texts)
    assert found[0] != found[1] and len(set(found[0])) > 1  # questions and tries differ


def test_the_floor_of_exact_answers_is_that_of_a_guess():
    """Of all 24 answers to a question one is exact, and the mean F1 is that of the docstring."""
    wanted = jnp.asarray([multi_hop.ENTITY + 2, multi_hop.FAMILY + 1], jnp.int32)
    every = [(multi_hop.ENTITY + e, multi_hop.FAMILY + f) for e in range(6) for f in range(4)]
    scores = [float(overlap.token_set_f1(jnp.asarray(x, jnp.int32), wanted)) for x in every]
    assert scores.count(1.0) == 1 and len(scores) == 24
    close.assert_near(np.mean(scores), 5 / 24)
    bed = deepresearcher.BED
    assert (bed.metric, bed.chance) == ("eval/exact", 1 / 24)


def test_the_prompted_agent_plays_no_episode_to_train(monkeypatch):
    """With rows of one's own it ran all of RL at a rate of 0: hours of episodes that change nothing."""
    monkeypatch.setattr(deepresearcher, "own", deepresearcher.embedded)
    base = arms.preset(deepresearcher, smoke=True, model=deepresearcher.Settings().model)
    for name, settings in arms.resolve(deepresearcher, base, ()).items():
        for one in (settings, dataclasses.replace(settings, data="rows.jsonl")):
            assert len(deepresearcher.build(one).stages) == (name != "prompted"), name
