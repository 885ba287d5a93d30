"""NuRL: hints where a whole group fails, one member without, gradients under the hinted prompt."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curriculum import nurl
from experiments.curriculum.parts import hints, plateau, written_hints
from experiments.parts import start_rates
from jaxrl_llm.advantages import group
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.run import parts
from jaxrl_llm.train import online
from jaxrl_llm.train import plan as plans
from jaxrl_llm.types import Rewards, Trajectories
from jaxrl_llm.verifiers import countdown
from tests import close
from tests.endpoint_for_tests import serving
from tests.experiment import made
from tests.models_for_tests import byte_model
from tests.papers import staged


def test_worked_group_one_unhinted_and_three_hinted():
    slots, asked = staged.scripted([[[0, 0, 0, 0]], [[1, 1, 1, 0]]], group_size=4, unhinted=1)
    rows = staged.run(slots, 1, 4)
    rewards = slots["score"](None, rows).value
    assert rewards.tolist() == [0.0, 1.0, 1.0, 0.0]
    advantages = group.group_normalized_advantages(rewards, rows.group_ids, ddof=0, eps=0.0)
    close.assert_near(advantages, [-1.0, 1.0, 1.0, -1.0])
    assert hints.stage_of(rows).tolist() == [0, 1, 1, 1]
    assert hints.draws_of(rows).tolist() == [2] * 4


def test_a_success_in_the_first_pass_leaves_the_group_alone():
    slots, _ = staged.scripted([[[0, 1, 0]], [[1, 1, 1]]], group_size=3, unhinted=1)
    rows = staged.run(slots, 1, 3)
    assert slots["score"](None, rows).value.tolist() == [0.0, 1.0, 0.0]
    assert not hints.stage_of(rows).any() and hints.draws_of(rows).tolist() == [1, 1, 1]


def test_groups_agree_with_the_rule_written_out():
    rng = np.random.default_rng(0)
    outcomes = (rng.random((2, 9, 4)) < 0.3).astype(int)
    rules = (
        (hints.all_wrong, lambda first: not first.any()),
        (hints.everyone, lambda first: True),
        (hints.nobody, lambda first: False),
    )
    for needs, again in rules:
        slots, _ = staged.scripted(outcomes, group_size=4, unhinted=1, needs=needs)
        rows = staged.run(slots, 9, 4)
        expected = []
        for first, second in zip(*outcomes, strict=True):
            expected += [first[0], *(second[1:] if again(first) else first[1:])]
        assert slots["score"](None, rows).value.tolist() == [float(x) for x in expected]


def test_the_hint_is_read_by_the_verifier_and_never_trained():
    slots, asked = staged.scripted([[[0, 0]], [[0, 0]], [[1, 0]]], group_size=2)
    rows = staged.run(slots, 1, 2)
    assert hints.stage_of(rows).tolist() == [2, 2]
    read = hints.with_hint(rows, asked).mask
    assert (read.sum(1) - rows.mask.sum(1)).tolist() == [2, 2]  # the two tokens of the hint of stage 2
    assert not rows.mask[:, : staged.WIDTH].any()
    with pytest.raises(ValueError, match="unhinted=2"):
        staged.scripted([[[0, 0]]], group_size=2, unhinted=2)


def test_hints_of_a_real_model_end_the_prompt_and_an_empty_one_is_the_plain_prompt():
    model = recipes.bench(
        recipes.OnlineSettings(data="countdown", train_problems=4, eval_problems=4, max_new_tokens=8)
    ).model
    problems = [staged.problem("cd 7 3 5 26=>", "7*3=21,21+5=26"), staged.problem("cd 2 2 4=>", "2+2=4")]
    asked = hints.encode_hints(model, problems, (hints.no_hint, hints.first_operands, hints.no_hint))
    assert asked.length.tolist() == [[0, 0], [4, 4], [0, 0]]
    np.testing.assert_array_equal(asked.tokens[0], asked.tokens[2])
    assert not asked.valid[:, :, 0].any()  # column 0 is free for the stage
    shown = model.tokenizer.decode([int(t) for t in asked.tokens[1, 0][asked.valid[1, 0]]])
    assert shown.endswith("26=>7*3=")
    with pytest.raises(ValueError, match="no_hint"):
        hints.encode_hints(model, problems, (hints.first_step,))


def test_hint_kinds_and_leaks():
    long, short = staged.problem("p", "7*3=21,21+5=26"), staged.problem("p", "2+2=4")
    assert [f(long) for f in (hints.no_hint, hints.first_operands, hints.first_step)] == ["", "7*3=", "7*3=21,"]
    assert hints.first_step(short) == ""
    assert [hints.leaks(f(long), long) for f in (hints.first_operands, hints.first_step, hints.whole_solution)] == [
        False, False, True,
    ]  # fmt: skip


def test_a_hint_that_names_the_answer_is_none():
    assert written_hints.gives_away("The sum is Forty-Two.", "forty-two")
    assert not written_hints.gives_away("Carry the one.", "") and not written_hints.gives_away("x = 420", "42")


def test_hints_are_asked_for_with_the_answer_and_then_from_the_explanation_alone(monkeypatch):
    model = recipes.bench(recipes.OnlineSettings(train_problems=4, eval_problems=4, max_new_tokens=8)).model
    problems = [staged.problem("What is 20 + 22?", "20 + 22 = 42"), staged.problem("What is 1 + 2?", "3")]
    problems = [p._replace(answer={"value": a}) for p, a in zip(problems, ("42", "3"), strict=True)]
    seen, said = [], [["Tens first:  40, ones\n2.", "Count."], ["Add tens and ones apart.", "It is 3."]]

    def replies(model, asked, **numbers):
        seen.append(([p.prompt for p in asked], numbers["salt"]))
        return said[len(seen) - 1] if len(seen) < 3 else ["It is 3!"] if len(seen) == 3 else ["Go on by one."]

    monkeypatch.setattr(written_hints, "replies", replies)

    def write(tries):
        seen.clear()
        ask = written_hints.asks_model(model, chat=False)
        return written_hints.write(
            ask, model.tokenizer, problems, explanation_tokens=200, most_tokens=40, tries=tries
        )  # fmt: skip

    assert write(2) == ["Add tens and ones apart.", ""], "a hint that names the answer is left out"
    asked = [requests for requests, _ in seen]
    assert "right answer is 42" in asked[0][0] and "right answer" not in asked[1][0]
    assert "Tens first: 40, ones 2." in asked[1][0], "the explanation on one line"
    assert write(4) == ["Add tens and ones apart.", "Go on by one."]
    assert [len(requests) for requests, _ in seen] == [2, 2, 1, 1], "only what named the answer is asked for again"
    assert seen[1][0][1] == seen[2][0][0] == seen[3][0][0] and len({salt for _, salt in seen}) == 4
    with pytest.raises(ValueError, match="tries=0"):
        write(0)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # replies are kept below the working folder
    byte_model(tmp_path, "qwen2", max_positions=400)
    rows = [{"question": f"What is {k} + 1 ?", "answer": f"{k} + 1 = {k + 1}.\n#### {k + 1}"} for k in range(100, 140)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = {"levels": (), "data": str(tmp_path / "rows.jsonl"), "format": "gsm8k", "model": str(tmp_path)}
    return dataclasses.replace(nurl.Settings(), **nurl.SMOKE | small)


def _teacher(request):
    """Explains all; abstracts after the first draw, and refuses where the answer is a multiple of ten."""
    text = request["messages"][0]["content"]
    if "The right answer is" in text:
        return f"One more than before, that is {text.partition('answer is ')[2].partition('.')[0]}."
    answer = text.partition("that is ")[2].partition(".")[0]
    return f"It is {answer}." if request["seed"] < 2 or answer.endswith("0") else "Count on\nby one."


def test_a_model_behind_an_address_writes_the_hints(own, monkeypatch):
    pytest.importorskip("openai")
    with serving(monkeypatch, reply=_teacher) as server:
        settings = dataclasses.replace(own, writer=server.address, writer_model="someone")
        hint = nurl.in_words(settings)
        problems = recipes.solved_problems(settings)
        for problem in problems:
            never = str(written_hints._answer(problem)).endswith("0")
            assert hint(problem) == ("" if never else "Count on by one.")
        count = len(server.seen)
        assert nurl.in_words(settings).args[0] is hint.args[0] and len(server.seen) == count, "written once"
        draws = [r["seed"] for r in server.seen if "State in one sentence" in r["messages"][0]["content"]]
        assert draws.count(1) == len(problems) == draws.count(2) and 0 < draws.count(3) < len(problems)
        assert set(draws) == {1, 2, 3, 4}
        with pytest.raises(UserError, match="needs --writer-model NAME"):
            nurl.in_words(dataclasses.replace(settings, writer_model=""))
    with pytest.raises(UserError, match="--writer-model someone is a name behind an address"):
        nurl.in_words(dataclasses.replace(own, writer_model="someone"))


def test_a_model_writes_hints_and_prompts_beyond_its_context_get_none():
    model = recipes.bench(recipes.OnlineSettings(train_problems=4, eval_problems=4, max_new_tokens=8)).model
    problems = [staged.problem("1+2", "3"), staged.problem("1+2" * model.config.max_positions, "3")]
    said = written_hints.replies(model, problems, chat=False, max_new_tokens=4, temperature=1.0, salt=1, at_once=2)
    assert len(said) == 2 and said[0] and said[1] == ""


def test_failed_groups_are_drawn_again_plain_until_the_switch_and_hinted_behind_it():
    outcomes = [[[0, 0, 0], [0, 1, 0]], [[0, 1, 0], [1, 1, 1]], [[1, 1, 1], [1, 1, 1]]]
    options = {"group_size": 3, "unhinted": 1, "make": hints.make_switched_rollout}
    slots, asked = staged.scripted(outcomes, **options, lengths=(0, 1, 2))
    for hinted, rewards, stages in (
        (False, [0, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0]),
        (True, [0, 1, 1, 0, 1, 0], [0, 2, 2, 0, 0, 0]),
    ):
        rows = jax.jit(lambda flag: staged.run(slots, 2, 3, (None, flag)))(jnp.asarray(hinted))
        assert slots["score"](None, rows).value.tolist() == rewards
        assert hints.stage_of(rows).tolist() == stages
        assert hints.switched_extras({}, rows, slots["score"](None, rows))["draws"].tolist() == [2, 2, 2, 1, 1, 1]
        added = hints.with_hint(rows, asked).mask.sum(1) - rows.mask.sum(1)
        assert added.tolist() == stages, "the verifier reads the hint of the stage the row was drawn at"
    with pytest.raises(ValueError, match="2 stages"):
        staged.scripted(outcomes[:2], **options)


@pytest.mark.slow
def test_hints_begin_where_the_validation_reward_is_flat_and_validation_never_trains():
    settings = dataclasses.replace(
        nurl.Settings(), **nurl.EMBEDDED | nurl.SMOKE | {"validation": 2, "window": 2, "steps": 3},
    )  # fmt: skip
    plan = nurl.build(settings)
    (stage,) = plan.stages
    state = jax.tree.map(jnp.copy, plans.start(stage, plan.init(jax.random.key(0)), jax.random.key(1)))
    held = plateau.held_rows(16, settings.validation_rows)
    step, seen = jax.jit(lambda s: (online.begin(stage.method, s).trajectories, online.iterate(stage.method, s)[0])), []
    for _ in range(2 * settings.steps):
        hinted = bool(nurl.hinted_after(state)[1])
        rows, state = step(state)
        seen.append(hinted)
        latest = int(hints.stage_of(rows).max())
        assert latest in ((0, 2) if hinted else (0, 1))
        rewards = stage.method.score(online.answers_of(stage.method, rows), rows)
        mask = stage.method.estimate(state.params, state.extras, rows, rewards).mask
        outside = held[np.asarray(rows.problem_ids)]
        assert outside.sum() == 2 * settings.group_size and not np.asarray(mask)[outside].any()
    assert seen[:4] == [False] * 4 and seen[-1], "windows of two: the second that does not rise brings the hints"


@pytest.mark.slow
def test_a_compiled_staged_rollout_keeps_shapes_and_draws_new_responses():
    settings = recipes.OnlineSettings(data="countdown", train_problems=4, eval_problems=4, max_new_tokens=8)
    found = recipes.bench(settings)
    rollout = recipes.rollout_of_model(found.model, group_size=3, max_new_tokens=8, temperature=1.0)
    problems = [staged.problem("cd 7 3 5 26=>", "7*3=21,21+5=26")] * 4
    asked = hints.encode_hints(found.model, problems, (hints.no_hint, hints.no_hint))
    never = {"numbers": jnp.zeros((4, 4), jnp.int32), "target": jnp.full((4,), -1, jnp.int32)}
    slots = hints.make_staged_rollout(rollout, found.score, never, asked, group_size=3, unhinted=1)
    keys, ids = jax.random.split(jax.random.key(0), 12), jnp.arange(4, dtype=jnp.int32)
    rows = jax.jit(slots["rollout"])(found.model.params, None, None, keys, ids)
    plain = rollout(found.model.params, asked.tokens[0], asked.valid[0], keys, ids)
    same = jnp.all(rows.tokens[:, 1:] == plain.tokens[:, 1:], axis=1).reshape(4, 3)
    assert same[:, 0].all() and not same[:, 1:].all()
    assert hints.stage_of(rows).reshape(4, 3).tolist() == [[0, 1, 1]] * 4


OWN = recipes.OnlineSettings(data="countdown", levels=(2, 3, 4), train_problems=12, eval_problems=4, max_new_tokens=28)


def test_a_right_response_of_the_model_is_its_explanation():
    """Every text is right for its own problem, whatever is drawn together; it is the first right one of the samples."""
    found, problems = recipes.bench(OWN), recipes.solved_problems(OWN)
    own = written_hints.right_responses(found, samples=4, max_new_tokens=28)
    assert own == written_hints.right_responses(found, samples=4, max_new_tokens=28, at_once=20), "five and seven"
    assert len(own) == 12 and 0 < sum(map(bool, own)) < 12
    rollout = jax.jit(recipes.rollout_of_model(found.model, group_size=4, max_new_tokens=28, temperature=1.0))
    rows = recipes.sample_all(rollout, found.model.params, found.train, jax.random.key(33), 4)
    texts = parts.responses(found.model.tokenizer, rows)
    for k, (problem, text) in enumerate(zip(problems, own, strict=True)):
        right = [t for t in texts[4 * k : 4 * k + 4] if countdown.verify(problem.answer, t).value == 1.0]
        assert text == (right[0] if right else "")
    with pytest.raises(ValueError, match="samples=0"):
        written_hints.right_responses(found, samples=0, max_new_tokens=28)


def test_the_cue_of_an_own_response_has_no_result_and_is_none_without_one(monkeypatch):
    hint = written_hints.cue_of(OWN, 4)
    own = written_hints.right_responses(recipes.bench(OWN), samples=4, max_new_tokens=28)
    for problem, text in zip(recipes.solved_problems(OWN), own, strict=True):
        cue = hint(problem)
        assert (cue == "") == (text == "") and text.startswith(cue)
        assert not text or (cue.endswith("=") and cue.count("=") == 1)
    assert hint(staged.problem("unknown", "1+1=2")) == "", "a problem that was never drawn has none"
    assert written_hints.cue_of(OWN, 4).args[0] is hint.args[0], "drawn once"
    monkeypatch.setattr(written_hints, "right_responses", lambda *_, **__: ["it is 26"] * 12)
    assert set(written_hints.cue_of(OWN, 5).args[0].values()) == {""}, "no operands: it would give the answer away"


def test_the_reference_cue_needs_steps():
    """Of an answer-only row the text up to the first '=' is the answer itself."""
    settings = nurl.Settings(data="rows.jsonl", **nurl.ARMS["reference"])
    with pytest.raises(UserError, match="--data rows.jsonl: the arm reference takes its cue from the first step"):
        nurl.build(settings)


def test_what_the_base_never_solves_is_measured_apart(monkeypatch):
    """Of four problems without a right response of the base one is solved by either of two samples."""
    settings = nurl.Settings(**nurl.EMBEDDED | nurl.SMOKE)
    asked = []

    def base_rates(settings, samples):
        asked.append(samples)
        return np.array([0.0, 0.0, 0.0, 0.0, 0.125, 1.0, 0.5, 0.25])

    monkeypatch.setattr(start_rates, "base_rates", base_rates)
    right = jnp.array([[0, 1], [0, 0], [0, 0], [0, 0], [1, 1], [1, 1], [0, 0], [1, 0]], jnp.float32).ravel()
    grid, ids = jnp.zeros((16, 3), jnp.int32), jnp.arange(16, dtype=jnp.int32) // 2
    masks = jnp.ones((16, 3), bool), jnp.zeros((16, 3), jnp.float32), jnp.zeros(16, bool)
    rows = Trajectories(grid, grid, grid, *masks, ids, ids)
    figures = nurl.of_the_unsolved(recipes.bench_identity(settings), settings.hint_samples)
    found = figures(recipes.bench(settings), None, rows, Rewards(right, jnp.ones(16, bool)))
    assert float(found["unsolved/pass@2"]) == 0.25 and float(found["unsolved/share"]) == 0.5 and asked == [8]
    assert float(found["eval/pass@2"]) == 0.5, "beside the figures of all problems"
    plans = [nurl.build(dataclasses.replace(settings, **nurl.ARMS[name])) for name in ("grpo", "reference")]
    assert plans[0].measure is plans[1].measure is recipes.make_measure(settings, figures=figures)


def test_the_claim_asks_for_what_was_unsolved():
    metrics = {name: [0.3, 0.31] for name in nurl.METRICS}
    arms = {name: dataclasses.replace(made.arm([0.0, 0.0]), metrics=metrics) for name in nurl.ARMS}
    parts = nurl.claim(Results(arms)).secondary
    assert [(part.metric, part.arm, part.than) for part in parts[:1]] == [("unsolved/pass@16", "nurl", "grpo")]
