"""Files with an embedded world over a model and rows of one's own: two steps of every arm on random weights."""

import dataclasses
import importlib
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import strings, text_rows
from experiments.preference.parts import conduct
from jaxrl_llm import experiment
from jaxrl_llm.data import formats
from jaxrl_llm.data.problems import is_heldout
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, cli
from jaxrl_llm.experiment.own_rows import tasks
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import lora_state, options
from jaxrl_llm.run import parts as run_parts
from jaxrl_llm.run import rated as rewards
from tests import close
from tests.endpoint_for_tests import serving
from tests.experiments.test_smoke import FILES, _name, second
from tests.models_for_tests import byte_model
from tests.run.test_rated import of_job

FAMILIES = ("preference", "reward_models", "analysis", "systems")
PAIRS = (  # over pairs of one's own, by the same text
    "rpo", "salsa", "rlhf_workflow", "robust_rlhf", "sharpe_active", "cyclealign", "u2a", "model_surgery", "mpo",
    "pairwise_rl", "rlhf_diversity", "brme", "creative_writing", "encore", "rlbff", "safe_grpo", "deepseek_grm", "j1",
    "judgelrm",
)  # fmt: skip
LINES = ("capo", "effective_reward", "pav")  # over problems with solutions whose steps are lines
FREE = ("cross_domain_rlvr", "general_reasoner", "rlpr")  # over problems with solutions that mark an answer
SOLVED = (
    "math_beyond",
    "mip_overthinking",
    "relational_reasoning",
    "negative_synthetic",
    "trpa",
)  # over problems with solutions
ELSEWHERE = (
    "asyncflow",
    "calibration",
    "compose_skills",
    "drc_planning",
    "llamarl",
    "tba",
)  # read --data themselves, and are tried elsewhere
OF_FAMILIES = {path.stem: _name(path) for path in FILES if path.parent.name in FAMILIES}


def test_every_file_takes_rows_or_says_why():
    only = {slug for slug, name in OF_FAMILIES.items() if hasattr(importlib.import_module(name), "EMBEDDED_ONLY")}
    assert len(only) <= 7, "at most seven files may stay in their embedded world"
    assert {*only, *PAIRS, *SOLVED, *LINES, *FREE, *ELSEWHERE} == OF_FAMILIES.keys()
    lists = (only, PAIRS, SOLVED, LINES, FREE, ELSEWHERE)
    assert sum(map(len, lists)) == len(OF_FAMILIES)
    for slug in PAIRS:
        module = importlib.import_module(OF_FAMILIES[slug])
        assert "scorer" in {f.name for f in dataclasses.fields(tasks.with_rows(module).Settings)}, slug


def test_an_arm_and_a_flag_of_rows_have_names_of_their_own(monkeypatch):
    """Else the flag's default takes the place of what the arm is."""
    for name in OF_FAMILIES.values():
        tasks.with_rows(importlib.import_module(name))
    module = importlib.import_module(OF_FAMILIES["rpo"])
    monkeypatch.setattr(module, "ARMS", module.ARMS | {"judged": {"scorer": "bt"}})
    with pytest.raises(UserError, match="rpo: arm judged sets scorer, which is a flag of rows of .* [(]--scorer[)]"):
        tasks.with_rows(module)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=400)
    rows = [{"prompt": f"Say {k} kindly:", "chosen": f" {k}, please", "rejected": f" {k}! now {k % 7}"}
            for k in range(120)]  # fmt: skip
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = str(folder / "pairs.jsonl")
    return ["--model", str(folder), "--data", data, "--max-new-tokens", "16", "--scorer-steps", "3"]


