"""ReSearch: rewards of text and of tokens, a retriever against a loop, and the world its experiment plays in."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import research_search
from experiments.agents.parts import bm25, multi_hop
from jaxrl_llm.experiment import arms
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.types import Trajectories
from jaxrl_llm.verifiers import overlap
from tests import close
from tests.close import doubles

GOOD = "<think>who?</think><search>us president</search><result>obama</result><think>so</think>"


def test_worked_examples():
    wanted = {"value": "Obama"}
    assert overlap.verify_research(wanted, "bad tags").value == 0.0
    assert overlap.verify_research(wanted, GOOD + "<answer>\\boxed{bush}</answer>").value == 0.1
    assert overlap.verify_research(wanted, GOOD + "<answer>\\boxed{Barack Obama}</answer>").value == doubles(2 / 3)
    assert overlap.verify_research(wanted, GOOD + "<answer>\\boxed{the obama!}</answer>").value == 1.0
    for broken in ("<answer>obama</answer>", "<answer>\\boxed{obama}", "<answer>\\boxed{obama}</answer> and on"):
        assert overlap.verify_research(wanted, GOOD + broken).value == 0.0, broken
    for wrong in ("<result>obama</result><search>us president</search>", "<search>a<result>b</search>c</result>",
                  "<search>a</search><search>b</search><result>c</result><result>d</result>"):  # fmt: skip
        said = f"<think>who?</think>{wrong}<answer>\\boxed{{obama}}</answer>"
        assert overlap.verify_research(wanted, said).value == 0.0, wrong
    twice = "<search>a</search><result>b</result><think>so</think>" * 2
    assert overlap.verify_research(wanted, f"<think>who?</think>{twice}<answer>\\boxed{{obama}}</answer>").value == 1.0
    long = f"<think>{'who? ' * 5000}</think><answer>\\boxed{{obama}}</answer>"  # the beginning counts, however far
    assert overlap.verify_research(wanted, long).value == 1.0
    assert (
        overlap.verify_deep_research(wanted, f"<answer>no</answer>{'x' * 20_000}<answer>obama</answer>").value == -1.0
    )
    unanswered = "<think>who?</think><search>us president</search><answer>\\boxed{obama}</answer>"
    assert overlap.verify_research(wanted, unanswered).value == 0.0
    assert overlap.answer_f1("a", "A") == 1.0 and overlap.answer_f1("+", "+") == 1.0  # articles and marks alone
    assert overlap.answer_f1("the", "A") == 0.0 and overlap.answer_f1("+", "-") == overlap.answer_f1("", "") == 0.0
    assert overlap.answer_f1("yes", "no") == 0.0 and overlap.answer_f1("yes indeed", "yes") == 0.0
    assert overlap.verify_f1({"value": []}, "obama").value == 0.0
    score, formed = jnp.array([0.6667, 0.0, 1.0]), jnp.array([True, True, False])
    close.assert_printed(shaping.graded_rewards(score, formed), [0.6667, 0.1, 0.0], 4, magnitude=0)


@pytest.mark.parametrize(
    "text", ["", "<answer>", "</answer>" * 9, "<think>" * 30_000, "\\boxed{" * 9_000, "\x00é" * 99]
)
def test_any_text_is_judged(text):
    for verify in (overlap.verify_f1, overlap.verify_research, overlap.verify_deep_research):
        found = verify({"value": "obama"}, text)
        assert found.valid and found.value in (0.0, -1.0)


def test_f1_of_tokens_is_that_of_words():
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 5, (2, 40, 5)).astype(np.int32)
    bags = jax.vmap(overlap.token_bag_f1)(*map(jnp.asarray, pairs))
    sets = jax.vmap(overlap.token_set_f1)(*map(jnp.asarray, pairs))
    for k in range(40):
        given, wanted = ([int(x) for x in side[k] if x] for side in pairs)
        common = sum(min(n, Counter(wanted)[w]) for w, n in Counter(given).items())
        precision, recall = common / max(len(given), 1), common / max(len(wanted), 1)
        expected = 2 * precision * recall / (precision + recall) if common else 0.0
        close.assert_near([bags[k], overlap.bag_f1(given, wanted)], expected)
        close.assert_near(sets[k], overlap.set_f1(given, wanted))


def test_bm25_agrees_with_a_loop():
    rng = np.random.default_rng(1)
    query, texts = np.asarray([3, 5, 5, 0, 9]), rng.integers(0, 8, (7, 6))
    size = (texts > 0).sum(axis=1)
    expected = np.zeros(7)
    for d in range(7):
        for word in query[query > 0]:
            holders = sum(word in row for row in texts)
            often = int((texts[d] == word).sum())
            weight = math.log(1 + (7 - holders + 0.5) / (holders + 0.5))
            expected[d] += weight * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * size[d] / size.mean()))
    given = jnp.asarray(query, jnp.int32), jnp.asarray(texts, jnp.int32)
    close.assert_near(bm25.bm25_scores(*given, k1=1.2), expected)
    ids, found = bm25.best_documents(jnp.asarray(expected, jnp.float32), count=3)
    np.testing.assert_array_equal(ids, np.argsort(-expected, kind="stable")[:3])
    assert np.asarray(found).all()
    with pytest.raises(ValueError, match="count=9"):
        bm25.best_documents(jnp.zeros(7), count=9)
    with pytest.raises(ValueError, match="b=2"):
        bm25.bm25_scores(*given, b=2.0)


def _episode(env, step, task, act):
    """Tokens, mask and turns of one episode of ``act(state, turn)``."""
    state, tokens, mask, ends, reward, done = env.reset(jax.random.key(0), task), [], [], [], 0.0, False
    for turn in range(4):
        action = jnp.asarray(act(state, turn), jnp.int32)
        answer = step(state, action, jnp.int32(3))
        tokens, mask = tokens + action.tolist(), mask + [True] * 3
        ends.append(len(tokens) - 1)
        state, reward, done = answer.state, reward + float(answer.reward), bool(answer.done)
        if done:
            break
        tokens, mask = tokens + answer.tokens.tolist(), mask + [False] * 6
    return tokens, mask, ends, reward, done


def _rows(problems, played):
    width, rows = problems.tokens.shape[1], len(played)
    tokens, mask = np.zeros((rows, width + 40), np.int32), np.zeros((rows, width + 40), bool)
    end, used = np.zeros((rows, 4), np.int32), np.zeros((rows, width + 40), bool)
    tokens[:, :width], used[:, :width] = problems.tokens[:rows], True
    for b, (said, chosen, ends, _, _) in enumerate(played):
        tokens[b, width : width + len(said)], mask[b, width : width + len(said)] = said, chosen
        used[b, width : width + len(said)], end[b, : len(ends)] = True, width + np.asarray(ends)
    done = jnp.asarray([x[4] for x in played])
    found = multi_turn.Turns(
        jnp.zeros(tokens.shape, jnp.int32), jnp.asarray(end), jnp.asarray(end > 0), jnp.zeros((rows, 4), jnp.float32),
        jnp.zeros((rows, 4), jnp.int32), done, jnp.ones(rows, bool),
    )  # fmt: skip
    one = jnp.zeros(rows, jnp.int32)
    return Trajectories(
        jnp.asarray(tokens), jnp.asarray(used, jnp.int32), jnp.asarray(used, jnp.int32), jnp.asarray(mask),
        jnp.zeros(tokens.shape, jnp.float32), ~done, one, one,
        extras={f"turns/{name}": value for name, value in found._asdict().items()},
    )  # fmt: skip


def test_who_follows_the_documents_succeeds():
    problems = multi_hop.problems(6, 3, (1, 2, 3))
    env = multi_hop.make_env()
    step, following = jax.jit(env.step), jax.jit(multi_hop.next_action)
    tasks = [jax.tree.map(lambda x, b=b: x[b], problems.answers) for b in range(6)]
    played = [_episode(env, step, task, lambda state, turn: following(state)) for task in tasks[:3]]
    gold = multi_hop.gold(tasks[3])
    other = multi_hop.ENTITY + (gold[0] - multi_hop.ENTITY + 1) % multi_hop.ENTITIES
    half = jnp.stack([jnp.int32(multi_hop.ANSWER), other, gold[1]])
    broken = jnp.asarray([multi_hop.DOT, 5, 6], jnp.int32)
    played += [_episode(env, step, tasks[3], lambda state, turn: half)]
    played += [_episode(env, step, tasks[4], lambda state, turn: broken if turn == 0 else following(state))]
    played += [_episode(env, step, tasks[5], lambda state, turn: [multi_hop.SEARCH, 5, 6])]
    rows = _rows(problems, played)
    found = multi_hop.read(problems.answers, rows)
    # one, two and three hops as they should; half an answer at once; a broken action on the way; never an answer
    close.assert_near(found.f1, [1, 1, 1, 0.5, 1, 0], magnitude=0)
    close.assert_near(found.f1, [x[3] for x in played], magnitude=0)
    assert found.exact.tolist() == [True, True, True, False, True, False]
    assert found.formed.tolist() == [True, True, True, True, False, False]
    assert found.searches.tolist() == [1, 2, 3, 0, 2, 4]
    score = multi_hop.score_by_f1(shaping.graded_rewards)(problems.answers, rows)
    close.assert_near(score.value, [1, 1, 1, 0.5, 0, 0], magnitude=0)

    # what was retrieved has no gradient, unless it is said to train; without a search nothing differs
    open_ = multi_turn.with_observations(rows, prompt_tokens=problems.tokens.shape[1])
    logp, ones = jnp.full(rows.mask.shape, -1.0), jnp.ones(rows.mask.shape)

    def slope(mask):
        return np.asarray(jax.grad(lambda x: jnp.sum(clipped_policy_loss(x, logp, ones, mask).loss))(logp)) != 0

    np.testing.assert_array_equal(slope(rows.mask), rows.mask)
    np.testing.assert_array_equal(slope(open_.mask), open_.mask)
    assert (np.asarray(open_.mask).sum(1) - np.asarray(rows.mask).sum(1)).tolist() == [6, 12, 18, 0, 18, 24]


def test_retrievers():
    problems = multi_hop.problems(64, 5, (2,))
    start = jax.vmap(lambda task: multi_hop.make_env().reset(jax.random.key(0), task))(problems.answers)
    query = jax.vmap(multi_hop.next_action)(start)[:, 1:]
    wanted = jax.vmap(lambda s: s.task["relations"][0] * multi_hop.ENTITIES + s.at)(start)
    best = jnp.argmax(jax.vmap(multi_hop.by_query)(start, query), axis=1)
    np.testing.assert_array_equal(best, wanted)
    turned = jax.vmap(multi_hop.by_query)(start, query[:, ::-1])
    np.testing.assert_array_equal(jnp.argmax(turned, axis=1), wanted)
    # the question as a query finds some first hops, and nothing a second time
    asked = jnp.argmax(jax.vmap(multi_hop.by_question_once)(start, query), axis=1)
    assert 0.3 < float(jnp.mean((asked == wanted).astype(jnp.float32))) < 0.9
    again = start._replace(searches=start.searches + 1)
    assert not np.asarray(jax.vmap(multi_hop.by_question_once)(again, query)).any()
    assert not np.asarray(jax.vmap(multi_hop.nothing)(start, query)).any()


def test_one_retrieval_comes_before_the_first_action():
    """The prompt ends in it whatever the policy does, as the policy's own first search would read."""
    plain, rag = multi_hop.make_multi_hop(multi_hop.nothing), multi_hop.make_retrieved(shown=1)
    letters = multi_hop.ALPHABET
    for before, after in ((plain.train, rag.train), (plain.heldout, rag.heldout)):
        assert after.tokens.shape[1] == before.tokens.shape[1] + 3 + 6 and bool(after.valid.all())
        np.testing.assert_array_equal(after.tokens[:, : before.tokens.shape[1]], before.tokens)
        np.testing.assert_array_equal(after.level, before.level)
    reset, step = jax.jit(rag.env.reset), jax.jit(rag.env.step)
    onward = 0
    for k in range(24):
        task = jax.tree.map(lambda x, k=k: x[k], rag.heldout.answers)
        start, relation = int(task["start"]), int(task["relations"][0])
        said = "".join(letters[int(t)] for t in rag.heldout.tokens[k, plain.heldout.tokens.shape[1] :])
        assert said[:3] == "?" + "abcdef"[start] + "xyz"[relation]
        subject, about, target, family = said[3:7]
        found = int(task["objects"]["xyz".index(about), "abcdef".index(subject)])
        assert target == "abcdef"[found] and family == "1234"[int(task["family"][found])], "a document of the task"
        state = reset(jax.random.key(0), task)
        leads = subject == "abcdef"[start] and about == "xyz"[relation]
        assert int(state.step) == int(leads) and int(state.searches) == 1
        assert int(state.at) == (found if leads else start)
        onward += leads
        assert said[8] == "=" and said[7] == (
            "." if int(state.step) == int(task["hops"]) else "xyz"[int(task["relations"][int(state.step)])]
        )
        again = step(state, multi_hop.next_action(state), jnp.int32(3))
        assert not np.asarray(again.tokens[:4]).any(), "no search of its own finds anything"
    assert 0 < onward < 24
    assert jax.tree.map(jnp.shape, plain.policy.init(jax.random.key(0))) == jax.tree.map(
        jnp.shape, rag.policy.init(jax.random.key(0))
    ), "decoders of one size"


