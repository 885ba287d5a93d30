"""Reward models among the rewards: what they read, what their head says of it, and runs that train on it."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.__main__ import main
from jaxrl_llm.data.chat import encode_chat, encode_prompt
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.jobs import rows as rows_of_jobs
from jaxrl_llm.jobs import sft
from jaxrl_llm.models import config as model_config
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import method, parts, rated
from jaxrl_llm.types import Trajectories
from jaxrl_llm.verifiers.verdict import Verdict
from tests.close import singles
from tests.models_for_tests import byte_model

HERE = {"mesh": None, "compute": "float32", "attention": "xla"}
PROBLEMS = [Problem("rows", text, "", {}, 0, str(k)) for k, text in enumerate(("ab?", "What is longer?"))]


def of_job(folder, **changes):
    """As ``jaxrl reward-model`` writes it."""
    byte_model(folder, **changes)
    head = np.random.default_rng(3).normal(size=(16, 1)).astype(np.float32)
    save_file({"reward/weight": head, "reward/bias": np.full((1,), 0.5, np.float32)}, folder / "heads.safetensors")
    return folder, head[:, 0], 0.5


def of_transformers(folder, **changes):
    """As transformers writes a sequence classifier: no projection to the vocabulary, a ``score.weight``."""
    byte_model(folder, **changes)
    stored = {name: x for name, x in load_file(folder / "model.safetensors").items() if not name.startswith("lm_head")}
    score = np.random.default_rng(4).normal(size=(1, 16)).astype(np.float32)
    save_file(stored | {"score.weight": score}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, score[0], 0.0


def drawn(tokenizer, texts, problem_ids, *, width, truncated=()):
    """Responses as a rollout has them, behind prompts of other rows' length."""
    rows = len(texts)
    tokens, mask = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
    for k, text in enumerate(texts):
        ids = [*tokenizer.encode(text), *([] if k in truncated else [2])]
        tokens[k, 3 : 3 + len(ids)], mask[k, 3 : 3 + len(ids)] = ids, True
    return Trajectories(
        tokens=tokens, segment_ids=np.ones_like(tokens), positions=np.zeros_like(tokens), mask=mask,
        sampler_logp=np.zeros(tokens.shape, np.float32), group_ids=np.arange(rows, dtype=np.int32),
        problem_ids=np.asarray(problem_ids, np.int32), truncated=np.isin(np.arange(rows), truncated),
    )  # fmt: skip


def alone(folder, ids, weight, bias):
    """The reward of one row by itself, in float64 behind the hidden states."""
    config = model_config.read_config(folder)
    policy, tree = make_policy(config), weights.load(folder, weights.config_of(folder, judges=True), judges=True)
    tokens = jnp.asarray([ids], jnp.int32)
    hidden = policy.hidden(tree, tokens, jnp.arange(len(ids), dtype=jnp.int32)[None], jnp.ones_like(tokens))
    return float(np.asarray(hidden[0, -1], np.float64) @ weight.astype(np.float64) + bias)


@pytest.mark.parametrize("make", [of_job, of_transformers])
@pytest.mark.parametrize("mesh", ["", pytest.param("data=2,tensor=2", marks=pytest.mark.slow)])
def test_a_model_says_of_a_row_what_it_says_of_it_alone(make, mesh, tmp_path):
    folder, weight, bias = make(tmp_path, max_positions=256)
    load = rated.load_named(
        method.own_rewards(types.SimpleNamespace(reward=(str(folder),), reward_weights=())),
        **HERE | {"mesh": meshes.parse_mesh(mesh) if mesh else None},
    )
    (found,) = load()
    tokenizer = found.model.tokenizer
    texts = ["no", "yes, a longer answer", "", "cut off"] * 9  # more than are read at once
    rows = drawn(tokenizer, texts, [0, 1, 1, 0] * 9, width=64, truncated=(3,))
    values = rated.make_rate(load, tokenizer, PROBLEMS, chat=False)(rows)[str(folder)]
    end = [2] if make is of_job else []
    for k, (text, problem) in enumerate(zip(texts[:4], (0, 1, 1, 0), strict=True)):
        ids = [1, *tokenizer.encode(PROBLEMS[problem].prompt), *tokenizer.encode(text), *([] if k == 3 else end)]
        assert values[k] == singles(alone(folder, ids, weight, bias), magnitude=4)
    assert values[4:7].tolist() == singles(values[:3].tolist(), magnitude=4) and len(values) == 36


