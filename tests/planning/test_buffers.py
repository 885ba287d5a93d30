"""Memory by the TPU compiler's buffers: what is watched for, by hand; the figure of a whole compilation, compiled."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.planning import buffers, chips, compiled
from jaxrl_llm.planning.parallel_layout import Sizes
from jaxrl_llm.planning.work import Work
from tests.models_for_tests import small_config

# of 8 and 15 MB: the compiler sets aside 0.2 MB less when it goes on to code; plans count in GiB
SET_ASIDE = 2**19
REPORT = "module_0000.jit_update.cl_1.after_optimizations-buffer-assignment.txt"
TEXT = """BufferAssignment:
allocation 0: size 1000000000, page 0, parameter 3, shape |f32[48,64,384,128]| at ShapeIndex {}:
 value: <302 param.5 @0> (size=603979776,offset=0): f32[48,64,384,128]{3,2,1,0:T(8,128)}
allocation 1: size 536870912, page 0, thread-local:
allocation 2: size 200000000, page 0, output shape is |(bf16[64])|, maybe-live-out:
allocation 3: size 39334400, page 0, preallocated-temp:
allocation 233: size 74580480, color 1, page 0, preallocated-temp:
"""


def _child(folder, program):
    with (folder / "said").open("wb") as said:
        return subprocess.Popen([sys.executable, "-S", "-c", program], stdout=said, stderr=said, cwd=folder)


@pytest.mark.parametrize("forever", [True, False])
def test_the_assignment_of_the_tpus_program_ends_the_watch(tmp_path, forever):
    """While the child still runs, and where it has ended; programs for this machine have one, too."""
    write = "import os, time; os.mkdir('dump'); put = lambda name, text: open('dump/' + name, 'w').write(text)\n"
    write += f"put('module_0001.jit_seed.cpu_{REPORT.partition('cl_1.')[2]}', {TEXT[:120]!r})\n"
    write += f"out = open('dump/{REPORT}', 'w')\n"
    for part in (TEXT[:150], TEXT[150:]):  # in the middle of a write there is less
        write += f"out.write({part!r}); out.flush(); time.sleep(0.1)\n"
    write += "time.sleep(60)\n" * forever
    child = _child(tmp_path, write)
    try:
        assert buffers._watched(child, tmp_path, 30.0) == 1239334400
        assert (child.poll() is None) == forever
    finally:
        child.kill()
        child.wait()


def test_a_program_that_is_too_large_says_how_large(tmp_path):
    said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 37.25G of 15.75G hbm"
    child = _child(tmp_path, f"print({said!r})")
    assert buffers._watched(child, tmp_path, 30.0) == 37.25 * 2**30


def test_what_the_compiler_said_last_is_the_error(tmp_path):
    with pytest.raises(UserError, match="ended without a program: no such chip"):
        buffers._watched(_child(tmp_path, "print('no such chip')"), tmp_path, 30.0)
    child = _child(tmp_path, "import time; time.sleep(60)")
    try:
        with pytest.raises(UserError, match="assigned no buffers within 0 seconds"):
            buffers._watched(child, tmp_path, 0.3)
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
@pytest.mark.skipif(not compiled.available(), reason="needs libtpu (extra plan)")
@pytest.mark.parametrize("phase", ["update", "decode"])
def test_the_figure_is_that_of_a_whole_compilation(phase):
    config = small_config("qwen3", num_layers=8, hidden_size=256, head_dim=128, vocab_size=512, max_positions=512)
    work = Work(prompt=128, response=128, rows=16, rollout_rows=16, group=4, compute_dtype=jnp.bfloat16)
    topology, train, rollout = chips.parse("v5e:2x2"), Sizes(fsdp=4), Sizes(data=4)
    whole = compiled.of_step(config, train, rollout, work, compiled.devices(topology), names=(phase,))[phase]
    found = buffers.peak(config, train, rollout, work, topology, phase)
    assert found == pytest.approx(whole.peak, abs=SET_ASIDE)
