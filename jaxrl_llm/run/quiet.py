"""What libraries say on the terminal: a warning is one line, and a TPU's library says nothing where there is no TPU."""

import logging
import os
import pathlib
import warnings

LONGEST = 200  # characters of another package's warning
# without them libtpu asks a metadata server and complains over five lines; where it serves as a compiler, any type does
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}  # fmt: skip


def has_tpu() -> bool:
    """Whether this machine has the devices of a TPU."""
    return any(pathlib.Path("/dev").glob("accel[0-9]*")) or any(pathlib.Path("/dev/vfio").glob("[0-9]*"))


def one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """``note: MESSAGE``, of other packages with their name: the first line, without the source."""
    text = next((x.strip() for x in str(message).splitlines() if x.strip()), category.__name__)
    parts = pathlib.Path(filename).parts
    package = parts[parts.index("site-packages") + 1].removesuffix(".py") if "site-packages" in parts[:-1] else ""
    if package in ("", "jaxrl_llm"):
        return f"note: {text}\n"
    return f"note ({package}): {text if len(text) <= LONGEST else f'{text[:LONGEST]} ...'}\n"


def quieten() -> None:
    """For command lines, before the first array is made. What a user has set in the environment stays."""
    warnings.formatwarning = one_line
    # what a callback raises is told once, by the error of its program, see errors.from_callbacks
    logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)
    if not has_tpu():
        for name, value in _NO_TPU.items():
            os.environ.setdefault(name, value)