def test_the_reader_answers_from_the_documents_in_its_prompt():
    """Followed by hand through the five documents that stand there: known where the chain is whole, else a guess."""
    rag, held = multi_hop.make_retrieved(hops=(1, 2, 3)), multi_hop.make_retrieved().heldout
    said, known = jax.jit(jax.vmap(lambda task: multi_hop.read_off(task, shown=5)))(held.answers)

    def first(task, key):
        return multi_hop.make_reader(1.0, shown=5)(rag.env.reset(jax.random.key(0), task), key)

    spoken = jax.jit(jax.vmap(first))(held.answers, jax.random.split(jax.random.key(1), 48))
    read = {1: 0, 2: 0, 3: 0}
    letters, tasks = multi_hop.ALPHABET, jax.tree.map(np.asarray, held.answers)
    for k in range(48):
        text = "".join(letters[int(t)] for t in held.tokens[k])
        links = {text[i : i + 2]: text[i + 2 : i + 4] for i in range(10, 30, 4)}
        asked, at, ends = text[:3].replace(".", ""), text[3:5], ""
        for relation in asked:
            at = ends = links.get(at[0] + relation, "") if at else ""
        assert bool(known[k]) == bool(ends), text
        answer = "".join(letters[int(t)] for t in spoken[k])
        assert answer[0] == "!" and answer[1] in "abcdef" and answer[2] in "1234"
        if ends:
            assert answer[1:] == ends and answer == "".join(letters[int(t)] for t in said[k])
            read[int(tasks["hops"][k])] += 1
    assert read[1] > read[2] > 0  # of 16 each


