import pytest

from jaxrl_llm.data.rows import read_jsonl, read_problems
from jaxrl_llm.errors import DataError, UserError


def _file(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_in_order_and_blank_lines_skipped(tmp_path):
    path = _file(tmp_path, '{"prompt": "1+1=>", "answer": 2}\n\n{"prompt": "é=>", "answer": "x", "level": 3}\n')
    assert [row["prompt"] for row in read_jsonl(path)] == ["1+1=>", "é=>"]
    first, second = read_problems(path)
    assert (first.prompt, first.answer, first.level) == ("1+1=>", {"value": 2}, 0)
    assert (second.answer, second.level, second.identity) == ({"value": "x"}, 3, "é=>")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "answer": 1}\n{"prompt": "b",\n', r"rows.jsonl:2: not JSON .*one object a line"),
        ('{"prompt": "a", "answer": 1}\n\n[1, 2]\n', r"rows.jsonl:3: a list, not an object"),
        ('{"prompt": "a", "reply": 1}\n', r"rows.jsonl:1: lacks answer; it has prompt, reply"),
        ("{}\n", r"rows.jsonl:1: lacks prompt, answer; it has nothing"),
        ("", "holds no rows; the data set is empty"),
        ("\n  \n", "holds no rows; the data set is empty"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as error:
        read_jsonl(_file(tmp_path, text))
    assert isinstance(error.value, UserError) and "\n" not in str(error.value)


def test_a_missing_file_names_the_remedy(tmp_path):
    with pytest.raises(DataError, match="none.jsonl does not exist; give a .jsonl file"):
        read_jsonl(tmp_path / "none.jsonl")


def test_other_columns(tmp_path):
    path = _file(tmp_path, '{"question": "q"}\n')
    assert read_jsonl(path, columns=("question",)) == [{"question": "q"}]
    with pytest.raises(DataError, match="lacks chosen"):
        read_jsonl(path, columns=("question", "chosen"))


def test_bytes_that_are_no_text_and_a_level_that_is_no_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": 1}\n{"prompt": "\xff", "answer": 1}\n')
    with pytest.raises(DataError, match="rows.jsonl:2: not UTF-8"):
        read_jsonl(path)
    with pytest.raises(DataError, match="rows.jsonl: row 1: level 'hard' is not a whole number"):
        read_problems(_file(tmp_path, '{"prompt": "a", "answer": 1, "level": "hard"}\n'))
