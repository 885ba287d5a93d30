"""Agents' experiments in worlds of files: two steps with random weights, or one line that says what to do."""

import importlib
import json
import sys
import types

import numpy as np
import pytest

from experiments.agents.parts import desks, tau_bench_telecom, tau_bench_tools
from jaxrl_llm.envs import webshop
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from jaxrl_llm.tools import boxes, endpoints
from tests import close
from tests.models_for_tests import byte_model
from tests.rollout import test_host_telecom
from tests.rollout.test_host_desk import START
from tests.shop_for_tests import first_products, forty_mugs

SIZES = ["--max-turns", "2", "--action-tokens", "4", "--observation-tokens", "8", "--max-new-tokens", "24",
         "--slots", "4", "--eval-problems", "2"]  # fmt: skip
ROWS = ["--data", "{folder}/rows.jsonl", "--verifier", "f1"]
SEARCH = [*ROWS, "--tools", "search={folder}/corpus.jsonl"]
USER = ["--user", "http://localhost:1/v1", "--user-model", "someone"]
EXECUTOR = ["--executor", "http://localhost:1/v1", "--executor-model", "someone"]
CASES = {  # experiment: its arms, and what it is given
    "torl": (["no_tool", "outputs_too"], [*ROWS, "--tools", "calculator"]),
    "research_search": (["rag", "no_mask"], SEARCH),
    "deepresearcher": (["deep", "no_reader"], [*SEARCH, "--closed-book", "2"]),
    "asearcher": (["asearcher", "sync"], [*SEARCH, "--loop", "async"]),
    "igpo": (["igpo"], SEARCH),
    "supo": (
        ["supo", "long", "rule"],
        [*SEARCH, "--context-tokens", "1150", "--summary-tokens", "3", "--max-new-tokens", "2400", "--max-turns", "4"],
    ),
    "agentgym_rl": (["scaling"], ["--data", "webshop:{folder}/shop", "--turns", "1", "2"]),
    "spa_rl": (["spa", "uniform"], ["--data", "webshop:{folder}/shop"]),
    "loop": (["loop", "critic"], ["--data", "appworld:{folder}", "--servers", "http://localhost:1"]),
    "tool_star": (["tool_star"], [*SEARCH[:-1], "calculator,search={folder}/corpus.jsonl"]),
    "ufo": (["ufo", "grpo"], ROWS),
    "curio": (["rlhf", "diff_acc", "info_gain"], ["--data", "{folder}/users.jsonl", *USER]),
    "w4s": (["rlao", "untrained", "sft_best", "repaired"], [*ROWS, *EXECUTOR, "--validation-items", "1"]),
    "mua_rl": (["mua_rl", "static", "cold_start"], ["--data", "retail:{folder}/desk", *USER, "--eval-samples", "4"]),
    "asyncflow": (["async"], [*ROWS, "--eval-samples", "2"]),
}
UNMEASURED = {  # what the embedded world alone can tell, or two held-out questions cannot
    "research_search": {"eval/f1_2", "eval/f1_3", "eval/searches_rise"},
    "deepresearcher": {"eval/f1_1", "eval/f1_2"},
    "agentgym_rl": {"eval/success_near", "eval/success_far", "policy/entropy"},
    "spa_rl": {"eval/credit"},
    "mua_rl": {"eval/fickle"},
    "supo": {"eval/far", "eval/right_summaries"},
    "w4s": {"eval/test@10"},
    "curio": {"eval/belief", "eval/suggested"},
    "ufo": {"eval/success@3", "eval/success@4", "eval/success@5"},
    "asearcher": {"eval/exact_many", "eval/searches_many", "flow/hours"},
}


