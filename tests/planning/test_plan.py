"""Plans: shapes of known models, closed forms against XLA's own figures, the search, the command."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from jaxrl_llm.distributed import expert_exchange, rules
from jaxrl_llm.distributed.mesh import parse_sizes
from jaxrl_llm.distributed.reshard import moved_bytes
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import heads
from jaxrl_llm.models.config import Experts, to_hf
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.quantised import BITS
from jaxrl_llm.planning import buffers, chips, compiled, cost, estimate, phases, reshard_cost, search, utilisation
from jaxrl_llm.planning import known_models as shapes
from jaxrl_llm.planning.parallel_layout import Sizes, gathered, held, held_adapter, held_matrices
from jaxrl_llm.planning.work import Work, columns, kept_bytes, rows_of, sampled_bytes
from jaxrl_llm.run import compile_cache, flags
from jaxrl_llm.run import plan as cli
from jaxrl_llm.run.settings import Settings, check
from jaxrl_llm.train import packing
from jaxrl_llm.train.methods.prefixes import prefix_trees
from jaxrl_llm.train.packing import packed_rows
from tests import close
from tests.close import doubles
from tests.models_for_tests import small_config

OF_PEAKS = 0.15  # the promise of docs/plans.md: a closed form is not the compiler's buffer assignment
OF_ARGUMENTS = 0.05  # arguments have known shapes: only the compiler's padding and alignment are left
OF_TWO_FIGURES = 1e-3  # GiB: each is rounded to a thousandth
OF_TOKENS = 0.01  # the rows of token numbers, beside the state of the optimiser
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920, "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200, "Qwen3-32B": 32_762_123_264, "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512, "Qwen2.5-14B": 14_770_033_664, "Qwen2.5-32B": 32_763_876_352,
    "Llama-3-8B": 8_030_261_248, "Llama-3-70B": 70_553_706_496, "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824, "Mistral-7B": 7_241_732_096,
    "Gemma-2-2B": 2_614_341_888, "Gemma-3-1B": 999_885_952, "GPT-2": 124_439_808,
}  # fmt: skip
V5E = chips.parse("v5e:4x4")
WORK = Work(1024, 3072, 128, 128, group=8)


@pytest.mark.parametrize("name", shapes.KNOWN)
def test_known_models_have_the_published_number_of_parameters(name):
    assert shapes.shape_of(name.lower()).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize(("window", "keys"), [(4, 3.5), (8, 6.0), (16, 8.0), (400, 8.0)])
def test_a_query_of_a_layer_with_a_window_sees_no_more(window, keys):
    """Of 16 tokens, 8 keys in the mean without one: up to the window they grow, behind it they are the window."""
    config, chip = small_config("mistral", windows=()), V5E.chip._replace(flops=1.0)
    whole, cut = (
        cost.step_seconds(dataclasses.replace(config, windows=windows), chip, Sizes(), Sizes(), Work(16, 16, 4, 4))
        for windows in ((), (window, 0))
    )
    assert whole["prefill"] - cut["prefill"] == 4 * 4 * 4 * (4 * 16) * (8.0 - keys)


def test_rotary_factors_of_llama_3():
    """As config.json of the models has them."""
    factors = {name: shapes.shape_of(name).rope_scaling.factor for name in shapes.KNOWN if name.startswith("Llama-3.")}
    assert factors == {"Llama-3.1-8B": 8.0, "Llama-3.2-1B": 32.0, "Llama-3.2-3B": 32.0}


def test_shapes_of_files(tmp_path, monkeypatch):
    config = small_config("llama")
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "Qwen3-8B").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    assert shapes.shape_of("Qwen3-8B") == config, "a folder of one's own comes first"
    assert shapes.shape_of("Qwen/Qwen3-8B").num_parameters == PARAMETERS["Qwen3-8B"]
    assert shapes.shape_of(str(tmp_path)) == shapes.shape_of(str(tmp_path / "config.json")) == config
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="model_type=None is not supported"):
        shapes.shape_of(str(tmp_path))
    with pytest.raises(ValueError, match="--model GPT-9 is no folder with config.json and none of Qwen3-0.6B"):
        shapes.shape_of("GPT-9")


def test_topologies():
    assert (V5E.chips, V5E.kind, chips.parse("v5p:2x2x4").chips) == (16, "v5e", 16)
    seven = chips.parse("v7x:2x2x1")  # two devices on a chip
    assert (seven.chips, seven.of_libtpu, seven.size) == (8, "tpu7x:2x2x1", "4 chips, 8 devices of 94.74 GiB")
    assert V5E.of_libtpu == V5E.name and V5E.size == "16 chips of 15.75 GiB"
    for name, message in (("v9:2x2", "unknown generation 'v9'"), ("v5e:16", "no shape of 2 sides, as in v5e:4x4"),
                          ("v5p:4x4", "as in v5p:2x2x2"), ("v5e:0x4", "'0x4' is no shape")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            chips.parse(name)


def test_what_a_chip_holds_by_hand():
    config = small_config("llama")  # width 16, inner 32, 2 layers, vocabulary 24, 4 heads of 4 for 2
    matrices = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32)
    whole, norms = 2 * 24 * 16, 2 * 2 * 16 + 16
    assert held(config, Sizes()) == config.num_parameters == matrices + whole + norms
    assert held(config, Sizes(data=8)) == config.num_parameters
    assert held(config, Sizes(fsdp=4, tensor=2)) == (matrices + whole) // 8 + norms
    assert gathered(config, Sizes(fsdp=4, tensor=2)) == matrices // 2 // 2 + 2 * 16


def _tiny(**changes):
    settings = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_layers": 8, "num_heads": 8,
                "num_kv_heads": 4, "head_dim": 16, "max_positions": 512}  # fmt: skip
    return small_config(**(settings | changes))


CASES = {
    "fsdp": (_tiny(), Sizes(fsdp=8), Sizes(data=8), {}),
    "tensor": (_tiny(), Sizes(fsdp=4, tensor=2), Sizes(data=2, tensor=4), {"microbatches": 2}),
    "kept": (_tiny(), Sizes(fsdp=4, tensor=2), Sizes(data=2, tensor=4), {"remat": False}),
    "experts": (
        _tiny(family="qwen3_moe", experts=Experts(8, 2, 64, normalise=True)), Sizes(fsdp=2, expert=4),
        Sizes(data=2, expert=4), {},
    ),
    "adapter": (_tiny(), Sizes(fsdp=4, tensor=2), Sizes(data=2, tensor=4), {"adapter": 4}),
    "data": (_tiny(family="llama"), Sizes(data=4, tensor=2), Sizes(data=4, tensor=2), {"prompt": 32, "response": 32}),
}  # fmt: skip


@pytest.mark.parametrize("phase", ["update", "score", "reshard", "prefill", "decode"])
@pytest.mark.parametrize("case", CASES)
def test_closed_form_against_the_compiler(case, phase):
    """Within 15 % of XLA's buffer assignment for eight CPU devices."""
    if case == "experts" and phase in ("update", "score"):
        pytest.skip("on a CPU the products of groups are expanded to all experts; a TPU has them as one operation")
    config, train, rollout, changes = CASES[case]
    work = Work(**({"prompt": 64, "response": 64, "rows": 32, "rollout_rows": 32, "group": 2, "scores": 1,
                    "compute_dtype": jnp.float32} | changes))  # fmt: skip
    found = compiled.of_step(config, train, rollout, work, jax.devices(), names=(phase,))[phase]
    guess = estimate.memory(config, train, rollout, work)[phase]
    assert guess.arguments == pytest.approx(found.arguments, rel=OF_ARGUMENTS)
    assert guess.peak == pytest.approx(found.peak, rel=OF_PEAKS), (guess, found)


