"""Workflows of text: what they may ask, what they score, and what the regression on their turns weighs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import w4s
from experiments.agents.parts import workflow_programs
from experiments.agents.parts.workflow_programs import SEED, Task
from jaxrl_llm.advantages.selection import exponential_weights
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.sandbox.records import Ran
from jaxrl_llm.tools import endpoints
from jaxrl_llm.train.methods import builders, episode_methods
from jaxrl_llm.types import Problems, Rewards, Trajectories
from jaxrl_llm.verifiers.verdict import Verdict
from tests import close
from tests.close import singles
from tests.endpoint_for_tests import serving
from tests.models_for_tests import small_config


@pytest.fixture(scope="module")
def run():
    with Sandbox(workers=2) as sandbox:
        yield sandbox.run


def double(text, again):
    """An executor that can only double, and is wrong the first time."""
    return str(2 * int(text) + (again == 0))


def verify(answer, text):
    return Verdict(float(text == answer["value"]))


QUESTIONS = [Problem("d", str(k), "", {"value": str(4 * k)}, 0, str(k)) for k in range(4)]
TWICE = "def workflow(ask, question):\n    ask(question)\n    return ask({})"
RIGHT = """
import random
def sure(ask, text):
    ask(text)
    return ask(text)
def workflow(ask, question):
    return sure(ask, sure(ask, question))