def module_of(slug):
    family = "systems" if slug == "asyncflow" else "agents"
    return importlib.import_module(f"experiments.{family}.{slug}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, questions with answers, and a corpus."""
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=1400)
    rows = [{"prompt": f"What is {k} + {k}?", "answer": str(2 * k), "level": 1 + k % 3} for k in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [{"contents": f"{k} and {k} make {2 * k}"} for k in range(20)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, texts)))
    users = [{"profile": f"User {k} likes it {'calm' if k % 2 else 'loud'}.", "type": "Yoga" if k % 2 else "Boxing"}
             for k in range(40)]  # fmt: skip
    (folder / "users.jsonl").write_text("\n".join(map(json.dumps, users)))
    write_apps(folder / "data")
    write_desk(folder / "desk")
    rows = [test_host_telecom.record_of("service", name) for name in ("airplane", "sim")]
    test_host_telecom.write(folder / "telecom", rows)
    (folder / "shop").mkdir()
    forty_mugs(folder / "shop")
    return folder


def write_apps(data):
    """AppWorld's files of three tasks to train on, and one scenario of two variants held out."""
    who = {"first_name": "Ann", "last_name": "Lee", "email": "ann@example.com", "phone_number": "1"}
    (data / "datasets").mkdir(parents=True)
    for split, names in (("train", ("a_1", "b_1", "b_2")), ("dev", ("c_1", "c_2"))):
        (data / "datasets" / f"{split}.txt").write_text("\n".join(names))
        for name in names:
            truth = data / "tasks" / name / "ground_truth"
            truth.mkdir(parents=True)
            specs = {"instruction": "Which song?", "supervisor": who, "datetime": "2023-05-18T12:00:00"}
            (data / "tasks" / name / "specs.json").write_text(json.dumps(specs))
            (truth / "metadata.json").write_text(json.dumps({"difficulty": 1}))


def write_desk(desk):
    """tau-bench's files of two users, one of them held out, who want nothing changed."""
    (desk / "data").mkdir(parents=True)
    for name, rows in START.items():
        (desk / "data" / f"{name}.json").write_text(json.dumps(rows))
    (desk / "wiki.md").write_text("Be kind.")
    for split, said in (("train", "How are you?"), ("test", "Who are you?")):
        (desk / f"tasks_{split}.py").write_text(f"TASKS = [Task(instruction={said!r}, actions=[])]")


class AppWorld:
    """AppWorld's interface: every second action ends the task, wrong."""

    def __init__(self, task_id, experiment_name, **settings):
        self.actions = 0

    def execute(self, code):
        self.actions += 1
        return "ran"

    def task_completed(self):
        return self.actions > 1

    def evaluate(self):
        return types.SimpleNamespace(success=False)

    def close(self):
        self.actions = 0


@pytest.fixture(autouse=True)
def plain_packages(monkeypatch):
    """In the place of what the searches, AppWorld and users need; and a desk of one tool, whose prompt is short."""
    few = [(tool, run) for tool, run in tau_bench_tools.RETAIL if tool.name == "calculate"]
    monkeypatch.setitem(desks.DESK_TOOLS, "retail", few)
    few = [(tool, run) for tool, run in tau_bench_telecom.TELECOM if tool.name == "get_details_by_id"]
    monkeypatch.setitem(desks.DESK_TOOLS, "telecom", few)
    monkeypatch.setattr(
        endpoints, "make_chat", lambda *given, **more: lambda heard, draw=0: "Hello" if len(heard) == 2 else "?"
    )
    monkeypatch.setattr(boxes, "bm25", lambda texts: lambda query, count: range(count))
    monkeypatch.setattr(webshop, "bm25_search", first_products)
    monkeypatch.setitem(sys.modules, "appworld", types.SimpleNamespace(AppWorld=AppWorld))


