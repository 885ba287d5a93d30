"""Cog-Rethinker: who is asked again, what a refining prompt shows, and what the supervised term learns from."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curriculum import cog_rethinker
from experiments.curriculum.parts import hints
from experiments.parts import start_rates
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli, recipes
from jaxrl_llm.run import parts
from tests import close
from tests.models_for_tests import byte_model
from tests.papers import staged

NEW = 8


def test_worked_stages():
    outcomes = [[[0, 0], [1, 0]], [[0, 1], [1, 1]], [[1, 1], [1, 1]]]  # decomposing helps A; B is solved at once
    slots, _ = staged.scripted(outcomes, group_size=2)
    rows = staged.run(slots, 2, 2)
    assert hints.stage_of(rows).tolist() == [1, 1, 0, 0]
    assert slots["score"](None, rows).value.tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.fixture(scope="module")
def world():
    """A table of two problems with a plain, a decomposing and a refining stage."""
    settings = recipes.OnlineSettings(train_problems=4, eval_problems=4, max_new_tokens=NEW)
    model = recipes.bench(settings).model
    problems = [staged.problem("m11 3+5*4=>", "3+5=8,8*4=10#10"), staged.problem("m7 2*3=>", "2*3=6#6")]
    asked = (hints.no_hint, hints.first_operands, hints.shown_attempt)
    table = hints.encode_hints(model, problems, asked, spare_tokens=NEW + 1)
    rollout = jax.jit(recipes.rollout_of_model(model, group_size=1, max_new_tokens=NEW, temperature=1.0))
    return model, asked, table, rollout


def _text(model, tokens, keep):
    return model.tokenizer.decode([int(t) for t in np.asarray(tokens)[np.asarray(keep)]])


def _answered(world, stage, prompts, texts):
    """Rows whose responses are the given texts, with an end token, asked at a stage."""
    model, _, table, rollout = world
    tokens, valid = prompts
    keys, ids = jax.random.split(jax.random.key(0), 2), jnp.arange(2, dtype=jnp.int32)
    rows = rollout(model.params, tokens, valid, keys, ids)
    width = tokens.shape[1]
    for k, text in enumerate(texts):
        said = [*model.tokenizer.encode(text), model.tokenizer.eos_ids[0]]
        there = jnp.arange(NEW) < len(said)
        row = jnp.asarray(said + [0] * (NEW - len(said)), jnp.int32)
        prompt = int(valid[k].sum())
        rows = rows._replace(
            tokens=rows.tokens.at[k, width:].set(row),
            mask=rows.mask.at[k, width:].set(there),
            segment_ids=rows.segment_ids.at[k, width:].set(there.astype(jnp.int32)),
            positions=rows.positions.at[k, width:].set(jnp.where(there, prompt + jnp.arange(NEW), 0).astype(jnp.int32)),
        )
    return rows._replace(tokens=rows.tokens.at[:, 0].set(stage))


def _table(world, stage):
    return world[2].tokens[stage], world[2].valid[stage]


@pytest.mark.slow
def test_a_refining_prompt_shows_the_attempt(world):
    model, asked, table, _ = world
    prompts = hints.make_attempt_prompts(table, asked, model.tokenizer, group_size=1)
    ids = jnp.arange(2, dtype=jnp.int32)
    before = _answered(world, 1, _table(world, 1), ["9#9", "5#5"])
    tokens, valid = prompts(2, ids, before)
    assert tokens.shape == table.tokens[0].shape and not valid[:, 0].any()
    assert [_text(model, t, v) for t, v in zip(tokens, valid, strict=True)] == [
        "m11 3+5*4=>3+5=9#9;",
        "m7 2*3=>2*3=5#5;",
    ]
    for got, own in zip(prompts(1, ids, before), _table(world, 1), strict=True):
        np.testing.assert_array_equal(got, own)


def test_the_supervised_term_sees_the_plain_prompt_only(world):
    model, asked, table, _ = world
    prompts = hints.make_attempt_prompts(table, asked, model.tokenizer, group_size=1)
    ids, both = jnp.arange(2, dtype=jnp.int32), jnp.ones(2, bool)
    plain_answers = jax.jit(hints.plain_answers)
    decomposed = _answered(world, 1, _table(world, 1), ["8#8", "6#6"])
    refined = _answered(world, 2, prompts(2, ids, decomposed), ["#10", "#6"])
    plain = _answered(world, 0, _table(world, 0), ["#10", "#6"])
    for rows, said in ((decomposed, ["3+5=8#8", "2*3=6#6"]), (refined, ["#10", "#6"]), (plain, ["#10", "#6"])):
        found = plain_answers(rows, table, both)
        for k, (prompt, answer) in enumerate(zip(["m11 3+5*4=>", "m7 2*3=>"], said, strict=True)):
            real = found.segment_ids[k] > 0
            assert _text(model, found.tokens[k], real & ~found.mask[k]) == prompt
            assert _text(model, found.tokens[k], found.mask[k]) == answer
            assert found.positions[k][real].tolist() == list(range(int(real.sum())))
    none = plain_answers(refined, table, jnp.zeros(2, bool))
    assert not none.mask.any()  # nothing chosen: the term is 0


# --- requests in words, over rows of one's own


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=400)
    rows = [{"question": f"What is {k} + 1?", "answer": f"{k} + 1 = {k + 1}.\n#### {k + 1}"} for k in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def _worded(folder, chat):
    """A table of two problems in words, its prompts and a rollout."""
    model = parts.load_model(str(folder))
    problems = [staged.problem("Ann has 3. How many?", "3"), staged.problem("2 + 3?", "5")]
    asked = (hints.no_hint, cog_rethinker.in_words(hints.first_operation), hints.shown_attempt)
    behind = hints.refine_words(model, problems, chat=chat)
    sizes = {"spare_tokens": NEW + len(behind), "chat": chat, "phrase": "\n"}
    table = hints.asked_in_words(hints.encode_hints(model, problems, asked, **sizes))
    rollout = jax.jit(recipes.rollout_of_model(model, group_size=1, max_new_tokens=NEW, temperature=1.0))
    prompts = hints.make_attempt_prompts(table, asked, model.tokenizer, group_size=1, separator=behind)
    return (model, asked, table, rollout), prompts


@pytest.mark.parametrize("chat", [False, True])
def test_requests_in_words_are_asked_and_are_no_answer(own, chat):
    """Decomposed inside the message, refined in the next one; what is taught stands behind the plain prompt alone."""
    world, prompts = _worded(own, chat)
    model, _, table, _ = world
    ids = jnp.arange(2, dtype=jnp.int32)
    ask = ("<s><|user|>{}<|end|><|assistant|>" if chat else "<s>{}").format
    split = f"\n{hints.DECOMPOSE}\n"
    split = "\n" + split if chat else split

    def spelled(tokens, keep):
        shown = [int(t) for t in np.asarray(tokens)[np.asarray(keep)]]
        special = {k: name for k, name in enumerate(("<pad>", "<s>", "<|end|>", "</s>", "<|user|>", "<|assistant|>"))}
        return "".join(special.get(t) or model.tokenizer.decode([t]) for t in shown)

    asked = ["Ann has 3. How many?", "2 + 3?"]
    decomposed = _answered(world, 1, _table(world, 1), ["No: 4", "6"])
    for k, text in enumerate(asked):
        assert spelled(table.tokens[0, k], table.valid[0, k]) == ask(text)
        assert spelled(table.tokens[1, k], table.valid[1, k]) == ask(text + split)
    tokens, valid = prompts(2, ids, decomposed)
    again = f"<|end|><|user|>{hints.REFINE}<|end|><|assistant|>" if chat else f"\n\n{hints.REFINE}\n"
    for k, (text, said) in enumerate(zip(asked, ["No: 4", "6"], strict=True)):
        assert spelled(tokens[k], valid[k]) == ask(text + split) + said + again
    refined = _answered(world, 2, (tokens, valid), ["3", "5"])
    for rows, said in ((decomposed, ["No: 4", "6"]), (refined, ["3", "5"])):
        np.testing.assert_array_equal(hints.with_hint(rows, table).mask, rows.mask)  # a verifier reads the answer alone
        found = hints.plain_answers(rows, table, jnp.array([True, True]))
        for k, text in enumerate(asked):
            real, mask = np.asarray(found.segment_ids[k] > 0), np.asarray(found.mask[k])
            assert spelled(found.tokens[k], real & ~mask) == ask(text)
            assert spelled(found.tokens[k], mask).removesuffix("<|end|>") == said[k]
            assert found.positions[k][real].tolist() == list(range(real.sum()))


WRONG = {
    "no room": (["--max-new-tokens", "120"], "of the model's 400 positions; lower --max-new-tokens"),
    "corrections": (["--max-new-tokens", "24", "--warm-steps", "3"], "--warm-steps is read by no chosen arm"),
    "no template": (["--data", "chain", "--chat"], "--chat belong to rows of your own, not to --data chain"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case, own, capsys, monkeypatch):
    given, said = WRONG[case]
    monkeypatch.setattr("sys.argv", ["x"])
    rows = [] if "chain" in given else ["--model", str(own), "--data", str(own / "rows.jsonl"), "--format", "gsm8k"]
    with pytest.raises(SystemExit) as stop:
        cli.main(cog_rethinker.__name__, ["--smoke", "--seeds", "1", "--arm", "cog", *rows, *given])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and said in lines[0], lines


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_two_steps_in_words(chat, own, tmp_path):
    words = ["--model", str(own), "--data", str(own / "rows.jsonl"), "--format", "gsm8k", "--max-new-tokens", "24"]
    given = ["--smoke", "--seeds", "1", "--arm", "cog", "refine", "--out", str(tmp_path / "run")]
    found = cli.run(cog_rethinker, [*given, *words, *(["--chat"] if chat else [])])
    for name, arm in found.arms.items():
        assert np.isfinite(arm.metrics["loss/total"]).all(), name
        assert arm.rollouts == 2 * 3 * 2 * 2, "random weights solve nothing: both prompts are drawn three times"


def test_without_a_warm_stage_arms_begin_with_the_model_itself():
    """As a model of one's own on chains, whose settings have no warm stage: a run of zero steps is an error."""
    changes = cog_rethinker.EMBEDDED | cog_rethinker.SMOKE | {"warm_steps": 0}
    settings = dataclasses.replace(cog_rethinker.Settings(), **changes)
    plan = cog_rethinker.build(settings)
    assert plan.init(jax.random.key(0)) is recipes.bench(settings).model.params