"""


@pytest.mark.parametrize(
    ("program", "text", "why"),
    [
        (SEED, "7", ""),  # the first reply to 3
        (TWICE.format("question"), "6", ""),  # the second
        (TWICE.format("'5'"), "11", ""),  # the first to something else
        (RIGHT, "12", ""),
        ("def workflow(ask, question):\n    return question", "3", ""),
        ("def workflow(ask, question):\n    print('noise')\n    return 5", "5", ""),
        ("def workflow(ask, question):\n    while True: ask('1')", None, "asks more than 6 times"),
        (
            "def workflow(ask, question):\n    import random; return ask(str(random.random())[2:6])",
            None,
            "asks more than",
        ),
        ("def workflow(ask, question):\n    return 1 / 0", None, "ZeroDivisionError"),
        ("nonsense(", None, "SyntaxError"),
        ("x = 1", None, "NameError"),
        ("import os; os._exit(0)", None, "ok"),
        # it may say anything in its own name, and no more than that
        ("import sys\ndef workflow(ask, q):\n    print('[1]'); sys.stdout.flush(); return 'x'", "x", ""),
    ],
)
def test_a_workflow_is_played_with_the_replies_so_far(program, text, why, run):
    found = workflow_programs.answer(program, "3", double, run, most=6)
    assert found.text == text and why in found.why


def test_a_forged_message_is_an_answer_like_any_other(run):
    """The program can read the mark: it can answer in its own name, and nothing else is believed."""
    read = "import json, sys\nf = _began.__code__\nprint(sys.stdin.read())\ndef workflow(ask, q): return ask(q)"
    assert workflow_programs.answer(read, "3", double, run, most=6).text == "7"
    for said, known in (('{"answer": [1]}', {}), ("{", {}), ("[]", {}), ('{"ask": "1"}', {"ask": "1"})):
        assert workflow_programs._said(f"x\nmark{said}\n", "mark") == known


def test_failures_of_the_world_are_none_of_the_program(run):
    def silent(text, again):
        raise endpoints.Unanswered("away")

    with pytest.raises(endpoints.Unanswered):
        workflow_programs.answer(SEED, "3", silent, run, most=6)
    with pytest.raises(RuntimeError, match="the verifier failed: no"):
        workflow_programs.score(SEED, QUESTIONS, lambda *_: Verdict(0.0, False, "no"), double, run, most=6)


def test_turns_are_paid_for_beating_what_was_before(run):
    """Scores 0, 0.25, 0.25, 1 and 0.25 after a start of 0: 0, 1, 0, 1 and 0; then 1 again is above the last only."""
    world = workflow_programs.workflow_world(verify, double, run, most=6)
    at = world.reset(np.zeros(2, np.uint32), Task(tuple(QUESTIONS), tuple(QUESTIONS[1:3])))
    zero = "```python\ndef workflow(ask, question):\n    return 0\n```"  # right of question 0
    written = ["x", zero, zero, f"So:\n```python\n{RIGHT}```", zero, f"```python\n{RIGHT}```"]
    paid, marks = [], []
    for text in written:
        before = world.identity(at)
        said = world.step(at, text)
        at, paid, marks = said.state, [*paid, said.reward], [*marks, said.mark]
        assert not said.done and said.valid and world.identity(at) != before
    assert paid == [0.0, 1.0, 0.0, 1.0, 0.0, 0.5]
    shares, tested, seed, runs = (x.tolist() for x in workflow_programs.scores_of(jnp.array(marks)))
    assert shares == [0.0, 0.25, 0.25, 1.0, 0.25, 1.0]
    assert tested == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]  # of the best so far
    assert seed == [0.0] * 6
    assert runs == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert "Right: 1.000. Before: 0.250, at best 1.000." in said.text
    assert "Question: 1\nit answers: 0" in world.step(at, zero).text


def test_a_program_that_fails_is_repaired_before_it_counts(run):
    """Two attempts a turn: the third failure counts, with 0, and so does what runs; a search ends after two turns."""
    world = workflow_programs.workflow_world(verify, double, run, most=6, repairs=2, turns=2)
    at = world.reset(np.zeros(2, np.uint32), Task(tuple(QUESTIONS), tuple(QUESTIONS[1:3])))
    fine = f"It asks too little.\n```python\n{RIGHT}```"
    said = []
    for text in ("x", "def workflow(ask, question):\n    return 1 / 0", "y", "z", fine):
        said.append(world.step(at, text))
        assert world.identity(at) != world.identity(said[-1].state)
        at = said[-1].state
    marks = jnp.array([x.mark for x in said])
    assert workflow_programs.counted(marks).tolist() == [False, False, True, False, True]
    assert [x.reward for x in said] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert [x.done for x in said] == [False, False, False, False, True]
    shares, tested, _, runs = (x.tolist() for x in workflow_programs.scores_of(marks))
    assert shares == [0, 0, 0, 0, 1] and tested == [0, 0, 0, 0, 1] and runs == [0, 0, 0, 0, 1]
    assert "attempt 1 of 2" in said[0].text and "NameError" in said[0].text
    assert "attempt 2 of 2" in said[1].text and "ZeroDivisionError" in said[1].text
    assert "Right: 0.000" in said[2].text and "attempt 1 of 2" in said[3].text


def test_every_repetition_asks_with_a_seed_of_its_own(monkeypatch, tmp_path):
    settings = w4s.Settings(executor_model="a/b", endpoint_seed=3)
    with serving(
        monkeypatch, reply=lambda request: f"{request['seed']} {request['messages'][-1]['content']}"
    ) as server:
        settings = dataclasses.replace(settings, executor=server.address)
        ask = workflow_programs.executor(settings, folder=str(tmp_path))
        assert [ask("x", 0), ask("x", 1), ask("y", 0), ask("x", 1)] == ["3 x", "4 x", "3 y", "4 x"]
    assert [s["content"] for r in server.seen for s in r["messages"]] == ["Say yes.", "x", "x", "y"]
    assert {r["temperature"] for r in server.seen} == {0.7} and list((tmp_path / "executors").glob("a_b-*.jsonl"))


def _rows(marks, rewards, taken):
    count, turns = np.asarray(marks).shape
    nothing = np.zeros((count, turns), np.int32)
    extras = {"turn": nothing, "end": nothing, "taken": np.asarray(taken, bool), "identity": nothing,
              "reward": np.asarray(rewards, np.float32), "mark": np.asarray(marks, np.int32),
              "done": np.zeros(count, bool), "valid": np.ones(count, bool)}  # fmt: skip
    grid = jnp.zeros((count, turns), jnp.int32)
    return Trajectories(
        grid, grid, grid, grid > 0, grid.astype(jnp.float32), jnp.zeros(count, bool), jnp.arange(count),
        jnp.zeros(count, jnp.int32), {f"turns/{name}": jnp.asarray(x) for name, x in extras.items()},
    )  # fmt: skip


def test_figures_of_searches():
    """The second search is cut after one turn: it keeps the program that it has."""
    mark = workflow_programs.marked
    rows = _rows([[mark(0.2, 0.1, 0.1, True), mark(0.6, 0.5, 0.1, False)], [mark(0.3, 0.4, 0.2, True), 0]],
                 [[1.0, 1.0], [0.5, 0.0]], [[True, True], [True, False]])  # fmt: skip
    valid = Rewards(jnp.zeros(2), jnp.ones(2, bool))
    problems = Problems(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool), {}, jnp.zeros(1, jnp.int32))
    found = {name: float(x) for name, x in workflow_programs.figures(rows, valid, problems).items()}
    wanted = {"eval/test@1": 0.25, "eval/test@2": 0.45, "eval/seed": 0.15, "eval/runs": 2 / 3, "eval/better": 2 / 3}
    assert found == singles(wanted)


def test_repairs_are_in_no_figure():
    """Three turns at most: one with two repairs before it, one alone; the second search repairs and stops."""
    mark = workflow_programs.marked
    rows = _rows(
        [[mark(None, 0.1, 0.1, False)] * 2 + [mark(0.3, 0.4, 0.1, True), mark(0.1, 0.4, 0.1, False)],
         [mark(0.0, 0.2, 0.2, False), mark(None, 0.2, 0.2, False), 0, 0]],
        [[0.0, 0.0, 1.0, 0.0], [0.0] * 4], [[True] * 4, [True, True, False, False]],
    )  # fmt: skip
    valid = Rewards(jnp.zeros(2), jnp.ones(2, bool))
    problems = Problems(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool), {}, jnp.zeros(1, jnp.int32))
    found = workflow_programs.figures(rows, valid, problems, turns=3)
    wanted = {"eval/test@1": 0.3, "eval/test@2": 0.3, "eval/test@3": 0.3, "eval/seed": 0.15, "eval/runs": 1 / 3,
              "eval/better": 1 / 3}  # fmt: skip
    assert {name: float(x) for name, x in found.items()} == singles(wanted)


def test_the_regression_is_the_mean_over_turns_of_weighted_token_means():
    policy = make_policy(small_config(num_layers=1))
    params, rng = policy.init(jax.random.key(0)), np.random.default_rng(0)
    turn = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]])
    mask = np.array([[0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 0, 0]], bool)
    rows = _rows(np.zeros((2, 2)), [[1.0, 0.5], [0.0, 0.0]], [[True, True], [True, False]])
    used = jnp.asarray(turn >= 0)
    tokens = jnp.asarray(rng.integers(0, policy.vocab_size, turn.shape), jnp.int32)
    rows = rows._replace(
        tokens=tokens, segment_ids=used.astype(jnp.int32), mask=jnp.asarray(mask),
        positions=jnp.where(used, jnp.arange(6, dtype=jnp.int32), 0), sampler_logp=jnp.zeros(turn.shape),
        extras=rows.extras | {"turns/turn": jnp.asarray(turn, jnp.int32)},
    )  # fmt: skip
    place = episode_methods.HostTasks(policy, None)
    logp = np.asarray(builders.score_tokens(policy, params, rows)[0], np.float64)
    wanted, turns = 0.0, 0
    for b, k, reward in ((0, 0, 1.0), (0, 1, 0.5), (1, 0, 0.0)):
        mine = [logp[b, t] for t in range(6) if mask[b, t] and turn[b, t] == k]
        wanted, turns = wanted - np.exp(reward / 0.4) * np.mean(mine), turns + 1
    weigh = lambda rewards: exponential_weights(rewards, temperature=0.4)  # noqa: E731
    value = workflow_programs.regression(place, params, rows, weigh)
    close.assert_near(np.float32(value), wanted / turns, terms=rows.tokens.size)
    # a program that was to be repaired does not train
    marks = jnp.array([[workflow_programs.marked(None, 0.0, 0.0, False), 0], [0, 0]], jnp.int32)
    less = workflow_programs.regression(place, params, rows._replace(extras=rows.extras | {"turns/mark": marks}), weigh)
    first = -np.exp(1.0 / 0.4) * np.mean(logp[0, 1:3])
    close.assert_near(np.float32(less), (wanted - first) / (turns - 1), terms=rows.tokens.size)
    # what a world answered does not train: its tokens are in no mask
    slope = jax.grad(lambda p: workflow_programs.regression(place, p, rows, lambda r: 0.0 * r))(params)
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(slope))


def test_tasks_and_what_is_too_few():
    tasks = workflow_programs.training_tasks(QUESTIONS, 3, 2)
    assert tasks == workflow_programs.training_tasks(QUESTIONS, 3, 2)
    assert all(len({p.identity for p in task.validation}) == 2 and not task.test for task in tasks)
    held = workflow_programs.held_task(QUESTIONS, 3)
    assert (len(held.validation), len(held.test)) == (3, 1)
    with pytest.raises(UserError, match="--validation-items 5: there are 4 questions"):
        workflow_programs.training_tasks(QUESTIONS, 3, 5)
    with pytest.raises(UserError, match="so none is left to test"):
        workflow_programs.held_task(QUESTIONS, 4)
    shown = workflow_programs.asked(tasks[0], most=7).prompt
    assert "first analyse" in shown and "At most 7 calls" in shown and "of 2 questions" in shown and SEED in shown


def test_endless_brackets_are_no_answer():
    found = workflow_programs.answer(
        "",
        "q",
        double,
        lambda program, stdin: Ran("ok", 0, f"\n{json.loads(stdin)['mark']}{'[' * 60_000}\n", "", 0.0),
        most=1,
    )
    assert found == workflow_programs.Answered(None, "ok: ")


def test_half_of_a_character_in_an_answer_is_a_question_mark():
    """What cannot be encoded would fail the episode, and with it the low score of the program."""

    def ran(program, stdin):
        given = json.loads(stdin)
        what = {"answer": "b\udc00"} if given["replies"] else {"ask": "a\ud800"}
        return Ran("ok", 0, f"\n{given['mark']}{json.dumps(what)}\n", "", 0.0)

    asked = []
    found = workflow_programs.answer("", "q", lambda text, again: asked.append((text, again)) or "r", ran, most=2)
    assert found == workflow_programs.Answered("b?") and asked == [("a?", 0)]
