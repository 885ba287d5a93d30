"""OpenAGI over tasks and experts of one's own: tables, plans in words, what a plan earns, decoding to the names."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import openagi
from experiments.agents.parts import example_experts, expert_tables, text_plans
from jaxrl_llm.data import sources
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.rollout.keys import sample_keys
from tests import close
from tests.models_for_tests import byte_model

HERE = "experiments.agents.parts.example_experts"
EXPERTS = expert_tables.read_experts(f"{HERE}:experts")
METRICS = expert_tables.read_metrics(f"{HERE}:metrics")


def _tasks(*rows, experts=EXPERTS, most=3):
    whole = [{"input": "die katze", "target": "the cat", "input_kind": "german", "target_kind": "english"} | row
             for row in rows]  # fmt: skip
    return expert_tables.read_tasks([sources.Row(f"f:{k}", row) for k, row in enumerate(whole)], experts, METRICS, most)


# --- what a plan earns


def test_every_worked_plan_of_the_example_earns_all_and_the_blind_ones_do_not():
    rows = [sources.Row(f"row {k}", row) for k, row in enumerate(example_experts.rows())]
    tasks = expert_tables.read_tasks(rows, EXPERTS, METRICS, 4)
    assert len(tasks) == 80 and all(len(task.inputs) == 2 for task in tasks)
    earned = expert_tables.make_earned(tasks, EXPERTS, METRICS, 4)
    assert all(earned(task, task.plan).value == 1.0 for task in tasks)
    blind = expert_tables.blind_plans(tasks[::2], tasks[1::2], EXPERTS, earned, 4)
    best = {}  # by hand: of the plans of a pair of kinds the one that earns most on the same tasks
    for task in tasks[1::2]:
        same = [x for x in tasks[::2] if (x.takes, x.gives) == (task.takes, task.gives)][: expert_tables.BLIND]
        plans = {x.plan for x in same}
        best[task.number] = max(plans, key=lambda plan, same=same: sum(earned(x, plan).value for x in same))
    close.assert_near(blind, np.mean([earned(tasks[k], plan).value for k, plan in best.items()]))
    assert 0.3 < blind < 0.9


def test_a_plan_earns_the_mean_over_its_inputs_or_cannot_be_run():
    calls = []

    def seen(value):
        calls.append(value)
        if value == "bad":
            raise ValueError("not this one")
        return value.upper()

    experts = EXPERTS | {"shout": expert_tables.Expert("german", "english", seen)}
    (task,) = _tasks(
        {"instruction": "Shout.", "input": "a b", "target": "a b"},
        {"instruction": "Shout.", "input": "c", "target": "d"}, experts=experts,
    )  # fmt: skip
    earned = expert_tables.make_earned([task], experts, METRICS, 3)
    assert earned(task, ("shout",)).value == 0.5 and earned(task, ("shout",)).value == 0.5
    assert calls == ["a b", "c"], "outputs are kept"
    for plan, why in {
        (): "0 experts", ("shout",) + ("summarise",) * 3: "4 experts", ("summarise",): "takes english, not german",
        ("shout", "count"): "gives number, wanted is english", ("shout", "translate"): "translate takes german, not",
    }.items():  # fmt: skip
        found = earned(task, plan)
        assert found.value == -1.0 and found.valid and why in found.reason
    assert calls == ["a b", "c"], "a plan whose kinds do not chain is not begun"
    (bad,) = _tasks({"instruction": "Shout.", "input": "bad"}, experts=experts)
    assert "not this one" in expert_tables.make_earned([bad], experts, METRICS, 3)(bad, ("shout",)).reason
    broken = {"shout": experts["shout"]._replace(run=lambda value: value[9])}
    with pytest.raises(UserError, match="--experts: shout fails on 'bad': IndexError"):
        expert_tables.make_earned([bad], broken, METRICS, 3)(bad, ("shout",))
    for metric, said in (
        (lambda one, other: 7.0, "gave 7.0 for 'A B'"),
        (lambda one, other: {}["x"], "metric text fails"),
    ):
        with pytest.raises(UserError, match=said):
            expert_tables.make_earned([task], experts, {"text": metric}, 3)(task, ("shout",))


def test_outputs_of_a_file_stand_for_experts(tmp_path, capsys):
    lines = [
        {"expert": "detect", "takes": "image", "gives": "text", "input": {"file": "1.png"}, "output": "a cat"},
        {"expert": "detect", "takes": "image", "gives": "text", "input": {"file": "2.png"}, "output": "a dog"},
        {"expert": "first", "takes": "text", "gives": "text", "input": "a cat", "output": "cat"},
    ]
    path = tmp_path / "outputs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    experts = expert_tables.read_experts(f"{path},{HERE}:experts")
    assert list(experts) == ["detect", "first", *EXPERTS]
    kinds = {"input_kind": "image", "target_kind": "text", "metric": "class"}
    one, other = _tasks(
        {"instruction": "one", "input": {"file": "1.png"}, "target": "Cat"} | kinds,
        {"instruction": "other", "input": {"file": "2.png"}, "target": "dog"} | kinds, experts=experts,
    )  # fmt: skip
    earned = expert_tables.make_earned([one, other], experts, METRICS, 3)
    assert earned(one, ("detect", "first")).value == 1.0 and earned(one, ("detect",)).value == 0.0
    assert earned(other, ("detect", "first")).value == -1.0
    earned(other, ("detect", "first"))
    assert capsys.readouterr().out.count("lacks an output of first") == 1


def test_text_is_read_as_the_nearest_names():
    for text, plan in {
        "translate\nsummarise\n": ("translate", "summarise"),
        " 1) Translate \n\n - Summarize\n": ("translate", "summarise"),
        "": (), "3\n": (),
        "__import__('os').system('true')": None,
    }.items():  # fmt: skip
        assert expert_tables.named(text, EXPERTS) == plan, text
    assert expert_tables.named("translate\n" * 100_000, EXPERTS) is not None


# --- decoding


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and the tasks of the example in a file."""
    folder = tmp_path_factory.mktemp("experts")
    byte_model(folder, "qwen2", max_positions=600)
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, example_experts.rows())))
    return folder