def test_what_is_read(tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    ours, theirs = (
        rated.load_reward_model(str(make(tmp_path / name)[0]), **HERE)
        for make, name in ((of_job, "ours"), (of_transformers, "theirs"))
    )
    tokenizer = ours.model.tokenizer
    read = rated.make_reader(ours, PROBLEMS, chat=True)
    opened = encode_prompt(tokenizer, PROBLEMS[1].prompt, chat=True)
    assert read(1, "ok", True) == [*opened, *tokenizer.encode("ok"), 2]
    assert read(1, "ok", False) == [*opened, *tokenizer.encode("ok")]
    said = [{"role": "user", "content": "ab?"}, {"role": "assistant", "content": "ok"}]
    whole = rated.make_reader(theirs, PROBLEMS, chat=True)(0, "ok", True)
    assert whole == encode_chat(tokenizer, said) and whole[-1] == 2, "its template ends the turn"
    talk = [PROBLEMS[0]._replace(prompt=said[:1])]
    assert rated.make_reader(theirs, talk, chat=False)(0, "ok", False) == whole
    assert rated.make_reader(theirs, PROBLEMS, chat=False)(0, "ok", True) == [1, *tokenizer.encode("ab?ok")]


def test_what_a_model_cannot_read_is_no_reward(tmp_path):
    folder, *_ = of_job(tmp_path, max_positions=20)
    both = types.SimpleNamespace(reward=(str(folder), "tests.run.test_rated:length"), reward_weights=(2.0, 1.0))
    verify = method.own_rewards(both)
    load = rated.load_named(verify, **HERE)
    tokenizer = load()[0].model.tokenizer
    rows = drawn(tokenizer, ["short", "much too long for twenty"], [0, 0], width=40)
    rate = rated.make_rate(load, tokenizer, PROBLEMS, chat=False)
    value = rate(rows)[str(folder)]
    assert np.isfinite(value[0]) and np.isnan(value[1])
    rewards = parts.make_scorer(tokenizer, PROBLEMS, verify, None, rate)(rows)
    assert rewards.valid.tolist() == [True, False]
    assert rewards.value.tolist() == singles([2 * value[0] + 5.0, 0.0], magnitude=8)
    assert rewards.parts["length"].tolist() == [5.0, 24.0] and set(rewards.parts) == {tmp_path.name, "length"}
    assert verify.each({}, "abc", {str(folder): 0.25})[0] == Verdict(3.5, True, f"{tmp_path.name} 0.25, length 3")


def length(answer, response):
    return float(len(response))


def test_a_reward_that_is_no_number_stops_the_run(tmp_path):
    folder, *_ = of_job(tmp_path)
    found = rated.load_reward_model(str(folder), **HERE)
    broken = found._replace(head=jax.tree.map(lambda x: x * jnp.inf, found.head))
    with pytest.raises(UserError, match="gives no finite number for a response"):
        rated.make_model_reward(broken)([[1, 7, 8]])


def with_heads(**tensors):
    return lambda folder: save_file({k.replace("_", "/"): x for k, x in tensors.items()}, folder / "heads.safetensors")


TWO = np.zeros((16, 2), np.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "heads.safetensors").unlink(), "neither heads.safetensors nor score.weight"),
        (with_heads(value_weight=TWO), "holds value/weight, no reward/weight"),
        (with_heads(reward_weight=TWO, reward_bias=TWO[0]), r"a reward is one number of 16.*\(16, 2\)"),
        (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
    ],
)
def test_another_folder_is_one_line(change, said, tmp_path):
    folder, *_ = of_job(tmp_path)
    change(folder)
    verify = method.own_rewards(types.SimpleNamespace(reward=(str(folder),), reward_weights=()))
    with pytest.raises(UserError, match=f"--reward {folder}: .*{said}"):
        rated.load_named(verify, **HERE)