def test_the_warm_stage_teaches_to_correct_and_keeps_the_plain_prompt():
    problems = [chain.from_parts([3, 5, 4], "+*", 11), chain.from_parts([2, 3], "*", 7)]
    pairs = cog_rethinker.taught_pairs(problems)
    assert [said for _, said in pairs] == ["3+5=8,8*4=10#10"] * 2 + ["2*3=6#6"] * 2
    assert [asked for asked, _ in pairs[1::2]] == ["m11 3+5*4=>", "m7 2*3=>"]
    for (asked, right), problem in zip(pairs[::2], problems, strict=True):
        attempt = asked.removeprefix(problem.prompt).removesuffix(";")
        assert asked == f"{problem.prompt}{attempt};" and "#" in attempt and attempt != right


def test_what_a_chain_begins_with_is_read_off_its_prompt():
    """The sub-problem is that of the prompt, whatever the solution says, and other tasks have none there."""
    made = chain.from_parts([10, 7, 4], "-+", 11)
    assert hints.first_operation(made) == "10-7=" == hints.first_operands(made)
    assert hints.first_operation(made._replace(solution="")) == "10-7="
    with pytest.raises(UserError, match="not of none: --data chain"):
        hints.first_operation(staged.problem("cd 7 3 5 26=>", "7*3=21,21+5=26"))
    assert cog_rethinker.in_words(hints.first_operation) is hints.in_parts