def _settings(folder, **changes):
    named = {"data": str(folder / "tasks.jsonl"), "experts": f"{HERE}:experts", "metrics": f"{HERE}:metrics"}
    model = {"model": str(folder), "mesh": "", "compute": "float32", "remat": False, "attention": "xla", "lora": 0}
    return types.SimpleNamespace(**vars(text_plans.Settings()) | model | {"learning_rate": 1e-3} | named | changes)


def test_decoding_keeps_to_the_names_and_kinds_of_the_experts(folder):
    """Every worked plan may be written, whatever is drawn is a plan, and beams are the most probable of all plans."""
    opened = text_plans.open_task(_settings(folder))
    task, world = opened.task, opened.task.world
    train, held = task.prompts()
    assert train.shape[0] + held.shape[0] == 80 and held.shape[0] >= 4
    prompts, kept = train[:3], task.kept()
    prompts = prompts[:, int(jnp.min(jnp.sum((prompts < 0).astype(jnp.int32), axis=1))) - 2 :]  # two columns to spare
    params = world.policy.init(jax.random.key(0))
    names = {name: text_plans.name_tokens(_model(folder), EXPERTS, _settings(folder))[name] for name in EXPERTS}
    every = [(a,) for a in ("translate", "correct")]
    every += [(a, b) for (a,) in every for b in ("summarise", "classify", "count")]
    every += [(a, "summarise", c) for (a,) in every[:2] for c in ("classify", "count")]
    plans = np.full((len(every), world.response_tokens), world.end, np.int32)
    for row, plan in zip(plans, every, strict=True):
        tokens = [t for name in plan for t in names[name]]
        row[: len(tokens)] = tokens
    state, told = np.zeros(len(every), np.int64), {plan.tobytes() for plan in plans}
    for column in plans.T:
        there = kept.tokens[state] == column[:, None]
        assert there.any(1).all()
        state = kept.following[state, there.argmax(1)]

    @jax.jit
    def both(params, prompts, keys):
        drawn = openagi.drawn(world, params, prompts, keys, jnp.arange(3), kept, 16)
        likely = openagi.likeliest(world, params, prompts, keys, jnp.arange(3), kept, 16)
        score = grammars.score_legal(kept)
        return drawn, likely, score(world.policy, params, drawn)[0], score(world.policy, params, likely)[0]

    drawn, likely, *scored = both(params, prompts, sample_keys(jax.random.key(1), 0, jnp.arange(3), 16))
    width = prompts.shape[1]
    for rows, logp in zip((drawn, likely), scored, strict=True):
        close.assert_near(jnp.where(rows.mask, logp, 0.0), rows.sampler_logp, terms=64, magnitude=16.0)
        said = np.where(np.asarray(rows.mask), np.asarray(rows.tokens), world.end)[:, width:].astype(np.int32)
        alive = np.asarray(rows.mask).any(1)
        assert {row.tobytes() for row in said[alive]} <= told
    alive = np.asarray(likely.mask).any(1).reshape(3, 16)
    assert (alive.sum(1) == len(every)).all() and len(every) == 12, "there are no more plans"
    total = np.where(alive, np.asarray(likely.sampler_logp).sum(1).reshape(3, 16), -np.inf)
    close.assert_near(np.exp(total).sum(1), 1.0, terms=64, magnitude=16.0)
    assert (np.diff(total[:, :12], axis=1) <= 0).all()
    rewards = task.score({}, jax.device_get(likely))
    np.testing.assert_array_equal(np.asarray(rewards.valid).reshape(3, 16), alive)