@pytest.fixture(scope="module")
def solved(own, tmp_path_factory):
    path = tmp_path_factory.mktemp("solved") / "sums.jsonl"
    rows = [{"question": f"What is {k} + 1?", "answer": f"{k}+1\n#### {k + 1}"} for k in range(120)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return [*own[:2], "--data", str(path), "--format", "gsm8k", "--max-new-tokens", "24"]


@pytest.mark.slow
@pytest.mark.parametrize("slug", [*PAIRS, *SOLVED, *LINES, *FREE])
def test_an_arm_traces_over_own_rows(slug, own, solved, capsys):
    """Among the first of the slow tests, as ``test_smoke.test_an_arm_traces``."""
    module = importlib.import_module(OF_FAMILIES[slug])
    arm = second(module)
    cli.run(module, ["--smoke", "--plan", "--arm", arm, *(own if slug in PAIRS else solved)])
    assert arm in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("slug", [*PAIRS, *SOLVED, *LINES, *FREE])
def test_two_steps_of_every_arm(slug, own, solved, tmp_path):
    module = importlib.import_module(OF_FAMILIES[slug])
    words = own if slug in PAIRS else solved
    found = cli.run(module, ["--smoke", "--seeds", "1", "--out", str(tmp_path), *words])
    other = {"allen_direct", "allen_scratchpad", "allen_rl"} if slug == "relational_reasoning" else set()
    assert found.arms.keys() == module.ARMS.keys() - other, "rows have one calculus"
    for name, arm in found.arms.items():
        for metric in ("loss/total", "grad/norm"):
            assert np.isfinite(arm.metrics.get(metric, [0.0])).all(), f"{name}: {metric} {arm.metrics[metric]}"
        measured = {key for key in arm.metrics if key in module.METRICS}
        assert measured, name


@pytest.mark.slow
@pytest.mark.parametrize("slug", ["rpo", "mpo", "rlhf_workflow", "brme"])
def test_two_steps_with_an_adapter(slug, own, tmp_path):
    """Policy, reference and judge of own pairs are adapters beside one base."""
    module = importlib.import_module(OF_FAMILIES[slug])
    first = list(module.ARMS)[:2]
    found = cli.run(module, ["--smoke", "--seeds", "1", "--out", str(tmp_path), "--lora", "2", *own, "--arm", *first])
    for name, arm in found.arms.items():
        for metric in ("loss/total", "grad/norm"):
            assert np.isfinite(arm.metrics.get(metric, [0.0])).all(), f"{name}: {metric} {arm.metrics[metric]}"
        assert {key for key in arm.metrics if key in module.METRICS}, name


def test_parameters_of_own_rows_are_an_adapter_whose_zero_is_the_loaded_model(own, monkeypatch):
    of_rows = text_rows.Settings(data=own[3], max_new_tokens=16)
    opened = {}
    for rank in (0, 2):
        model = dataclasses.asdict(options.ModelSettings(model=own[1], lora=rank))
        opened[rank] = text_rows.opened(
            types.SimpleNamespace(**model | dataclasses.asdict(of_rows), learning_rate=1e-3)
        )
    base, adapted = opened[0].model, opened[2].model
    sizes = [sum(x.size for x in jax.tree.leaves(model.params)) for model in (base, adapted)]
    assert 0 < sizes[1] < sizes[0] / 4 and all("lora" in name for name in adapted.params)
    table = opened[0].heldout
    rows = (
        jnp.maximum(table.prompts[:4], 0),
        jnp.tile(jnp.arange(table.prompts.shape[1]), (4, 1)),
        table.prompts[:4] >= 0,
    )
    rows = *rows[:2], rows[2].astype(jnp.int32)
    plain, beside = (model.policy.hidden(model.params, *rows) for model in (base, adapted))
    np.testing.assert_array_equal(plain, beside)  # B is zero: the reference costs an adapter, not a model
    grads = jax.grad(lambda p: jnp.sum(adapted.policy.hidden(p, *rows) ** 2))(adapted.params)
    assert grads.keys() == adapted.params.keys() and any(np.abs(x).max() > 0 for x in grads.values())
    monkeypatch.setattr(text_rows, "COMPILED", 1)
    text_rows._opened.cache_clear()
    with pytest.raises(UserError, match="--lora 2: .* set JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1"):
        text_rows.opened(types.SimpleNamespace(**model | dataclasses.asdict(of_rows), learning_rate=1e-3))


def test_the_policy_of_own_rows_is_exported_with_its_base(own, tmp_path):
    of_rows = dataclasses.asdict(text_rows.Settings(data=own[3], max_new_tokens=16))
    opened = {}
    for rank in (0, 2):
        model = dataclasses.asdict(options.ModelSettings(model=own[1], lora=rank))
        opened[rank] = text_rows.opened(types.SimpleNamespace(**model | of_rows, learning_rate=1e-3))
    rows = opened[0]
    plan = text_rows.finish(rows)(experiment.Plan(lambda key: {}, (), lambda params, key: {}))
    moved = jax.tree.map(lambda x: x + 1, rows.model.params)
    beside = {"reference": rows.model.params, "value": jnp.ones(3)}
    judged = ({"judge": moved, "meta": jnp.ones(3)}, {"policy": moved, "judge": rows.model.params})
    for params in ({"policy": moved} | beside, {"model": moved} | beside, moved, *judged):
        model, found = plan.exported(params)
        assert model.folder == rows.model.folder and found is moved
    assert plan.exported({"policy": moved | {"steer": jnp.ones(3)}} | beside) is None
    adapted = opened[2]
    trained = jax.tree.map(lambda x: x + 1, adapted.model.params)
    model, found = text_rows.exported(adapted, {"policy": trained} | beside)
    assert found["lora"] is trained and jax.tree.structure(found["base"]) == jax.tree.structure(rows.model.params)
    whole = lora_state.save(tmp_path / "adapter", model, found, lora_state.rank_of(found))
    assert (tmp_path / "adapter").is_dir() and jax.tree.structure(whole) == jax.tree.structure(rows.model.params)


@pytest.mark.slow
def test_surgery_on_a_model_of_ones_own_leaves_it_edited(own, tmp_path, monkeypatch):
    """One gate row in twenty of the two layers, and nothing else; what is said after it is not sampled here."""
    figures = {"eval/rude": 0.25, "eval/gold": 1.0, "eval/perplexity": 2.0}
    monkeypatch.setattr(conduct, "politeness", lambda *_: {name: jnp.asarray(x) for name, x in figures.items()})
    module = importlib.import_module(OF_FAMILIES["model_surgery"])
    where = ["--out", str(tmp_path), *own, "--arm", "none", "surgery", "steering"]
    found = cli.run(module, ["--smoke", "--seeds", "1", *where])
    assert 0.0 <= found.arms["surgery"].metrics["probe/accuracy"][0] <= 1.0
    kept = {path.parent.parent.name: path for path in tmp_path.glob("seeds/*/*/model")}
    assert kept.keys() == {"none", "surgery"}, "an arm that edits no weight leaves none"
    before, after = (run_parts.load_model(str(kept[name])).params for name in ("none", "surgery"))
    gates = [np.asarray(x["layers"]["gate"]) for x in (before, after)]
    changed = (gates[0] != gates[1]).any(axis=1)
    assert changed.sum() == max(1, round(0.05 * changed.size))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, after)
    assert not same["layers"].pop("gate") and all(jax.tree.leaves(same))


