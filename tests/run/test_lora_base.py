"""``--lora-base``: adapters beside a base in few bits (QLoRA), trained, resumed and merged."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.__main__ import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.jobs.grpo import cli
from jaxrl_llm.models import lora, quantised
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import options, parts
from tests import close
from tests.run.test_method import of

pytest.importorskip("qwix")
GAP = 1e-4  # nats: what samples and what trains read the same numbers
TINY = ("--data", "chain", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8", "--train-problems",
        "16", "--eval-problems", "4", "--eval-samples", "2", "--lora", "2", "--reward",
        "tests.run.test_method:_by_length", "--learning-rate", "1e-2")  # fmt: skip
# the levels of NF4, from "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv:2305.14314, appendix E
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                0.7229568362236023, 1.0])  # fmt: skip


def figures(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_nf4_in_blocks_agrees_with_a_loop():
    """Every 64 inputs of an output by their largest, and the nearest of sixteen levels; others have one scale."""
    rng = np.random.default_rng(0)
    model = parts.load_model("nano")
    layers = dict(model.params["layers"])
    count, inputs, outputs = layers["down"].shape
    assert inputs % quantised.BLOCK == 0
    drawn = np.asarray(rng.normal(size=(count, inputs, outputs)), np.float32)
    kept = quantised.quantise(model.config, {"layers": layers | {"down": jnp.asarray(drawn)}}, "nf4", block=64)
    found = quantised.on_host(kept)["layers"]["down"]
    for layer, output in ((0, 0), (count - 1, outputs - 1)):
        for begin in range(0, inputs, 64):
            own = drawn[layer, begin : begin + 64, output].astype(np.float64)
            scale = np.abs(own).max()
            level = NF4[np.abs(own[:, None] / scale - NF4[None]).argmin(1)]
            close.assert_relative(found[layer, begin : begin + 64, output], level * scale)
    odd = quantised.quantise(model.config, {"layers": layers}, "nf4", block=inputs - 1)["layers"]["down"]
    assert odd.scale.shape[1] == 1, "a block that does not divide the inputs"


def test_an_adapter_trains_beside_a_base_in_four_bits(tmp_path, capsys):
    """It samples what it trains, goes on bit for bit, and is merged into the base as it was read."""
    words = [*TINY, "--lora-base", "nf4"]
    assert cli([*words, "--steps", "2", "--out", str(tmp_path / "run")]) == 0
    lines = figures(tmp_path / "run")
    assert all(line["grad/norm"] > 0 and line["kl/sampler_max"] < GAP for line in lines)
    assert f"on the weights of {weights.bundled('nano')} it is another model" in capsys.readouterr().out

    base, merged = parts.load_model("nano"), parts.load_model(str(tmp_path / "run" / "model"))
    few = quantised.quantise(base.config, base.params, "nf4", block=quantised.BLOCK)
    assert quantised.in_few_bits(few) and not quantised.in_few_bits(base.params)
    spec, adapter = lora.load(tmp_path / "run" / "adapter", base.config)
    assert float(jnp.abs(adapter["q_lora_b"]).max()) > 0
    want = lora.merge_on_host(quantised.on_host(few), adapter, spec.scale)
    for name, x in merged.params["layers"].items():
        rounded = jnp.asarray(want["layers"][name]).astype(jnp.bfloat16)  # the precision in which it came
        np.testing.assert_array_equal(np.asarray(x), np.asarray(rounded, np.float32))
    assert np.any(np.asarray(merged.params["layers"]["q"]) != np.asarray(base.params["layers"]["q"]))

    assert cli([*words, "--steps", "1", "--schedule-steps", "2", "--out", str(tmp_path / "cut")]) == 0
    assert cli(["--resume", str(tmp_path / "cut"), "--steps", "2"]) == 0
    again = figures(tmp_path / "cut")
    assert [line["grad/norm"] for line in again] == [line["grad/norm"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("int8", "--mesh", "data=1,fsdp=2"),
        ("nf4", "--kl", "k3_gradient_terms", "--kl-weight", "0.1", "--compute", "bfloat16"),
        ("int4", "--loop", "async"),
        ("float8_e4m3fn", "--strict", "--layout", ""),
    ],
    ids=" ".join,
)
def test_it_goes_with_meshes_references_and_other_loops(more, tmp_path):
    assert cli([*TINY, "--lora-base", *more, "--steps", "2", "--out", str(tmp_path / "run")]) == 0
    assert all(line["grad/norm"] > 0 for line in figures(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "dpo", "reward-model", "ppo", "online-dpo", "distil"])
def test_other_commands_have_it(command, tmp_path):
    words = [command, "--smoke", "--seeds", "1", "--lora", "2", "--lora-base", "nf4", "--out", str(tmp_path)]
    assert main([*words, "--model", "nano"]) == 0
    (weights,) = tmp_path.rglob("adapter_model.safetensors")
    assert weights.stat().st_size > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": 0}, "--lora-base nf4 is of the frozen weights beside an adapter: give --lora RANK"),
        ({"rollout_weights": "int8"}, "--rollout-weights int8 makes other weights of those that train"),
        ({"rollout_mesh": "data=2"}, "--rollout-mesh data=2 makes other weights"),
    ],
)
def test_mistakes_are_named(changes, said):
    with pytest.raises(UserError, match=said):
        options.base_of(of(lora_base="nf4", **{"lora": 4} | changes))


def test_a_base_takes_the_memory_of_its_bits():
    model = parts.load_model("nano")
    sizes = {
        kind: sum(
            x.size * jax.dtypes.itemsize_bits(x.dtype)
            for x in jax.tree.leaves(quantised.quantise(model.config, model.params, kind, block=64)["layers"]["down"])
        )
        for kind in ("nf4", "int8")
    }
    count = model.params["layers"]["down"].size
    assert sizes["nf4"] == count * 4 + count // 64 * 32 and sizes["int8"] == count * 8 + count // 64 * 32