def test_each_arm_begins_from_a_base_that_has_seen_what_it_reads(monkeypatch):
    """One that had never met five documents in a prompt would have to learn to read them from the reward alone."""
    seen = {}
    monkeypatch.setattr(
        research_search.arenas, "make_base", lambda arena, *, steps: seen.update(base=arena, steps=steps)
    )
    given = arms.resolve(
        research_search, arms.preset(research_search, smoke=False, model=research_search.Settings().model), ()
    )
    for name, width in (("rag", 7 + 3 + 22), ("research", 7), ("direct", 7)):
        seen.clear()
        setup = research_search.embedded(given[name])
        assert setup.tasks.train.tokens.shape[1] == seen["base"].train.tokens.shape[1] == width, name
        assert seen["steps"] == given["research"].base_steps * (3 if name == "rag" else 1)
        assert set(np.asarray(seen["base"].train.level).tolist()) == {1, 2, 3}
        assert set(np.asarray(setup.tasks.train.level).tolist()) == {2}, "three hops are for the measurement"


def test_five_retrieved_documents_hold_both_hops_at_times():
    """One document never answers a question of two hops: an arm that reads it alone could not be beaten by chance."""
    rag, length = multi_hop.make_retrieved(), multi_hop.make_multi_hop().heldout.tokens.shape[1]
    assert rag.heldout.tokens.shape[1] == length + 3 + 5 * 4 + 2
    assert (rag.env.action_tokens, rag.env.observation_tokens) == (3, 6), "later searches read as everywhere"
    both = 0
    for k in np.flatnonzero(np.asarray(rag.heldout.level) == 2):
        task = jax.tree.map(lambda x, k=k: np.asarray(x[k]), rag.heldout.answers)
        shown = np.asarray(rag.heldout.tokens[k, length + 3 : -2]).reshape(5, 4)
        rows = np.asarray(multi_hop.documents(jax.tree.map(jnp.asarray, task)))
        first, second = task["relations"][:2]
        bridge = task["objects"][first, task["start"]]
        wanted = rows[[first * 6 + task["start"], second * 6 + bridge]]
        assert all((rows == one).all(axis=1).any() for one in shown), "documents of the task"
        both += all((shown == one).all(axis=1).any() for one in wanted)
    assert 0 < both < 16
