"""Reinforcement learning of language models as pure functions in JAX; ``jaxrl --help`` lists the commands."""

import os

__version__ = "0.1.0"

if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
    # the threads that OpenBLAS starts for each device's call spin for one lock, see docs/cpu-linalg.md
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
