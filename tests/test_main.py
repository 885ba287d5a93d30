"""The main job as a user runs it: right input, and every wrong input with one clear line and exit code 2."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data.chat import template_hash
from jaxrl_llm.distributed import hosts, rules
from jaxrl_llm.distributed.mesh import parse_mesh
from jaxrl_llm.jobs import grpo
from jaxrl_llm.jobs.grpo import cli, count_microbatches, rollout_of_flags
from jaxrl_llm.models import decoder
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import lora_state, parts
from jaxrl_llm.run.records import track, view
from jaxrl_llm.run.settings import Settings, located, parse, run_folder
from tests import close

SMALL = [
    "--model", "nano", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8", "--steps", "2",
    "--train-problems", "32", "--eval-problems", "8", "--eval-samples", "2", "--checkpoint-every", "1",
]  # fmt: skip


def _rows(path, n=60):
    path.write_text("\n".join(json.dumps({"prompt": f"m10 {i}+{i}=>", "answer": 2 * i % 10}) for i in range(n)))
    return str(path)


def test_sources_are_found_from_anywhere(tmp_path, monkeypatch):
    """Files, saved data sets with their split, and mixtures of both; what is no file stays as it is."""
    monkeypatch.chdir(tmp_path)
    _rows(tmp_path / "a.jsonl")
    (tmp_path / "saved").mkdir()
    given = Settings(data="a.jsonl@0.7,saved:test@3,tfds:gsm8k:train@1", eval_data="saved", model="nano")
    found = located(given)
    assert found.data == f"{tmp_path}/a.jsonl@0.7,{tmp_path}/saved:test@3,tfds:gsm8k:train@1"
    assert (found.eval_data, found.model) == (f"{tmp_path}/saved", "nano") and located(found) == found
    for data in ("countdown", "reasoning_gym:leg_counting", "tfds:gsm8k", "missing.jsonl", ""):
        assert located(Settings(data=data, eval_data=data)) == Settings(data=data, eval_data=data)
    assert located(Settings(data="tfds:saved:train")).data == f"tfds:{tmp_path}/saved:train"


def test_several_hosts_write_into_one_folder(tmp_path, monkeypatch):
    """Named by the clock of the first of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hosts, "of_first", lambda said, most=256: said and "20010909-014640")
    run = run_folder(Settings())
    assert run.parts == ("runs", "20010909-014640")


def test_run_folder(tmp_path, capsys):
    run = tmp_path / "run"
    assert cli([*SMALL, "--data", "chain", "--out", str(run)]) == 0
    out = capsys.readouterr().out
    for words in ("pass@1  before", "pass@2  before", "log-prob gap", "tokens/s", "before  ", "after   "):
        assert words in out
    for name in (
        "settings.json",
        "metrics.jsonl",
        "results.json",
        "samples.jsonl",
        "curve.png",
        "checkpoints",
        "model",
    ):
        assert (run / name).exists(), name
    results = json.loads((run / "results.json").read_text())
    assert results["before"]["pass@1"]["n"] == 8 and results["versions"]["jax"]
    assert (run / "curve.png").read_bytes()[:4] == b"\x89PNG"
    # the trained model is a model folder again, with what it learned
    trained, base = (parts.load_model(name) for name in (str(run / "model"), "nano"))
    assert trained.config == base.config and trained.tokenizer.eos_ids == base.tokenizer.eos_ids
    moved = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a != b))), trained.params, base.params)
    # the bundled model is stored in bfloat16, and so is what it became: two steps move no norm near 1 that far
    norms = {name for name in moved["layers"] if "norm" in name}
    assert all(value for name, value in moved["layers"].items() if name not in norms) and moved["embed"]
    assert trained.tokenizer.encode("m10 1+2=>") == base.tokenizer.encode("m10 1+2=>")


