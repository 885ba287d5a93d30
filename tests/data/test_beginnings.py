"""Tokenizers that begin a text with a blank, and what files of tokenizers carry besides their vocabulary."""

import json
import shutil

import pytest
import tokenizers as hf

from jaxrl_llm.data import chat, pieces
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.problems import encode_problems, no_answers
from jaxrl_llm.data.token_bytes import token_bytes
from jaxrl_llm.data.tokenizer import load
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.io import weights
from tests.models_for_tests import byte_tokenizer

ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "the"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "of the"},
    {"role": "assistant", "content": "her"},
]


def _write(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return load(folder)


def _json_tokenizer(folder, template=None, **config):
    """As Llama 2, Mistral 7B and TinyLlama have it: a blank in front of every text, blanks as lower blocks."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for text in [f"<0x{i:02X}>" for i in range(256)] + sorted("▁abcdefghijklmnopqrstuvwxyzINST[]/<>|:"):
        words[text] = len(words)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("f", "o"), ("u", "r"), ("fo", "ur"), ("▁", "four")]
    words |= {a + b: len(words) + k for k, (a, b) in enumerate(merges)}
    model = hf.Tokenizer(hf.models.BPE(words, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    model.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")])
    model.decoder = hf.decoders.Sequence(
        [
            hf.decoders.Replace("▁", " "),
            hf.decoders.ByteFallback(),
            hf.decoders.Fuse(),
            hf.decoders.Strip(" ", 1, 0),
        ]
    )
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    model.post_processor = hf.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    model.save(str(folder / "tokenizer.json"))
    return _write(folder, **({"chat_template": template} if template else {}), **config), words


def _pieces_tokenizer(folder, template=None, **config):
    """The same as a SentencePiece model."""
    import sentencepiece

    text = folder / "corpus.txt"
    text.write_text(
        "\n".join(["the four of her is the answer", "hello there [INST] <|user|> <|assistant|> [/INST]"] * 50)
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=310, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True, minloglevel=2,
    )  # fmt: skip
    return _write(folder, **({"chat_template": template} if template else {}), **config)


def test_a_blank_is_put_in_front_of_what_begins_a_sequence_alone(tmp_path):
    tokenizer, words = _json_tokenizer(tmp_path)
    the, four, alone = words["▁the"], words["▁four"], words["four"]
    assert tokenizer.opening("four") == [four] and tokenizer.encode("four") == [alone]
    assert tokenizer.encode(" four") == [four] and tokenizer.opening("the four") == [the, four]
    assert chat.encode_prompt(tokenizer, "the") == [1, the]
    rows, _ = encode_responses(tokenizer, [" four", "four"], width=3)
    assert rows[:, :2].tolist() == [[four, 2], [alone, 2]]
    assert tokenizer.decode([the, alone]) == "thefour" and tokenizer.decode([the, four]) == "the four"
    for text in (":0\na", ":", "0", "", "\n", "://", "  four"):  # of what an anchor could swallow
        assert tokenizer.decode([the, *tokenizer.encode(text)]) == "the" + text


@pytest.mark.parametrize("template", [ZEPHYR, MISTRAL])
@pytest.mark.parametrize("make", [lambda *a: _json_tokenizer(*a)[0], _pieces_tokenizer])
def test_a_talk_has_the_tokens_of_its_text(tmp_path, make, template):
    """Answers that train are those that stand in the whole conversation, with no blank of their own."""
    tokenizer = make(tmp_path, template)
    whole = chat.encode_chat(tokenizer, TALK)
    ids, mask = chat.encode_dialogue(tokenizer, TALK)
    assert ids == whole and ids.count(1) == 1
    assert chat.imitated(tokenizer, TALK) == [(ids, mask)]
    trained = [i for i, said in zip(ids, mask, strict=True) if said]
    blank = " " if template == MISTRAL else ""
    assert trained == [*tokenizer.encode(blank + "four"), 2, *tokenizer.encode(blank + "her"), 2]
    opened = chat.encode_chat(tokenizer, TALK[:1], add_generation_prompt=True)
    assert ids[: len(opened)] == opened  # what a rollout is prompted with
    before = chat.encode_chat(tokenizer, TALK[:2])
    assert [*before, *chat.encode_turns(tokenizer, TALK[:2], TALK[2:3])] == ids[: len(ids) - 1 - len(
        tokenizer.encode(blank + "her")) - (template == ZEPHYR) * len(tokenizer.opening("\n"))]  # fmt: skip


def test_bundled_tokenizers_begin_with_no_blank():
    tokenizer = load(weights.bundled("nano"))
    assert tokenizer.begins is None and tokenizer.opening("1+1") == tokenizer.encode("1+1")
    for prompt, answer in (("2+3=", "5#5"), ("z", "z:s"), ("a\n", "\n4"), ("", " 1")):  # z and lines are unknown to it
        assert chat.encode_answer(tokenizer, prompt, answer) == tokenizer.encode(answer)


@pytest.mark.parametrize("template, count", [(ZEPHYR, 0), (MISTRAL, 1)])
def test_a_tokenizer_that_adds_no_bos_has_the_one_that_its_template_writes(tmp_path, template, count):
    tokenizer, _ = _json_tokenizer(tmp_path, template, add_bos_token=False)
    assert 1 not in chat.encode_prompt(tokenizer, "the four")
    assert chat.encode_chat(tokenizer, TALK).count(1) == count
    assert chat.encode_dialogue(tokenizer, TALK)[0] == chat.encode_chat(tokenizer, TALK)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    assert chat.encode_prompt(load(tmp_path), "the")[0] == 1


def test_a_bos_that_is_named_and_not_added(tmp_path):
    """The files of GPT-2 and SmolLM2 say nothing of ``add_bos_token``, and their tokenizers put none in front."""
    model = hf.Tokenizer.from_file(str(byte_tokenizer(tmp_path) / "tokenizer.json"))
    assert chat.encode_prompt(load(tmp_path), "a")[0] == 1
    model.post_processor = hf.processors.ByteLevel(trim_offsets=False)
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert chat.encode_prompt(tokenizer, "a") == tokenizer.encode("a") == model.encode("a").ids
    assert chat.encode_chat(tokenizer, TALK)[0] == 1  # which the template writes
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    assert chat.encode_prompt(load(tmp_path), "a") == [1, *tokenizer.encode("a")]


def _phi3(folder):
    """Phi 3's in small: a blank in front of what stands behind a marker of turns, which swallows the blanks there."""
    named = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]
    letters = [*(chr(c) for c in range(97, 123)), "▁", "\n", "?", ".", ":", "0", "▁f", "▁t"]
    words = {text: i for i, text in enumerate([*named, *letters])}
    model = hf.Tokenizer(hf.models.BPE(words, [("▁", "f"), ("▁", "t")], unk_token="<unk>"))
    model.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")])
    model.decoder = hf.decoders.Sequence([hf.decoders.Replace("▁", " "), hf.decoders.Fuse()])
    model.add_special_tokens([hf.AddedToken(t, special=True, normalized=False, rstrip=t in named[4:]) for t in named])
    model.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    )
    config = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": False, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    return load(folder), model


