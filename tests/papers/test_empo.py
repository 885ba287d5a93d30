"""Answers are read alike on the device and from text; meanings that a model compares; a start that agrees on errors."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient import empo
from experiments.policy_gradient.parts import agreement, meanings
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import Results, recipes
from jaxrl_llm.run import parts
from jaxrl_llm.types import Rewards, Trajectories
from tests import close
from tests.experiment import made
from tests.models_for_tests import byte_model


def _trajectories(bench, texts):
    tokenizer = bench.model.tokenizer
    width = max(map(len, texts)) + 1
    tokens, mask = np.full((len(texts), width), tokenizer.pad_id, np.int32), np.zeros((len(texts), width), bool)
    for row, text in enumerate(texts):
        ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
    zeros = jnp.zeros((len(texts),), jnp.int32)
    grid = jnp.zeros((len(texts), width), jnp.int32)
    return Trajectories(
        jnp.asarray(tokens), grid, grid, jnp.asarray(mask), grid.astype(jnp.float32), zeros > 0, zeros, zeros
    )


def test_device_and_host_readers_cluster_alike():
    bench = recipes.bench(recipes.OnlineSettings(train_problems=8, eval_problems=8, max_new_tokens=8))
    rows = _trajectories(bench, ["3+5=8#8", "#8", "1*2=2#2", "2+6=8#8"])
    clusters = []
    for found in (bench, bench._replace(score=None)):
        values, answered = recipes.make_answer_reader(found)(rows)
        assert answered.all()
        clusters.append(agreement.greedy_clusters(agreement.same_values(values, answered), rows.group_ids).tolist())
    assert clusters == [[0, 0, 2, 0]] * 2
    # a response without a marked number has no answer
    assert recipes.make_answer_reader(bench)(_trajectories(bench, ["3+5=8", "#"]))[1].tolist() == [False, False]


def test_the_answer_of_steps_to_a_target_is_their_last_result():
    settings = recipes.OnlineSettings(
        data="countdown", levels=(3,), train_problems=8, eval_problems=8, max_new_tokens=18
    )
    bench = recipes.bench(settings)
    solution = recipes.solved_problems(settings)[0]
    texts = [solution.solution, "2*3=6,6-1=5", "2*3=6,6-1", "2*3=6,6-1=", "5"]
    values, answered = recipes.make_answer_reader(bench)(_trajectories(bench, texts))
    assert answered.tolist() == [True, True, False, False, False]
    assert values.tolist() == [solution.answer["target"], 5, 0, 0, 0]


def test_half_of_what_labels_gain_is_asked_of_empo():
    """From 0.5 labels reach 0.9: without them 0.75 is more than half of that, 0.65 less, and more than by lot."""
    for reached, holds in ((0.75, True), (0.65, False)):
        ends = {"grpo": 0.9, "empo": reached, "random": 0.1}
        arms = {
            name: made.arm([end, end + 0.001, end + 0.002], curve={0: [0.5] * 3, 8: [end, end + 0.001, end + 0.002]})
            for name, end in ends.items()
        }
        arms["empo"].curves["eval/majority"] = {"step": [0, 8], "values": [[0.7, 0.5]] * 3}
        arms["empo"].curves["agreement/entropy"] = {"step": [2, 8], "values": [[1.0, 0.5], [1.0, 0.6], [1.0, 0.7]]}
        claim = empo.claim(Results(arms))
        assert claim.primary.than == "grpo" and (claim.verdict == "supported here") == holds
        # the ends of grpo and empo grow alike over the seeds: half of that of grpo is left, 0, 0.0005 and 0.001
        assert claim.primary.mean == close.doubles(reached - 0.5 + 0.0005 - (0.9 - 0.5) / 2)
        (beside,) = (part for part in claim.secondary if "eval/majority" in part.text)
        assert (beside.mean > 0) == (reached > 0.7)  # what a vote of the untrained model gets


def test_pairs_of_a_group_are_asked_once_and_equal_texts_never():
    heard = []

    def says_same(pairs):
        heard.extend(pairs)
        return np.asarray([{a, b} <= {"2", "two", "zwei"} and (a, b) != ("two", "zwei") for _, a, b in pairs])

    answers, ids = ["2", "two", "2", "", "zwei", "2", "two", ""], [0, 0, 0, 0, 0, 5, 5, 5]
    questions = ["q"] * 5 + ["r"] * 3
    same = np.asarray(meanings.equivalence(questions, answers, ids, says_same))
    assert sorted(heard) == sorted({("q", "2", "two"), ("q", "two", "2"), ("q", "2", "zwei"), ("q", "two", "zwei"),
                                    ("r", "2", "two")})  # fmt: skip
    want = np.zeros((8, 8), bool)
    for i, j in ((0, 1), (0, 2), (1, 2), (0, 4), (2, 4), (5, 6)):
        want[i, j] = want[j, i] = True
    want |= np.diag([bool(a) for a in answers])
    np.testing.assert_array_equal(same, want)
    # compared with the opener alone: "zwei" joins "2", though it does not mean the same as "two"
    clusters = agreement.greedy_clusters(jnp.asarray(same), jnp.asarray(ids))
    assert clusters.tolist() == [0, 0, 0, 3, 0, 5, 5, 7]


def test_with_chat_a_model_is_asked_in_a_turn_of_a_user(tmp_path, monkeypatch):
    """The question stands in the template, and the word is looked for where the turn of the assistant begins."""
    byte_model(tmp_path, "qwen2", max_positions=256)
    model, tables = parts.load_model(str(tmp_path)), []
    word = model.tokenizer.encode
    likes_yes = jnp.zeros(model.config.vocab_size).at[word("Y")[0]].set(1.0)  # and the space of " Yes" not at all
    blind = types.SimpleNamespace(
        hidden=lambda params, tokens, positions, segments: jnp.zeros((*tokens.shape, 1)),
        unembed=lambda params, hidden: jnp.broadcast_to(params, (hidden.shape[0], params.shape[0])),
    )
    encode = meanings.tables.encode_problems
    monkeypatch.setattr(
        meanings.tables, "encode_problems", lambda *given, **more: tables.append(encode(*given, **more)) or tables[-1]
    )
    asked = [("Who?", "a man", "one man")]
    found = {}
    for chat in (False, True):
        found[chat] = meanings.make_asked_in_words(model._replace(policy=blind), likes_yes, chat=chat)(asked).tolist()
    rows = [table.tokens[0][table.valid[0]].tolist() for table in (tables[1], tables[3])]
    question, (begin, end, user, assistant) = word(meanings.in_words(asked[0])), (1, 2, 4, 5)
    assert [i for i in rows[0] if i != begin] == question
    assert rows[1] == [begin, user, *question, end, assistant]
    assert found == {False: [False], True: [True]}


def test_the_comparer_of_chat_is_asked_in_chat_where_it_has_a_template(tmp_path, monkeypatch):
    settings = _settings()
    bench, heard = recipes.bench(settings), []
    monkeypatch.setattr(meanings, "make_asked_in_words", lambda model, params, *, chat: heard.append(chat))
    monkeypatch.setattr(recipes, "solved_problems", lambda settings: [])  # chat belongs to rows of one's own
    byte_model(tmp_path, "qwen2", max_positions=64)
    for chat in (True, False):
        empo.by_model(dataclasses.replace(settings, comparer=str(tmp_path), chat=chat), bench)
    names = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": None}))
    empo.by_model(dataclasses.replace(settings, comparer=str(tmp_path), chat=True), bench)
    assert heard == [True, False, False]


def test_rewards_of_free_text_against_a_loop():
    rng = np.random.default_rng(2)
    ids = np.repeat(np.arange(5) * 6, 6)
    for trial in range(20):
        most = 6 if trial % 2 else 2
        clusters = np.concatenate([6 * g + np.sort(rng.integers(0, most, 6)) for g in range(5)])
        clusters = np.asarray([np.flatnonzero(clusters == c)[0] for c in clusters])  # the row that opened each
        answered, again = rng.random(30) < 0.8, rng.random(30) < 0.2
        want = []
        for k in range(30):
            mine = clusters[ids == ids[k]].tolist()
            shares = [mine.count(c) / 6 for c in mine]
            value = mine.count(clusters[k]) / 6
            if again[k] or (len(set(mine)) > 1 and max(shares) < 0.3):
                value = 0.0
            want.append(value if answered[k] else -0.5)
        found = meanings.free_text_rewards(*(jnp.asarray(x) for x in (clusters, ids, answered, again)), least=0.3)
        close.assert_near(found, want)


def _settings(**changes):
    settings = empo.Settings(levels=(1, 2), train_problems=64, eval_problems=32, max_new_tokens=20, group_size=4,
                             prompts_per_step=2, steps=1, eval_samples=8, comparer_steps=300,
                             misled_steps=60)  # fmt: skip
    return dataclasses.replace(settings, **changes)


@pytest.mark.slow
def test_the_comparer_learns_to_compare_and_clusters_are_those_of_the_numbers():
    settings = _settings()
    bench = recipes.bench(settings)
    params = meanings.trained_comparer(settings, steps=settings.comparer_steps)
    says = meanings.make_says_same(bench.model, params, meanings.in_numbers, yes="T", no="F")
    pairs = [("", str(a), str(b)) for a in range(11) for b in range(11)]
    right = says(pairs) == np.asarray([a == b for _, a, b in pairs])
    assert right.mean() > 0.95
    rows = _trajectories(bench, ["3+5=8#8", "#8", "1*2=2#2", "2+6=8#8"])
    judged = empo.by_model(settings, bench)
    assert judged.bench.score is None
    clusters, _, answered = judged.clusters_of(rows)
    assert clusters.tolist() == [0, 0, 2, 0] and answered.all()
    assert judged.rewards(rows).value.tolist() == [0.75, 0.75, 0.25, 0.75]


@pytest.mark.slow
def test_a_start_that_agrees_on_errors():
    """Most majorities are right at first; after misleading solutions less than 3 of 10, and the truth is still said."""
    settings = _settings()
    key, found = jax.random.key(0), {}
    for arm in ("empo", "misled"):
        plan = empo.build(dataclasses.replace(settings, **empo.ARMS[arm]))
        figures = plan.measure(plan.init(key), key)
        found[arm] = {name: float(figures[name]) for name in ("eval/majority", "eval/pass@8")}
    assert found["empo"]["eval/majority"] > 0.5 > 0.3 > found["misled"]["eval/majority"]
    assert found["misled"]["eval/pass@8"] > found["misled"]["eval/majority"]


def test_the_majority_of_each_problem_is_looked_up():
    settings = _settings(eval_problems=2)
    bench = recipes.bench(settings)
    bench = bench._replace(heldout=jax.tree.map(lambda x: x[:2], bench.heldout))
    rows = _trajectories(bench, ["#8", "#8", "#2", "1", "#3", "#5", "", "#5"])
    right = jnp.array([1.0, 1, 0, 0, 1, 0, 0, 0])
    figures = empo.with_majority(bench, None, rows, Rewards(right, jnp.ones(8, bool)))
    assert float(figures["eval/majority"]) == 0.5  # 8 of the first; of the second 5 is commoner than the right 3
    assert meanings.misleading("#9, #10") == "#9, #11"
    with pytest.raises(UserError, match="cannot be made to mislead"):
        meanings.misleading("none")


def test_random_rewards_are_tried_at_smaller_steps():
    """Adam's first update is the rate itself, wherever there is a gradient."""
    moved = {}
    for arm in ("random", "random_10"):
        settings = _settings(**empo.ARMS[arm], learning_rate=0.1)
        tx = empo.build(settings).stages[0].method.tx
        with jax.numpy_dtype_promotion("standard"):  # optax mixes weak integers and floats
            change, _ = tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
        moved[arm] = change
    close.assert_near(moved["random"], 10 * moved["random_10"], terms=8)
    close.assert_near(moved["random"], [-0.1], terms=8)