def test_rows_to_be_measured_on_while_training(tmp_path, capsys, monkeypatch):
    texts, tracked, opened = [], {}, track.open_trackers

    def watched(names, folder, *, begin=0):
        found = opened(names, folder, begin=begin)

        def write(step, values):
            tracked.setdefault(step, {}).update(values)
            found.write(step, values)

        return found._replace(text=lambda *said: (texts.append(said), found.text(*said)), write=write)

    monkeypatch.setattr(track, "open_trackers", watched)
    measured = tmp_path / "measured.jsonl"
    rows = [{"question": f"{i}+1=", "answer": f"#### {i + 1}"} for i in range(1, 7)]
    measured.write_text("\n".join(map(json.dumps, rows)))
    run = tmp_path / "run"
    words = ["--data", "chain", "--eval-data", str(measured), "--eval-format", "gsm8k", "--eval-every", "1"]
    words += ["--track", "tensorboard", "--prompt-tokens", "80", "--out", str(run)]
    assert cli([*SMALL, *words]) == 0
    assert "step 1  pass@1" in capsys.readouterr().out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "eval/pass@1" in lines[0] and "eval/pass@2/low" in lines[0] and "eval/pass@1" not in lines[1]
    results = json.loads((run / "results.json").read_text())
    assert results["before"]["pass@1"]["n"] == 6  # of the file alone
    assert list(results["while_training"]) == ["1"]
    assert list((run / "tensorboard").iterdir())
    whole = {0: results["before"], 1: {"pass@1": dict(mean=lines[0]["eval/pass@1"])}, 2: results["after"]}
    assert {step: x["eval/pass@1"] for step, x in tracked.items()} == {k: x["pass@1"]["mean"] for k, x in whole.items()}
    assert [step for step, name, _ in texts] == [1, 2] and texts[0][1] == "samples"
    assert texts[0][2].count("reward") == 8  # two groups of four
    # it goes on with another number of evaluations, and not with other rows
    assert cli(["--resume", str(run), "--eval-every", "2"]) == 0
    again = parse(["--resume", str(run)])  # as the run itself says to go on
    assert (again.eval_every, again.steps, again.schedule_steps, again.resume) == (2, 2, 2, str(run))
    capsys.readouterr()
    assert cli(["--resume", str(run), "--steps", "1"]) == 2
    assert "is at step 2, beyond the 1 that are asked for" in capsys.readouterr().err
    assert json.loads((run / "settings.json").read_text())["steps"] == 2
    assert cli(["--resume", str(run), "--eval-data", "chain"]) == 2


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--verifier", "choice"], "choice"),
        (["--verifier", "choice", "--eval-format", "plain"], "choice"),  # said or not, the format is that of --data
        (["--eval-format", "plain"], "any"),
        (["--verifier", "choice", "--eval-format", "gsm8k"], "number"),
        (["--verifier", "choice", "--format", "gsm8k", "--eval-format", "plain"], "any"),
    ],
)
def test_rows_to_be_measured_on_are_judged_as_those_that_train_or_by_their_own_format(words, name, tmp_path):
    own = tmp_path / "measured.jsonl"
    own.write_text(json.dumps({"prompt": "1?", "question": "1?", "answer": "#### 1"}))
    _, verify = grpo.evaluated_on(parse(["--data", "rows.jsonl", "--eval-data", str(own), *words]))
    assert verify is parts.VERIFIERS[name]


def test_rows_to_be_measured_on_do_not_train(tmp_path):
    data = _rows(tmp_path / "rows.jsonl")
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join((tmp_path / "rows.jsonl").read_text().splitlines()[:5]))
    evaluated, verify = parts.load_evaluated(str(few), most=4, layout="plain")
    with pytest.warns(UserWarning, match="4 of 60 rows are rows of --eval-data"):
        train, held, _ = parts.load_problems(data, train=0, heldout=9, seed=0, evaluated=evaluated)
    assert held == evaluated and len(train) == 56 and not {p.prompt for p in train} & {p.prompt for p in held}
    assert verify is parts.VERIFIERS["any"]