@pytest.mark.slow
@pytest.mark.parametrize("slug", CASES)
def test_two_steps(slug, folder, tmp_path):
    chosen, given = CASES[slug]
    given = [word.format(folder=folder) for word in given]
    arguments = ["--smoke", "--seeds", "1", "--arm", *chosen, "--out", str(tmp_path), "--model", str(folder)]
    sizes = SIZES if slug != "asyncflow" else ["--max-new-tokens", "8", "--eval-problems", "2"]  # it has no episodes
    sizes = dict(zip(sizes[::2], sizes[1::2], strict=True))
    kept = [word for flag, value in sizes.items() if flag not in given for word in (flag, value)]
    found = cli.run(module_of(slug), [*arguments, *kept, *given])
    for name, arm in found.arms.items():
        assert arm.updates == 0 or np.isfinite(arm.metrics["loss/total"]).all(), name
        assert arm.updates == 0 or arm.metrics.get("world/failed_fraction", [0.0]) == [0.0], name
        missing = set(module_of(slug).METRICS) - set(arm.metrics)
        assert missing <= UNMEASURED.get(slug, set()), f"{name} does not measure {missing}"


@pytest.mark.slow
def test_two_desks_train_together_and_are_measured_apart(folder, tmp_path):
    module, kept = module_of("mua_rl"), [*SIZES, "--eval-samples", "4", "--endpoint-requests", "1000"]
    data = f"retail:{folder}/desk,telecom:{folder}/telecom"
    given = ["--model", str(folder), "--data", data, *USER, "--arm", "mua_rl", "static", "--seeds", "1"]
    found = cli.run(module, ["--smoke", *given, *kept, "--out", str(tmp_path)])
    for name, arm in found.arms.items():
        assert np.isfinite(arm.metrics["loss/total"]).all() and arm.metrics["world/failed_fraction"] == [0.0], name
        apart = [arm.metrics[f"eval/pass1_{kind}"][0] for kind in ("retail", "telecom")]
        close.assert_near(arm.metrics["eval/pass1"][0], np.mean(apart))
        assert {"eval/pass4_retail", "eval/pass4_telecom"} <= set(arm.metrics)


@pytest.mark.slow
def test_summaries_are_written_and_train(folder, tmp_path, monkeypatch):
    """In a world that goes on after any answer: two summaries where two are allowed, and three when measured."""
    module = module_of("supo")
    monkeypatch.setattr(module.catalog, "questions", module.catalog.retries)
    monkeypatch.setattr(module.tool_question, "figures", lambda *_: {})
    sizes = ["--context-tokens", "100", "--summary-tokens", "3", "--max-turns", "6", "--action-tokens", "4",
             "--observation-tokens", "32", "--max-new-tokens", "1200", "--eval-problems", "2"]  # fmt: skip
    base = ["--smoke", "--seeds", "1", "--out", str(tmp_path), "--model", str(folder), *ROWS[:1]]
    given = [*base, ROWS[1].format(folder=folder), *ROWS[2:], *sizes]
    found = cli.run(module, [*given, "--arm", "supo", "truncated", "rule", "no_mask"])
    for name, written in {"supo": 3.0, "truncated": 0.0, "rule": 3.0, "no_mask": 3.0}.items():
        metrics = found.arms[name].metrics
        assert metrics["eval/summaries"] == [written], name
        assert metrics["eval/overlong"] == [1.0] and metrics["world/failed_fraction"] == [0.0], name
        assert np.isfinite(metrics["loss/total"]).all() and metrics["eval/context"][0] > 90, name