def test_what_is_said_of_tokens_ends_where_a_text_ends():
    """A text is filled up behind its end: what stands there is no token of a perplexity, nor of a share."""
    logp, words = jnp.log(jnp.asarray([[0.5, 0.25, 1.0, 1.0]])), jnp.asarray([[4, 9, 9, 9]], jnp.int32)
    embedded = strings.make_world(12, 2, 4, end=9)
    text = embedded._replace(start=dict)
    close.assert_near(jnp.exp(-strings.over_tokens(text, logp, words)), 8**0.5)
    close.assert_near(strings.over_tokens(text, words == 4, words), 0.5)
    close.assert_near(strings.over_tokens(embedded, words == 4, words), 0.25)


def test_what_the_model_is_computed_with_counts_as_read(own):
    """``--lora`` is read where the rows are opened, before any arm is built: it is not refused as idle."""
    module = importlib.import_module("experiments.preference.rpo")
    _, base, given = cli.parse(tasks.with_rows(module), ["--smoke", "--lora", "2", *own])
    made, base = tasks.over_rows(module, base, given)
    settings, reads = arms.watched(arms.resolve(made, base, ("rpo",))["rpo"])
    made.build(settings)
    assert given <= reads


@pytest.mark.slow
def test_another_world_is_the_one_that_is_measured(own, tmp_path, capsys, monkeypatch):
    """An arm that trains nothing, measured: the judge is one's own, prompts are held out, and the file is untouched."""
    seen = []
    monkeypatch.setitem(sys.modules, "mine", _module(seen))
    module = importlib.import_module("experiments.preference.salsa")
    words = [*own, "--scorer", "mine:shortest", "--smoke", "--seeds", "1", "--arm", "soup", "--out", str(tmp_path)]
    arm = cli.run(module, words).arms["soup"]
    assert "--learning-rate 0.0006" in capsys.readouterr().out  # by the model's size
    assert -16 <= arm.metrics["eval/gold"][0] <= 0  # tokens of random bytes, all counted
    numbers = {prompt.split()[1] for prompt, _ in seen}
    rows = [json.loads(line)["prompt"] for line in open(own[3])]
    held = [x for x in rows if is_heldout(x)]
    assert numbers <= {x.split()[1] for x in held} and numbers
    assert importlib.import_module("experiments.parts.preference_task").VOCABULARY == 32


def _module(seen):
    def shortest(prompt, response):
        seen.append((prompt, response))
        return -len(response)

    return types.SimpleNamespace(shortest=shortest)