def test_an_answer_begins_as_behind_the_marker_of_its_turn(tmp_path):
    tokenizer, model = _phi3(tmp_path)
    talk = [{"role": "user", "content": "the q?"}, {"role": "assistant", "content": "four"}]
    whole = ["<|user|>", "▁t", "h", "e", "▁", "q", "?", "<|end|>", "<|assistant|>", "▁f", "o", "u", "r", "<|end|>",
             "<|endoftext|>"]  # fmt: skip
    ids, mask = chat.encode_dialogue(tokenizer, talk)
    assert [model.id_to_token(i) for i in ids] == whole and ids == chat.encode_chat(tokenizer, talk)
    assert mask == [False] * 9 + [True] * 6
    assert chat.encode_prompt(tokenizer, "the q?", chat=True) == ids[:9]
    rows, valid = encode_responses(tokenizer, ["four"], width=6, prompts=["the q?"], chat=True)
    assert rows[0][valid[0]].tolist() == ids[9:14]
    rows, valid = encode_responses(tokenizer, ["four"], width=6, prompts=[talk[:1]])
    assert rows[0][valid[0]].tolist() == ids[9:14]
    rows, valid = encode_responses(tokenizer, ["four"], width=6, prompts=["the q:"])
    assert [model.id_to_token(i) for i in rows[0][valid[0]]] == ["f", "o", "u", "r", "<|end|>"]


def test_what_a_file_says_of_cutting_and_filling_up_is_not_of_the_vocabulary(tmp_path):
    _, words = _json_tokenizer(tmp_path)
    model = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model.enable_truncation(max_length=2)
    model.enable_padding(length=6)
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("abc") == [words[c] for c in "abc"]
    table = encode_problems(tokenizer, [Problem("rows", "the abc", "", {}, 0, "a")], answers=no_answers)
    assert table.tokens.tolist() == [[1, words["▁the"], words["▁"], *(words[c] for c in "abc")]]


def _bundled_with(folder, ends, **config):
    shutil.copy(weights.bundled("nano") / "tokenizer.model", folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_tokens_beyond_the_pieces_of_a_model_are_refused_where_they_are_used(tmp_path):
    size = load(weights.bundled("nano")).vocab_size
    turn, beside = {str(size): {"content": "<|im_end|>"}}, "make a tokenizer.json"
    _bundled_with(tmp_path, [2, size])
    with pytest.raises(UserError, match=rf"{size} pieces.*{size} \(of no name\).*{beside}"):
        load(tmp_path)
    _bundled_with(tmp_path, 2, added_tokens_decoder=turn, chat_template="{{ messages[0].content }}<|im_end|>")
    with pytest.raises(UserError, match=rf"{size} \(<\|im_end\|>\).*{beside}"):
        load(tmp_path)
    _bundled_with(tmp_path, 2, added_tokens_decoder=turn)
    assert load(tmp_path).vocab_size == size  # one that nothing writes does no harm
    _bundled_with(tmp_path, 2, chat_template="<|im_end|>{{ messages[0].content }}")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    with pytest.raises(UserError, match=beside):
        load(tmp_path)


def test_added_runs_of_blanks_are_blanks(tmp_path):
    """Gemma adds runs of lower blocks to its vocabulary; no special tokens, and its decoder makes blanks of them."""
    _, words = _json_tokenizer(tmp_path)
    model = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model.add_tokens([hf.AddedToken("▁▁", normalized=False)])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    run = model.token_to_id("▁▁")
    ids = [words["a"], run, words["b"]]
    assert tokenizer.decode(ids) == "a  b"
    assert b"".join(token_bytes(tokenizer)[i] for i in ids) == b"a  b"
    two = pieces.two_tokenizers(tokenizer, tokenizer)
    assert tokenizer.decode(pieces.reread(two, ids, most=20)[0]) == "a  b"
