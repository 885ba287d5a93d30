"""Rows from wherever a data set lies: JSON, CSV, Parquet, a saved Hugging Face data set, TensorFlow Datasets.

JSON and CSV files may be compressed by gzip (``FILE.jsonl.gz``). A row is a dict of columns, in the order of the
source, with the place it came from; what cannot be read is counted.
"""

import csv
import gzip
import io
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from jaxrl_llm.errors import DataError, UserError, extra_module, read_json_object


class Row(NamedTuple):
    """Columns of one row and where it lies (``FILE:LINE``, or ``SOURCE: row N``), for messages."""

    where: str
    columns: dict[str, Any]


class Malformed(NamedTuple):
    """A row that could not be read, and why."""

    where: str
    reason: str


_HALF = re.compile(r"[\ud800-\udfff]")


def half(read: Any) -> str:
    r"""A code of half a character in the texts of what JSON held, at any depth: JSON can name one, UTF-8 has none.

    >>> half({"a": ["b\ud800"]}), half({"a": "b"})
    ('\\ud800', '')
    """
    left = [read]
    while left:
        value = left.pop()
        if isinstance(value, str):
            if not value.isascii() and (found := _HALF.search(value)):
                return f"\\u{ord(found[0]):x}"
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
    return ""


def _object(where: str, columns: Any) -> Row | Malformed:
    if not isinstance(columns, dict):
        return Malformed(where, f"a {type(columns).__name__}, not an object")
    if torn := half(columns):
        return Malformed(where, f"not UTF-8 ({torn} is half of a character); write the whole one or drop the row")
    return Row(where, columns)


def _short(error: Exception) -> str:
    return str(error).partition(";")[0]


def _bytes(path: pathlib.Path) -> io.BufferedIOBase:
    """What a file holds, of a compressed one what was compressed."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _kind(path: pathlib.Path) -> str:
    """The ending by which a file is read, of a compressed one that of what it holds.

    >>> _kind(pathlib.Path("rows.jsonl")), _kind(pathlib.Path("rows.csv.gz"))
    ('.jsonl', '.csv')
    """
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def json_lines(path: pathlib.Path) -> Iterator[Row | Malformed]:
    """Every line that holds something, in order; blank lines are skipped."""
    with _bytes(path) as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            where = f"{path}:{number}"
            try:
                columns = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                yield Malformed(where, f"not UTF-8 ({error.reason}); save the file as UTF-8")
            except json.JSONDecodeError as error:
                yield Malformed(where, f"not JSON ({error.msg}); write one object a line")
            except (ValueError, RecursionError) as error:  # of numbers with thousands of digits, of endless brackets
                yield Malformed(where, f"JSON that cannot be read ({_short(error)}); shorten the row")
            else:
                yield _object(where, columns)


def json_array(path: pathlib.Path) -> Iterator[Row | Malformed]:
    """The objects of a ``.json`` file that holds one list, as many benchmarks ship them; else its lines."""
    with _bytes(path) as file:
        if not file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from json_lines(path)
            return
    try:
        with _bytes(path) as file:
            found = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no readable JSON list: {_short(error)}") from error
    for number, columns in enumerate(found, start=1):
        where = f"{path}: row {number}"
        yield _object(where, columns)


def separated(path: pathlib.Path) -> Iterator[Row | Malformed]:
    """The rows of a ``.csv`` or ``.tsv`` file: columns by the names in its first line, every value as text.

    Raises:
      DataError: for a file that is not UTF-8 or whose first line does not name the columns.
    """
    mark = "\t" if _kind(path) == ".tsv" else ","
    with io.TextIOWrapper(_bytes(path), encoding="utf-8-sig", newline="") as file:
        csv.field_size_limit(2**31 - 1)  # a text may be long
        lines = csv.reader(file, delimiter=mark, strict=True)
        try:
            names = next(lines, [])
            if len(set(names)) < len(names) or not all(names):
                raise DataError(f"{path}: the first line must name the columns, each once; it holds {names!r:.200}")
            for values in lines:
                where = f"{path}:{lines.line_num}"
                if len(values) == len(names):
                    yield Row(where, dict(zip(names, values, strict=True)))
                elif values:  # else a blank line
                    yield Malformed(where, f"{len(values)} values where the first line names {len(names)} columns")
        except csv.Error as error:
            raise DataError(f"{path}:{lines.line_num}: {error}; quote texts with double quotes") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _arrow():
    use = "Parquet and saved data sets need"
    for part in ("dataset", "ipc", "parquet"):
        extra_module(f"pyarrow.{part}", use, "data")
    return extra_module("pyarrow", use, "data")


def _in_microseconds(batch: Any) -> Any:
    """A batch of Arrow's without nanoseconds, which the times of Python do not have."""
    arrow = _arrow()
    for k, field in enumerate(batch.schema):
        kind = field.type
        if getattr(kind, "unit", "") != "ns":
            continue
        if arrow.types.is_timestamp(kind):
            coarse = arrow.timestamp("us", kind.tz)
        else:
            coarse = arrow.duration("us") if arrow.types.is_duration(kind) else arrow.time64("us")
        batch = batch.set_column(k, field.name, batch.column(k).cast(coarse, safe=False))
    return batch