def test_presets_by_size(tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(weights.bundled("nano"), model)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 600, "max_position_embeddings": 200}))
    found = parse(["--model", str(model)])
    said = capsys.readouterr().out
    assert "where no flag says otherwise: --learning-rate 0.0001 --max-new-tokens 100 --compute float32" in said
    assert (found.learning_rate, found.max_new_tokens, found.remat) == (1e-4, 100, False)
    found = parse([f"--model={model}", "--lora", "4", "--max_new_tokens=7"])
    assert (found.learning_rate, found.max_new_tokens) == (1e-3, 7)
    assert "--max-new-tokens" not in capsys.readouterr().out
    (model / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 9000, "max_position_embeddings": 9999}))
    found = parse(["--model", str(model), "--remat"])
    assert (found.compute, found.remat, found.max_new_tokens) == ("bfloat16", True, 1024)
    assert parse([]) == parse(["--model", "nano"]) == Settings()  # the bundled ones are the quickstart's
    assert "--learning-rate 0.0006" not in capsys.readouterr().out


@pytest.mark.slow
def test_stop_strings(tmp_path):
    run = tmp_path / "run"
    words = [*SMALL, "--data", "chain", "--out", str(run), "--stop", "=", ";"]
    assert cli(words) == 0
    for pair in map(json.loads, (run / "samples.jsonl").read_text().splitlines()):
        assert not set("=;") & set(pair["before"][:-1])  # nothing comes after a stop string
    assert cli(["--resume", str(run)]) == 0  # the flag is read back as it was given


@pytest.mark.slow
def test_slots_train_on_the_same_samples(tmp_path):
    lines = []
    for slots in ("0", "5"):
        run = tmp_path / slots
        assert cli([*SMALL, "--data", "chain", "--out", str(run), "--slots", slots]) == 0
        lines.append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    for one, other in zip(*lines, strict=True):
        assert one["reward/mean"] == other["reward/mean"] and one["tokens/generated"] == other["tokens/generated"]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_reference_is_kept_as_it_is_computed(compute):
    """Plans count it so; what trains stays float32."""
    settings = Settings(compute=compute, kl="k3_gradient_terms", kl_weight=0.1, train_problems=32, eval_problems=8)
    found = grpo.opened(settings)
    (stage,) = grpo.build(found, None).stages
    reference = stage.extras(found.model.params, jax.random.key(0))["reference"]
    assert reference["layers"]["q"].dtype == reference["embed"].dtype == jnp.dtype(compute)
    assert reference["layers"]["input_norm"].dtype == found.model.params["embed"].dtype == jnp.float32
    policy, tokens = found.model.policy, jnp.arange(1, 9, dtype=jnp.int32)[None]
    given = (tokens, tokens - 1, jnp.ones_like(tokens))
    np.testing.assert_array_equal(policy.hidden(reference, *given), policy.hidden(found.model.params, *given))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("how", [{"slots": 2}, {"row_stages": 2, "cache_stages": 2}], ids=["slots", "stages"])
def test_rollouts_of_every_device_of_a_mesh(rank, how):
    settings = Settings(max_new_tokens=6, mesh="data=2,fsdp=2", lora=rank)
    found = []
    for spec in ("", settings.mesh):
        mesh = parse_mesh(spec) if spec else None
        model = lora_state.with_adapter(parts.load_model("nano", mesh=mesh), rank, 0)
        params = rules.shard(model.params, mesh) if spec else model.params
        tokens = jnp.asarray([model.tokenizer.encode(f"m10 {i}+{i}=>") for i in range(4)], jnp.int32)
        ids = jnp.arange(4, dtype=jnp.int32)
        given = (tokens, tokens >= 0, jax.random.split(jax.random.key(0), 8), ids)
        one = dataclasses.replace(settings, **how if spec else {})
        found.append(jax.jit(rollout_of_flags(one, model, 2, mesh))(params, *given))
    jax.tree.map(np.testing.assert_array_equal, *(rows._replace(sampler_logp=0) for rows in found))