def test_what_the_warm_stage_costs_is_a_figure_and_a_gate(monkeypatch):
    """Four of five right before and three of five behind it: 0.2 are lost; without the stage nothing is."""
    assert cog_rethinker.BED.judges == (("direct", "warm/gain", -0.05),) and "warm/gain" in cog_rethinker.METRICS
    settings = dataclasses.replace(cog_rethinker.Settings(), **cog_rethinker.EMBEDDED | cog_rethinker.SMOKE)
    model = recipes.bench(settings).model
    rates = {True: np.array([1.0, 1.0, 1.0, 1.0, 0.0]), False: np.array([1.0, 1.0, 0.0, 1.0, 0.0])}
    monkeypatch.setattr(start_rates, "heldout_rates", lambda found, params, **_: rates[params is model.params])
    monkeypatch.setattr(start_rates, "base_rates", lambda settings, samples: rates[True])
    monkeypatch.setattr(cog_rethinker, "corrected", lambda settings, steps: {})
    close.assert_near(cog_rethinker.warm_gain(settings, 7), -0.2)
    batch = types.SimpleNamespace(
        extras={"plain": hints.PlainAnswers(*[jnp.zeros((4, 2), jnp.int32)] * 3, jnp.zeros((4, 2), bool))}
    )
    for steps, gain in ((7, -0.2), (0, 0.0)):
        figures = cog_rethinker.build(dataclasses.replace(settings, warm_steps=steps)).stages[0].method.figures
        close.assert_near(figures(batch, {})["warm/gain"], gain)
