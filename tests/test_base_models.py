"""The bundled base models: they load, fit their limits, and predict held-out text well, but not perfectly."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import pretrain_base
from experiments.parts import corpus
from jaxrl_llm import logprobs
from jaxrl_llm.data import problems
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.io import weights

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "pretrain_base"
LIMITS = {
    "nano": (100_000, 300_000, 0.6),
    "nano_1": (100_000, 300_000, 0.6),
    "tiny": (500_000, 2_000_000, 0.6),
}  # parameters, nats a response token


def _heldout_rows(tokenizer, task, n, width=96):
    """One right document a row."""
    tokens = np.full((n, width), tokenizer.pad_id, np.int32)
    mask = np.zeros((n, width), bool)
    for k, p in enumerate(problems.make_split(task, split="heldout", n=n, seed=11)):
        ids = corpus.encode_document(tokenizer, p.prompt, p.solution)
        tokens[k, : len(ids)] = ids
        mask[k, len(p.prompt) + 1 : len(ids)] = True
    return tokens, mask


@pytest.mark.parametrize("name", LIMITS)
def test_size_and_loss_on_held_out_text(name):
    policy, params, config = weights.pretrained(weights.bundled(name))
    tokenizer = tokenizers.load(weights.bundled(name))
    low, high, bound = LIMITS[name]
    assert low <= config.num_parameters <= high
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.num_parameters
    parts = [_heldout_rows(tokenizer, task, 8) for task in corpus.MIXTURE]
    tokens, mask = (jnp.asarray(np.concatenate(x)) for x in zip(*parts, strict=True))
    segments = (tokens != tokenizer.pad_id).astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    logits = policy.unembed(params, policy.hidden(params, tokens, positions, segments))
    logp = np.asarray(logprobs.token_logprobs(logits, tokens))
    mask = np.asarray(mask)
    loss = -logp[mask].mean()
    assert 0.02 < loss < bound, loss  # uniform over the vocabulary would be 4.2


@pytest.mark.parametrize("name", LIMITS)
def test_layout_and_record(name):
    folder = weights.bundled(name)
    files = {"config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json", "generation_config.json"}
    assert {f.name for f in folder.iterdir()} >= files
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert (folder / "model.safetensors").stat().st_size < 5 * 2**20
    record = json.loads((RESULTS / f"{name}.json").read_text())
    _, _, model = weights.pretrained(folder)
    assert record["parameters"] == model.num_parameters
    size, *seed = name.split("_")
    assert record["command"].startswith(f"python -m experiments.pretrain_base --size {size}")
    assert ("--seed 1" in record["command"]) == bool(seed)
    assert len(record["loss"]) == record["settings"]["steps"] // record["steps_per_point"]
    assert record["loss"][-1] < 0.1 * record["loss"][0]
    assert (RESULTS / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", LIMITS)
def test_every_task_has_some_right_answers_and_countdown_leaves_room(name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    assert set(record["accuracy"]) == {task.__name__.rsplit(".", 1)[1] for task in corpus.MIXTURE}
    for task, row in record["accuracy"].items():
        assert row["pass@8"]["low"] > 0.3 and row["pass@1"]["high"] < 0.95, task
        for part in (row, *row["levels"].values()):
            for interval in (part["pass@1"], part["pass@8"]):
                assert 0 <= interval["low"] <= interval["mean"] <= interval["high"] <= 1 and interval["n"] >= 2
    three = record["accuracy"]["countdown"]["levels"]["3"]
    assert three["pass@8"]["mean"] - three["pass@1"]["mean"] > 0.3  # what reinforcement learning can win


SHORT = {"size": "nano", "steps": 4, "rows": 2, "width": 128, "seed": 1, "eval_problems": 1}


@jax.numpy_dtype_promotion("standard")  # optax's AdamW under a schedule needs it
def test_training_that_was_stopped_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrain_base, "PER_CALL", 1)
    tokenizer = tokenizers.load(weights.bundled("nano"))
    policy, _, _ = weights.pretrained(weights.bundled("nano"))
    settings = pretrain_base.Settings(**SHORT)
    whole, losses = pretrain_base.train(settings, policy, tokenizer)
    assert not pretrain_base.checkpoints(settings).exists() and len(losses) == 4

    def stopped(*_, **__):
        save(*_, **__)
        raise KeyboardInterrupt

    save = pretrain_base.checkpoint.save
    monkeypatch.setattr(pretrain_base, "KEPT_EVERY", 2)
    monkeypatch.setattr(pretrain_base.checkpoint, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        pretrain_base.train(settings, policy, tokenizer)
    monkeypatch.setattr(pretrain_base.checkpoint, "save", save)
    again, curve = pretrain_base.train(settings, policy, tokenizer)
    assert curve == losses
    jax.tree.map(np.testing.assert_array_equal, again, whole)


def test_a_model_that_is_not_bundled_wants_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wrong in ({"size": "small"}, {"size": "nano", "seed": 2}, {"size": "tiny", "seed": 1}):
        with pytest.raises(UserError, match="--out FOLDER"):
            pretrain_base.main(pretrain_base.Settings(**wrong))
    with pytest.raises(UserError, match="train it first"):
        pretrain_base.main(pretrain_base.Settings(steps=0, out="none"))
