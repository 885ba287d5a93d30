"""Memory of a phase on a TPU as soon as the compiler has assigned its buffers, before it generates any code.

The buffers are assigned within seconds; code, and with it the cycles of a schedule, takes up to a hundred times as
long, for kernels and fusions one by one. So another process compiles, is watched for what the compiler writes about its
buffers, and is ended.
"""

import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import chips, compiled
from jaxrl_llm.planning.chips import Topology
from jaxrl_llm.planning.parallel_layout import Sizes
from jaxrl_llm.planning.work import Work

_WRITTEN = "*.cl_*.after_optimizations-buffer-assignment.txt"  # of a program for TPUs, not for this machine
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*)$", re.MULTILINE)
_WAIT = 0.5  # seconds between two looks


class _Asked(NamedTuple):
    config: ModelConfig
    train: Sizes
    rollout: Sizes
    work: Work
    topology: str
    phase: str
    effort: float


def peak(
    config: ModelConfig,
    train: Sizes,
    rollout: Sizes,
    work: Work,
    topology: Topology,
    phase: str,
    *,
    effort: float = 0.0,
    patience: float = 1800.0,
) -> float:
    """Bytes on one chip that a phase needs, by the compiler's assignment of buffers.

    Args:
      effort: as in ``compiled.of_phase``.
      patience: seconds after which it is given up.

    Raises:
      UserError: where the compiler does not get so far, with what it said last.
    """
    asked = _Asked(config, train, rollout, work, topology.name, phase, effort)
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        (place / "asked").write_bytes(pickle.dumps(asked._replace(work=_plain(work))))
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}/dump --xla_dump_hlo_as_text"
        with (place / "said").open("wb") as said:
            child = subprocess.Popen(
                [sys.executable, "-m", "jaxrl_llm.planning.buffers", str(place / "asked")],
                env=os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}, stdout=said, stderr=said,
            )  # fmt: skip
        try:
            return _watched(child, place, patience)
        finally:
            child.kill()
            child.wait()


def _plain(work: Work) -> Work:
    """With a dtype that can be sent."""
    return Work(**(vars(work) | {"compute_dtype": np.dtype(work.compute_dtype)}))


def assigned(text: str) -> float:
    """Bytes in the chip's own memory by the compiler's assignment of buffers.

    Without those of other memories (a colour), and without what lies within an operation: that the compiler lists for
    programs that an operation calls, though it never has such an array. Of a mixture's prefill that was half of all.
    """
    found = _ALLOCATION.findall(text)
    return float(sum(int(size) for size, kind in found if " color " not in kind and " thread-local" not in kind))


def _watched(child: subprocess.Popen, place: pathlib.Path, patience: float) -> float:
    """What the compiler writes, or says where the program is too large."""
    end, before = time.monotonic() + patience, ""
    while time.monotonic() < end:
        over = child.poll() is not None
        for report in (place / "dump").glob(_WRITTEN):
            text = report.read_text()
            if text and (over or text == before):  # all of it: nothing came since the last look
                return assigned(text)
            before = text
        if over:
            said = (place / "said").read_text(errors="replace")
            if (needed := compiled.too_large(said)) is not None:
                return needed
            raise UserError(f"the TPU compiler ended without a program: {said.strip()[-500:] or 'it said nothing'}")
        time.sleep(_WAIT)
    raise UserError(f"the TPU compiler assigned no buffers within {patience:.0f} seconds")


def main(path: str) -> None:
    """Compiles what is asked for, and is ended meanwhile."""
    asked: Any = pickle.loads(pathlib.Path(path).read_bytes())
    found = compiled.of_step(
        asked.config, asked.train, asked.rollout, asked.work, compiled.devices(chips.parse(asked.topology)),
        names=(asked.phase,), effort=asked.effort,
    )  # fmt: skip
    if not found[asked.phase].fits:
        print(f"Used {found[asked.phase].peak / 2**30:.6f}G", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