def _of_batch(batch: Any, source: pathlib.Path, behind: int) -> Iterator[Row | Malformed]:
    """The rows of a batch of Arrow's, whose texts are any bytes: one that is no text costs its own row alone."""
    batch = _in_microseconds(batch)
    try:
        whole = batch.to_pylist()
    except (ValueError, OverflowError, LookupError):  # a row at a time is slower by far, and says which
        whole = None
    for k in range(batch.num_rows):
        where = f"{source}: row {behind + k + 1}"
        try:
            yield Row(where, whole[k] if whole is not None else batch.slice(k, 1).to_pylist()[0])
        except UnicodeDecodeError as error:
            yield Malformed(where, f"not UTF-8 ({error.reason}); save its texts as UTF-8 or drop the row")
        except (ValueError, OverflowError, LookupError) as error:  # a date beyond Python's, a zone that nobody knows
            yield Malformed(where, f"a value that Python does not have ({error}); save its column as text or drop it")


def parquet(path: pathlib.Path) -> Iterator[Row | Malformed]:
    """The rows of a Parquet file, a batch at a time.

    Raises:
      DataError: for a file that is none, or a part of it that cannot be read.
    """
    arrow = _arrow()
    try:
        file = arrow.parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is no readable Parquet file: {error}") from error
    number = 0
    try:
        for batch in file.iter_batches(1024):
            yield from _of_batch(batch, path, number)
            number += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged behind row {number}: {error}; fetch the file again") from error


def saved_dataset(folder: pathlib.Path, split: str) -> Iterator[Row | Malformed]:
    """The rows of a folder written by the ``save_to_disk`` of Hugging Face's datasets, read without that library.

    Args:
      split: of a folder with several; empty: ``train``, or the only one.
    """
    arrow = _arrow()
    several = folder / "dataset_dict.json"
    if several.is_file():
        splits = read_json_object(several).get("splits") or []
        name = split or ("train" if "train" in splits else "".join(splits[:1]))
        if name not in splits:
            raise DataError(f"{folder} has no split {name!r}; it has {', '.join(splits)}")
        folder = folder / name
    elif split:
        raise DataError(f"{folder} is a single split; drop :{split}")
    state = folder / "state.json"
    if not state.is_file():
        raise DataError(f"{folder} is no saved data set: it has no state.json")
    number = 0
    parts = read_json_object(state).get("_data_files")
    if not isinstance(parts, list) or not all(isinstance(x, dict) and "filename" in x for x in parts):
        raise DataError(f"{state} names no data files (_data_files); save the data set again")
    for entry in parts:
        path = folder / entry["filename"]
        try:
            with arrow.memory_map(str(path)) as mapped, arrow.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    yield from _of_batch(batch, folder, number)
                    number += batch.num_rows
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is no readable Arrow stream: {error}") from error