@pytest.mark.parametrize(
    ("slug", "given", "message"),
    [
        ("torl", "{model}", "without --data: these arms train a decoder of their own in an embedded world"),
        ("torl", "{rows}", "needs a model of text: --model nano is no folder; give --model DIR"),
        ("torl", "{model} --data {folder}/none.jsonl", "none.jsonl"),
        ("torl", "{model} --data {folder}/corpus.jsonl", "prompt"),
        ("torl", "{model} {rows} --tools oven", "'oven' is no tool; choose python"),
        ("igpo", "{model} {rows}", "rows.jsonl needs --tools: any of python, calculator"),
        ("asearcher", "{model} {rows} --tools search=none", "the corpus none cannot be read"),
        (
            "asearcher", "{model} {rows} --tools calculator --max-new-tokens 64",
            "arm asearcher learns from samples of up to 4 updates ago: give --loop async, or --arm with others",
        ),
        (
            "research_search --arm rag", "{model} {rows} --tools calculator",
            "--tools: an arm that retrieves before the answer needs search=CORPUS.jsonl",
        ),
        (
            "torl", "{model} {rows} --observation-tokens 3",
            "--observation-tokens 3: the chat template alone puts 3 tokens around an observation; raise it",
        ),
        ("agentgym_rl", "{model} --data shop:{folder}", "give webshop:FOLDER, alfworld:FOLDER, textworld:FOLDER, "),
        ("agentgym_rl", "{model} --data webshop:{folder}/shop --max-turns 2", "--max-turns 2 is below --turns"),
        ("spa_rl", "{model} --data webshop:none", "--data webshop:none: give webshop:FOLDER"),
        ("loop", "{model} --data appworld:none", "--data appworld:none: give appworld:FOLDER, where FOLDER is"),
        ("mua_rl", "{model} --data retail:{folder}/desk", "needs --user ADDRESS and --user-model NAME"),
        ("mua_rl", "{model} --data airline:{folder}/desk", "reservations.json cannot be read"),
        ("mua_rl", "{model} --data telecom:{folder}/desk", "db.toml cannot be read"),
        ("mua_rl", "{model} --data bank:{folder}/desk", "give retail:FOLDER, airline:FOLDER or telecom:FOLDER, "),
        ("mua_rl", "{model} --data retail:{folder}/desk,retail:{folder}/desk", "a kind of desk stands twice"),
        ("mua_rl", "{model} --data retail:{folder}", "has no wiki.md and no policy.md and no main_policy.md"),
        ("mua_rl", "{model} --data retail:{folder}/desk --eval-samples 2", "--eval-samples 2: pass.4 needs 4"),
        (
            "tool_star --arm no_cold_start", "{model} {rows} --tools calculator",
            "no_cold_start, sft and single_tool are of the embedded world; give --arm accuracy",
        ),
        ("ufo", "{model} {rows} --max-new-tokens 9000", "need .* columns, the model's context"),
        ("supo", "{model} {rows}", "rows.jsonl needs --tools: any of python, calculator"),
        (
            "supo --arm supo", "{model} {rows} --tools calculator --context-tokens 700",
            "the context is too small: tokens=700 of context are less than the 2[0-9]+ of prompt and summary; the lon",
        ),
        (
            "supo --arm supo", "{model} {rows} --tools calculator --context-tokens 9000",
            "prompts and a context of 9000 tokens need [0-9]+ columns, the model's context has 1400; lower it",
        ),
        ("supo --arm rule", "{model} {rows} --tools calculator --last-turn dropped", "a rule reads the observation"),
        ("w4s --arm rlao", "{model} {rows}", "workflows need --executor ADDRESS and --executor-model NAME"),
        ("w4s --arm archive", "{model} {rows}", "arms no_best and archive are of the embedded world;"),
        (
            "w4s --arm rlao", "{model} {rows} --executor x --executor-model y --eval-problems 4",
            "--validation-items 32: [0-9]+ questions are held out, so none is left to test",
        ),
        ("curio --arm rlhf", "{model} --data {folder}/users.jsonl", "needs --user ADDRESS and --user-model NAME"),
        ("curio --arm rlhf", "{rows} {model} --user x --user-model y", "rows.jsonl:1: lacks profile; it has prompt"),
        ("curio --arm exact_ent", "{model} --data {folder}/users.jsonl", "arm exact_ent is of the embedded world"),
        ("openagi", "--data x", "--data x needs --model FOLDER, a model that reads text"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_before_any_work(slug, given, message, folder):
    slug, *arm = slug.split()
    names = {"folder": folder, "rows": f"--data {folder}/rows.jsonl", "model": f"--model {folder}"}
    with pytest.raises(UserError, match=message):
        cli.run(module_of(slug), ["--plan", *arm, *given.format(**names).split()])
