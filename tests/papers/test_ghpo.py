"""GHPO: longer prefixes of the solution, stage after stage, until one response is right."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curriculum import ghpo
from experiments.curriculum.parts import hints
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula
from jaxrl_llm.run import bench
from jaxrl_llm.types import Trajectories
from tests.models_for_tests import byte_model
from tests.papers import staged


def test_worked_prefixes():
    problem = staged.problem("p", "0123456789")
    assert [len(hints.make_prefix_hint(w)(problem)) for w in (0.25, 0.5, 0.75)] == [2, 5, 8]
    assert hints.make_prefix_hint(0.5)(staged.problem("p", "7*3=21,21+5=26")) == "7*3=21,"
    with pytest.raises(ValueError, match="share=1.5"):
        hints.make_prefix_hint(1.5)


def test_escalation_stops_with_the_first_right_response():
    outcomes = [[[0, 0, 0, 0]], [[0, 0, 1, 0]], [[1, 1, 1, 1]], [[1, 1, 1, 1]]]
    slots, _ = staged.scripted(outcomes, group_size=4)
    rows = staged.run(slots, 1, 4)
    assert slots["score"](None, rows).value.tolist() == [0.0, 0.0, 1.0, 0.0]  # the group at 0.25, not at 0.5
    assert hints.draws_of(rows).tolist() == [2] * 4


def test_solvable_prompts_stay_and_hopeless_ones_keep_the_last_group():
    outcomes = np.zeros((4, 2, 2), int)
    outcomes[0, 0] = [1, 0]
    slots, _ = staged.scripted(outcomes, group_size=2)
    rows = staged.run(slots, 2, 2)
    assert hints.stage_of(rows).tolist() == [0, 0, 3, 3]
    assert slots["score"](None, rows).value.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_agrees_with_a_loop():
    rng = np.random.default_rng(3)
    outcomes = (rng.random((4, 12, 3)) < 0.2).astype(int)
    slots, _ = staged.scripted(outcomes, group_size=3)
    rows = staged.run(slots, 12, 3)
    rewards, stages = [], []
    for problem in range(12):
        stage = 0
        while stage < 3 and not outcomes[stage, problem].any():
            stage += 1
        rewards += outcomes[stage, problem].tolist()
        stages += [stage] * 3
    assert slots["score"](None, rows).value.tolist() == [float(r) for r in rewards]
    assert hints.stage_of(rows).tolist() == stages


@pytest.fixture(scope="module")
def chat_bench(tmp_path_factory):
    """A bench of rows of one's own whose prompts are chat messages, judged on the host."""
    folder = byte_model(tmp_path_factory.mktemp("own"), max_positions=400)
    lines = [{"question": f"What is {k} + 1?", "answer": f"{k} and one is {k + 1}.\n#### {k + 1}"} for k in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = ghpo.Settings(
        model=str(folder), data=str(folder / "rows.jsonl"), format="gsm8k", chat=True, max_new_tokens=8,
        train_problems=64, eval_problems=8, prompts_per_step=2, group_size=2,
    )  # fmt: skip
    return settings, bench.bench(settings)


def test_training_prompts_are_chat_prompts_where_evaluation_prompts_are(chat_bench):
    settings, found = chat_bench
    problems = bench.solved_problems(settings)
    stages = (hints.no_hint, hints.make_prefix_hint(0.5))
    asked = hints.encode_hints(found.model, problems, stages, chat=True, phrase=" Begin: ")

    def ids(tokens, valid):
        return np.asarray(tokens)[np.asarray(valid)].tolist()

    plain = ids(asked.tokens[0, 3], asked.valid[0, 3])
    assert plain == ids(found.train.tokens[3], found.train.valid[3]), "stage 0 is the prompt of the bench"
    user, assistant = 4, 5  # <|user|> and <|assistant|> of the byte tokenizer
    assert plain[:2] == [1, user] and plain[-1] == assistant
    hinted = ids(asked.tokens[1, 3], asked.valid[1, 3])
    assert hinted[:2] == [1, user] and hinted[-1] == assistant, "the hint stands inside the user's message"
    shown = found.model.tokenizer.decode(hinted)
    hint = stages[1](problems[3])
    assert f" Begin: {hint}" in shown and len(hint) > 5
    assert asked.length.tolist() == [[0] * len(problems)] * 2, "the response does not go on from it"


def test_hints_in_messages_and_a_context_that_is_too_small(chat_bench):
    _, found = chat_bench
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    problem = staged.problem(said, "2")
    asked = hints.encode_hints(found.model, [problem], (hints.no_hint, hints.whole_solution))
    assert asked.length.tolist() == [[0], [0]]
    assert said[1]["content"] == "1+1?", "the problem itself is left as it was"
    with pytest.raises(UserError, match="no message of a user"):
        hints.with_text(said[:1], "2", chat=True, phrase=" ")
    with pytest.raises(UserError, match="of the model's 400 positions"):
        hints.encode_hints(found.model, [staged.problem("p" * 500, "2")], (hints.no_hint,))


def test_fine_tuning_has_the_rate_of_the_run_in_the_embedded_world_and_its_own_with_another_model(monkeypatch):
    seen, embedded = [], dataclasses.replace(ghpo.Settings(), **ghpo.EMBEDDED | ghpo.SMOKE | ghpo.ARMS["sft_grpo"])
    monkeypatch.setattr(curricula, "solutions_imitated", lambda settings, **numbers: seen.append(numbers))
    scale = {name: getattr(ghpo.Settings(), name) for name in ("learning_rate", "sft_rate")}
    for changes in ({}, {"learning_rate": 1.5e-4}, scale):
        ghpo.build(dataclasses.replace(embedded, **changes)).init(jax.random.key(0))
    assert seen == [{"steps": 60, "learning_rate": rate} for rate in (3e-4, 1.5e-4, 1e-5)]
    assert scale["learning_rate"] == 1e-6


def test_the_judge_on_the_host_reads_the_hint_too(chat_bench):
    """Plain prompts whose answer stands in the hint: the response that goes on from it is right."""
    settings, _ = chat_bench
    settings = dataclasses.replace(settings, chat=False, shares=(1.0,), needs=hints.everyone)
    plan = ghpo.build(settings)
    assert plan.on_host and plan.host_score is None, "the stage's own score judges"
    found = bench.bench(settings)
    problems = bench.solved_problems(settings)
    asked = hints.encode_hints(found.model, problems, (hints.no_hint, hints.make_prefix_hint(1.0)))
    width, ids = asked.tokens.shape[2], jnp.asarray([3], jnp.int32)
    tokens = jnp.pad(asked.tokens[1, 3:4], ((0, 0), (0, 2))).at[:, 0].set(1)
    real = jnp.pad(asked.valid[1, 3:4], ((0, 0), (0, 2)))
    zeros, mask = jnp.zeros(tokens.shape, jnp.int32), jnp.arange(width + 2)[None, :] >= width
    rows = Trajectories(
        tokens, real.astype(jnp.int32), zeros, mask, zeros.astype(jnp.float32), jnp.zeros((1,), bool),
        jnp.zeros((1,), jnp.int32), ids,
    )  # fmt: skip
    method = plan.stages[0].method
    assert problems[3].answer["value"] in problems[3].solution
    assert float(method.score(None, rows).value[0]) == 1.0
    assert float(found.host_score(rows).value[0]) == 0.0, "without the hint nothing was answered"