def tensorflow_datasets(name: str, split: str) -> Iterator[Row | Malformed]:
    """The rows of a prepared data set of TensorFlow Datasets (array records: no TensorFlow needed).

    Args:
      name: as ``tfds.data_source`` takes it, or the folder of a prepared version.
      split: empty: ``train``.
    """
    tfds = extra_module("tensorflow_datasets", "tfds: needs", "data")
    try:
        if (pathlib.Path(name) / "dataset_info.json").is_file():
            found = tfds.builder_from_directory(name).as_data_source(split=split or "train")
        else:
            found = tfds.data_source(name, split=split or "train", download=False)
    except Exception as error:  # the library raises its own kinds for names, versions and formats
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"tfds:{name}: {first}; prepare it with file_format='array_record'") from error
    for number in range(len(found)):
        where = f"tfds:{name}: row {number + 1}"
        try:
            yield Row(where, {k: _text(v) for k, v in found[number].items()})
        except UnicodeDecodeError as error:
            yield Malformed(where, f"bytes that are not UTF-8 ({error.reason}); a set of texts is needed")


def _text(value: Any) -> Any:
    """Bytes as text, arrays as lists, also inside one another."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {key: _text(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_text(x) for x in value]
    return _text(value.tolist()) if hasattr(value, "tolist") else value


_PREPARED = re.compile(
    r"(?P<name>[^:]*(?::[0-9]+\.[0-9*]+\.[0-9*]+)?)(?::(?P<split>.*))?", re.DOTALL
)  # may be of a version


def columnar(spec: str) -> bool:
    """Whether a source keeps columns, as Arrow does: absent keys of an object that others have come out as nulls.

    >>> columnar("rows.parquet"), columnar("rows.jsonl")
    (True, False)
    """
    return _kind(pathlib.Path(spec)) not in (".jsonl", ".json", ".csv", ".tsv")


@contextmanager
def _readable(spec: str) -> Iterator[None]:
    """What the file system refuses (rights, a name that is too long, a damaged disk) is a mistake in ``--data``."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"--data {spec} cannot be read ({error.strerror or error}); give a file that you may read"
        ) from error
    except (EOFError, zlib.error) as error:  # of gzip; what is no such file at all is an OSError
        raise DataError(f"--data {spec} is damaged ({error}); fetch the file again") from error


def _is(spec: str, kind: Callable[[pathlib.Path], bool]) -> bool:
    """Whether a path is there; one that cannot be looked up is not: a mixture may be longer than a name of a file."""
    try:
        return kind(pathlib.Path(spec))
    except OSError:  # whoever reads it says what is wrong with it
        return False


def rows(spec: str) -> Iterator[Row | Malformed]:
    """The rows of a file (jsonl, json, csv or tsv, also with ``.gz`` behind; parquet), of a folder or a prepared set.

    The latter are ``FOLDER[:SPLIT]`` and ``tfds:NAME[:VERSION][:SPLIT]``.

    Raises:
      DataError: for a source that does not exist or cannot be read as a whole.
    """
    with _readable(spec):  # of a generator this is its making; whoever asks it for rows is not in here
        found = _opened(spec)
    return _read_on(spec, found)


def _read_on(spec: str, found: Iterator[Row | Malformed]) -> Iterator[Row | Malformed]:
    with _readable(spec):
        yield from found


def _opened(spec: str) -> Iterator[Row | Malformed]:
    if spec.startswith("tfds:"):
        found = _PREPARED.fullmatch(spec[len("tfds:") :])
        return tensorflow_datasets(found["name"], found["split"] or "")
    path, split = pathlib.Path(spec), ""
    if not path.exists() and ":" in spec:
        name, _, split = spec.rpartition(":")
        path = pathlib.Path(name)
    if path.is_dir():
        return saved_dataset(path, split)
    if not path.is_file():
        raise DataError(
            f"--data {spec} does not exist; give a .jsonl, .csv or .parquet file, a saved data set, tfds:NAME, "
            "or, in no mixture, a task name"
        )
    if split:
        raise DataError(f"--data {spec}: {path} is one file, which has no splits; drop :{split}")
    readers = {".parquet": parquet, ".json": json_array, ".csv": separated, ".tsv": separated}
    if _kind(path) != path.suffix and _kind(path) == ".parquet":
        raise DataError(f"--data {spec}: a Parquet file is compressed within; gunzip it")
    return readers.get(_kind(path), json_lines)(path)