@pytest.mark.slow
def test_updates_on_trees_train_alike_and_go_on_bit_for_bit(tmp_path):
    """Groups share their prompts; what is planned depends on the batch alone, so a resumed run plans it again."""
    lines = {}
    for name, words in {
        "padded": [],
        "tree": ["--layout", "tree"],
        "ended": ["--layout", "tree", "--steps", "1"],
    }.items():
        run = tmp_path / name
        schedule = ["--schedule", "constant"]
        assert (
            cli(
                [
                    *SMALL,
                    "--data",
                    "countdown",
                    "--no-filter-groups",
                    "--microbatches",
                    "1",
                    *schedule,
                    "--out",
                    str(run),
                    *words,
                ]
            )
            == 0
        )
        if name == "ended":
            assert cli(["--resume", str(run), "--steps", "2"]) == 0
        lines[name] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for tree, padded in zip(lines["tree"], lines["padded"], strict=True):
        assert tree["update/columns"] < 0.8 and "update/columns" not in padded
        for figure in ("grad/norm", "policy/entropy"):
            close.assert_relative(tree[figure], padded[figure])
    for tree, ended in zip(lines["tree"], lines["ended"], strict=True):
        assert tree["grad/norm"] == ended["grad/norm"] and tree["policy/entropy"] == ended["policy/entropy"]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", ["1", "2"])
def test_a_strict_run_has_no_gap(epochs, tmp_path):
    run = tmp_path / "run"
    words = [*SMALL, "--data", "chain", "--out", str(run), "--strict", "--most-gap", "1e-30", "--inner-epochs", epochs]
    assert cli(words) == 0
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        assert line["kl/sampler_max"] == line["kl/sampler_p99"] == 0.0


@pytest.mark.slow
def test_a_gap_beyond_the_limit_stops_the_run(tmp_path, capsys):
    words = [*SMALL, "--data", "chain", "--out", str(tmp_path / "run"), "--compute", "bfloat16", "--remat"]
    assert cli([*words, "--optimiser", "muon", "--attention", "pallas", "--most-gap", "1e-9"]) == 2
    assert "the limit is 1e-09" in capsys.readouterr().err


@pytest.mark.slow
def test_a_policy_that_moves_away_by_its_own_updates_is_no_gap(tmp_path):
    words = [*SMALL, "--data", "chain", "--out", str(tmp_path / "run"), "--inner-epochs", "4", "--warmup-steps", "0"]
    words += ["--learning-rate", "3e-3", "--advantages", "signed_advantages", "--no-filter-groups"]
    assert cli([*words, "--most-gap", "0.001"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("more", [[], ["--lora", "4"], ["--slots", "5"]], ids=["weights", "lora", "slots"])
def test_weights_of_the_rollout_in_few_bits_show_their_gap(tmp_path, kind, more):
    pytest.importorskip("qwix")
    run = tmp_path / "run"
    assert cli([*SMALL, "--data", "chain", "--out", str(run), "--rollout-weights", kind, *more]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(1e-4 < line["kl/sampler_mean"] < {"int8": 0.05, "int4": 0.8}[kind] for line in lines)


@pytest.mark.slow
def test_a_cache_of_a_byte_shows_its_gap(tmp_path):
    gaps = []
    for name in ("", "int8", "float8_e4m3fn"):
        more = ["--rollout-cache", name] if name else []
        run = tmp_path / (name or "whole")
        assert cli([*SMALL, "--data", "chain", "--out", str(run), "--slots", "5", *more]) == 0
        gaps.append(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["kl/sampler_max"])
    seen = 1e-4  # of a log-probability: what eight bits lose, and float32 does not
    assert gaps[0] < seen < min(gaps[1:]) and max(gaps[1:]) < 0.5


@pytest.mark.slow
def test_published_formats_and_bad_rows(tmp_path):
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"m10 {i}+{i}=>", "answer": f"so #### {2 * i % 10}"} for i in range(60)]
    data.write_text("\n".join([*map(json.dumps, rows), "nonsense"]))
    run = tmp_path / "run"
    words = [*SMALL, "--data", str(data), "--format", "gsm8k", "--prompt-tokens", "160", "--out", str(run)]
    assert cli(words) == 2
    with pytest.warns(UserWarning, match="1 of 61 rows left out: .*rows.jsonl:61: not JSON"):
        assert cli([*words, "--bad-rows", "1"]) == 0


def test_parts_of_a_batch_hold_whole_groups_and_divide_over_the_mesh():
    settings = Settings(prompts_per_step=12, group_size=2)
    assert count_microbatches(settings, None) == 12
    assert count_microbatches(dataclasses.replace(settings, prompts_per_step=34), None) == 2
    assert count_microbatches(dataclasses.replace(settings, microbatches=3), None) == 3
    mesh = parse_mesh("data=4,fsdp=2")
    assert count_microbatches(settings, mesh) == 3
    assert count_microbatches(dataclasses.replace(settings, prompts_per_step=7), mesh) == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["threads:2", "ray:1"])