def test_a_language_model_judges(own):
    """What the judge says depends on prompt and response, not on what stands behind the end of either."""
    of_rows = text_rows.Settings(data=own[3], max_new_tokens=16, judge_model=own[1])
    both = dataclasses.asdict(options.ModelSettings(model=own[1])) | dataclasses.asdict(of_rows)
    settings = types.SimpleNamespace(**both, learning_rate=1e-3)
    rows = text_rows.opened(settings)
    gold, table = text_rows.make_gold(rows, settings), rows.heldout
    first, second = (np.asarray(gold(table.prompts, x)) for x in (table.chosen, table.rejected))
    assert np.isfinite(first).all() and (first != second).all() and len(set(first.round(4))) > 1
    wider = jnp.pad(table.prompts, ((0, 0), (3, 0)), constant_values=-1)
    _, _, config = weights.pretrained(own[1])
    close.assert_same_forward(gold(wider, table.chosen), first, config, columns=wider.shape[1] + 16)


def test_a_reward_model_judges(own, tmp_path):
    """What it says of prompt and response is what it says of them as a reward of a run."""
    folder, *_ = of_job(tmp_path, max_positions=400)
    of_rows = text_rows.Settings(data=own[3], max_new_tokens=16, judge_model=str(folder))
    both = dataclasses.asdict(options.ModelSettings(model=own[1])) | dataclasses.asdict(of_rows)
    settings = types.SimpleNamespace(**both, learning_rate=1e-3)
    rows = text_rows.opened(settings)
    said = np.asarray(text_rows.make_gold(rows, settings)(rows.heldout.prompts, rows.heldout.chosen))
    found = rewards.load_reward_model(str(folder), mesh=None, compute="float32", attention="xla")
    pairs = zip(np.asarray(rows.heldout.prompts), np.asarray(rows.heldout.chosen), strict=True)
    ends = found.model.tokenizer.eos_ids
    ids = []
    for prompt, response in pairs:
        text = [int(t) for t in response if t >= 0]
        last = next(k for k, t in enumerate(text) if t in ends)
        ids.append([*(int(t) for t in prompt if t >= 0), *text[: last + 1]])
    _, _, config = weights.pretrained(own[1])
    close.assert_same_forward(said[:, None], rewards.make_model_reward(found)(ids)[:, None], config, columns=64)


def rated(request):
    """Longer responses are better, up to ten; a response with a 7 gets words alone."""
    response = request["messages"][-1]["content"].rpartition("Response:\n")[2]
    return "Hard to say." if "7" in response else f"Well written in 2 lines: {min(len(response), 10)}/10."


def test_a_model_behind_an_address_rates(own, monkeypatch, tmp_path, capsys):
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    with serving(monkeypatch, reply=rated) as server:
        of_rows = text_rows.Settings(data=own[3], max_new_tokens=16, rater=server.address, rater_model="someone")
        both = dataclasses.asdict(options.ModelSettings(model=own[1])) | dataclasses.asdict(of_rows)
        settings = types.SimpleNamespace(**both, learning_rate=1e-3)
        rows = text_rows.opened(settings)
        gold, table = text_rows.make_gold(rows, settings), rows.heldout
        decode = rows.model.tokenizer.decode
        texts = [decode([t for t in row if t >= 0 and t not in rows.model.tokenizer.eos_ids])
                 for row in np.asarray(table.chosen).tolist()]  # fmt: skip
        want = [5.5 if "7" in text else min(len(text), 10) for text in texts]
        assert {5.5} < set(want)
        np.testing.assert_array_equal(jax.jit(gold)(table.prompts, table.chosen), want)
        asked = len(server.seen)
        np.testing.assert_array_equal(gold(table.prompts, table.chosen), want)
        assert len(server.seen) == asked  # ratings are kept
        assert capsys.readouterr().err.count("which is no rating and counts as 5.5") == 1
        assert "Say" in server.seen[1]["messages"][0]["content"]
        server.reply = lambda request: "No idea."
        settings.endpoint_seed = 1
        with pytest.raises(UserError, match="^--rater http.*: asked for a number from 1 to 10 it says 'No idea.'"):
            text_rows.make_gold(rows, settings)


@pytest.mark.slow
def test_two_steps_by_ratings(own, monkeypatch, tmp_path):
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("experiments.preference.rpo")
    with serving(monkeypatch, reply=rated) as server:
        words = [*own, "--rater", server.address, "--rater-model", "someone", "--arm", *list(module.ARMS)[:2]]
        found = cli.run(module, ["--smoke", "--seeds", "1", "--out", str(tmp_path / "run"), *words])
    assert all(1 <= arm.metrics["eval/gold"][0] <= 10 for arm in found.arms.values())


