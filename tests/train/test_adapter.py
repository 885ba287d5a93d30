"""LoRA in a job: the optimiser sees the adapter alone, checkpoints leave the base out, the run ends in PEFT's files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from jaxrl_llm.experiment import curricula
from jaxrl_llm.jobs.grpo import cli
from jaxrl_llm.models import lora
from jaxrl_llm.models.io import weights
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.run import lora_state
from jaxrl_llm.run.bench import OnlineSettings
from jaxrl_llm.run.options import open_model
from jaxrl_llm.train import checkpoint
from jaxrl_llm.train.step import make_update
from jaxrl_llm.types import TrainState
from tests import close
from tests.models_for_tests import dense_rows, small_model

JOB = [
    "--model", "nano", "--data", "chain", "--lora", "4", "--prompts-per-step", "8", "--group-size", "4",
    "--max-new-tokens", "8", "--train-problems", "32", "--eval-problems", "8", "--eval-samples", "2",
    "--checkpoint-every", "1", "--learning-rate", "0.01",
]  # fmt: skip


def test_the_update_moves_the_adapter_alone():
    base_policy, base, config = small_model()
    policy = lora.make_policy(base_policy, config, Lora(2))
    params = {"base": base, "lora": policy.init(jax.random.key(0))["lora"]}
    segments, positions = dense_rows(4, 5)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (4, 5)), jnp.int32)

    def loss(params, rows):
        hidden = policy.hidden(params, rows, positions, segments)
        return jnp.mean(policy.unembed(params, hidden)[..., 0]), {}

    tx = optax.adamw(1e-2, weight_decay=0.1)
    state = TrainState(params, tx.init({"lora": params["lora"]}), jnp.zeros((), jnp.int32), jax.random.key(0), (), {})
    after, metrics = jax.jit(make_update(loss, tx, trained="lora"))(state, tokens)
    jax.tree.map(np.testing.assert_array_equal, after.params["base"], base)
    assert all(np.any(np.asarray(after.params["lora"][name]) != 0) for name in params["lora"])
    assert jax.tree.structure(after.opt_state[0].mu) == jax.tree.structure({"lora": params["lora"]})
    assert float(metrics["grad/norm"]) > 0


@pytest.mark.parametrize("compute, kind", [("bfloat16", jnp.bfloat16), ("float32", jnp.float32)])
def test_the_base_of_an_adapter_is_kept_as_it_is_computed(compute, kind):
    settings = OnlineSettings(model="nano", lora=2, compute=compute)
    model = open_model(settings)
    assert model.params["base"]["layers"]["q"].dtype == model.params["base"]["embed"].dtype == kind
    assert {x.dtype for x in jax.tree.leaves(model.params["lora"])} == {jnp.dtype("float32")}
    assert open_model(dataclasses.replace(settings, lora=0)).params["embed"].dtype == jnp.float32  # it trains
    assert open_model(dataclasses.replace(settings, lora=0), trains=False).params["embed"].dtype == kind
    few = dataclasses.replace(settings, rollout_weights="int8")
    assert open_model(few).params["base"]["embed"].dtype == kind  # rollouts round what trains beside the adapter
    asked = open_model(dataclasses.replace(few, lora=0), trains=False)
    assert asked.params["embed"].dtype == jnp.float32  # rounded to few bits once


def test_an_adapter_is_merged_in_float32(tmp_path):
    model = open_model(OnlineSettings(model="nano", lora=2, compute="bfloat16"))
    adapter = {name: x + 0.001 for name, x in model.params["lora"].items()}
    merged = lora_state.save(tmp_path, model, model.params | {"lora": adapter}, 2)
    wide = open_model(OnlineSettings(model="nano", lora=2)).params["base"]
    spec = Lora(2, targets=lora.targets_of(model.config))
    jax.tree.map(np.testing.assert_array_equal, merged, lora.merge(wide, adapter, spec.scale))
    # a model that is divided over devices fits on none: it is merged where it was gathered, a matrix at a time
    assert {(type(x), x.dtype) for x in jax.tree.leaves(merged)} == {(np.ndarray, np.dtype(np.float32))}


@pytest.mark.slow
def test_main_job_and_resume(tmp_path):
    """Two steps at once are one step and a resumed one; the folders hold the adapter and the merged model."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cli([*JOB, "--steps", "2", "--out", str(whole)]) == 0
    kept = checkpoint.latest(whole / "checkpoints")
    size = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    _, base, config = weights.pretrained(weights.bundled("nano"))
    assert size < sum(x.nbytes for x in jax.tree.leaves(base))
    spec, adapter = lora.load(whole / "adapter", config)
    assert spec.rank == 4 and all(bool(jnp.any(x != 0)) for x in adapter.values())
    merged = weights.load(whole / "model", config)
    want = lora.merge(base, adapter, spec.scale)
    # a product of so many terms, its scale and the weight; written in bfloat16, as the model came: half a unit of it
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
    near = {"rtol": 2.0**-8, "atol": close.bound(spec.rank + 2, largest)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **near), merged, want)

    assert cli([*JOB, "--steps", "2", "--out", str(parts)]) == 0
    (parts / "model").rename(parts / "first")
    for path in (parts / "checkpoints").glob("step_00000002"):
        path.rename(parts / "second")  # as if the run had ended after one step
    assert cli(["--resume", str(parts)]) == 0
    a, b = (safetensors.numpy.load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, parts))
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_adapter_on_a_mesh(tmp_path):
    assert cli([*JOB, "--steps", "1", "--mesh", "data=2,fsdp=2,tensor=2", "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()


def test_what_is_imitated_while_a_program_is_traced_may_lie_on_a_mesh():
    """The start of a run is computed at once, and beside the trace that asks for it: its own programs are whole."""
    settings = OnlineSettings(
        mesh="data=2", lora=2, train_problems=4, eval_problems=2, max_new_tokens=16, levels=(2,), group_size=2
    )

    def start(scale):
        found = curricula.solutions_imitated(settings, steps=1, learning_rate=1e-3, rows_per_step=2)
        return jax.tree.map(lambda x: scale * x, found)

    traced, shapes = jax.make_jaxpr(start, return_shape=True)(jnp.float32(1.0))
    found = curricula.solutions_imitated(settings, steps=1, learning_rate=1e-3, rows_per_step=2)
    assert jax.tree.structure(shapes) == jax.tree.structure(found)
    assert "scan" not in str(traced) and all(np.isfinite(x).all() for x in jax.tree.leaves(found))
