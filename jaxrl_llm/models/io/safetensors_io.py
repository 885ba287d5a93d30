"""Safetensors files written whole and read piece by piece: a header says where each tensor lies, then plain reads."""

import errno
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_llm.errors import UserError, json_object, read_json_object

MOST_HEADER = 100_000_000  # bytes, as the format's own library has it
_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

_EXPONENTS = {  # all ones where a value is infinite or none
    np.dtype(np.float64): (np.uint64, np.uint64(0x7FF << 52)),
    np.dtype(np.float32): (np.uint32, np.uint32(0xFF << 23)),
    np.dtype(np.float16): (np.uint16, np.uint16(0x1F << 10)),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, np.uint16(0xFF << 7)),
}
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)  # that every type in which models compute holds


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
    """Every tensor of one file. Together they are all of it: no two share a byte and none is left over.

    Raises:
      UserError: in one line, naming the file and the first tensor that is wrong.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, MOST_HEADER):
                raise UserError(f"{path} is no readable safetensors file: a header of {length} bytes")
            raw = json_object(file.read(length), f"{path} is no readable safetensors file: its header")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error
    raw.pop("__metadata__", None)
    tensors, end = {}, 0
    places = {name: _place(path, name, entry) for name, entry in raw.items()}
    for name in sorted(places, key=lambda n: places[n][2:]):
        dtype, shape, start, stop = places[name]
        if start != end:
            what = "overlaps the tensor before it" if start < end else f"leaves {start - end} bytes before it to nobody"
            raise UserError(f"{path} is no readable safetensors file: {name} {what}")
        tensors[name], end = Tensor(path, dtype, shape, 8 + length + start), stop
    held = size - 8 - length
    if end != held:
        what = "it is cut off" if held < end else "it goes on too long"
        raise UserError(f"{path} is no readable safetensors file: {what}, {held} bytes of tensors in place of {end}")
    return {name: tensors[name] for name in places}


def _place(path: pathlib.Path, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Type, shape, first and last byte of one entry of a header; a type that is not read is void."""

    def wrong(what: str) -> UserError:
        return UserError(f"{path} is no readable safetensors file: {name[:80]} {what}")

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise wrong("lacks dtype, shape or data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for key, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or any(type(x) is not int or not 0 <= x < 1 << 62 for x in value):
            raise wrong(f"has {key}={str(value)[:80]}, which are no sizes")
    if len(offsets) != 2 or offsets[0] > offsets[1] or len(shape) > 32:
        raise wrong(f"has data_offsets={str(offsets)[:80]} and a shape of {len(shape)} axes")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _TYPES:
        return np.dtype(np.void), tuple(shape), *offsets
    dtype = np.dtype(_TYPES[entry["dtype"]])
    if offsets[1] - offsets[0] != dtype.itemsize * math.prod(shape):
        raise wrong(f"has {offsets[1] - offsets[0]} bytes, which are not shape {tuple(shape)} of {entry['dtype']}")
    return dtype, tuple(shape), *offsets


def tensors_of(folder: pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of one ``model.safetensors`` or of the shards that an index names.

    Raises:
      UserError: naming absent or damaged files, tensors that the index promises and no file holds, and files that
        would lie outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise UserError(f"{folder} holds no model.safetensors nor model.safetensors.index.json")
        return header(single)
    where = read_json_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UserError(f"{index} has no weight_map from tensors to files")
    for name, file in where.items():
        # a plain name: what it links to is the user's own matter, as in the cache of Hugging Face
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]{1,200}\.safetensors", file):
            raise UserError(
                f"{index} places {name[:80]} in {str(file)[:80]!r}; it must be a *.safetensors file of the same folder"
            )
    names = sorted(set(where.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(
            f"{folder} lacks {', '.join(ascii(name)[1:-1] for name in absent[:3])}, which {index.name} names"
        )
    headers = {name: header(folder / name) for name in names}
    for name, file in where.items():
        if name not in headers[file]:
            raise UserError(f"{folder / file} lacks {name}, which {index.name} places there")
    return {name: headers[file][name] for name, file in where.items()}


def check_finite(name: str, tensor: Tensor, values: np.ndarray) -> np.ndarray:
    """The values themselves.

    Raises:
      UserError: naming file and tensor, where one is infinite or not a number, or becomes so as float32: training would
        make all of them so.
    """
    bits, exponent = _EXPONENTS[values.dtype]
    if values.size and ((values.view(bits) & exponent) == exponent).any():
        raise UserError(
            f"{tensor.path}: {name} holds values that are infinite or not a number; the file is damaged, or the run "
            "that wrote it diverged: take an earlier checkpoint"
        )
    if values.dtype == np.float64 and values.size and (np.abs(values) > _LARGEST).any():
        raise UserError(f"{tensor.path}: {name} holds values beyond {_LARGEST:.3g}, infinite in other types")
    return values


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
