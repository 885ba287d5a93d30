"""Critiques and second attempts: device and host agree, the refinement stands behind the plain prompt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import refinement
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.run import parts
from jaxrl_llm.types import Rewards
from tests.models_for_tests import byte_model

SETTINGS = recipes.OnlineSettings(levels=(2, 3), train_problems=8, eval_problems=8, max_new_tokens=28, group_size=2)
NEW = SETTINGS.max_new_tokens


def _rows(texts, ids):
    """Trajectories whose responses are the texts."""
    found = recipes.bench(SETTINGS)
    model, ids = found.model, jnp.asarray(ids, jnp.int32)
    rollout = recipes.rollout_of_model(model, group_size=1, max_new_tokens=NEW, temperature=1.0)
    rows = rollout(
        model.params, found.train.tokens[ids], found.train.valid[ids], sample_keys(jax.random.key(0), 0, ids, 1), ids
    )
    tokens, valid = encode_responses(model.tokenizer, texts, width=NEW)
    return given_responses.with_responses(rows, jnp.ones(len(ids), bool), jnp.asarray(tokens), jnp.asarray(valid))


def _text(tokens, valid):
    tokenizer = recipes.bench(SETTINGS).model.tokenizer
    return tokenizer.decode([int(t) for t, there in zip(tokens, valid, strict=True) if there])


@pytest.mark.slow
@pytest.mark.parametrize("critic", [refinement.indicative, refinement.with_answer, refinement.located])
def test_second_prompts_are_those_of_the_host(critic):
    found, problems = recipes.bench(SETTINGS), curricula.train_problems(SETTINGS)
    rng = np.random.default_rng(0)
    texts = [chain.flawed(rng, p) if k else p.solution for k, p in enumerate(problems)]
    rows = _rows(texts, range(8))
    rewards = found.score(jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers), rows)
    critiques = refinement.encode_critiques(found.model, problems, critic)
    tokenizer = found.model.tokenizer
    asked, valid = refinement.second_prompts(
        critiques, rows, rewards, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id
    )
    assert rewards.value[0] == 1 and 0 < float(rewards.value.sum()) < 8
    for k, (problem, text) in enumerate(zip(problems, texts, strict=True)):
        wrong = None if rewards.value[k] > 0.5 else refinement.wrong_step(problem.solution, text)
        want = refinement.asked_again(problem.prompt, text, critic(problem, wrong))
        assert _text(asked[k], valid[k]) == want
        # left-padded: once true, true to the end
        assert (np.diff(np.asarray(valid[k]).astype(int)) >= 0).all()


@pytest.mark.slow
def test_the_best_refinement_takes_the_last_place():
    """Scores of the refinements [0, 1] and [0, 0] in two groups: the second, then the first of equals."""
    found, problems = recipes.bench(SETTINGS), curricula.train_problems(SETTINGS)
    critiques = refinement.encode_critiques(found.model, problems, refinement.located)
    tokenizer, ids = found.model.tokenizer, jnp.arange(2, dtype=jnp.int32)
    first = _rows(["#0", "#1", "#2", "#3"], [0, 0, 1, 1])._replace(group_ids=jnp.array([0, 0, 1, 1]))
    second = _rows(["7+7=1#99", problems[0].solution, "5-5=0#98", "5-5=0#97"], [0, 0, 1, 1])
    never = Rewards(jnp.zeros(4), jnp.ones(4, bool))
    by_scores = iter([never, Rewards(jnp.array([0.0, 1.0, 0.0, 0.0]), jnp.ones(4, bool))] * 2)

    def refining(only_right):
        slots = refinement.make_refining_rollout(
            lambda *_: first, lambda *_: second, lambda *_: next(by_scores), found.train.answers,
            refinement.make_scripted(critiques, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id),
            group_size=2, new_tokens=NEW, only_right=only_right,
        )  # fmt: skip
        keys = sample_keys(jax.random.key(0), 0, ids, 2)
        return slots["rollout"](({}, ()), found.train.tokens[ids], found.train.valid[ids], keys, ids)

    rows, width = refining(False), found.train.tokens.shape[1]
    got = [_text(t, m) for t, m in zip(rows.tokens, rows.mask, strict=True)]
    assert got == ["#0", problems[0].solution, "#2", "5-5=0#98"]
    # behind the plain prompt: nothing of the critique is left
    np.testing.assert_array_equal(rows.tokens[:, :width], first.tokens[:, :width])
    np.testing.assert_array_equal(rows.segment_ids[:, :width], first.segment_ids[:, :width])
    rows = refining(True)
    assert rows.mask[1].any() and not rows.mask[3].any()


def test_examples_teach_all_passes():
    problems = curricula.train_problems(SETTINGS)
    triples = refinement.examples(problems, chain.flawed, [refinement.with_answer], wrong=1.0)
    assert len(triples) == 24
    for problem, first, critique, second in zip(problems, triples[::3], triples[1::3], triples[2::3], strict=True):
        assert first[0] == problem.prompt and second[1] == problem.solution
        assert critique[0] == problem.prompt + first[1] + "?" and second[0].startswith(critique[0])
        right = first[1].split("#")[-1] == problem.solution.split("#")[-1]
        wrong = None if right else refinement.wrong_step(problem.solution, first[1])
        assert critique[1] == refinement.located(problem, wrong)
    kept = refinement.examples(problems, chain.flawed, [refinement.located], wrong=0.0)
    assert all(pair[0].endswith("?T=>") and pair[1] == p.solution for p, pair in zip(problems, kept[2::3], strict=True))
    assert all(pair[1] == "T" for pair in kept[1::3])


def test_a_written_critique_stands_between_attempt_and_second_attempt():
    """What a critic and the second attempt are asked, and what its words cost; no reward reaches the critic."""
    found, problems = recipes.bench(SETTINGS), curricula.train_problems(SETTINGS)
    tokenizer = found.model.tokenizer
    rows, said, heard = _rows(["#0", "3+5=1#1"], [0, 1]), ["F0", "T"], []

    def speak(params, tokens, valid, keys, ids):
        heard.append((params, [_text(*row) for row in zip(tokens, valid, strict=True)], ids.tolist()))
        grid, there = encode_responses(tokenizer, said, width=4)
        prompt = jnp.zeros(tokens.shape, bool)
        mask = jnp.concatenate([prompt, jnp.asarray(there)], axis=1)
        tokens = jnp.concatenate([tokens, jnp.asarray(grid)], axis=1)
        segments = jnp.concatenate([valid, jnp.asarray(there)], axis=1).astype(jnp.int32)
        return rows._replace(
            tokens=tokens, segment_ids=segments, positions=segments, mask=mask, sampler_logp=mask.astype(jnp.float32)
        )

    words = refinement.words_of(found.model, problems, chat=False)
    criticise = refinement.make_written(speak, words, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    keys, asked = sample_keys(jax.random.key(0), 0, jnp.arange(2), 1), []
    for value in (0.0, 1.0):
        tokens, valid, spent = criticise({"a": 1}, rows, Rewards(jnp.full(2, value), jnp.ones(2, bool)), keys)
        asked.append([_text(*row) for row in zip(tokens, valid, strict=True)])
        assert spent.tolist() == [3.0, 2.0]  # with their ends
    starts = [problems[0].prompt + "#0?", problems[1].prompt + "3+5=1#1?"]
    assert heard == [({"a": 1}, starts, [0, 1])] * 2
    assert asked == [[f"{starts[0]}F0=>", f"{starts[1]}T=>"]] * 2


def test_words_for_text_and_for_chat(tmp_path):
    problem = Problem("own", "What is 1 + 1?", "1 + 1 = 2.\n#### 2", {"value": 2}, 1, "x")
    assert refinement.with_answer(problem, 0) == "The solution is wrong. The right answer is 2."
    assert refinement.located(problem, 0) == "The solution is wrong. The right answer is 2."  # and not that of a step
    assert refinement.indicative(problem, None) == "The solution is right." != refinement.located(problem, 1)
    byte_model(tmp_path, "qwen2", max_positions=64)
    model = parts.load_model(str(tmp_path))
    plain = refinement.words_of(model, [problem], chat=False)
    assert refinement.CRITICISE in model.tokenizer.decode(plain.criticise)
    chat = refinement.words_of(model, [problem], chat=True)
    for words, text in ((chat.criticise, refinement.CRITICISE), (chat.again, refinement.AGAIN)):
        assert words[0] == model.tokenizer.eos_ids[0] and text in model.tokenizer.decode(words)
