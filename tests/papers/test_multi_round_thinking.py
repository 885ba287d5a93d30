"""Rounds of thinking: what a round is asked, what counts in the end, and parents that prompts are read back to."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.search import multi_round_thinking
from experiments.search.parts import rounds
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, recipes
from jaxrl_llm.run import bench
from jaxrl_llm.verifiers import countdown
from tests import close
from tests.close import doubles

PROBLEM = Problem("sum", "What is 2+2?", "4", {"value": "4"}, 1, "2+2")


def _round(texts, right):
    return rounds.Round(None, np.arange(len(texts)), texts, np.asarray(right, bool))


def test_a_round_is_asked_with_the_answer_and_without_the_reasoning():
    response = "because 2 and 2 <think>..</think> so \\boxed{5}"
    shown = rounds.final_answer([response], 1)
    again = rounds.asked(PROBLEM, shown[0], rounds.as_published)
    assert again.prompt == (
        "What is 2+2?\nThe assistant's previous answer is: <answer> 5 </answer>, and please re-answer."
    )
    assert "because" not in again.prompt and again.answer == PROBLEM.answer
    assert "because" in rounds.asked(PROBLEM, rounds.whole_response([response], 1)[0], rounds.in_signs).prompt
    assert rounds.asked(PROBLEM, None, rounds.as_published) is PROBLEM
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "What is 2+2?"}]
    chat = rounds.asked(PROBLEM._replace(prompt=messages), "5", rounds.in_signs).prompt
    assert chat == [messages[0], {"role": "user", "content": "5?What is 2+2?"}] and len(messages[1]["content"]) == 12


def test_anothers_answer_is_of_another_problem():
    texts = ["#1", "#2", "#3", "#4", "#5", "#6"]  # three problems, two samples
    assert rounds.anothers(texts, 2) == ["5", "6", "1", "2", "3", "4"]
    assert rounds.nothing(texts, 2) == [None] * 6


def test_transitions_account_for_the_gain_exactly():
    rng = np.random.default_rng(0)
    before, after = rng.random(96) < 0.4, rng.random(96) < 0.6
    found = rounds.transitions(before, after)
    close.assert_near(sum(found.values()), 1.0)
    close.assert_near(after.mean(), before.mean() + found["fixed"] - found["spoilt"])
    loop = sum(not a and b for a, b in zip(before, after, strict=True)) / 96
    assert found["fixed"] == doubles(loop)


def test_what_counts_in_the_end():
    played = [_round(["#1", "#2", "#7"], [0, 1, 0]), _round(["#3", "#9", "#8"], [1, 0, 0]),
              _round(["#1", "#2", "#8"], [0, 1, 0])]  # fmt: skip
    assert rounds.last_round(played, 1).tolist() == [False, True, False]
    assert rounds.first_right(played, 1).tolist() == [True, True, False]
    assert rounds.majority(played, 1).tolist() == [False, True, False]  # 1, 2 and 8; where all differ, the first
    assert rounds.majority(played[:2], 1).tolist() == [False, True, False]


@pytest.fixture(scope="module")
def settings():
    base = arms.preset(multi_round_thinking, smoke=True, model="nano")
    return arms.override(base, {"taught_steps": 0, "max_new_tokens": 18, "rounds": 3}, "the test")


def test_rounds_of_a_model_are_asked_with_their_parents_answers(settings):
    found, problems = recipes.bench(settings), bench.heldout_problems(settings)
    how = {"number": 3, "samples": 2, "ask": rounds.in_signs}
    played = rounds.make_rounds(settings, problems, found.heldout_score, **how)(found.model.params, jax.random.key(1))
    one = rounds.make_rounds(settings, problems, found.heldout_score, **how | {"number": 1})
    alone = one(found.model.params, jax.random.key(1))
    assert alone[0].texts == played[0].texts and played[0].parents.tolist() == [-1] * 16  # the first is a plain rollout
    decode, pad = found.model.tokenizer.decode, found.model.tokenizer.pad_id
    for before, after in zip(played, played[1:], strict=False):
        assert after.parents.tolist() == list(range(16))
        for k, parent in enumerate(after.parents):
            row = after.rows
            asked = row.tokens[k][(row.segment_ids[k] > 0) & ~row.mask[k] & (row.tokens[k] != pad)]
            shown = rounds.final_part(before.texts[parent])
            assert decode(asked.tolist()).endswith(f"{shown}?{problems[k // 2].prompt}")
    figures = rounds.figures(played, rounds.last_round(played, 2), 2)
    for k, now in enumerate(played):
        assert figures[f"round/accuracy_{k + 1}"] == doubles(now.right.mean())
    gain = figures["second/fixed"] - figures["second/spoilt"]
    close.assert_near(figures["round/accuracy_2"], figures["round/accuracy_1"] + gain)
    assert figures["problems/right"].shape == (8,) and figures["problems/right"].sum() == played[-1].right.sum()


def test_teaching_shows_all_kinds_of_prompts_and_right_ends(settings):
    pairs = rounds.examples(settings, rounds.in_signs, key=jax.random.key(0), samples=2)
    problems = recipes.solved_problems(settings)
    assert len(pairs) == 6 * len(problems)
    for k, (prompt, response) in enumerate(pairs):
        problem = problems[k // 6]
        assert prompt.endswith(problem.prompt) and (prompt == problem.prompt) == (k % 3 == 0)
        assert countdown.verify(problem.answer, response).value == 1.0
        if k % 3 == 1:  # a right answer is shown, and repeated
            assert prompt == f"{rounds.final_part(response)}?{problem.prompt}"


def test_each_seed_is_taught_with_pairs_of_its_own(settings, monkeypatch):
    keys, examples = [], rounds.examples

    def watched(*first, key, **more):
        keys.append(np.asarray(jax.random.key_data(key)).tolist())
        return examples(*first, key=key, **more)

    monkeypatch.setattr(rounds, "examples", watched)
    taught = rounds.make_taught(dataclasses.replace(settings, taught_steps=1, learning_rate=3e-3, ask=rounds.in_signs))
    for seed in (7, 8, 7):
        taught(jax.random.key(seed))
    assert len(keys) == 2 and keys[0] != keys[1]


def test_a_round_is_as_wide_as_its_prompts_and_not_as_the_longest_response(settings):
    long = dataclasses.replace(settings, max_new_tokens=48)
    found, problems = recipes.bench(long), bench.heldout_problems(long)
    how = {"number": 2, "samples": 1, "ask": rounds.in_signs, "shown": lambda texts, samples: ["7"] * len(texts)}
    played = rounds.make_rounds(long, problems, found.heldout_score, **how)(found.model.params, jax.random.key(1))
    assert played[1].rows.tokens.shape[1] == 32 + 48 > played[0].rows.tokens.shape[1]


def test_right_answers_that_are_kept():
    def one(right):
        rows = types.SimpleNamespace(mask=np.ones((4, 3), bool))
        return rounds.Round(rows, np.arange(4), ["#1"] * 4, np.asarray(right, bool))

    played = [one([1, 1, 1, 0]), one([1, 1, 0, 1])]
    assert rounds.figures(played, played[1].right, 2)["second/kept"] == doubles(2 / 3)
    played = [one([0] * 4), one([1] * 4)]
    assert rounds.figures(played, played[1].right, 2)["second/kept"] == 0.0


def test_arms_on_chains_are_refused_where_a_model_or_rows_are_ones_own():
    said = (
        "^arms forward_once, forward_twice, forward_whole are on the chains of the bundled models and read no rows of "
        "your own; give --arm once twice four again anothers keep vote tuned$"
    )
    base = dataclasses.replace(multi_round_thinking.Settings(), data="rows.jsonl")
    for own in ({"model": "a/folder"}, {"chat": True}, {"format": "gsm8k"}, {"verifier": "number"}):
        given = arms.resolve(multi_round_thinking, dataclasses.replace(base, **own), ())
        for name in ("forward_once", "forward_twice", "forward_whole"):
            with pytest.raises(UserError, match=said):
                multi_round_thinking.build(given[name])
        for name in ("once", "twice", "vote", "tuned"):
            assert given[name].data == "rows.jsonl"
            multi_round_thinking.check_chains(given[name])
    embedded = arms.preset(multi_round_thinking, smoke=True, model="nano")
    for one in arms.resolve(multi_round_thinking, embedded, ()).values():
        multi_round_thinking.check_chains(one)


def test_wrong_numbers_of_rounds_are_refused(settings):
    with pytest.raises(UserError, match="--rounds 0 must be at least 1"):
        rounds.make_rounds(settings, [PROBLEM], lambda rows: rows, number=0, samples=1)


def test_a_trial_of_fine_tuning_has_second_rounds_alone_and_goes_on_from_the_taught_model(settings):
    problems, found = recipes.solved_problems(settings), recipes.bench(settings)
    pairs = rounds.examples(
        settings, rounds.in_signs, samples=2, params=found.model.params, key=jax.random.key(5), teach=False
    )
    assert len(pairs) == 2 * len(problems)
    for k, (prompt, response) in enumerate(pairs):
        problem = problems[k // 2]
        assert prompt.endswith(f"?{problem.prompt}") and countdown.verify(problem.answer, response).value == 1.0
    plain = dataclasses.replace(settings, taught_steps=2, learning_rate=1e-3, ask=rounds.in_signs)
    tuned = dataclasses.replace(plain, tuned_steps=2)
    key = jax.random.key(3)
    before, after = rounds.make_tuned(plain)(key), rounds.make_tuned(tuned)(key)
    moved = [bool(jnp.any(a != b)) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert any(moved) and rounds.make_tuned(tuned)(key) is after
    assert rounds.make_tuned(plain) is rounds.make_taught(plain)