def test_an_adapter_is_no_judge(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert not weights.is_judge(tmp_path)


def test_a_classifier_is_no_policy(tmp_path, capsys):
    folder, *_ = of_transformers(tmp_path, tie_embeddings=True)
    assert main(["train", "--model", str(folder), "--data", "chain", "--out", str(tmp_path / "run")]) == 2
    assert "score.weight" in capsys.readouterr().err


TINY = ("--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8", "--train-problems", "32",
        "--eval-problems", "8", "--eval-samples", "2")  # fmt: skip


def test_a_run_learns_from_a_reward_model_and_goes_on_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "judge").mkdir()
    of_job(tmp_path / "judge", max_positions=256)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--data", "chain", *TINY, "--steps", "2", "--out", "run", "--reward", "judge"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "3"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(line["reward/judge"] == line["reward/mean"] != 0 for line in lines)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["after"]["reward"]["n"] == 8


def test_prompts_without_answers(tmp_path, capsys):
    """RL from preferences: rows of a prompt and nothing else, in text and in messages."""
    (tmp_path / "judge").mkdir()
    of_job(tmp_path / "judge", max_positions=256)
    rows = [{"prompt": f"{k}?" if k % 2 else [{"role": "user", "content": f"{k}?"}], "style": "any"} for k in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = ["--model", str(tmp_path / "judge"), "--data", str(tmp_path / "rows.jsonl"), "--format", "prompts"]
    few = [*TINY, "--steps", "1", "--out", str(tmp_path / "run")]
    assert main(["train", *own, *few]) == 2 and parts.NO_ANSWERS in capsys.readouterr().err
    assert main(["eval", *own, "--max-new-tokens", "4"]) == 2 and parts.NO_ANSWERS in capsys.readouterr().err
    for command in ("ppo", "online-dpo"):
        with pytest.raises(SystemExit):
            main([command, *own, *few])
        assert parts.NO_ANSWERS in capsys.readouterr().err
    with pytest.raises(UserError, match="the rows have no answers to judge by"):
        parts.verifier_of("prompts")({}, "text")
    assert main(["train", *own, *few, "--reward", str(tmp_path / "judge"), "tests.run.test_rated:styled"]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["reward/styled"] == 1.0 and json.loads(lines[0])["reward/judge"] != 0


def test_responses_are_measured_by_a_reward_model_and_the_best_are_imitated(tmp_path, capsys):
    """Reward-ranked fine-tuning, by two commands."""
    (tmp_path / "judge").mkdir()
    of_job(tmp_path / "judge", max_positions=256)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{k}+2=>"}) for k in range(10)))
    own = str(tmp_path / "own.jsonl")
    words = ["--data", str(tmp_path / "rows.jsonl"), "--format", "prompts", "--samples", "4", "--reward",
             str(tmp_path / "judge")]  # fmt: skip
    assert main(["eval", *words, "--responses", own, "--out", str(tmp_path / "found.json")]) == 0
    assert " the best of their prompt)" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["figures"]) == {"reward", "best@2", "best@4"}
    assert found["figures"]["best@4"]["mean"] > found["figures"]["best@2"]["mean"] > found["figures"]["reward"]["mean"]
    rows = [json.loads(line) for line in open(own)]
    for prompt in {row["prompt"] for row in rows}:
        mine = [row for row in rows if row["prompt"] == prompt]
        assert [row["reward"] for row in mine if row["label"]] == [max(row["reward"] for row in mine)]
    kept = rows_of_jobs.texts(sft.Settings(data=own), "unpaired")
    assert [row.response for row in kept] == [row["completion"] for row in rows if row["label"]]


def styled(answer, response):
    return float(answer["row"]["style"] == "any")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("train", "--mesh", "data=2,fsdp=2"), ("train", "--compute", "bfloat16"),
        ("train", "--loop", "async", "--staleness", "1"),
        ("train", "--loop", "async", "--staleness", "1", "--workers", "local:1"),
        ("ppo", "--kl-weight", "0.05"), ("ppo", "--kl-weight", "0.05", "--lora", "2", "--critic-warmup", "1"),
        ("ppo", "--mesh", "data=2"), ("online-dpo",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_and_loop(words, tmp_path):
    (tmp_path / "judge").mkdir()
    of_job(tmp_path / "judge", max_positions=256)
    own = ("--data", "chain") if words[0] == "train" else ("--seeds", "1", "--eval-every", "2")
    given = [*words, *own, *TINY, "--steps", "2", "--out", str(tmp_path / "run"), "--reward", str(tmp_path / "judge")]
    assert main(given) == 0
    (lines,) = (tmp_path / "run").rglob("metrics.jsonl")
    assert all(json.loads(line)["reward/judge"] != 0 for line in lines.read_text().splitlines())