def _model(folder):
    return text_plans.parts.load_model(str(folder))


def test_worked_plans_of_training_tasks_are_shown_and_prompts_go_through_the_template(folder):
    settings = _settings(folder, chat=True)
    task = text_plans.open_task(settings).task
    prompts, plans = task.worked(5)(jax.random.key(0), 64)
    decode = _model(folder).tokenizer.decode
    pairs = {
        (decode([t for t in a if t >= 0]), decode(b)) for a, b in zip(prompts.tolist(), plans.tolist(), strict=True)
    }
    assert len({prompt for prompt, _ in pairs}) == 5
    train = {tuple(row) for row in task.prompts()[0].tolist()}
    assert {tuple(row) for row in prompts.tolist()} <= train
    rows = {row["instruction"]: row["plan"] for row in example_experts.rows()}
    for prompt, plan in pairs:
        assert rows[prompt.split("\n")[0]] == plan.split(), "the text of a plan is its names"
    assert int(prompts[0][prompts[0] >= 0][1]) == 4, "the turn of a user is opened"
    plain = text_plans.open_task(_settings(folder)).task
    assert plain.prompts()[0].shape[1] < task.prompts()[0].shape[1]


def test_several_kinds_of_input_may_begin_and_too_many_plans_are_refused():
    modules = [grammars.Module((k,), kind, "c") for k, kind in enumerate("abc", start=1)]
    found = grammars.plan_grammar(modules, start=("a", "b"), end=0, most=2)
    assert set(found.tokens[0].tolist()) - {-1} == {1, 2}
    many = [grammars.Module((k,), "a", "a") for k in range(1, 25)]
    with pytest.raises(ValueError, match="most=12 of 24 modules make more than 100,000 states; lower it"):
        grammars.plan_grammar(many, start="a", end=0, most=12)


# --- the whole


def test_a_model_is_measured_over_tasks_of_a_file(folder, tmp_path):
    """The smoke run of the real-scale path that trains nothing; all arms are behind ``--slow``."""
    words = ["--model", str(folder), "--data", str(folder / "tasks.jsonl"), "--experts", f"{HERE}:experts"]
    words += ["--metrics", f"{HERE}:metrics", "--arm", "zero_shot", "--seeds", "1", "--smoke", "--out", str(tmp_path)]
    arm = cli.run(openagi, words).arms["zero_shot"]
    assert set(openagi.METRICS) <= set(arm.metrics)
    assert -1 <= arm.metrics["eval/score"][0] <= 1 and arm.metrics["eval/right"][0] <= arm.metrics["eval/valid"][0]


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--chat"], ["--lora", "2", "--arm", "rltf", "anything"]])
def test_two_steps_of_every_arm(more, folder, tmp_path):
    words = ["--model", str(folder), "--data", str(folder / "tasks.jsonl"), "--experts", f"{HERE}:experts"]
    words += ["--metrics", f"{HERE}:metrics", "--seeds", "1", "--smoke", "--out", str(tmp_path), *more]
    found = cli.run(openagi, words)
    assert found.arms.keys() == (openagi.ARMS.keys() if "--arm" not in more else {"rltf", "anything"})
    for name, arm in found.arms.items():
        assert set(openagi.METRICS) <= set(arm.metrics), name
        for metric in ("loss/total", "grad/norm"):
            assert np.isfinite(arm.metrics.get(metric, [0.0])).all(), f"{name}: {metric} {arm.metrics[metric]}"
        gap = np.max(arm.metrics.get("kl/sampler_max", [0.0]))
        assert gap <= close.near(0.0, 0.0, terms=64, magnitude=16.0), f"{name}: {gap}"
    assert all(arm.metrics["reward/mean"][-1] >= -1 for arm in found.arms.values() if "reward/mean" in arm.metrics)


# --- wrong input


def _mine(monkeypatch, **functions):
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(**functions))


