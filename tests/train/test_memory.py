"""Freed memory stays with the process: the second large buffer costs no new pages."""

import subprocess
import sys

import pytest

CODE = """
import resource
import numpy as np
from jaxrl_llm.run.host_memory import keep_freed_pages
assert {kept} is None or keep_freed_pages()
np.ones(2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    np.ones(2**23)  # 64 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(kept: bool) -> int:
    out = subprocess.run(
        [sys.executable, "-c", CODE.format(kept=kept or None)], capture_output=True, text=True, check=True
    )
    return int(out.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator of glibc")
def test_a_step_reuses_the_pages_of_the_one_before():
    assert _faults(True) * 10 < _faults(False)
