import datetime
import gzip
import json
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds

from jaxrl_llm.data import sources
from jaxrl_llm.errors import DataError, UserError

COLUMNS = [{"prompt": "1+1=>", "answer": 2}, {"prompt": "é=>", "answer": 3}]


def _file(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _columns(spec):
    return [row.columns for row in sources.read(spec)[0]]


def _saved(folder, columns):
    """A folder as ``save_to_disk`` of Hugging Face's datasets writes one, two batches in two files."""
    folder.mkdir(parents=True)
    names = []
    for k, row in enumerate(columns):
        names.append(f"data-{k:05}-of-{len(columns):05}.arrow")
        table = pyarrow.Table.from_pylist([row])
        with pyarrow.OSFile(str(folder / names[-1]), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))


def test_json_lines_in_order_with_their_places_and_blank_lines_skipped(tmp_path):
    path = _file(tmp_path, "\n".join([json.dumps(COLUMNS[0]), "", json.dumps(COLUMNS[1], ensure_ascii=False)]))
    found, bad = sources.read(path)
    assert [(row.where, row.columns) for row in found] == [(f"{path}:1", COLUMNS[0]), (f"{path}:3", COLUMNS[1])]
    assert bad == []


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(COLUMNS[0]).encode())
    assert _columns(str(path)) == COLUMNS[:1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "answer": 1}\n{"prompt": "b",\n', r"rows.jsonl:2: not JSON .*one object a line"),
        ('{"prompt": "a", "answer": 1}\n\n[1, 2]\n', r"rows.jsonl:3: a list, not an object"),
        ("", "holds no rows; the data set is empty"),
        ("\n  \n", "holds no rows; the data set is empty"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as error:
        sources.read(_file(tmp_path, text))
    assert isinstance(error.value, UserError) and "\n" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": 1}\n{"prompt": "\xff", "answer": 1}\n')
    with pytest.raises(DataError, match="rows.jsonl:2: not UTF-8"):
        sources.read(str(path))


def test_half_of_a_character_is_an_unreadable_row(tmp_path):
    """JSON can name one by its code; nothing could encode it, or write it anywhere."""
    whole = {"prompt": "\U0001f600", "answer": "1"}
    deep = {"prompt": "a", "answer": "1", "more": [{"x\udc00": 1}]}
    rows = [whole, {"prompt": "a\ud800b", "answer": "1"}, {"prompt": "a", "answer": "\udfff"}, deep]
    path = _file(tmp_path, "\n".join(map(json.dumps, rows)))
    found, bad = sources.read(path, bad_rows=3)
    assert [row.columns for row in found] == [whole]
    remedy = "is half of a character); write the whole one or drop the row"
    assert bad == [
        (f"{path}:2", f"not UTF-8 (\\ud800 {remedy}"),
        (f"{path}:3", f"not UTF-8 (\\udfff {remedy}"),
        (f"{path}:4", f"not UTF-8 (\\udc00 {remedy}"),
    ]
    with pytest.raises(DataError, match=r"rows.jsonl:2: not UTF-8 \(.ud800 is half"):
        sources.read(path)
    listed = tmp_path / "rows.json"
    listed.write_text(json.dumps(rows))
    found, bad = sources.read(str(listed), bad_rows=3)
    assert [row.columns for row in found] == [whole] and [row.where[-5:] for row in bad] == ["row 2", "row 3", "row 4"]


def _half_encoded():
    """A table of three rows, whose second one holds bytes that are no text."""
    ends = pyarrow.array([0, 2, 7, 8], pyarrow.int32()).buffers()[1]
    texts = pyarrow.StringArray.from_buffers(3, ends, pyarrow.py_buffer(b"oka\xed\xa0\x80bz"))
    return pyarrow.table({"prompt": texts, "answer": ["1", "2", "3"]})


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_bytes_that_are_no_text_are_a_row_of_arrows_too(kind, tmp_path):
    table, path = _half_encoded(), tmp_path / ("rows.parquet" if kind == "parquet" else "saved")
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        path.mkdir()
        with pyarrow.OSFile(str(path / "a.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
        (path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    found, bad = sources.read(str(path), bad_rows=1)
    assert [row.columns["answer"] for row in found] == ["1", "3"]
    assert found[1].where == f"{path}: row 3"
    assert bad[0].where == f"{path}: row 2" and bad[0].reason.startswith("not UTF-8 (invalid continuation byte)")
    with pytest.raises(DataError, match=": row 2: not UTF-8"):
        sources.read(str(path))


@pytest.mark.parametrize("name", ["a" * 300 + ".jsonl", "a" * 300, "a" * 300 + ":train", "/proc/self/mem"])
def test_what_the_file_system_refuses_is_one_line(name):
    """A name that is too long for it, and a file that opens but cannot be read."""
    reason = "Input/output error" if name == "/proc/self/mem" else "File name too long"
    assert sources.mixture(name) == [(name, 1.0)]
    assert name == "/proc/self/mem" or sources.located(name) == name
    with pytest.raises(DataError) as error:
        sources.read(name)
    assert str(error.value) == f"--data {name} cannot be read ({reason}); give a file that you may read"


def test_a_mixture_may_be_longer_than_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = ",".join(f"{letter * 100}.jsonl@1" for letter in "abc")
    assert [name[0] for name, _ in sources.mixture(spec)] == ["a", "b", "c"] and sources.located(spec) == spec


@pytest.mark.parametrize("refused", ["open", "exists"])
def test_a_file_that_is_not_ones_own(refused, tmp_path, monkeypatch):
    path = _file(tmp_path, '{"prompt": "a"}')

    def no(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(pathlib.Path, refused, no)
    with pytest.raises(DataError, match=r"rows.jsonl cannot be read \(Permission denied\); give a file that you may"):
        sources.read(path)


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (pyarrow.timestamp("ns"), datetime.datetime(1970, 1, 1, microsecond=1)),
        (pyarrow.timestamp("ns", "UTC"), datetime.datetime(1970, 1, 1, microsecond=1, tzinfo=datetime.UTC)),
        (pyarrow.duration("ns"), datetime.timedelta(microseconds=1)),
        (pyarrow.time64("ns"), datetime.time(microsecond=1)),
    ],
    ids=str,
)
def test_times_in_nanoseconds(tmp_path, kind, read):
    table = pyarrow.table({"prompt": ["a"], "seen": pyarrow.array([1999], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert _columns(str(tmp_path / "rows.parquet")) == [{"prompt": "a", "seen": read}]


def test_a_date_beyond_those_of_python_is_a_row_that_cannot_be_read(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": ["a", "b"], "seen": pyarrow.array([1, 2**62], pyarrow.timestamp("us"))})
    pyarrow.parquet.write_table(table, path)
    rows, bad = sources.read(str(path), bad_rows=1)
    assert [row.columns["prompt"] for row in rows] == ["a"] and bad[0].where == f"{path}: row 2"
    with pytest.raises(DataError, match="row 2: a value that Python does not have .*; save its column as text or drop"):
        sources.read(str(path))


def test_a_parquet_file_that_is_damaged_within(tmp_path):
    path = tmp_path / "rows.parquet"
    texts = [f"{k * 2654435761 % 2**32:032x}" for k in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), path)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3 : len(raw) // 3 + 4000] = b"\xff" * 4000
    path.write_bytes(raw)
    with pytest.raises(DataError, match="rows.parquet is damaged behind row 0: .*; fetch the file again"):
        sources.read(str(path))


def test_lines_that_exhaust_the_reader_are_unreadable_rows(tmp_path):
    """Brackets without end, and a number longer than Python reads: one row each, not the end of the run."""
    path = _file(tmp_path, '{"prompt": "a"}\n' + "[" * 200_000 + '\n{"prompt": ' + "9" * 5000 + "}\n")
    found, bad = sources.read(path, bad_rows=2)
    assert [row.columns["prompt"] for row in found] == ["a"] and [row.where[-2:] for row in bad] == [":2", ":3"]
    assert all("JSON that cannot be read" in row.reason for row in bad)


def test_bytes_inside_of_arrays_and_records_are_text():
    held = {"a": np.array([b"x", b"y"], object), "b": [{"c": b"z"}], "d": np.array([1, 2])}
    assert sources._text(held) == {"a": ["x", "y"], "b": [{"c": "z"}], "d": [1, 2]}


def test_unreadable_rows_up_to_a_limit_are_counted(tmp_path):
    path = _file(tmp_path, '{"prompt": "a"}\nnonsense\n{"prompt": "b"}\n7\n')
    found, bad = sources.read(path, bad_rows=2)
    assert [row.columns["prompt"] for row in found] == ["a", "b"]
    assert [row.where for row in bad] == [f"{path}:2", f"{path}:4"]
    with pytest.raises(DataError, match=r":4: an? int, not an object \(2 unreadable rows, --bad-rows 1 allowed\)"):
        sources.read(path, bad_rows=1)


def test_a_missing_source_names_the_remedy(tmp_path):
    with pytest.raises(DataError, match="--data countdown does not exist; .*, or, in no mixture, a task name"):
        sources.read(sources.mixture("countdown@1,rows.jsonl@1")[0][0])
    with pytest.raises(DataError, match="none.jsonl does not exist; give a .jsonl, .csv or .parquet file"):
        sources.read(str(tmp_path / "none.jsonl"))


def test_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(COLUMNS), path)
    assert _columns(str(path)) == COLUMNS
    assert sources.read(str(path))[0][1].where == f"{path}: row 2"
    path.write_text("no parquet")
    with pytest.raises(DataError, match="is no readable Parquet file"):
        sources.read(str(path))


def test_saved_data_set_and_its_splits(tmp_path):
    _saved(tmp_path / "one", COLUMNS)
    assert _columns(str(tmp_path / "one")) == COLUMNS
    with pytest.raises(DataError, match="is a single split; drop :test"):
        sources.read(f"{tmp_path}/one:test")
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="rows.jsonl is one file, which has no splits; drop :test"):
        sources.read(f"{tmp_path}/rows.jsonl:test")

    _saved(tmp_path / "both" / "train", COLUMNS[:1])
    _saved(tmp_path / "both" / "test", COLUMNS[1:])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert _columns(f"{tmp_path}/both") == COLUMNS[:1]
    assert _columns(f"{tmp_path}/both:test") == COLUMNS[1:]
    with pytest.raises(DataError, match="has no split 'dev'; it has train, test"):
        sources.read(f"{tmp_path}/both:dev")


def test_a_damaged_saved_data_set(tmp_path):
    _saved(tmp_path / "one", COLUMNS)
    (tmp_path / "one" / "data-00001-of-00002.arrow").write_bytes(b"no stream")
    with pytest.raises(DataError, match="data-00001-of-00002.arrow is no readable Arrow stream"):
        sources.read(str(tmp_path / "one"))
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="is no saved data set: it has no state.json"):
        sources.read(str(tmp_path / "other"))
    for text, message in (("{", "state.json is not JSON"), ('{"a": 1}', "state.json names no data files")):
        (tmp_path / "other" / "state.json").write_text(text)
        with pytest.raises(UserError, match=message):
            sources.read(str(tmp_path / "other"))


class ToyProblems(tfds.core.GeneratorBasedBuilder):
    """Two problems, in the columns of GSM8K."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"question": text, "answer": text, "seen": tfds.features.Tensor(
                shape=(2,), dtype=np.int32)}),
        )  # fmt: skip

    def _split_generators(self, manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for k, answer in enumerate(("so #### 2", "so #### 1,000")):
            yield k, {"question": f"q{k}", "answer": answer, "seen": np.arange(2, dtype=np.int32)}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    ToyProblems.pkg_dir_path = pathlib.Path(tmp_path_factory.mktemp("package"))
    ToyProblems(data_dir=str(folder), file_format="array_record").download_and_prepare()
    return folder / "toy_problems" / "1.0.0"


def test_a_prepared_set_of_tensorflow_datasets_by_its_folder(prepared):
    found = sorted(_columns(f"tfds:{prepared}"), key=lambda c: c["question"])
    assert found[1] == {"question": "q1", "answer": "so #### 1,000", "seen": [0, 1]}
    assert len(found) == 2


def test_bytes_of_a_prepared_set_that_are_no_text(prepared, monkeypatch):
    found = [{"question": b"q", "answer": b"a"}, {"question": b"q", "answer": b"\xff"}]
    monkeypatch.setattr(tfds, "data_source", lambda *_, **__: found)
    with pytest.raises(DataError, match="tfds:toy: row 2: bytes that are not UTF-8 "):
        sources.read("tfds:toy")
    assert len(sources.read("tfds:toy", bad_rows=1)[0]) == 1


def test_a_prepared_set_of_tensorflow_datasets_by_its_name(prepared, monkeypatch):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(prepared.parents[1]))
    assert len(_columns("tfds:toy_problems:train")) == 2
    assert len(_columns("tfds:toy_problems:1.0.0")) == len(_columns("tfds:toy_problems:1.*.*:train")) == 2
    assert len(_columns("tfds:toy_problems:train[:1]")) == len(_columns("tfds:toy_problems:1.0.0:train[1:]")) == 1
    with pytest.raises(DataError, match="tfds:toy_problems: .*; prepare it"):
        sources.read("tfds:toy_problems:test")


def test_an_unknown_set_of_tensorflow_datasets():
    with pytest.raises(DataError, match="tfds:no_such_set: .*; prepare it with file_format='array_record'"):
        sources.read("tfds:no_such_set")


@pytest.mark.parametrize(("spec", "module"), [("rows.parquet", "pyarrow"), ("tfds:gsm8k", "tensorflow_datasets")])
def test_an_absent_extra_is_named(tmp_path, monkeypatch, spec, module):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("rows.parquet").write_text("")
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[data\]'"):
        sources.read(spec)


def test_a_json_list_is_read_as_rows_and_json_lines_by_the_same_name_as_lines(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([COLUMNS[0], 3, COLUMNS[1]], indent=1))
    rows, bad = sources.read(str(path), bad_rows=1)
    assert [r.columns for r in rows] == list(COLUMNS[:2]) and rows[1].where == f"{path}: row 3"
    assert bad == [sources.Malformed(f"{path}: row 2", "a int, not an object")]
    path.write_text("\n".join(json.dumps(c) for c in COLUMNS[:2]))
    assert [r.columns for r in sources.read(str(path))[0]] == list(COLUMNS[:2])
    path.write_text("[{]")
    with pytest.raises(DataError, match="rows.json is no readable JSON list: "):
        sources.read(str(path))


def test_compressed_files_are_read_as_what_they_hold(tmp_path):
    lines = "\n".join(map(json.dumps, COLUMNS)).encode()
    texts = {"rows.jsonl": lines, "rows.json": json.dumps(COLUMNS).encode(), "rows.csv": b"prompt,answer\n1+1=>,2\n"}
    for name, text in texts.items():
        plain, packed = tmp_path / name, tmp_path / f"{name}.gz"
        plain.write_bytes(text)
        packed.write_bytes(gzip.compress(text))
        found = sources.read(str(packed))[0]
        assert [row.columns for row in found] == _columns(str(plain)) and found[0].where.startswith(f"{packed}:")
        assert sources.columnar(str(packed)) == sources.columnar(str(plain))
    packed = tmp_path / "rows.jsonl.gz"
    many = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % k for k in range(999)))
    for broken, said in (
        (lines, "rows.jsonl.gz cannot be read .Not a gzipped file"),
        (many[:-40], r"rows.jsonl.gz is damaged .*; fetch the file again"),
        (many[:20] + b"\xff" * 40 + many[60:], r"rows.jsonl.gz is damaged .*; fetch the file again"),
    ):
        packed.write_bytes(broken)
        with pytest.raises(DataError, match=said):
            sources.read(str(packed))
    (tmp_path / "rows.parquet.gz").write_bytes(b"")
    with pytest.raises(DataError, match="a Parquet file is compressed within; gunzip it"):
        sources.read(str(tmp_path / "rows.parquet.gz"))