@pytest.mark.parametrize("sizes", [Sizes(fsdp=8), Sizes(fsdp=4, tensor=2)])
def test_reward_models_are_planned_as_they_read(sizes):
    """Within 15 % of the compiler's assignment for the program of a run; their own shape, their own context."""
    judge = _tiny(num_layers=4, hidden_size=128, max_positions=96)
    work = Work(64, 64, 32, 32, group=2, compute_dtype=jnp.float32, judges=(judge, _tiny()))
    names = ("reward 1", "reward 2")
    found = compiled.of_step(_tiny(), sizes, sizes, work, jax.devices(), names=names)
    guess = estimate.memory(_tiny(), sizes, sizes, work)
    assert found.keys() == set(names) and set(names) < guess.keys()
    for name in names:
        assert guess[name].arguments == pytest.approx(found[name].arguments, rel=OF_ARGUMENTS)
        assert guess[name].peak == pytest.approx(found[name].peak, rel=OF_PEAKS), (name, guess[name], found[name])


def test_reward_models_lie_beside_every_phase():
    """Two of them by hand: both in bfloat16 all along, each with what it needs while it reads."""
    config, judges = small_config("llama"), (_tiny(), _tiny(num_layers=4))
    here, (one, two) = held(config, Sizes()), (2 * held(judge, Sizes()) for judge in judges)
    work = dataclasses.replace(WORK, judges=judges)
    alone = {"decode": 2.0, "update": 4.0, "reward 1": one + 5.0, "reward 2": two + 6.0}
    assert estimate.of_the_loop(config, Sizes(), alone, work) == {
        "decode": 2 + 12 * here + one + two, "update": 4 + one + two, "reward 1": 5 + 12 * here + one + two,
        "reward 2": 6 + 12 * here + one + two,
    }  # fmt: skip


def test_a_reward_model_by_hand():
    """One chip: operations on every token of all rows, without the vocabulary's product."""
    judge, chip = shapes.shape_of("Llama-3.2-1B"), chips.CHIPS["v6e"]
    work = Work(256, 256, 64, 64, judges=(judge,))
    active, tokens = judge.num_parameters - 128256 * 2048, 64 * 512
    attention = 4 * 16 * 32 * 64 * tokens * 256
    seconds = (2 * active * tokens + attention) / chip.flops
    assert cost.step_seconds(judge, chip, Sizes(), Sizes(), work)["reward"] == doubles(seconds)
    least = cost.least_seconds(judge, chip, Sizes(), Sizes(), work)["reward"]
    assert least == doubles(seconds * heads.READ_AT_ONCE / 64)