WRONG = {
    "no experts": ("{data}", "needs --experts MODULE:FUNCTION, or FILE.jsonl of their outputs"),
    "no model": ("--data example", "--data example needs --model FOLDER"),
    "experts alone": ("--experts mine:table", "--experts is of rows of your own: give --model and --data"),
    "metrics alone": ("--metrics mine:table", "--metrics is of rows of your own: give --model and --data"),
    "modules alone": ("--max-modules 3", "--max-modules is of rows of your own: give --model and --data"),
    "chat alone": ("--chat", "--chat is of rows of your own: give --model and --data"),
    "no module": ("{data} --experts nowhere:f", "--experts nowhere:f: No module named 'nowhere'"),
    "no file": ("{data} --experts none.jsonl", "--experts none.jsonl: no such file; give FILE.jsonl"),
    "raises": ("{data} --experts mine:raises", "--experts mine:raises: RuntimeError: no card"),
    "no table": ("{data} --experts mine:nothing", "returns no table of names"),
    "no triple": ("{data} --experts mine:pair", "--experts mine:pair: a is no (takes, gives, function)"),
    "no kind": ("{data} --experts mine:kindless", "a: the kinds that it takes and gives must be texts"),
    "name": ("{data} --experts mine:lines", "'a\\nb' is no name"),
    "twice": ("{data} --experts mine:table,mine:table", "translate is there twice; give each expert once"),
    "outputs": ("{data} --experts {bad}", "bad.jsonl:1: lacks takes; it has expert"),
    "metric": ("{data} {experts}", "tasks.jsonl:49: metric 'near' is none of text, class; --metrics MODULE:FUNCTION"),
    "no metric": ("{data} {experts} --metrics mine:table", "--metrics mine:table: translate is no function"),
    "no metrics": ("{data} {experts} --metrics nowhere:f", "--metrics nowhere:f: No module named 'nowhere'"),
    "nobody takes it": ("--data {planless} --experts mine:table", "no expert takes input_kind 'draft'; they take"),
    "no file of tasks": ("--data none.jsonl {experts}", "--data none.jsonl does not exist"),
    "row": ("--data {bad} {experts}", "bad.jsonl:1: lacks input; it has expert"),
    "no modules": ("{data} {experts} {metrics} --max-modules 0", "--max-modules 0 must be at least 1"),
    "columns": ("{data} {experts} {metrics} --max-new-tokens 30", "may take 38 tokens; raise --max-new-tokens 30"),
    "prompts": ("{data} {experts} {metrics} --max-prompt-tokens 9", "raise --max-prompt-tokens or --max-new-tokens"),
    "context": ("{data} {experts} {metrics} --max-new-tokens 400", "exceed the model's context of 600"),
    "no plan": (
        "--data {planless} {experts}",
        "no task has a plan to imitate; give rows with a plan, or --sft-steps 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line(case, folder, tmp_path, capsys, monkeypatch):
    def raises():
        raise RuntimeError("no card")

    translate = ("german", "english", str.upper)
    _mine(
        monkeypatch, raises=raises, nothing=dict, pair=lambda: {"a": ("x", "y")}, kindless=lambda: {"a": (1, "y", str)},
        lines=lambda: {"a\nb": translate}, table=lambda: {"translate": translate},
    )  # fmt: skip
    (tmp_path / "bad.jsonl").write_text(json.dumps({"expert": "a"}))
    rows = [row | {"plan": None} for row in example_experts.rows() if row["metric"] != "near"]
    (tmp_path / "planless.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words, said = WRONG[case]
    model = [] if case.endswith("alone") or case == "no model" else ["--model", str(folder)]
    names = {
        "data": f"--data {folder}/tasks.jsonl", "experts": f"--experts {HERE}:experts", "bad": tmp_path / "bad.jsonl",
        "metrics": f"--metrics {HERE}:metrics", "planless": tmp_path / "planless.jsonl",
    }  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        cli.main(openagi.__name__, ["--smoke", *model, *words.format(**names).split(" ")])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and said in lines[0], lines


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": None, "input_kind": "x"}, "no expert takes input_kind 'x'"),
        ({"plan": ["dance"]}, "plan: 'dance' is no expert"),
        ({"plan": ["translate", "count"]}, "plan: it gives number, wanted is english"),
        ({"plan": ["translate", "summarise", "summarise"]}, "plan: an expert comes twice"),
        ({"plan": "translate"}, 'plan: "translate" is not a list'),
        ({"metric": 3}, "metric: 3 is not text"),
        ({"instruction": 3}, "instruction: 3 is not text"),
    ],
)
def test_wrong_rows_say_where(changes, said):
    with pytest.raises(UserError, match=said):
        _tasks({"instruction": "Say."}, {"instruction": "Say it."} | changes)
    with pytest.raises(UserError, match="the same instruction has other kinds"):
        _tasks({"instruction": "Say."}, {"instruction": "Say.", "target_kind": "number"})