def test_an_asynchronous_run_without_staleness_is_the_host_loop(tmp_path, monkeypatch, workers):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # other processes compile as this one does
    more = {"host": [], "async": ["--loop", "async", "--staleness", "0", "--workers", workers]}
    for name, words in more.items():
        assert cli([*SMALL[:-1], "5", "--data", "chain", "--out", str(tmp_path / name), *words]) == 0
    one, other = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in more
    )
    names = ("reward/mean", "loss/total", "grad/norm", "length/mean_tokens")
    assert [[row[name] for name in names] for row in one] == [[row[name] for name in names] for row in other]
    ray.shutdown()
    weights_of = (tmp_path / name / "model" / "model.safetensors" for name in more)
    assert len({path.read_bytes() for path in weights_of}) == 1
    texts = ((tmp_path / name / view.FILE).read_text().splitlines() for name in more)
    last, shown = ([line for line in map(json.loads, lines) if line["step"] == 2] for lines in texts)
    assert last and shown == last, "rollouts to be read"


def test_an_asynchronous_run_says_what_the_host_loop_says(tmp_path):
    """Evaluations between updates, tokens per second, rollouts to be read; no figure of an empty set."""
    run = tmp_path / "run"
    assert cli([*SMALL, "--data", "chain", "--loop", "async", "--eval-every", "1", "--out", str(run)]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ["eval/pass@1" in row for row in rows] == [True, False]
    assert all(row["tokens/per_s"] == row["tokens/generated"] / row["time/step_s"] for row in rows)
    for row in rows:  # no length of right answers where none is right
        assert ("length/right_tokens" in row) == (row["reward/mean"] > 0)
    assert {json.loads(line)["step"] for line in (run / view.FILE).read_text().splitlines()} == {1, 2}


@pytest.mark.slow
def test_generator_and_trainer_on_devices_of_their_own(tmp_path):
    """Weights go there in bfloat16, from two devices that share them to two that each have half of the heads."""
    more = ["--loop", "async", "--mesh", "fsdp=2", "--generator-mesh", "tensor=2", "--compute", "bfloat16"]
    assert cli([*SMALL, "--data", "chain", *more, "--storage-units", "2", "--out", str(tmp_path / "run")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["weights/sent_bytes"] > 0 and row["sampler/staleness"] <= 1 for row in rows)


@pytest.mark.slow
def test_own_rows_and_mesh(tmp_path):
    data = _rows(tmp_path / "rows.jsonl")
    assert cli([*SMALL, "--data", data, "--mesh", "data=2,fsdp=2", "--out", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_an_optimiser_that_waits_on_the_host_changes_nothing(tmp_path):
    """On a mesh, and resumed from a checkpoint."""

    def run(name, *words):
        assert cli([*SMALL, "--data", "chain", "--mesh", "data=2,fsdp=2", "--out", str(tmp_path / name), *words]) == 0

    run("here", "--steps", "4")
    run("there", "--steps", "2", "--schedule-steps", "4", "--offload", "optimiser", "--checkpoint-every", "1")
    assert cli(["--resume", str(tmp_path / "there"), "--steps", "4"]) == 0
    weights_of = (tmp_path / name / "model" / "model.safetensors" for name in ("here", "there"))
    assert len({path.read_bytes() for path in weights_of}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--optimiser", "muon"], ["--mesh", "data=2,fsdp=2", "--offload", "optimiser"]], ids=["muon", "mesh"]
)
def test_weights_in_bfloat16_train_and_go_on_bit_for_bit(tmp_path, more):
    """What rounds their updates is in the checkpoint."""
    words = [*SMALL, "--data", "chain", "--compute", "bfloat16", "--weights", "bfloat16", *more]
    assert cli([*words, "--steps", "4", "--out", str(tmp_path / "whole")]) == 0
    assert cli([*words, "--steps", "2", "--schedule-steps", "4", "--out", str(tmp_path / "parted")]) == 0
    assert cli(["--resume", str(tmp_path / "parted"), "--steps", "4"]) == 0
    whole, parted = (tmp_path / name / "model" / "model.safetensors" for name in ("whole", "parted"))
    assert whole.read_bytes() == parted.read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["update/skipped"] == 0 and line["grad/norm"] > 0 for line in lines)


def test_weights_in_bfloat16_have_no_float32_beside_them():
    """Matrices alone: norms are float32 in every type; moments are float32."""
    settings = Settings(data="chain", compute="bfloat16", weights="bfloat16", train_problems=64, eval_problems=8)
    found = grpo.opened(settings)
    online = grpo.method_of_flags(*found[:4])
    narrow = decoder.cast_at_use(found.model.config)
    flat, _ = jax.tree.flatten_with_path(found.model.params)
    assert {x.dtype.name for path, x in flat if path[-1].key in narrow} == {"bfloat16"}
    state = jax.eval_shape(online.tx.init, found.model.params)
    kinds = {x.dtype.name for x in jax.tree.leaves(state.inner) if x.shape}
    assert kinds == {"float32"}


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}=>{% endif %}"


@pytest.mark.slow
def test_conversations_and_a_verifier_in_its_own_processes(tmp_path):
    pytest.importorskip("math_verify")
    model = tmp_path / "chat"
    model.mkdir()
    for source in weights.bundled("nano").iterdir():
        (model / source.name).write_bytes(source.read_bytes())
    (model / "chat_template.jinja").write_text(TEMPLATE)
    data = tmp_path / "talks.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"m10 {i}+{i}"}], "answer": 2 * i % 10} for i in range(30)]
    rows += [{"prompt": f"m10 {i}+1", "answer": (i + 1) % 10} for i in range(30)]
    data.write_text("\n".join(map(json.dumps, rows)))
    run = tmp_path / "run"
    assert cli([*SMALL, "--model", str(model), "--data", str(data), "--chat", "--verifier", "math",
                "--out", str(run)]) == 0  # fmt: skip
    results = json.loads((run / "results.json").read_text())
    assert results["chat_template_sha256"] == template_hash(TEMPLATE)
    assert results["before"]["invalid"] == 0
    assert (run / "model" / "chat_template.jinja").read_text() == TEMPLATE  # the trained model is a chat model too


def _bad(tmp_path, case):
    """(arguments, a word of the message) of each mistake."""
    rows = tmp_path / "rows.jsonl"
    broken, absent, empty = (tmp_path / f"{n}.jsonl" for n in ("broken", "absent", "empty"))
    broken.write_text('{"prompt": "a", "answer": 1}\n{"prompt": \n')
    absent.write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b"}\n')
    empty.write_text("\n")
    file = tmp_path / "file"
    file.write_text("")
    mismatched = tmp_path / "mismatched"
    mismatched.mkdir()
    for source in weights.bundled("nano").iterdir():
        (mismatched / source.name).write_bytes(source.read_bytes())
    raw = json.loads((mismatched / "config.json").read_text())
    (mismatched / "config.json").write_text(json.dumps(raw | {"vocab_size": 12}))
    fits = tmp_path / "long.jsonl"
    fits.write_text("\n".join(json.dumps({"prompt": "1+" * 300 + str(i), "answer": 1}) for i in range(40)))
    return {
        "unknown flag": (["--learning-rat", "1"], "--learning-rate"),
        "what waits elsewhere": (["--offload", "weights"], "--offload"),
        "missing data": (["--data", str(tmp_path / "none.jsonl")], "does not exist"),
        "missing model": (["--model", str(tmp_path / "none")], "bundled are tiny, nano and nano_1"),
        "malformed line": (["--data", str(broken)], "broken.jsonl:2: not JSON"),
        "absent column": (["--data", str(absent)], "absent.jsonl:2: lacks answer"),
        "empty data": (["--data", str(empty)], "empty"),
        "few rows": (["--data", _rows(rows, 2)], "more distinct prompts"),
        "tokenizer mismatch": (["--model", str(mismatched)], ""),
        "prompt too long": (["--data", str(fits)], "context"),
        "prompt limit": (["--prompt-tokens", "3"], "limit is 3"),
        "mesh does not divide": (["--mesh", "data=3"], "does not divide"),
        "mesh axis": (["--mesh", "model=2"], "unknown axis"),
        "mesh rows": (["--mesh", "data=8"], "--prompts-per-step=4"),
        "rollout mesh alone": (["--rollout-mesh", "tensor=2"], "--mesh, which is empty; give both, or drop it"),
        "rollout mesh of others": (
            ["--mesh", "data=2", "--rollout-mesh", "tensor=4"],
            "4 devices and --mesh data=2 has 2",
        ),
        "rollout mesh axis": (
            ["--mesh", "data=2", "--rollout-mesh", "model=2"],
            "--rollout-mesh model=2: unknown axis",
        ),
        "rollout mesh rows": (
            ["--mesh", "tensor=8", "--rollout-mesh", "data=8"],
            "--rollout-mesh data=8: --prompts-per",
        ),
        "rollout mesh and slots": (
            ["--mesh", "fsdp=4", "--rollout-mesh", "data=2,tensor=2", "--slots", "4"],
            "give --rollout-mesh data=4, or drop --slots 4",
        ),
        "rollout mesh and stages": (
            ["--mesh", "fsdp=4", "--rollout-mesh", "data=2,tensor=2", "--row-stages", "4"],
            "give --rollout-mesh data=4, or drop --row-stages 4",
        ),
        "stages of slots": (["--slots", "4", "--row-stages", "2"], "--row-stages 2 is of rollouts in lock-step"),
        "strict stages": (["--strict", "--cache-stages", "2"], "drop it, or --strict"),
        "no stage": (["--row-stages", "0"], "--row-stages 0"),
        "strict rollout mesh": (["--strict", "--rollout-mesh", "data=2"], "drop --rollout-mesh data=2"),
        "no write permission": (["--out", str(file / "run")], "cannot be written"),
        "nothing to resume": (["--resume", str(tmp_path)], "no settings.json"),
        "micro-batches": (["--microbatches", "3"], "--microbatches 3"),
        "zero steps": (["--steps", "0"], "--steps 0"),
        "no template": (["--chat"], "no chat template"),
        "unknown verifier": (["--verifier", "maths"], "'math'"),
        "unknown format": (["--format", "gsm9k"], "'gsm8k'"),
        "another format": (["--data", str(absent), "--format", "gsm8k"], "absent.jsonl:1: lacks question"),
        "bad rows": (["--bad-rows", "-1"], "--bad-rows -1"),
        "too many bad rows": (["--data", str(broken), "--bad-rows", "0"], "broken.jsonl:2: not JSON"),
        "empty stop": (["--stop", ""], "--stop ''"),
        "negative slots": (["--slots", "-1"], "--slots -1"),
        "large seed": (["--seed", str(2**32)], "must be below 2**32"),
        "no folder to resume": (["--resume", ""], "--resume '' names no run folder"),
        "strict layout": (["--strict", "--layout", "tree"], "drop --layout tree"),
        "strict slots": (["--strict", "--slots", "4"], "drop --slots 4"),
        "negative gap": (["--most-gap", "-0.1"], "--most-gap -0.1"),
        "evaluation format alone": (["--eval-format", "gsm8k"], "--eval-format gsm8k belongs to --eval-data"),
        "evaluation": (["--eval-every", "-1"], "--eval-every -1"),
        "no rows to measure": (["--eval-data", str(tmp_path / "none.jsonl")], "does not exist"),
        "only rows to measure": (
            ["--data", _rows(tmp_path / "both.jsonl", 8), "--eval-data", str(tmp_path / "both.jsonl")],
            "every row is a row of --eval-data",
        ),
        "staleness": (["--staleness", "-1"], "--staleness -1"),
        "workers": (["--workers", "threads"], "must be threads:N, local:N or ray:N"),
        "evaluations between updates of workers": (
            ["--loop", "async", "--workers", "local:2", "--eval-every", "5"],
            "--eval-every 5 is of loops in one process",
        ),
        "layout of workers": (
            ["--loop", "async", "--workers", "local:2", "--layout", "packed"],
            "--workers local:2 trains rows as they stand: drop --layout packed",
        ),
        "verifier of generated rows": (
            ["--verifier", "math"],
            "--verifier math is of rows of your own, and --data chain is generated: give --data FILE with it, or drop",
        ),
        "format of generated rows": (["--format", "gsm8k"], "--format gsm8k is of rows of your own"),
        "bad rows of generated ones": (["--bad-rows", "2"], "--bad-rows 2 is of rows of your own"),
        "format of generated rows to measure": (
            ["--eval-data", "chain", "--eval-format", "gsm8k"],
            "--eval-format gsm8k is of rows of your own, and --eval-data chain is generated: give --eval-data FILE",
        ),
        "no digit of a rank": (["--lora", "\u00b2"], "--lora"),
        "tracker": (["--track", "paper"], "the trackers are tensorboard, wandb"),
        "muon and adapter": (["--optimiser", "muon", "--lora", "2"], "--lora 2"),
        "narrow weights alone": (["--weights", "bfloat16"], "--weights bfloat16 is of --compute bfloat16"),
        "narrow weights and adapter": (
            ["--weights", "bfloat16", "--compute", "bfloat16", "--lora", "2"],
            "the base of an adapter is kept in the type of --compute as it is",
        ),
    }[case]


CASES = (
    "unknown flag", "missing data", "missing model", "malformed line", "absent column", "empty data", "few rows",
    "tokenizer mismatch", "prompt too long", "prompt limit", "mesh does not divide", "mesh axis", "mesh rows",
    "no write permission", "nothing to resume", "micro-batches", "zero steps",
    "no template", "unknown verifier", "empty stop", "negative slots", "strict slots", "strict layout",
    "negative gap", "muon and adapter", "narrow weights alone", "narrow weights and adapter", "large seed",
    "no folder to resume",
    "rollout mesh alone", "rollout mesh of others", "rollout mesh axis", "rollout mesh rows",
    "rollout mesh and slots", "strict rollout mesh",
    "rollout mesh and stages", "stages of slots", "strict stages", "no stage",
    "evaluation format alone", "evaluation", "no rows to measure", "only rows to measure", "tracker",
    "staleness", "workers", "layout of workers", "evaluations between updates of workers",
    "verifier of generated rows", "format of generated rows", "bad rows of generated ones",
    "format of generated rows to measure", "no digit of a rank",
    "unknown format", "another format", "bad rows", "too many bad rows",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_wrong_input(tmp_path, capsys, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    arguments, words = _bad(tmp_path, case)
    base = [] if case == "nothing to resume" else SMALL
    assert cli([*base, "--data", "chain", *arguments] if base else arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0], lines
    assert not (tmp_path / "runs").exists()  # nothing is left behind by a mistake


def test_taken_folder_and_changed_settings(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.json").write_text("{}")
    assert cli([*SMALL, "--data", "chain", "--out", str(run)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert cli(["--resume", str(run), "--learning-rate", "3"]) == 2
    assert "drop --learning-rate" in capsys.readouterr().err
    for text, words in (("[1]", "a list where names"), ('{"steps": "many"}', "steps is 'many'"), ('{"no": 1}', "'no'")):
        (run / "settings.json").write_text(text)
        assert cli(["--resume", str(run)]) == 2
        assert words in capsys.readouterr().err