def test_a_reward_model_in_a_plan(capsys):
    words = ["--model", "Qwen3-1.7B", "--topology", "v5e:2x4", "--estimate", "--show", "1", "--json"]
    assert cli.cli(words) == 0
    without = json.loads(capsys.readouterr().out)["plans"][0]
    assert cli.cli([*words, "--reward", "Llama-3.2-3B"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"][0]
    held_too = 2 * held(shapes.shape_of("Llama-3.2-3B"), Sizes(fsdp=8)) / 2**30
    assert found["mesh"] == without["mesh"] == "fsdp=8"
    assert found["peak_gib"]["update"] - without["peak_gib"]["update"] == pytest.approx(held_too, abs=OF_TWO_FIGURES)
    assert found["roofline_seconds"]["reward"] > 0 and "reward" not in without["peak_gib"]
    assert flags.read(Settings, found["flags"].split(), prog="jaxrl").reward == ("Llama-3.2-3B",)
    work = cli.work_of(cli.Settings(estimate=True, reward=("Llama-3-8B",)), shapes.shape_of("nano"))
    assert [judge.num_parameters for judge in work.judges] == [PARAMETERS["Llama-3-8B"] - 128256 * 4096]
    assert cli.cli([*words, "--reward", "Qwen3-32B", "Llama-3-70B"]) == 1
    assert json.loads(capsys.readouterr().out)["would_fit"]


NARROW = {"compute_dtype": jnp.bfloat16, "weights": jnp.bfloat16}


@pytest.mark.parametrize("phase", ["update", "score", "reshard"])
def test_weights_without_masters_are_planned_as_they_are_kept(phase):
    """Two bytes in place of four; the rest is not compared, for a CPU computes bfloat16 as float32."""
    whole = Work(64, 64, 32, 32, group=2, scores=1)
    config, train, rollout = _tiny(), Sizes(fsdp=8), Sizes(data=8)
    given = {}
    for name, work in (("whole", whole), ("narrow", dataclasses.replace(whole, **NARROW))):
        found = compiled.of_step(config, train, rollout, work, jax.devices(), names=(phase,))[phase]
        guess = estimate.memory(config, train, rollout, work)[phase]
        assert guess.arguments == pytest.approx(found.arguments, rel=OF_ARGUMENTS)
        given[name] = guess.arguments
    assert given["whole"] - given["narrow"] == 2 * held(config, train)
    loops = (estimate.of_the_loop(config, train, {"decode": 0.0}, work)["decode"] for work in (whole, work))
    assert next(loops) - next(loops) == 2 * held(config, train)


@pytest.mark.parametrize("sizes", [Sizes(fsdp=4, tensor=2), Sizes(data=4, tensor=2)])
@pytest.mark.parametrize("base", ["", *BITS])
def test_what_lies_beside_an_adapter_is_planned_as_it_is_kept(base, sizes):
    """A base in few bits with its scales, an adapter, and moments of the adapter alone, in every phase that runs."""
    config = _tiny(hidden_size=256, intermediate_size=512)  # blocks of 64 inputs, which divide over the meshes
    work = Work(64, 64, 32, 32, group=2, scores=1, adapter=4, base=base)
    found = compiled.of_step(config, sizes, sizes, work, jax.devices())
    guess = estimate.memory(config, sizes, sizes, work)
    assert found.keys() == guess.keys() == {"prefill", "decode", "score", "update"}  # nothing moves for a rollout
    for phase, memory in guess.items():
        assert memory.arguments == pytest.approx(found[phase].arguments, rel=OF_ARGUMENTS), phase
    loop = estimate.of_the_loop(config, sizes, {"decode": 0.0}, work, sizes)["decode"]
    assert loop == (8 + 4) * held_adapter(config, sizes, 4)  # moments, and a reference of the adapter alone


@pytest.mark.parametrize("rollout", [Sizes(data=8), Sizes(fsdp=8)])
def test_rollouts_in_few_bits_beside_an_adapter_have_weights_of_their_own(rollout):
    """The base in few bits with its adapter, made from the base that trains beside it, wherever they run."""
    config, train = _tiny(hidden_size=256), Sizes(fsdp=8)
    work = Work(64, 64, 32, 32, group=2, adapter=4, sampled="int8", compute_dtype=jnp.float32)
    found = compiled.of_step(config, train, rollout, work, jax.devices(), names=("reshard", "prefill", "decode"))
    guess = estimate.memory(config, train, rollout, work)
    for phase, memory in found.items():
        assert guess[phase].arguments == pytest.approx(memory.arguments, rel=OF_ARGUMENTS), phase
    assert guess["reshard"].peak == pytest.approx(found["reshard"].peak, rel=OF_PEAKS)
    assert sampled_bytes(config, train, work) == (
        4 * held(config, train) - 3 * held_matrices(config, train) + 4 * held_adapter(config, train, 4)
    )
    beside = estimate.of_the_loop(config, train, {"decode": 0.0}, work, rollout)["decode"]
    assert beside == 4 * held(config, train) + (4 + 8) * held_adapter(config, train, 4)  # what trains, and its moments


def test_rollouts_in_few_bits_are_planned_as_they_are_kept():
    """Matrices, keys and values in bytes; what computes with them is not compared, for a CPU widens a layer of each."""
    config, train, rollout = _tiny(hidden_size=256), Sizes(fsdp=8), Sizes(data=8)
    work = Work(64, 64, 32, 32, group=2, sampled="int8", cached="int8", compute_dtype=jnp.float32)
    found = compiled.of_step(config, train, rollout, work, jax.devices(), names=("reshard", "prefill", "decode"))
    guess = estimate.memory(config, train, rollout, work)
    for phase, memory in found.items():
        assert guess[phase].arguments == pytest.approx(memory.arguments, rel=OF_ARGUMENTS), phase
    assert guess["reshard"].peak == pytest.approx(found["reshard"].peak, rel=OF_PEAKS)
    cache = phases._cache(*_sampled(config, rollout, work), work)
    here = sum(
        x.size * x.dtype.itemsize for name in ("k", "v", "k_scale", "v_scale") for x in jax.tree.leaves(cache[name])
    )
    assert here == 2 * 8 * 4 * 32 * cache["segment_ids"].shape[1] * (16 + 4)  # layers, heads, rows; a scale to a head
    assert estimate.cache(config, rollout, work, 4) == 4 * 128 * (2 * 8 * 4 * (16 + 4) + 8)
    plain = Work(64, 64, 32, 32, group=2)
    read = [
        cost.step_seconds(config, V5E.chip, train, rollout, dataclasses.replace(plain, sampled=few))["decode"]
        for few in ("", "int8")
    ]
    matrices = held_matrices(config, rollout)
    close.assert_relative(read[0] - read[1], 64 * matrices / V5E.chip.bandwidth)  # a byte less at each token


def _sampled(config, sizes, work):
    mesh = sizes.mesh(jax.devices())
    return phases._rollout_params(config, mesh, work)[0], mesh


def test_an_adapter_by_hand():
    """Rank 2 beside two layers of width 16: ``A`` along the inputs, ``B`` along the outputs of each matrix."""
    config = small_config("llama")
    inputs = 2 * 2 * (16 + 16 + 16 + 16 + 16 + 16 + 32)  # q, k, v, o, gate, up, down
    outputs = 2 * 2 * (16 + 8 + 8 + 16 + 32 + 32 + 16)
    assert held_adapter(config, Sizes(), 2) == inputs + outputs
    assert held_adapter(config, Sizes(fsdp=4, tensor=2), 2) == (  # o and down lie the other way round
        2 * 2 * ((16 * 5) // 4 + (16 + 32) // 2) + 2 * 2 * ((16 + 8 + 8 + 32 + 32) // 2 + (16 + 16) // 4)
    )
    assert held_matrices(config, Sizes()) == 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32)
    work = dataclasses.replace(WORK, adapter=2, base="nf4")
    whole = (config.num_parameters - held_matrices(config, Sizes())) * 2
    assert kept_bytes(config, Sizes(), work) == (
        whole + held_matrices(config, Sizes()) * (0.5 + 2 / 64) + 4 * (inputs + outputs)
    )


def test_an_adapter_makes_a_plan_fit(capsys):
    """Qwen3-8B on eight v5e chips: no room for its masters, room for its weights; the flags are of the main job."""
    command = ["--model", "Qwen3-8B", "--topology", "v5e:2x4", "--estimate", "--show", "1"]
    assert cli.cli(command) == 1
    for words in (["--lora", "16"], ["--lora", "16", "--lora-base", "nf4"]):
        capsys.readouterr()
        assert cli.cli([*command, *words]) == 0
        out = capsys.readouterr().out
        assert f"an adapter of rank 16 beside weights in {words[-1] if len(words) > 2 else 'bfloat16'}, " in out
        said = next(line for line in out.splitlines() if "flags of the main job" in line).partition(": ")[2].split()
        found = flags.read(Settings, said, prog="jaxrl")
        assert (found.lora, found.lora_base) == (16, words[-1] if len(words) > 2 else "")
        assert (found.rollout_mesh == "") == ("rollouts read the weights that are there" in out)
        assert found.rollout_mesh == "" or not found.lora_base  # few bits stay where they are
    capsys.readouterr()
    assert cli.cli([*command, "--json", "--lora", "16", "--rollout-weights", "int8"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    found = flags.read(Settings, plan["flags"].split(), prog="jaxrl")
    assert (found.lora, found.rollout_weights) == (16, "int8") and found.rollout_mesh == plan["rollout_mesh"]
    assert "reshard" in plan["peak_gib"]  # in few bits a rollout has weights of its own, wherever it runs
    few = search.plans(shapes.shape_of("Qwen3-8B"), V5E, dataclasses.replace(WORK, adapter=16, base="nf4"))
    assert few and all(plan.train == plan.rollout for plan in few)
    # a base has no gradient: of three passes with weights one is saved, attention's stay
    config, one = shapes.shape_of("Llama-3.2-1B"), Sizes()
    both = [
        cost.step_seconds(config, V5E.chip, one, one, Work(256, 256, 4, 4, remat=False, adapter=rank))["update"]
        for rank in (0, 8)
    ]
    close.assert_relative(both[0] - both[1], 2 * config.num_parameters * 4 * 512 / V5E.chip.flops)


RECORD = json.loads((pathlib.Path(__file__).resolve().parents[2] / "results/benchmarks/tpu_schedule.json").read_text())
MIXTURES = [(name, phase) for name, cell in RECORD.items() if "A3B" in name for phase in cell["gib"]]


@pytest.mark.parametrize("name, phase", MIXTURES)
def test_closed_form_of_a_mixture_against_the_tpus_compiler(name, phase):
    """Within 15 % of its buffers, as the table of the schedules has them."""
    cell, model = RECORD[name], name.split(" ")[0]
    parts = {key: cell[key] for key in ("rollout_rows", "microbatches", "remat")}
    train, rollout = (Sizes(**parse_sizes(cell[key])) for key in ("mesh", "rollout_mesh"))
    work = dataclasses.replace(WORK, scores=1, **parts)
    found = estimate.memory(shapes.shape_of(model), train, rollout, work, kernels=True)[phase]
    assert found.peak / 2**30 == pytest.approx(cell["gib"][phase], rel=OF_PEAKS)


def test_rows_in_a_layout_are_planned_as_they_run():
    """The layout that a run's planner makes is what is compiled; what it leaves out is not counted."""
    config, mesh = small_config(max_positions=128), Sizes(fsdp=4).mesh(jax.devices()[:4])
    padded = Work(16, 48, 16, 16, group=4, microbatches=2, compute_dtype=jnp.float32)
    seconds, computed = [], []
    for planner in (prefix_trees, packed_rows, None):
        work = dataclasses.replace(padded, planner=planner, filled=0.25 if planner else 1.0)
        seconds.append(cost.step_seconds(config, V5E.chip, Sizes(fsdp=4), Sizes(fsdp=4), work)["update"])
        computed.append(columns(work))
        if planner is not None:
            phase = phases.update_phase(config, mesh, work)
            layout = phase.arguments[1].extras[packing.LAYOUT]
            made = planner(rows_of(work), parts=2, shards=4)
            assert layout.source.shape[1:] == made.source.shape[1:] and layout.place.shape == made.place.shape
            assert (layout.pages is not None) == (planner is prefix_trees)
            assert phase.lower().compile().memory_analysis().argument_size_in_bytes > 0
            scored = phases.score_phase(config, mesh, work).arguments[1]
            assert scored.extras[packing.LAYOUT].place.shape == scored.tokens.shape == (8, 64)
    assert computed[0] < computed[1] < computed[2] == 16 * 64
    assert seconds[0] <= seconds[1] <= seconds[2]
    work = dataclasses.replace(WORK, planner=packed_rows)
    kept = [plan.work for plan in search.plans(shapes.shape_of("Qwen3-8B"), V5E, work)]
    assert kept and all(work.update_rows % work.group == 0 for work in kept)


def test_the_loop_adds_what_lies_there_meanwhile():
    config = small_config("llama")
    here = held(config, Sizes())
    alone = {"reshard": 1.0, "decode": 2.0, "score": 3.0, "update": 4.0}
    work = dataclasses.replace(WORK, scores=1)  # a reference in bfloat16 stays
    assert estimate.of_the_loop(config, Sizes(), alone, work) == {
        "reshard": 1 + 10 * here, "decode": 2 + 14 * here, "score": 3 + 10 * here, "update": 4 + 2 * here,
    }  # fmt: skip


def test_active_parameters_of_a_mixture():
    """48 layers: 18.9 M for attention, 8 experts of 4.7 M and 0.3 M that choose them, and 311 M for the vocabulary."""
    by_hand = 48 * (2 * 2048 * (32 + 4) * 128 + 8 * 3 * 2048 * 768 + 2048 * 128) + 151936 * 2048
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    assert cost.active_parameters(shapes.shape_of("Qwen3-30B-A3B")) == by_hand + norms
    tied = shapes.shape_of("Qwen3-0.6B")
    assert cost.active_parameters(tied) == tied.num_parameters


def test_a_step_by_hand():
    """One chip, no links: the update is operations, decoding reads weights and half of the caches."""
    config, chip = shapes.shape_of("Llama-3.2-1B"), chips.CHIPS["v6e"]
    work = Work(256, 256, 4, 4)
    found = cost.step_seconds(config, chip, Sizes(), Sizes(), work)
    active, tokens = config.num_parameters, 4 * 512
    attention = 4 * 16 * 32 * 64 * tokens * 256
    assert found["update"] == doubles(4 * (2 * active * tokens + attention) / chip.flops)
    read = 2 * active + 4 * (2 * 2 * 16 * 8 * 64) * (256 + 128)
    assert found["decode"] == doubles(256 * read / chip.bandwidth)
    assert found["reshard"] == found["score"] == 0


def test_tokens_are_sent_to_experts_where_there_is_a_program_for_it():
    """Eight choices over 64 devices: half of what collecting carries, on v5p; v5e and GPUs collect, as they run."""
    config, table = shapes.shape_of("Qwen3-30B-A3B"), chips.CHIPS | chips.GPUS
    v5p, v5e, h100 = (
        cost._experts(config, Sizes(expert=64), table[kind], 1024, 2) * table[kind].link
        for kind in ("v5p", "v5e", "h100")
    )
    assert v5e == doubles(h100) and v5p == doubles(expert_exchange.load(8, 64) * v5e) and v5p < 0.5 * v5e


def test_meetings_are_counted_where_they_are_known():
    """Two sums a layer and token over tensor; the matrices of a layer one by one over fsdp."""
    config, work = shapes.shape_of("Llama-3.2-1B"), Work(256, 256, 4, 4, remat=False, scores=1)
    kinds = chips.CHIPS["v6e"], chips.CHIPS["v6e"]._replace(meeting=100.0)  # nothing else is seen beside it
    sizes = Sizes(tensor=2), Sizes(fsdp=2)
    for size, want in zip(
        sizes, ({"decode": 256 * 32, "update": 64, "score": 32}, {"update": 336, "score": 112}), strict=True
    ):
        plain, met = (
            cost.step_seconds(config, kind, size, Sizes(tensor=size.tensor, data=size.fsdp), work) for kind in kinds
        )
        for phase, meetings in want.items():
            apart = plain[phase] / (100 * meetings)  # what one phase takes for other things, which a meeting may hide
            assert met[phase] - plain[phase] == pytest.approx(100 * meetings, rel=apart), (size, phase)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_bytes_of_a_reshard_are_those_of_the_shardings(family):
    config = _tiny(family=family, **({"experts": Experts(8, 2, 64)} if family == "qwen3_moe" else {}))
    shapes = jax.eval_shape(make_policy(config).init, jax.random.key(0))
    pairs = [(Sizes(fsdp=8), Sizes(data=8)), (Sizes(2, 2, 2), Sizes(data=2, tensor=4)), (Sizes(fsdp=4, expert=2),) * 2,
             (Sizes(fsdp=2, context=2, tensor=2), Sizes(data=4, tensor=2))]  # fmt: skip
    for before, after in pairs:
        put = [rules.shardings(shapes, sizes.mesh(jax.devices())) for sizes in (before, after)]
        assert sum(reshard_cost.received(config, before, after)) == moved_bytes(shapes, *put, 2)
    # each chip has an eighth of what divides, and lacks the rest
    lacks = reshard_cost.received(config, Sizes(fsdp=8), Sizes(data=8))
    assert set(lacks) == {2 * (config.num_parameters - held(config, Sizes(fsdp=8)))}


def test_the_search_prefers_what_fits_and_then_the_quickest():
    config = shapes.shape_of("Qwen3-8B")
    found = search.plans(config, V5E, WORK)
    limit = V5E.chip.hbm * search.MARGIN
    fits = [plan.peak <= limit for plan in found]
    assert fits[0] and fits == sorted(fits, reverse=True)
    steps = [plan.step for plan, ok in zip(found, fits, strict=True) if ok]
    assert steps == sorted(steps)
    assert all(plan.work.rows // plan.work.microbatches % plan.train.rows == 0 for plan in found)
    assert all(plan.work.rollout_rows // plan.work.group % plan.rollout.rows == 0 for plan in found)
    assert found[0].limit in found[0].peaks and found[0].step == doubles(sum(found[0].seconds.values()))
    # 70 B do not fit on sixteen such chips, and the smallest is on top
    large = search.plans(shapes.shape_of("Llama-3-70B"), V5E, WORK)
    assert large[0].peak > V5E.chip.hbm and large[0].peak == min(plan.peak for plan in large)


def test_parts_of_the_batch_leave_room_for_the_reference():
    """The frozen copy lies beside the update, too: more parts, and another mesh, are then the quickest that fit."""
    work = Work(512, 1536, 128, 128, group=8, scores=1)
    found = search.plans(shapes.shape_of("Qwen3-8B"), chips.parse("v5e:4x4"), work)[0]
    assert (found.train, found.work.microbatches, found.work.remat) == (Sizes(fsdp=16), 8, True)
    assert found.peak <= chips.parse("v5e:4x4").chip.hbm * search.MARGIN
    small = search.plans(shapes.shape_of("Qwen3-1.7B"), chips.parse("v5e:2x2"), work)
    alone = search.plans(shapes.shape_of("Qwen3-1.7B"), chips.parse("v5e:2x2"), dataclasses.replace(work, scores=0))
    limit = chips.parse("v5e:2x2").chip.hbm * search.MARGIN
    assert sum(p.peak <= limit for p in small) == sum(p.peak <= limit for p in alone) == 18


def test_memory_of_a_plan_by_the_compilers_buffers(capsys, monkeypatch):
    monkeypatch.setattr(compiled, "available", lambda *_: True)
    monkeypatch.setattr(compiled, "devices", lambda topology: [None])
    kept: list[bool] = []
    monkeypatch.setattr(compile_cache, "enable", kept.append)
    monkeypatch.setattr(buffers, "peak", lambda *given, **_: 2.0**30 * (7 if given[5] == "update" else 1))
    command = ["--model", "Qwen3-0.6B", "--show", "1", "--buffers"]
    assert cli.cli([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"][0]
    assert found["limit"] == "update" and found["loop_peak_gib"] == 7.0 and found["peak_gib"]["decode"] > 1
    assert kept == [False]  # what is compiled for a TPU that is not there cannot be loaded again
    assert cli.cli([*command, "--schedule"]) == 2
    assert "which --buffers leaves out" in capsys.readouterr().err


def test_gpus_are_planned_by_the_same_roofline(capsys):
    """By hand: a token of decode reads the weights and the cache; no TPU's kernels; two machines have the network."""
    config, eight = shapes.shape_of("Qwen3-8B"), chips.parse("h100:8")
    work = Work(1024, 1024, 64, 64, group=8)
    best = search.plans(config, eight, work, train=Sizes(fsdp=8), rollout=Sizes(data=8))[0]
    read = 2 * config.num_parameters + 8 * 2 * 2 * 36 * 8 * 128 * (1024 + 512)
    close.assert_relative(best.seconds["decode"], 1024 * read / 3.35e12)
    assert best.peaks["decode"] - best.peaks["reshard"] != 0 and best.peak < eight.chip.hbm
    alone = estimate.decode(config, Sizes(data=8), work)
    masters = sum(estimate.of_the_loop(config, Sizes(fsdp=8), {"decode": 0.0}, work).values())
    assert best.peaks["decode"] == alone.peak + masters  # one layer's cache is cut out of the stack
    # rows short enough that the backward pass of one layer takes less than 128 steps of logits
    longer = [estimate.update(config, Sizes(), Work(128, 384, 4, 4, scored=n)).peak for n in (0, 2048)]
    assert longer[1] - longer[0] == 3 * 4 * (512 - 128) * 4 * config.padded_vocab_size  # logits of 2,048 tokens
    far = cost.step_seconds(config, chips.parse("h100:16").chip, Sizes(fsdp=16), Sizes(data=16), work)
    near = cost.step_seconds(config, eight.chip, Sizes(fsdp=16), Sizes(data=16), work)
    assert far["reshard"] == doubles(9 * near["reshard"])  # 450 GB/s within, 50 GB/s between
    assert cli.cli(["--model", "Llama-3-70B", "--topology", "h100:8", "--show", "1"]) == 1
    out = capsys.readouterr().out
    assert "memory estimated in closed form" in out and "by the closed form would: h100:32 (" in out


def test_rows_of_many_tokens_are_cut_along_context(capsys):
    """Qwen3-8B at 131,072 tokens: no chip of 64 holds a whole row's activations, an eighth of one fits."""
    config = dataclasses.replace(shapes.shape_of("Qwen3-8B"), max_positions=131072)
    work, topology = Work(3072, 128000, 64, 64, group=8), chips.parse("v5p:4x4x4")
    best = search.plans(config, topology, work)[0]
    assert best.train.context > 1 and best.train.chips == 64 and best.peak <= search.MARGIN * topology.chip.hbm
    one, cut = (estimate.update(config, Sizes(fsdp=8, context=n), work, kernels=True) for n in (1, 8))
    assert cut.working < 0.5 * one.working
    assert cut.arguments == pytest.approx(one.arguments, rel=OF_TOKENS)
    long = ["--positions", "131072", "--prompt", "3072", "--response", "128000", "--prompts", "8"]
    assert cli.cli(["--model", "Qwen3-8B", "--topology", topology.name, "--estimate", "--show", "1", *long]) == 0
    assert f"train {best.train.spec} in" in capsys.readouterr().out
    assert all(sizes.context == 1 for sizes in search.train_sizes(config, 64, 4096))


def test_given_meshes_are_kept():
    found = search.plans(
        shapes.shape_of("Qwen3-0.6B"), V5E, WORK, train=Sizes(fsdp=8, tensor=2), rollout=Sizes(data=16)
    )
    assert {(plan.train, plan.rollout) for plan in found} == {(Sizes(1, 8, 2), Sizes(16, 1, 1))}


def test_command_text_and_json(capsys):
    command = ["--model", "Qwen3-8B", "--topology", "v5e:4x4", "--estimate"]
    assert cli.cli(command) == 0
    out = capsys.readouterr().out
    assert "resharding brings " in out and "flags of the main job: --mesh fsdp=16 --rollout-mesh " in out
    assert "--compute bfloat16 --attention auto --prompts-per-step 16 --group-size 8 --prompt-tokens 1024" in out
    assert "16 chips of 15.75 GiB" in out and "estimated in closed form" in out and "fits: " in out
    assert cli.cli([*command, "--json", "--show", "2", "--reference"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["memory"] == "estimated in closed form" and data["parameters"] == PARAMETERS["Qwen3-8B"]
    assert len(data["plans"]) == 2 and data["plans"][0]["fits"]
    assert 0 < data["plans"][0]["reshard_gib"]["most_of_a_chip"] < 16
    assert set(data["plans"][0]["peak_gib"]) == {"reshard", "prefill", "decode", "score", "update"}


def test_no_argument_plans_the_embedded_model(capsys, monkeypatch):
    """Its rows take the 512 positions that it has: a quarter of them is the prompt."""
    monkeypatch.setattr(compiled, "available", lambda *_: False)
    assert cli.cli([]) == 0
    out = capsys.readouterr().out
    assert "nano, 152,480 parameters, on v5e:2x4: 8 chips" in out and "128 rows of 128 + 384 tokens" in out
    assert "--prompt-tokens 128 --max-new-tokens 384" in out and "fits: " in out
    work = cli.work_of(cli.Settings(model="GPT-2", prompt=1000), shapes.shape_of("GPT-2"))
    assert (work.prompt, work.response) == (1000, 24)
    large = cli.work_of(cli.Settings(model="Qwen3-8B"), shapes.shape_of("Qwen3-8B"))
    assert (large.prompt, large.response) == (1024, 3072)


def test_command_where_nothing_fits(capsys):
    """It says what would: the smallest slice of the generation, and of the others none with more chips."""
    command = ["--model", "Qwen3-8B", "--topology", "v5e:2x4", "--estimate", "--show", "1"]
    assert cli.cli(command) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out and "nothing fits v5e:2x4; by the closed form would: v5e:4x4 (fsdp=16, 13." in out
    assert cli.cli([*command, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["would_fit"]
    assert {name[:3] for name in found} == {"v5e", "v4:", "v5p", "v6e", "v7x"}
    for name, plan in found.items():
        assert 0 < plan["peak_gib"] * 2**30 <= search.MARGIN * chips.parse(name).chip.hbm
        assert chips.parse(name).chips <= 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "x"], "--model x is no folder"),
        (["--model", "Qwen3-8B", "--topology", "v5e"], "'' is no shape of 2 sides"),
        (["--model", "Qwen3-8B", "--topology", "h100:12"], "is no number of GPUs, at most 8 or a multiple"),
        (["--model", "Qwen3-8B", "--prompt", "0"], "--prompt 0 must be at least 1"),
        (["--model", "Qwen3-8B", "--effort", "2"], "--effort 2 must lie between -1"),
        (["--model", "Qwen3-8B", "--response", "50000"], "give --positions N for a model that has been"),
        (["--model", "Qwen3-8B", "--mesh", "context=8", "--response", "3001"], "context does not divide the 4025"),
        (["--model", "Qwen3-8B", "--rollout-mesh", "context=8"], "--rollout-mesh context=8: context is of training"),
        (["--model", "Qwen3-8B", "--mesh", "fsdp=3"], "--mesh fsdp=3 has no 8 devices"),
        (["--model", "Qwen3-8B", "--mesh", "rows=8"], "--mesh rows=8: give data=N"),
        (["--model", "Qwen3-8B", "--mesh", "data=2,data=8"], "--mesh data=2,data=8: an axis is given twice"),
        (
            ["--model", "Qwen3-8B", "--prompts", "3", "--group", "1", "--mesh", "fsdp=8"],
            "divide over no mesh of 8 chips",
        ),
        (["--model", "nano", "--response", "500"], "--prompt 128 and --response 500 exceed the 512 positions"),
        (["--model", "nano", "--prompt", "5000"], "--prompt 5000 leaves no room for a response in the 512 positions"),
        (["--model", "nano", "--estimate", "--positions", "-5"], "--positions -5 must not be negative"),
        (["--model", "nano", "--estimate", "--buffers"], "which --estimate leaves out; give one of them"),
        (["--model", "nano", "--topology", "h100:8", "--buffers"], "--buffers is the TPU compiler's count, and h100:8"),
        (["--model", "nano", "--estimate", "--lora", "-1"], "--lora -1 must not be negative"),
        (["--model", "nano", "--estimate", "--lora-base", "nf4"], "frozen weights beside an adapter: give --lora RANK"),
        (
            ["--model", "nano", "--estimate", "--lora", "4", "--weights", "bfloat16"],
            "the base of an adapter is kept in the type that computes anyway; drop one of them",
        ),
        (
            [
                "--model",
                "Qwen3-8B",
                "--lora",
                "4",
                "--lora-base",
                "nf4",
                "--mesh",
                "fsdp=8",
                "--rollout-mesh",
                "data=8",
            ],
            "--rollout-mesh data=8 makes other weights",
        ),
        (
            ["--model", "Qwen3-8B", "--lora", "4", "--lora-base", "nf4", "--mesh", "context=8"],
            "--mesh context=8: a base in few bits is sampled where it trains, and context is of training alone",
        ),
        (["--modle", "Qwen3-8B"], "--model"),
        (["--model", "nano", "--estimate", "--reward", "nobody"], "--reward nobody is no folder with config.json"),
    ],
)
def test_wrong_commands(capsys, words, message):
    assert cli.cli(words) == 2
    assert message in capsys.readouterr().err


def test_without_the_compiler_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.cli(["--model", "Qwen3-0.6B", "--show", "1"]) == 0
    assert "closed form: libtpu is not installed (pip install 'jaxrl_llm[plan]')" in capsys.readouterr().out
    with pytest.raises(ValueError, match="libtpu is not installed"):
        compiled.devices(V5E)
    command = ["--model", "Qwen3-0.6B", "--topology", "h100:8", "--show", "1"]
    assert cli.cli(command) == 0
    assert "closed form: JAX's CUDA compiler is not installed (pip install 'jax[cuda12]')" in capsys.readouterr().out
    assert cli.cli([*command, "--estimate"]) == 0
    assert "closed form;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("h100:4", "1x1x4", "cuda_compute_capability { major: 9 minor: 0 }"),
        ("h200:8", "1x1x8", f"device_memory_size: {143_771 * 2**20} "),
        ("b200:32", "1x4x8", "memory_bandwidth: 8000000000000 "),
    ],
)
def test_gpus_that_are_not_there_are_described_to_the_compiler(name, shape, said, monkeypatch):
    """Machines of eight; the program of a described device is known by CUDA's name of it."""
    asked = []

    def get_topology_desc(*given, **described):
        asked.append((given, described))
        return types.SimpleNamespace(devices=["a", "b"])

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "jax_cuda13_plugin" else None)
    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    assert compiled.devices(chips.parse(name)) == ["a", "b"]
    ((given, described),) = asked
    assert given == (name, "cuda") and described["topology"] == shape and said in described["target_config"]

    def no_driver(*given, **described):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", no_driver)
    with pytest.raises(UserError, match=f"--topology {name}: JAX's CUDA compiler did not start .*JAX_PLATFORMS=cpu"):
        compiled.devices(chips.parse(name))
    kinds = utilisation.KINDS  # as a run knows it
    assert kinds[chips.TARGETS[chips.parse(name).kind].name] == chips.parse(name).kind


def test_a_plan_of_gpus_asks_for_none():
    """Else JAX's plugin looks for a driver, does not find one and is not there to compile."""
    command = "from jaxrl_llm.planning import compiled; compiled.without_a_gpu({}); import jax; print(jax.devices())"
    bare = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"}
    said = subprocess.run([sys.executable, "-c", command], env=bare, capture_output=True, text=True, check=True).stdout
    assert said.startswith("[CpuDevice(")


@pytest.mark.slow
@pytest.mark.skipif(not compiled.available(chips.parse("h100:8")), reason="needs JAX's plugin for CUDA")
def test_memory_of_a_plan_by_the_compiler_of_gpus():
    config, work = shapes.shape_of("Qwen3-0.6B"), Work(64, 64, 16, 16, group=4)
    devices = compiled.devices(chips.parse("h100:8"))
    found = compiled.of_step(config, Sizes(fsdp=8), Sizes(data=8), work, devices, names=("reshard", "decode"))
    assert all(one.fits and one.schedule is None for one in found.values())
    expected = estimate.reshard(config, Sizes(fsdp=8), Sizes(data=8), work)
    assert found["reshard"].arguments == pytest.approx(expected.arguments, rel=OF_TOKENS)
    assert found["decode"].arguments > sampled_bytes(config, Sizes(data=8), work)


def test_the_flags_of_a_plan_are_flags_of_the_main_job():
    config = shapes.shape_of("Qwen3-8B")
    plan = search.plans(config, V5E, dataclasses.replace(WORK, rows=256, rollout_rows=256))[0]
    found = flags.read(Settings, cli.job_flags(plan).split(), prog="jaxrl")
    assert (found.prompts_per_step, found.group_size, found.microbatches) == (32, 8, plan.work.microbatches)
    assert (found.prompt_tokens, found.max_new_tokens, found.remat) == (1024, 3072, plan.work.remat)
    few = plan._replace(work=dataclasses.replace(plan.work, sampled="int8", cached="float8_e4m3fn"))
    words = flags.read(Settings, cli.job_flags(few).split(), prog="jaxrl")
    assert (words.rollout_weights, words.rollout_cache) == ("int8", "float8_e4m3fn")
    assert (found.mesh, found.rollout_mesh, found.compute) == (plan.train.spec, plan.rollout.spec, "bfloat16")
    assert found.layout == "padded"
    assert found.kl == ""
    held = plan._replace(work=dataclasses.replace(plan.work, scores=1))  # without a term a run keeps no reference
    asked = flags.read(Settings, cli.job_flags(held).split(), prog="jaxrl")
    assert (asked.kl, asked.kl_weight) == ("k3_gradient_terms", 0.01)
    check(asked)
    laid = plan._replace(work=dataclasses.replace(plan.work, planner=prefix_trees))
    assert flags.read(Settings, cli.job_flags(laid).split(), prog="jaxrl").layout == "tree"


@pytest.mark.parametrize(
    "words, said",
    [
        (["--layout", "tree", "--filled", "0"], "--filled 0 is a share of --response: more than 0, at most 1"),
        (
            ["--filled", "0.5"],
            "--filled is what rows in a layout hold, and padded rows are computed whole: give --layout",
        ),
    ],
)
def test_shares_that_mean_nothing_are_refused(words, said, capsys):
    with pytest.raises(UserError, match=re.escape(said)):
        cli.best(flags.read(cli.Settings, ["--model", "Qwen3-0.6B", *words], prog="plan"))


def test_libtpu_asks_nobody_where_there_is_no_tpu(monkeypatch):
    settings = {"TPU_WORKER_HOSTNAMES": "mine"}
    monkeypatch.setattr(compiled.pathlib.Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr(compiled.pathlib.Path, "exists", lambda *_: False)
    compiled.without_a_tpu(settings)
    assert settings["TPU_WORKER_HOSTNAMES"] == "mine" and settings["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    monkeypatch.setattr(compiled.pathlib.Path, "glob", lambda *_: iter(["accel0"]))
    real: dict[str, str] = {}
    compiled.without_a_tpu(real)
    assert not real  # a machine with TPUs is left as it is


def test_a_program_that_is_too_large_says_how_large(monkeypatch):
    class Lowered:
        def compile(self, options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. "
                                             "Used 18.50G of 15.75G hbm. Exceeded hbm capacity by 2.75G.")  # fmt: skip

    monkeypatch.setattr(phases.Phase, "lower", lambda self: Lowered())
    found = compiled.of_phase(phases.Phase(None, ()))
    assert not found.fits and found.peak == 18.5 * 2**30


def test_the_module_of_the_issue():
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_llm", "plan", "--model", "Qwen3-0.6B", "--estimate", "--show", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "Qwen3-0.6B, 0.60 B parameters, on v5e:2x4" in done.stdout


@pytest.mark.parametrize(
    ("model", "spec"),
    [("Qwen3-0.6B", "v5e:2x4"), pytest.param("Qwen3-30B-A3B", "v6e:8x8", marks=pytest.mark.slow)],
)
def test_published_plans_are_those_of_the_code(model, spec):
    docs = pathlib.Path(__file__).resolve().parents[2] / "docs"
    rows = runpy.run_path(str(docs / "make_plans.py"))["row_of"]
    line = "| " + " | ".join(rows(model, spec)) + " |"
    assert line in (docs / "plans.md").read_text(), f"{line}\nrun: python docs/make_plans.py"


def test_rollouts_where_weights_lie_over_fsdp_collect_them_at_every_token():
    """Each chip reads its eighth, and the other seven come over both directions of a ring, 3,072 times."""
    config, chip, sizes = shapes.shape_of("Qwen3-8B"), chips.CHIPS["v5p"], Sizes(fsdp=8)
    whole = 2 * config.num_parameters * 7 / 8 / (2 * chip.link)
    for rank in (0, 8):
        work = Work(1024, 3072, 128, 128, group=8, adapter=rank)
        cut, copied = (cost.step_seconds(config, chip, sizes, x, work)["decode"] for x in (sizes, Sizes(data=8)))
        read = 3072 * 2 * (held(config, Sizes()) - held(config, sizes)) / chip.bandwidth
        close.assert_relative(cut, copied - read + 3072 * whole)
    # in the layout of training they are cast where they lie
    assert cost.step_seconds(config, chip, sizes, sizes, Work(1024, 3072, 128, 128, group=8))["reshard"] == 0.0
    assert cost.step_seconds(config, chip, sizes, Sizes(data=8), Work(1024, 3072, 128, 128, group=8))["reshard"] > 0.0


def test_gradients_are_summed_over_data():
    """Two chips whose link alone takes time: each sends and receives half of the bfloat16 gradients, and back."""
    config, work = shapes.shape_of("Llama-3.2-1B"), Work(256, 256, 4, 4, remat=False, scores=1)
    kind = chips.CHIPS["v6e"]._replace(flops=1e30)
    found = cost.step_seconds(config, kind, Sizes(data=2), Sizes(data=2), work)
    close.assert_relative(found["update"], 2 * config.num_parameters / (2 * kind.link))
