"""Safetensors files written whole and read piece by piece: a header says where each tensor lies, then plain reads."""

import errno
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class Tensor(NamedTuple):
    """Where one tensor lies: ``offset`` bytes into ``path``."""

    path: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


def write(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """One file with all the tensors, or none.

    Raises:
      OSError: by the file system's number, which safetensors gives in its text alone.
    """
    try:
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        path.unlink(missing_ok=True)
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number) if found else str(error), str(path)) from error


def header(path: pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of one file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= path.stat().st_size - 8:
                raise ValueError(f"a header of {length} bytes")
            raw = json.loads(file.read(length))
        raw.pop("__metadata__", None)
        tensors = {}
        for name, entry in raw.items():
            if entry["dtype"] not in _TYPES:
                tensors[name] = Tensor(path, np.dtype(np.void), tuple(entry["shape"]), 0)
                continue
            dtype, shape = np.dtype(_TYPES[entry["dtype"]]), tuple(entry["shape"])
            start, stop = entry["data_offsets"]
            if stop - start != dtype.itemsize * int(np.prod(shape)) or stop > path.stat().st_size - 8 - length:
                raise ValueError(f"{name} is cut off")
            tensors[name] = Tensor(path, dtype, shape, 8 + length + start)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    return tensors


def tensors_of(folder: pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of one ``model.safetensors`` or of the shards that an index names.

    Raises:
      ValueError: naming absent or damaged files, and tensors that the index promises and no file holds.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ValueError(f"{folder} holds no model.safetensors nor model.safetensors.index.json")
        return header(single)
    raw = json.loads(index.read_text())
    if "weight_map" not in raw:
        raise ValueError(f"{index} has no weight_map")
    files = sorted(set(raw["weight_map"].values()))
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"{folder} lacks {', '.join(absent)}, which {index.name} names")
    headers = {name: header(folder / name) for name in files}
    for name, file in raw["weight_map"].items():
        if name not in headers[file]:
            raise ValueError(f"{folder / file} lacks {name}, which {index.name} places there")
    return {name: headers[file][name] for name, file in raw["weight_map"].items()}


def rows(tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Rows ``start .. stop`` of the first axis, read into fresh memory."""
    if tensor.dtype == np.dtype(np.void):
        raise ValueError(f"{tensor.path} stores a tensor in a type other than {', '.join(_TYPES)}; convert it")
    width = int(np.prod(tensor.shape[1:]))
    out = np.empty((stop - start, *tensor.shape[1:]), tensor.dtype)
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset + start * width * tensor.dtype.itemsize)
        view, got = memoryview(out.reshape(-1).view(np.uint8)), 0
        while got < len(view):
            more = file.readinto(view[got:])
            if not more:
                raise ValueError(f"{tensor.path} ends early; is it still being written?")
            got += more
        if hasattr(os, "posix_fadvise"):  # read once: the pages need not stay cached
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return out


def row_blocks(tensor: Tensor, start: int, stop: int, block_bytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """``rows`` in turn, each block at most ``block_bytes`` (at least one row), with the first row's number."""
    width = max(int(np.prod(tensor.shape[1:])) * tensor.dtype.itemsize, 1)
    step = max(block_bytes // width, 1)
    for first in range(start, stop, step):
        yield first, rows(tensor, first, min(first + step, stop))
