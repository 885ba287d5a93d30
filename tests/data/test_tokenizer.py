import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_llm.data import tokenizer as tokenizer_module
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.token_bytes import token_bytes
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.io import weights
from jaxrl_llm.rollout.stop import make_stop_strings


def _write_bytes_tokenizer(folder, config):
    """A byte-level tokenizer without merges, as GPT-2's, Llama 3's and Qwen's are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(["<bos>", "<eos>", "<turn>", "<pad>"])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


CONFIG = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "lstrip": False}, "pad_token": "<pad>"}


@pytest.mark.parametrize("text", ["mod 11: 3+5*4=>", "3+5=8,8*4=10#10", "cd 3 5 7 26=>", " 1  2 "])
def test_bundled_model_spells_every_character(text):
    tokenizer = tokenizer_module.load(weights.bundled("nano"))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert not {tokenizer.bos_id, tokenizer.pad_id, *tokenizer.eos_ids} & set(ids)


def test_bundled_special_ids_and_texts():
    tokenizer = tokenizer_module.load(weights.bundled("nano"))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2,), 0)
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<s>", "</s>")
    assert tokenizer.decode([1, *tokenizer.encode("1+1"), 2, 0, 0]) == "1+1"
    assert {path.name for path in tokenizer.files} >= {"tokenizer.model", "tokenizer_config.json"}


@pytest.mark.parametrize("text", ["plain", "naïve 東京 🙂\n\ttabs"])
def test_hugging_face_file_round_trip(tmp_path, text):
    _write_bytes_tokenizer(tmp_path, CONFIG)
    tokenizer = tokenizer_module.load(tmp_path)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 260 and (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (256, (257,), 259)
    assert tokenizer.decode([256, *ids, 257, 259]) == text
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<bos>", "<eos>")


def test_encode_adds_no_special_token(tmp_path):
    _write_bytes_tokenizer(tmp_path, CONFIG)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        "<bos> $A <eos>", None, [("<bos>", 256), ("<eos>", 257)]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer_module.load(tmp_path).encode("ab")
    assert len(ids) == 2 and 256 not in ids


def test_every_end_id_of_the_generation_config_counts(tmp_path):
    _write_bytes_tokenizer(tmp_path, CONFIG)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 257]}')
    assert tokenizer_module.load(tmp_path).eos_ids == (258, 257)


@pytest.mark.parametrize(
    ("template", "first"),
    [
        ("{% for m in messages %}{{ m.content }}<turn>\n{% endfor %}", 258),  # Gemma's, and Llama 3's
        ("{% for m in messages %}{{ m.content }}<turn>\n{% endfor %}{{ eos_token }}", 258),  # Phi 3's
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}<turn>{% endfor %}", 257),
        ("{% for m in messages %}<turn>{{ m.content }}{% endfor %}", 258),  # GLM's
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", 257),
        ("{{ raise_exception('no') }}", 257),
        (None, 257),
    ],
)
def test_a_given_response_ends_as_the_template_ends_a_turn(tmp_path, template, first):
    _write_bytes_tokenizer(tmp_path, {"eos_token": "<eos>"} | ({} if template is None else {"chat_template": template}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    tokenizer = tokenizer_module.load(tmp_path)
    assert tokenizer.eos_ids == (first, 515 - first) and tokenizer.pad_id == 257
    tokens, valid = encode_responses(tokenizer, ["ab"], width=4)
    assert tokens[0, 2] == first and valid.sum() == 3


def test_special_texts_of_the_older_file(tmp_path):
    _write_bytes_tokenizer(tmp_path, {"eos_token": "<eos>", "pad_token": None})
    older = {"bos_token": {"content": "<bos>"}, "eos_token": "<turn>", "pad_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    tokenizer = tokenizer_module.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.bos_text, tokenizer.eos_ids, tokenizer.pad_id) == (256, "<bos>", (257,), 257)


def test_ids_that_are_no_token(tmp_path):
    """A model has more rows than its tokenizer tokens, and vocabularies leave ids out (those of tiktoken)."""
    nano = tokenizer_module.load(weights.bundled("nano"))
    assert nano.decode([*nano.encode("1+1"), nano.vocab_size, 10**6]) == "1+1"
    _write_bytes_tokenizer(tmp_path, CONFIG)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["model"]["vocab"]["Ġa"] = 299
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = tokenizer_module.load(tmp_path)
    assert tokenizer.vocab_size == 300 and tokenizer.decode([297, 400]) == ""
    found = token_bytes(tokenizer)
    assert len(found) == 300 and found[299] == b" a" and found[298] == b""


def test_added_tokens_beyond_the_rows_of_a_model(tmp_path):
    """As the image of Gemma 3 1B: one that nothing uses is spelled out, any other one is refused."""
    _write_bytes_tokenizer(tmp_path, CONFIG | {"pad_token": "<eos>", "chat_template": "{{ messages }}<turn>"})
    whole = tokenizer_module.load(tmp_path)
    assert whole.encode("<pad>") == [259] and tokenizer_module.fitted(whole, 260) is whole
    cut = tokenizer_module.fitted(whole, 259)
    assert cut.vocab_size == 259 and cut.decode([*cut.encode("a<pad>b"), 257]) == "a<pad>b"
    assert cut.encode("a<pad>b<turn>") == [*whole.encode("a<"), *whole.encode("pad>b"), 258]
    assert token_bytes(cut) == token_bytes(whole)[:259]
    assert make_stop_strings(["ab"], token_bytes(cut), vocab_size=259).kinds.shape == (259,)
    for rows, message in (
        (
            258,
            r"260 tokens and the model only 258 rows, and uses 258 \(<turn>\) beyond them; put the tokenizer of this",
        ),
        (257, r"only 257 rows, and uses 257 \(<eos>\), 258 \(<turn>\) beyond them"),
        (255, r"only 255 rows, and uses 256 \(<bos>\), 257"),
    ):
        with pytest.raises(UserError, match=message):
            tokenizer_module.fitted(whole, rows)
    _write_bytes_tokenizer(tmp_path, CONFIG)
    with pytest.raises(UserError, match=r"uses 259 \(<pad>\) beyond"):
        tokenizer_module.fitted(tokenizer_module.load(tmp_path), 259)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "Ġ"}))
    with pytest.raises(UserError, match="only 200 rows; put the tokenizer"):  # bytes that any text may have
        tokenizer_module.fitted(tokenizer_module.load(tmp_path), 200)
    with pytest.raises(UserError, match="only 20 rows; put the tokenizer"):
        tokenizer_module.fitted(tokenizer_module.load(weights.bundled("nano")), 20)


def test_tokenizer_without_bos_and_pad(tmp_path):
    _write_bytes_tokenizer(tmp_path, {"bos_token": None, "eos_token": "<eos>"})
    tokenizer = tokenizer_module.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.bos_text) == (None, 257, "")


def test_chat_template_from_each_place(tmp_path):
    _write_bytes_tokenizer(tmp_path, CONFIG | {"chat_template": "inline"})
    assert tokenizer_module.load(tmp_path).chat_template == "inline"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    _write_bytes_tokenizer(tmp_path, CONFIG | {"chat_template": several})
    assert tokenizer_module.load(tmp_path).chat_template == "usual"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert tokenizer_module.load(tmp_path).chat_template == "file"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds neither tokenizer.json nor tokenizer.model"),
        ({"tokenizer.json": "{}"}, "tokenizer.json is not a tokenizer"),
        ({"tokenizer.model": "junk"}, "tokenizer.model is not a SentencePiece model"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json is not JSON"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json holds no JSON object"),
        ({"tokenizer_config.json": "{}"}, "defines no end token"),
    ],
)
def test_errors_name_the_file(tmp_path, files, message):
    if any(name == "tokenizer_config.json" for name in files):
        _write_bytes_tokenizer(tmp_path, CONFIG)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        tokenizer_module.load(tmp_path)
