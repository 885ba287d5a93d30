"""Schedules by the TPU compiler's own count: a program by hand, and the loop that decodes, compiled."""

import ast
import collections
import dataclasses
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import runpy
import types

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.distributed import compiler_options
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.kernels.attention_cached import attend_layer
from jaxrl_llm.planning import buffers, chips, compiled, cost, known_models, phases, schedule
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.parallel_layout import Sizes
from jaxrl_llm.planning.work import Work
from jaxrl_llm.run import compile_cache, plan
from tests import close
from tests.close import doubles
from tests.models_for_tests import small_config

OF_DEPTHS = 0.05  # of a line through two depths, where the compiler decides for each depth what it keeps
OF_ARGUMENTS = 0.01  # the compiler's padding
OF_NORMS = 0.01  # norms and the sampler are no products of matrices
PRINTED = 1e-3  # a share, in thousandths
CHIP = Chip(hbm=1e9, bandwidth=1e6, flops=1e6, link=1e3, clock=1e3)
PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/jaxrl_llm/models/layers.py"
2 "/usr/lib/optax/update.py"

FunctionNames
1 "project"

FileLocations
1 {file_name_id=1 function_name_id=1 line=22 end_line=22 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%gathered (p: f32[10]) -> f32[40] {
  %p = f32[10]{0} parameter(0)
  ROOT %all-gather.9 = f32[40]{0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0}
}

%body (carry: (s32[], f32[10])) -> (s32[], f32[10]) {
  %carry = (s32[], f32[10]{0}) parameter(0)
  %x = f32[10]{0} get-tuple-element(%carry), index=1
  %dot.1 = f32[10]{0} fusion(%x), kind=kOutput, calls=%c, metadata={op_name="jit(step)/while/body/dot_general" stack_frame_id=1}, backend_config={"window_config":{"estimated_cycles":"30"}}
  %kernel.1 = f32[10]{0} custom-call(%dot.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/pallas_call" stack_frame_id=2}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"5000","transcendentals":"0","bytes_accessed":"9000","remote_bytes_transferred":"0"}}}
  ROOT %out = (s32[], f32[10]{0}) tuple(%x, %kernel.1)
}

%condition (carry: (s32[], f32[10])) -> pred[] {
  %carry = (s32[], f32[10]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %limit = s32[]{:T(128)} constant(4)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (a: f32[10], b: f32[100]) -> f32[10] {
  %a = f32[10]{0} parameter(0)
  %b = f32[100]{0} parameter(1)
  %async-collective-start = (f32[10]{0}, f32[40]{0}) fusion(%a), kind=kCustom, calls=%gathered, backend_config={"aliasing_operands":{"lists":[]}}
  %fusion.1 = f32[10]{0} fusion(%a), kind=kLoop, calls=%c, metadata={op_name="jit(step)/mul" stack_frame_id=2}, backend_config={"window_config":{"estimated_cycles":"20"}}
  %async-collective-done = f32[40]{0} fusion(%async-collective-start), kind=kCustom, calls=%d
  %copy-start.1 = (f32[100]{0:S(1)}, f32[100]{0}, u32[]) copy-start(%b)
  %copy-done.1 = f32[100]{0:S(1)} copy-done(%copy-start.1)
  %while.1 = (s32[], f32[10]{0}) while(%init), condition=%condition, body=%body
  ROOT %all-reduce.1 = f32[10]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("groups", "devices"),
    [("{{0,1,2,3},{4,5,6,7}}", 4), ("[2,8]<=[16]", 8), ("mesh['axis_0'=8] {'axis_0'}", 8),
     ("mesh['a'=2,'b'=4,'c'=3] {'a','c'}", 6), ("mesh['a'=2,'b'=16] {'b':(4)2}", 2)],
)  # fmt: skip
def test_how_many_devices_meet(groups, devices):
    gather = f"%g = f32[40]{{0}} all-gather(%p), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    program = f"ENTRY %main (p: f32[10]) -> f32[40] {{\n  %p = f32[10]{{0}} parameter(0)\n  {gather}\n}}\n"
    found = schedule.of_text(program, CHIP)
    assert found.collectives == doubles(160 * (devices - 1) / devices / 2e3)


@pytest.mark.parametrize(("parts", "shorter", "longer"), [(2, 1, 2), (4, 2, 2), (8, 2, 4), (16, 4, 4), (64, 8, 8)])
def test_all_to_alls_meet_in_the_middle_of_the_grid(parts, shorter, longer):
    """Each half sends half of what it has to the other, over the links between the columns in the middle."""
    through = (shorter * longer / 2) * (parts / 2) * (1000.0 / parts)
    found = schedule.collective_seconds("all-to-all", 1000.0, parts, CHIP)
    assert found == doubles(through / shorter / CHIP.link)


def test_a_program_by_hand():
    found = schedule.of_text(PROGRAM, CHIP)
    assert found.computing == doubles(4 * 0.030 + 0.020)
    assert found.kernels == doubles(4 * 0.009)  # 9,000 bytes take longer than 5,000 operations
    gather, reduce = 160 * 3 / 4 / 2e3, 2 * 40 * 3 / 4 / 2e3
    assert found.collectives == doubles(gather + reduce)
    assert found.exposed == doubles(gather - 0.020 + reduce)  # a fusion runs meanwhile
    assert found.waiting == doubles(400 / 1e6)
    assert found.total == doubles(found.computing + found.kernels + found.exposed + found.waiting)
    assert found.unknown_loops == 0
    first = found.places[0]
    assert (first.where, first.operation, first.kind) == ("models/layers.py:22", "dot_general", "computing")
    assert first.seconds == doubles(0.120)
    # a frame of another library is named by the frame of ours that called it
    assert ("kernels", "models/layers.py:22") in {(place.kind, place.where) for place in found.places}


@pytest.mark.parametrize(("step", "trips"), [(1, 4), (2, 2), (3, 2)])
def test_a_loop_that_counts_in_steps_has_fewer_turns(step, trips):
    """Windows of a product are two in a turn, and the compiler does not say how many turns there are."""
    counter = f"""  %i = s32[] get-tuple-element(%carry), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  ROOT %out = (s32[], f32[10]{{0}}) tuple(%next, %kernel.1)"""
    text = PROGRAM.replace("  ROOT %out = (s32[], f32[10]{0}) tuple(%x, %kernel.1)", counter)
    assert schedule.of_text(text, CHIP).computing == doubles(trips * 0.030 + 0.020)


def test_a_copy_does_not_come_while_a_kernel_has_the_memory():
    kernel = ('%k = f32[10]{0} custom-call(%a), custom_call_target="tpu_custom_call", '
              'backend_config={"cost_estimate":{"flops":"1","bytes_accessed":"5000"}}')  # fmt: skip
    text = PROGRAM.replace("  %copy-done.1", f"  {kernel}\n  %copy-done.1")
    assert schedule.of_text(text, CHIP).waiting == doubles(400 / 1e6)
    fusion = '%f = f32[10]{0} fusion(%a), calls=%c, backend_config={"estimated_cycles":"5"}'
    text = PROGRAM.replace("  %copy-done.1", f"  {fusion}\n  %copy-done.1")
    assert schedule.of_text(text, CHIP).waiting == 0


def test_what_travels_the_same_way_comes_one_after_the_other():
    def sent(number, pairs):
        start = f"%collective-permute-start.{number} = (f32[10], f32[10]) collective-permute-start(%a), "
        done = (
            f"%collective-permute-done.{number} = f32[10] collective-permute-done(%collective-permute-start.{number})"
        )
        return f"  {start}source_target_pairs={{{pairs}}}, metadata={{}}\n", f"  {done}\n"

    def seconds(*ways):
        lines = [sent(number, pairs) for number, pairs in enumerate(ways)]
        text = "".join(start for start, _ in lines) + "".join(done for _, done in lines)
        return schedule.of_text(
            f"ENTRY %main (a: f32[10]) -> f32[10] {{\n  %a = f32[10] parameter(0)\n{text}}}\n", CHIP
        )

    one, on, back = 40 / 1e3, "{0,1},{1,0}", "{1,0},{0,1}"
    assert seconds(on).exposed == doubles(one)
    assert seconds(on, back).exposed == doubles(one) and seconds(on, back).collectives == doubles(2 * one)
    assert seconds(on, back, on).exposed == doubles(2 * one)


def test_a_loop_of_unknown_length_is_counted_once_and_named():
    found = schedule.of_text(PROGRAM.replace("constant(4)", "parameter(1)"), CHIP)
    assert found.unknown_loops == 1 and found.computing == doubles(0.050)


@pytest.mark.slow
@pytest.mark.skipif(not compiled.available(), reason="needs libtpu (extra plan)")
@pytest.mark.parametrize("layers", [4, 70], ids=["layers apart", "layers in a loop"])
def test_the_loop_that_decodes_copies_no_cache(layers):
    """Nothing of the size of one layer's keys is made in the loop: they are written and read where they lie."""
    config = small_config("qwen3", num_layers=layers, hidden_size=256, head_dim=128, vocab_size=512, max_positions=2048)
    work = Work(prompt=512, response=512, rows=64, rollout_rows=64, group=8, compute_dtype=jnp.bfloat16)
    topology = chips.parse("v5e:2x2")
    mesh = Sizes(data=4).mesh(compiled.devices(topology))
    found = phases.decode_phase(config, mesh, work).lower().compile()
    of_layer = 16 * 1024 * config.num_kv_heads * 128 * 2  # bytes on one chip
    program = schedule.Program(found.as_text())
    loops = [line for lines in program.computations.values() for line in lines if line.op == "while"]
    inside = [line for loop in loops for line in program.computations[schedule._called(loop, "body")[0]]]
    kept = ("parameter", "get-tuple-element", "tuple", "bitcast", "while")
    large = [
        line for line in inside
        if line.op not in kept and schedule._largest(line.type) >= of_layer
        # written in place: the whole stack goes in and out under one name
        and not re.search("dynamic-update-slice|dynamic_update_slice", line.name + line.rest)
    ]  # fmt: skip
    assert loops and not large, [(line.name, line.type) for line in large]
    cache, weights = 2 * layers * of_layer, 2 * config.num_parameters
    assert found.memory_analysis().temp_size_in_bytes < 1.05 * cache + 3 * weights + 2**24
    assert "attend_layer" in found.as_text()
    assert schedule.of_text(found.as_text(), topology.chip).kernels > 0


@pytest.mark.slow
@pytest.mark.skipif(not compiled.available(), reason="needs libtpu (extra plan)")
def test_the_scales_of_a_cache_leave_fast_memory_to_the_weights():
    """Those of all layers are as large as it is at scale: kept there from token to token nothing comes ahead of use."""
    config = small_config("qwen3", num_layers=4, hidden_size=256, head_dim=128, vocab_size=512, max_positions=2048)
    work = Work(512, 512, 64, 64, group=8, compute_dtype=jnp.bfloat16, cached="int8")
    mesh = Sizes(data=4).mesh(compiled.devices(chips.parse("v5e:2x2")))
    text = phases.decode_phase(config, mesh, work).lower().compile().as_text()
    scales = re.findall(rf"f32\[4,16,{config.num_kv_heads},1024\]\{{([^}}]*)\}}", text)
    assert len(scales) > 2 and not [layout for layout in scales if "S(1)" in layout]


def test_the_least_of_a_phase_by_hand():
    """One v5e: updates by operations, decoding by bytes; a tied table is multiplied with once a prompt in prefill."""
    config, chip = known_models.shape_of("Qwen3-1.7B"), chips.CHIPS["v5e"]
    work = Work(1024, 1024, 256, 256, group=8)
    found = cost.least_seconds(config, chip, Sizes(fsdp=8), Sizes(data=8), work)
    parameters = found["decode"] / 1023 * 8.1e11 - 32 * 114688 * 1536
    close.assert_printed(parameters / 2 / 1e9, 1.7206, 4)
    body = config.num_parameters - 151936 * 2048
    attention = 4 * 28 * 16 * 128 * 4096 * 512
    assert found["prefill"] == pytest.approx((2 * body * 4096 + attention) / 1.97e14, rel=OF_NORMS)
    assert found["update"] == doubles(3 * (2 * config.num_parameters + 4 * 28 * 2048 * 1024) * 65536 / 1.97e14)


def test_attributes_may_have_line_breaks():
    """Those of a kernel of Pallas do, which ended the program there, so that all that follows took no time."""
    whole = "  %kernel.1 = f32[10]{0} custom-call(%dot.1), "
    text = PROGRAM.replace(whole, f'{whole}frontend_attributes={{kernel_metadata={{\n"block":1\n}}}}, ')
    assert text.count("\n") == PROGRAM.count("\n") + 2
    assert schedule.of_text(text, CHIP) == schedule.of_text(PROGRAM, CHIP)


def test_the_command_names_places(capsys, monkeypatch):
    found = schedule.of_text(PROGRAM, CHIP)
    figure = compiled.Compiled(1e9, 1e9, 0.0, 1.0, schedule=found)
    monkeypatch.setattr(compiled, "available", lambda *_: True)
    monkeypatch.setattr(compile_cache, "enable", lambda wanted: None)  # other tests want it
    monkeypatch.setattr(compiled, "devices", lambda topology: [None])
    monkeypatch.setattr(compiled, "of_step", lambda *_, names, **__: dict.fromkeys(names, figure))
    command = ["--model", "Qwen3-0.6B", "--show", "1", "--schedule"]
    assert plan.cli(command) == 0
    out = capsys.readouterr().out
    assert "dearest places of decode:" in out and "120.00 ms computing models/layers.py:22  dot_general" in out
    assert plan.cli([*command, "--json"]) == 0
    update = json.loads(capsys.readouterr().out)["plans"][0]["schedule_ms"]["update"]
    assert update["computing"] == 140 and update["places"][0]["where"] == "models/layers.py:22"
    assert update["share_of_roof"] == pytest.approx(update["least"] / update["total"], abs=PRINTED)
    assert plan.cli([*command, "--estimate"]) == 2
    assert "--schedule is the compiler's count" in capsys.readouterr().err


SPARSE = """HloModule jit_run, is_scheduled=true

%called (p: bf16[4,1000000]) -> bf16[4,1000000] {
  %p = bf16[4,1000000]{1,0} parameter(0)
  ROOT %all-reduce.1 = bf16[4,1000000]{1,0} all-reduce(%p), channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
}, execution_thread="sparsecore"

%async_computation (q: bf16[4,1000000]) -> bf16[4,1000000] {
  %q = bf16[4,1000000]{1,0} parameter(0)
  ROOT %custom-call.1 = bf16[4,1000000]{1,0} custom-call(%q), custom_call_target="x", called_computations={%called}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[4,1000000]) -> bf16[4,1000000] {
  %x = bf16[4,1000000]{1,0} parameter(0)
  %all-reduce.1.call-start = ((), (), (s32[0]{0})) async-start(), async_execution_thread="sparsecore", calls=%async_computation
  %before = bf16[4,1000000]{1,0} fusion(%x), kind=kLoop, backend_config={"estimated_cycles":"CYCLES"}
  %all-reduce.1.call-update = ((bf16[4,1000000]{1,0}), bf16[4,1000000]{1,0}, (s32[0]{0})) async-update(%all-reduce.1.call-start, %before)
  %beside = bf16[4,1000000]{1,0} fusion(%x), kind=kLoop, backend_config={"estimated_cycles":"CYCLES"}
  ROOT %all-reduce.1.call-done = bf16[4,1000000]{1,0} async-done(%all-reduce.1.call-update)
}
"""  # noqa: E501


def test_collectives_that_a_sparse_core_runs_begin_where_they_are_given_their_numbers():
    """Of a sum over four on links of v7x what is computed after the update is hidden, what is computed before not."""
    chip = chips.CHIPS["v7x"]
    whole = chip.meeting + 2 * 8e6 * 3 / 4 / (2 * chip.link)
    tenth = round(whole / 10 * chip.clock)
    found = schedule.of_text(SPARSE.replace("CYCLES", str(tenth)), chip)
    close.assert_relative(found.collectives, whole)
    close.assert_relative(found.computing, 2 * tenth / chip.clock)
    close.assert_relative(found.exposed, whole - tenth / chip.clock)
    update = next(line for line in SPARSE.splitlines() if "async-update" in line)
    start, done = (next(line for line in SPARSE.splitlines() if f"async-{word}(" in line) for word in ("start", "done"))
    second = {line: line.replace("all-reduce.1.call", "all-reduce.2.call") for line in (start, update)}
    two = SPARSE.replace(
        done, done.replace("ROOT ", "") + "\n" + done.replace("all-reduce.1.call", "all-reduce.2.call")
    )
    for line, more in second.items():
        two = two.replace(line, line + "\n" + more)
    found = schedule.of_text(two.replace("CYCLES", str(tenth)), chip)  # the links are one's at a time
    close.assert_relative(found.exposed, 2 * whole - tenth / chip.clock)
    turned = SPARSE.replace("all-reduce.1.call", "sparse-core-data-format-call").replace("all-reduce(", "copy(")
    moved = schedule.of_text(turned.replace("CYCLES", "1"), chip)
    assert moved.collectives == moved.exposed == 0.0
    close.assert_relative(moved.waiting, 8e6 / chip.bandwidth - 1 / chip.clock)


def test_options_are_those_of_a_generation():
    device = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    of, beside = compiler_options.options_of, "xla_tpu_enable_async_all_to_all"
    assert of([device] * 16) == compiler_options.OF_GENERATION["v5e"] and beside in of([device] * 16)
    larger = of([device] * 32)  # with it libtpu compiles nothing for so many of this generation
    assert larger == {name: x for name, x in compiler_options.OF_GENERATION["v5e"].items() if name != beside}
    assert beside in of([types.SimpleNamespace(platform="tpu", device_kind="TPU v6e")] * 64)
    assert of([types.SimpleNamespace(platform="tpu", device_kind="TPU v99")]) is None
    gpu = [types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")]
    assert of(gpu) == compiler_options.ON_GPU and of(gpu, samples=True) is None
    jax.jit(lambda x: x + 2, compiler_options=compiler_options.ON_GPU)(1)  # names and values are the compiler's
    assert compiler_options.options_of() is None  # a CPU
    jax.jit(lambda x: x + 1, compiler_options=compiler_options.options_of())(1)


def test_programs_that_sample_have_the_options_of_a_run(monkeypatch):
    device, seen = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite"), []
    monkeypatch.setattr(jax, "devices", lambda: [device] * 8)
    monkeypatch.setattr(jax, "jit", lambda function, **settings: seen.append((function, settings)))
    compiler_options.jit_sampling(len, donate_argnums=1)
    assert seen == [(len, {"compiler_options": compiler_options.OF_GENERATION["v5e"], "donate_argnums": 1})]


# What loads, moves or scores by rule multiplies nothing; what is one program of an experiment's seeds is small.
WITHOUT = {
    "asynchronous.lockstep", "distributed.direct_transfer", "distributed.mesh", "distributed.rollout_weights",
    "experiment.curricula", "experiment.evidence.pilot", "experiment.loop", "models.io.weights", "planning.phases",
    "planning.utilisation", "rollout.host.env", "run.parts",
}  # fmt: skip
PARTS = {
    "asynchronous.roles": 1, "rollout.host.slots": 1, "run.method": 2, "train.host": 2, "train.offline": 1,
}  # fmt: skip


def test_what_multiplies_has_the_options_of_the_compiler():
    """A program without them is another one than a plan compiles: its products are cut into windows."""
    found = collections.Counter()
    root = pathlib.Path(compiler_options.__file__).parents[1]
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "jax.jit":
                if not any(word.arg == "compiler_options" for word in node.keywords):
                    found[".".join(path.relative_to(root).with_suffix("").parts)] += 1
    assert found.keys() >= WITHOUT
    assert {name: count for name, count in found.items() if name not in WITHOUT} == PARTS


def test_the_tables_are_added_to_and_not_made_again(tmp_path, monkeypatch):
    figure = compiled.Compiled(2.0**30, 1e9, 0.0, 1.0, schedule=schedule.of_text(PROGRAM, CHIP))
    asked = []

    def of_step(config, train, rollout, work, devices, *, names, **_):
        asked.append(names)
        return dict.fromkeys(names, figure._replace(layers=(4, 8) if names == ("update",) else ()))

    monkeypatch.setattr(compiled, "available", lambda *_: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"0.0.52 of {package}")  # or none, as in CI
    monkeypatch.setattr(compiled, "devices", lambda topology: [None])
    monkeypatch.setattr(compiled, "of_step", of_step)
    script = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "tpu_schedule.py"))
    record, page = tmp_path / "record.json", tmp_path / "page.md"
    words = ["--models", "Qwen3-0.6B", "--slices"]
    script["main"]([*words, "v5e:2x4", "--phases", "decode"], record, page)
    assert "Qwen3-0.6B v5e:2x4 (" in page.read_text() and len(asked) == 1
    for topology in ("v5e:2x4", "v5e:2x4", "v6e:2x4"):
        script["main"]([*words, topology], record, page)
    assert len(asked) == 2 * len(script["PHASES"])  # each phase of each cell once
    found = json.loads(record.read_text())
    assert found["libtpu"] == "0.0.52 of libtpu"
    cell = found["Qwen3-0.6B v6e:2x4"]
    assert cell["command"] == "python benchmarks/tpu_schedule.py --models Qwen3-0.6B --slices v6e:2x4"
    assert {"commit", "made_on"} <= cell.keys()
    assert list(found) == ["libtpu", "Qwen3-0.6B v5e:2x4", "Qwen3-0.6B v6e:2x4"]
    assert f"with libtpu {found['libtpu']}." in page.read_text()
    assert found["Qwen3-0.6B v5e:2x4"]["loop_peak_gib"] > 1 and found["Qwen3-0.6B v5e:2x4"]["fits"]
    rows = [line for line in page.read_text().splitlines() if line.startswith("| Qwen3-0.6B | v5e:2x4 |")]
    row = next(line for line in rows if "| decode |" in line)
    assert "| decode | 140.0 | 36.0 |" in row and "`fsdp=8`" in row
    assert row.endswith("| `models/layers.py:22` 120.0 |")
    assert any("| update ~ |" in line for line in rows)  # from a few of its layers
    by_hand = {name: dict.fromkeys((*script["PARTS"], "collectives", "gib"), 1023.0)
               for name in ("decode, 1,023 tokens", "update, recomputed", "prefill")}  # fmt: skip
    by_hand["update, recomputed"] |= {"layers": [4, 8]}
    cell = found["Qwen3-0.6B v5e:2x4"]
    cell |= {"fits": False, "phases": {"update": cell["phases"]["update"] | {"schedule_ms": None, "fits": False}}}
    monkeypatch.setattr(buffers, "peak", lambda *given: 2.0**31 * (1 + 100 * (given[5] == "update")))
    script["main"]([*words, "v5p:2x2x2", "--memory"], record, page)
    memory = next(line for line in page.read_text().splitlines() if "| v5p:2x2x2 |" in line)
    assert memory.count("| 2.0 ") == 4 and "| 202.0 | 202.0 in update |" in memory and memory.endswith("| **no** |")
    assert len(asked) == 2 * len(script["PHASES"])  # nothing is compiled for it
    line = dict.fromkeys(("total", "gib"), 1023.0 * 1.25)
    told = script["page"]({"Qwen3-0.6B v5e:2x4": cell, "compared": by_hand, "checked": {"prefill": line}})
    assert "| update ~ | does not fit |" in told and "| **no** |" in told
    assert "| decode | 140.0 |" not in told and "prefill +25% of time, +25% of memory" in told
    assert "| update, recomputed ~ | 1,023.0 |" in told and "| prefill | 1,023.0 |" in told
    assert "| decode, one token | 1.00 |" in told and "Beside Tunix" not in told
    ours, theirs = (dict.fromkeys(script["PARTS"], x) | {"gib": gib} for x, gib in ((10.0, 10.0), (25.0, 15.0)))
    both = {"decode, one token": {"ours": ours, "tunix": theirs}, "update, recomputed": {"ours": ours, "tunix": None}}
    half = {"decode, one token": {"ours": ours}}  # what has been compiled of a model so far
    told = script["page"]({"tunix": {"version": "0.1.7", "Qwen3-0.6B": both, "Qwen3-1.7B": half}})
    assert told.count("does not fit |  |  | - |") == 1 and "| Qwen3-1.7B |" not in told
    assert "Tunix 0.1.7 (its models" in told
    assert "| decode, one token | tensor=1 | 10.00 | 10.00 | 10.00 | 25.00 | 25.00 | 15.00 | 2.50 |" in told
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--tunix: Tunix is not installed: pip install google-tunix"):
        script["main"](["--tunix"], record, page)
    record.write_text(json.dumps(found | {"libtpu": "0.0.1"}))
    with pytest.raises(SystemExit, match=r"made with libtpu 0\.0\.1, and .* pip install libtpu==0\.0\.1"):
        script["main"]([*words, "v6e:4x4"], record, page)
    assert len(asked) == 2 * len(script["PHASES"])


def test_the_compiler_of_the_tables_is_the_one_that_the_extra_installs():
    root = pathlib.Path(__file__).resolve().parents[2]
    made_with = json.loads((root / "results" / "benchmarks" / "tpu_schedule.json").read_text())["libtpu"]
    assert f"plan = libtpu=={made_with}\n" in (root / "setup.cfg").read_text()
    assert f"with libtpu {made_with}." in (root / "docs" / "schedule.md").read_text()


def test_a_deeper_program_is_a_straight_line_through_two():
    def of(layers):
        places = [schedule.Place(float(layers), "computing", "models/layers.py:22", "dot_general"),
                  schedule.Place(2.0, "computing", "models/decoder.py:1", "gather")]  # fmt: skip
        return schedule.Schedule(10.0 + layers, 2.0 * layers, 3.0, 1.0, 4.0 - layers / 2, tuple(places))

    found = schedule.extended(of(2), of(4), (2, 4, 28))
    assert found[:4] == (38.0, 56.0, 3.0, 1.0) and found.waiting == 0  # nothing is less than nothing
    assert [(place.seconds, place.where) for place in found.places] == [
        (28.0, "models/layers.py:22"), (2.0, "models/decoder.py:1")
    ]  # fmt: skip


@pytest.mark.parametrize("phase", [pytest.param("update", marks=pytest.mark.slow), "score", "decode"])
def test_memory_of_many_layers_is_a_line_through_few(phase):
    """On CPU devices, where the layers of an update are a loop and the rest as on a TPU: within 5 % of all layers."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_heads": 8, "num_kv_heads": 4}
    config = small_config("qwen3", num_layers=24, head_dim=16, max_positions=512, **sizes)
    work = Work(prompt=64, response=64, rows=32, rollout_rows=32, group=2, compute_dtype=jnp.float32)
    mesh = Sizes(fsdp=8).mesh(jax.devices())

    def make(shallow):
        return phases.phases(shallow, mesh, mesh, work)[phase]()

    whole, line = compiled.of_phase(make(config)), compiled.of_depths(config, make, depths=(8, 10))
    assert line.layers == (8, 10) and line.fits
    assert line.peak == pytest.approx(whole.peak, rel=OF_DEPTHS)
    assert line.arguments == pytest.approx(whole.arguments, rel=OF_ARGUMENTS)


def test_lines_are_only_through_layers_that_are_alike_and_apart():
    mixed = small_config("gemma2", num_layers=4, windows=(4, 0, 4, 0))
    with pytest.raises(ValueError, match=r"windows \[0, 4\] differ; compile all 4"):
        compiled.of_depths(mixed, lambda _: None)
    deep, work = known_models.shape_of("Qwen3-8B"), Work(64, 64, 8, 8, remat=False)
    names, where = ("reshard", "prefill", "score", "decode", "update"), (Sizes(data=8, tensor=8), 15.75 * 2**30)
    assert [name for name in names if compiled.apart(deep, name, work, *where)] == ["decode", "update"]
    assert not compiled.apart(deep, "update", Work(64, 64, 8, 8, remat=True), *where)  # a loop
    assert not compiled.apart(known_models.shape_of("Llama-3-70B"), "decode", work, *where)  # so many layers loop


def test_deep_models_decode_layer_by_layer_where_a_second_copy_has_room():
    """Qwen3-32B: 31.2 billion numbers of its layers in bfloat16 over tensor=8 are 7.3 GiB; with masters and moments two
    copies fill 20.2 GiB of each of 64 devices, 25.9 of 32, and three quarters of 31.25 are 23.4."""
    config, work = known_models.shape_of("Qwen3-32B"), Work(64, 64, 8, 8, compute_dtype=jnp.bfloat16)
    v5e, v6e, v5p = (chips.CHIPS[name].hbm for name in ("v5e", "v6e", "v5p"))
    many, fewer, few = (Sizes(data=n, tensor=8) for n in (8, 4, 1))
    for sizes, memory, there in ((many, v6e, True), (many, v5e, False), (fewer, v6e, False), (few, v5p, True)):
        assert compiled.apart(config, "decode", work, sizes, memory) == there
        policy = make_policy(
            config, compute_dtype=jnp.bfloat16, cached_fn=attend_layer,
            devices=caches.Devices(memory, sizes.data * sizes.tensor, sizes.tensor),
        )  # fmt: skip
        shapes = jax.eval_shape(lambda: policy.unstack(policy.init(jax.random.key(0))))  # noqa: B023
        assert isinstance(shapes["layers"], tuple) == there
    assert not compiled.apart(dataclasses.replace(config, num_layers=97, windows=(0,) * 97), "decode", work, few, v5p)


def test_a_program_that_cannot_be_printed_is_one_line(tmp_path):
    class Program:
        def as_text(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure in the printer\nmore")

    with pytest.raises(UserError, match="cannot be printed.*RET_CHECK failure in the printer.*without --schedule"):
        compiled._printed(Program(), tmp_path)
    (tmp_path / "module_0.jit_run.after_codegen.txt").write_text(PROGRAM)
    assert compiled._printed(Program(), tmp_path) == PROGRAM


def test_what_a_kernel_needs_is_read_in_any_order():
    turned = PROGRAM.replace('{"flops":"5000","transcendentals":"0","bytes_accessed":"9000"',
                             '{"bytes_accessed":"9000","transcendentals":"0","flops":"5000"')  # fmt: skip
    assert turned != PROGRAM and schedule.of_text(turned, CHIP) == schedule.of_text(PROGRAM, CHIP)