def test_a_file_makes_everything_from_the_task_that_it_is_given():
    module = importlib.import_module("experiments.preference.rpo")
    task = tasks.embedded(module)
    params = task.world.policy.init(jax.random.key(0))
    params = {"policy": params, "reference": params}
    settings, key = module.Settings(**module.SMOKE), jax.random.key(1)
    other = task._replace(gold_reward=lambda prompts, responses: jnp.full(responses.shape[:1], 7.0))
    given, own = (jax.jit(plan.measure) for plan in (module.build(settings, task=other), module.build(settings)))
    assert float(given(params, key)["eval/gold"]) == 7.0 != float(own(params, key)["eval/gold"])


@pytest.mark.parametrize("slug", [*PAIRS, *SOLVED])
def test_rows_open_a_task_of_the_type_that_the_file_is_given(slug):
    opener = tasks.opener(importlib.import_module(OF_FAMILIES[slug]))
    assert opener.open_task and "data" in {f.name for f in dataclasses.fields(opener.Settings)}


WRONG = {
    "model alone": ("preference.rpo", ["--model", "DIR"], "--model DIR without --data"),
    "no model": ("preference.rpo", ["--data", "FILE"], "--data FILE needs --model FOLDER"),
    "flag of rows": ("preference.rpo", ["--scorer", "a:b"], "--scorer is of rows of your own"),
    "two judges": ("preference.rpo", ["MODEL", "--scorer", "mine:f", "--judge-model", "nano"], "both judge: drop one"),
    "judges": ("preference.rpo", ["MODEL", "--scorer", "mine:f", "--rater", "http://x"], "both judge: drop one"),
    "no name": ("preference.rpo", ["MODEL", "--rater", "http://x"], "--rater http://x needs --rater-model NAME"),
    "no address": ("preference.rpo", ["MODEL", "--rater-model", "x"], "give --rater ADDRESS with it, or a folder"),
    "judge of rows": ("preference.rpo", ["--rater", "http://x"], "--rater is of rows of your own"),
    "other tokens": ("preference.rpo", ["MODEL", "--judge-model", "nano"], "--judge-model nano reads other tokens"),
    "no such judge": ("preference.rpo", ["MODEL", "--scorer", "nowhere:f"], "--scorer nowhere:f"),
    "too long": ("preference.rpo", ["MODEL", "--max-new-tokens", "3"], "raise --max-prompt-tokens or --max-new-tokens"),
    "beyond the context": ("preference.rpo", ["MODEL", "--max-new-tokens", "399"], "exceed the model's context"),
    "adapter": ("preference.salsa", ["MODEL", "--lora", "2"], "--lora 2: this paper averages whole models"),
    "adapter to edit": ("preference.model_surgery", ["MODEL", "--lora", "2"], "--lora 2: this paper edits the weights"),
    "format": ("preference.rpo", ["MODEL", "--format", "scores"], "lacks completions"),
    "embedded": ("systems.hybridflow", ["--data", "x"], "--data: this experiment has its embedded world alone"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case, own, capsys, monkeypatch):
    name, words, said = WRONG[case]
    words = [*own, *words[1:]] if words[0] == "MODEL" else words
    if words[:4] == own[:4] and len(words) > len(own):  # a flag may stand once
        flag = words[len(own)]
        words = [w for k, w in enumerate(words) if k >= len(own) or (w != flag and words[k - 1] != flag)]
    module = importlib.import_module(f"experiments.{name}")
    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(SystemExit) as stop:
        cli.main(module.__name__, ["--smoke", *words])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and said in lines[0], lines


def test_formats_of_judgements(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completions": ["b", "c"], "scores": [0, 1]}))
    assert formats.read_pairs(str(path), layout="scores")[0] == [formats.Pair("a", "c", "b", 1.0)]
    judged = [{"prompt": "a", "completion": x, "label": x == "c"} for x in "bcd"]
    path.write_text("\n".join(map(json.dumps, judged)))
    assert [p[:3] for p in formats.read_pairs(str(path), layout="unpaired")[0]] == [("a", "c", "b"), ("a", "c", "d")]
    path.write_text("\n".join(map(json.dumps, judged[:1])))
    with pytest.raises(UserError, match="no prompt has a response with label true and one with label false"):
        formats.read_pairs(str(path), layout="unpaired")