def mixture(spec: str) -> list[tuple[str, float]]:
    """The parts of ``SOURCE@WEIGHT,SOURCE@WEIGHT`` with weights that add up to 1; of one source itself and 1.

    >>> mixture("a.jsonl@3,tfds:gsm8k:train@1")
    [('a.jsonl', 0.75), ('tfds:gsm8k:train', 0.25)]
    >>> mixture("a.jsonl")
    [('a.jsonl', 1.0)]

    Raises:
      UserError: for parts of which some have no weight, or one that is no positive number.
    """
    words = spec.split(",")
    if not any("@" in word for word in words) or _is(spec, pathlib.Path.exists):
        return [(spec, 1.0)]
    found = []
    for word in words:
        name, _, weight = word.rpartition("@")
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if not (name and 0 < value < float("inf")):
            raise UserError(f"--data {spec}: {word!r} is no SOURCE@WEIGHT; give every source a weight above 0, for "
                            "example a.jsonl@0.7,b.jsonl@0.3")  # fmt: skip
        found.append((name, value))
    total = sum(value for _, value in found)
    return [(name, value / total) for name, value in found]


def located(spec: str) -> str:
    """The same sources, wherever the command that names them runs: files and folders by their absolute paths.

    >>> located("tfds:gsm8k:train"), located("missing.jsonl")
    ('tfds:gsm8k:train', 'missing.jsonl')
    """
    if not spec:
        return spec
    if _is(spec, pathlib.Path.exists):
        return str(pathlib.Path(spec).resolve())
    if "@" in spec:
        parts = (word.rpartition("@") for word in spec.split(","))
        return ",".join(f"{located(name)}{at}{weight}" for name, at, weight in parts)
    kind = "tfds:" if spec.startswith("tfds:") else ""
    name, colon, split = spec.removeprefix(kind).partition(":")
    return f"{kind}{pathlib.Path(name).resolve()}{colon}{split}" if _is(name, pathlib.Path.is_dir) else spec


MOST_MIXED = 10_000_000  # rows of a mixture


def proportioned(sources: Sequence[Sequence[Any]], weights: Sequence[float]) -> list[Any]:
    """One epoch of a mixture: every row at least once, and of each source its share, by rows that stand again.

    >>> proportioned([["a", "b", "c"], ["x"]], [0.5, 0.5])
    ['a', 'b', 'c', 'x', 'x', 'x']

    Raises:
      UserError: where a small source with a large weight would make an epoch of more than ``MOST_MIXED`` rows.
    """
    whole = max(len(rows) / weight for rows, weight in zip(sources, weights, strict=True))
    if whole > MOST_MIXED:
        raise UserError(f"the weights of the mixture make an epoch of {whole:,.0f} rows, for every row stands in it at "
                        "least once; raise the smallest weight")  # fmt: skip
    found = []
    for rows, weight in zip(sources, weights, strict=True):
        count = max(len(rows), round(whole * weight))
        found += [rows[k % len(rows)] for k in range(count)]
    return found


def sift(items: Iterable[Any], bad: list[Malformed], *, bad_rows: int) -> list[Any]:
    """The readable ones of ``items``; the others are added to ``bad``.

    Raises:
      DataError: for more than ``bad_rows`` unreadable ones, naming the last.
    """
    good = []
    for item in items:
        if not isinstance(item, Malformed):
            good.append(item)
            continue
        bad.append(item)
        if len(bad) > bad_rows:
            more = f" ({len(bad)} unreadable rows, --bad-rows {bad_rows} allowed)" if bad_rows else ""
            raise DataError(f"{item.where}: {item.reason}{more}")
    return good


def read(spec: str, *, bad_rows: int = 0) -> tuple[list[Row], list[Malformed]]:
    """All rows, and those that could not be read.

    Args:
      bad_rows: how many rows may be unreadable; one more is an error.

    Raises:
      DataError: for too many unreadable rows, naming the last one, or for no rows at all.
    """
    bad: list[Malformed] = []
    good = sift(rows(spec), bad, bad_rows=bad_rows)
    if not good:
        raise DataError(f"{spec} holds no rows; the data set is empty")
    return good, bad
