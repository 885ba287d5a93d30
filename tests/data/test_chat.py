"""Chat templates against texts written by hand; ids against a tokenizer whose every word is visible."""

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxrl_llm.data import chat
from jaxrl_llm.data import tokenizer as tokenizer_module
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.envs import text as text_envs
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import text_contexts
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
BOS_EVERY_TURN = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "bye"},
]
WORDS = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>", "user", "assistant", "hi", "hello", "you", "bye", "\n", "[INST]",
         "[/INST]", "?"]  # fmt: skip


def _tokenizer(folder, template, bos="<s>"):
    raw = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(r"\n"), "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    raw.add_special_tokens(WORDS[:4])
    raw.save(str(folder / "tokenizer.json"))
    config = {"bos_token": bos, "eos_token": {"content": "<|im_end|>"}, "pad_token": "<pad>", "chat_template": template,
              "add_bos_token": True}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer_module.load(folder)


def _words(ids):
    return [WORDS[i] for i in ids]


def test_chatml_text():
    want = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render(CHATML, TALK[:1], add_generation_prompt=True) == want


def test_bos_text_is_what_the_template_says():
    assert chat.render(BOS_EVERY_TURN, TALK, bos_token="<s>", eos_token="</s>") == (
        "<s>[INST] hi [/INST] hello you</s><s>[INST] bye [/INST]"
    )


@pytest.mark.parametrize("template", [CHATML, BOS_EVERY_TURN, "{{ bos_token }}{{ bos_token }}" + CHATML])
def test_bos_exactly_once_and_in_front(tmp_path, template):
    ids = chat.encode_chat(_tokenizer(tmp_path, template), TALK)
    assert ids[0] == 1 and ids.count(1) == 1


def test_a_bos_that_opens_turns_stays_there(tmp_path):
    """SmolLM2's BOS is <|im_start|>: once in front, as everywhere, and every other turn keeps its opening."""
    tokenizer = _tokenizer(tmp_path, CHATML, bos="<|im_start|>")
    opening = ["<|im_start|>", "user", "\n", "hi", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    assert chat.bos_marks_turns(tokenizer)
    start = chat.encode_prompt(tokenizer, TALK[:1])
    assert _words(start) == opening
    ids, mask = chat.encode_dialogue(tokenizer, TALK[:2])
    assert _words(ids)[: len(start)] == opening and mask == [False] * len(start) + [True] * 3 + [False]
    whole = start + [i for i, own in zip(ids, mask, strict=True) if own] + chat.make_reply_encoder(tokenizer)("bye")
    assert whole == chat.encode_chat(tokenizer, TALK, add_generation_prompt=True)
    assert chat.encode_prompt(tokenizer, "hi") == [tokenizer.bos_id, *tokenizer.encode("hi")]
    written = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"  # by the template, in rows of one's own
    assert _words(chat.encode_prompt(tokenizer, written)) == opening


def test_a_bos_that_is_the_end_too_ends_answers(tmp_path):
    """GPT-2's: without it an answer would never be taught to end."""
    plain = "{% for m in messages %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}"
    tokenizer = _tokenizer(tmp_path, plain + "{% if add_generation_prompt %}assistant{% endif %}", bos="<|im_end|>")
    ids, mask = chat.encode_dialogue(tokenizer, [{"role": "user", "content": "hi"}, TALK[1]])
    assert _words(ids)[0] == "<|im_end|>" and _words(ids)[-1] == "<|im_end|>" and mask[-1]
    assert ids.count(tokenizer.bos_id) == 3  # in front, behind the user and behind the answer


def test_no_bos_where_the_tokenizer_has_none(tmp_path):
    ids = chat.encode_chat(_tokenizer(tmp_path, CHATML, bos=None), TALK[:1], add_generation_prompt=True)
    assert _words(ids) == ["<|im_start|>", "user", "\n", "hi", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]


def test_special_texts_of_a_sentencepiece_model_are_single_ids():
    """The bundled model spells characters: its end token must not be spelled."""
    from jaxrl_llm.models.io import weights

    tokenizer = tokenizer_module.load(weights.bundled("nano"))._replace(
        chat_template="{% for m in messages %}{{ bos_token + m['content'] + eos_token }}{% endfor %}"
    )
    ids = chat.encode_chat(tokenizer, [{"role": "user", "content": "1+2"}, {"role": "user", "content": "3"}])
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
    assert ids == [1, *tokenizer.encode("1+2"), 2, *tokenizer.encode("3"), 2]
    turn_first = tokenizer._replace(eos_ids=(5, 2))  # another id ends a turn; the text of this one is still itself
    assert chat.encode_chat(turn_first, [{"role": "user", "content": "3"}]) == [1, *tokenizer.encode("3"), 2]


def test_turns_are_appended_and_history_is_not_encoded_again(tmp_path):
    tokenizer = _tokenizer(tmp_path, CHATML)
    start = chat.encode_chat(tokenizer, TALK[:2])
    added = chat.encode_turns(tokenizer, TALK[:2], TALK[2:])
    assert start + added == chat.encode_chat(tokenizer, TALK, add_generation_prompt=True)
    assert _words(added)[:4] == ["<|im_start|>", "user", "\n", "bye"]


def test_a_reply_goes_behind_the_end_token(tmp_path):
    tokenizer = _tokenizer(tmp_path, CHATML)
    start = chat.encode_chat(tokenizer, TALK[:1], add_generation_prompt=True)
    answer = [*tokenizer.encode("hello you"), tokenizer.eos_ids[0]]  # as it is sampled: nothing after its end
    whole = start + answer + chat.make_reply_encoder(tokenizer)("bye")
    assert whole == chat.encode_chat(tokenizer, TALK, add_generation_prompt=True)


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace(
            "message.content", "('hi\\n' if loop.last and message.role == 'assistant' else '') + message.content"
        ),
        CHATML + "{% if not add_generation_prompt %}[INST]{% endif %}",
    ],
    ids=["Qwen 3's", "Phi 3's"],
)
def test_a_reply_where_the_last_answer_is_shown_in_another_way(tmp_path, template):
    assert template != CHATML
    tokenizer = _tokenizer(tmp_path, template)
    with pytest.raises(UserError, match="rewrites earlier turns"):
        chat.encode_turns(tokenizer, TALK[:2], TALK[2:])
    assert _words(chat.make_reply_encoder(tokenizer)("bye")) == [
        "\n", "<|im_start|>", "user", "\n", "bye", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "opening", ["[INST]\\n", "[INST]\\n\\n[/INST]\\n\\n"], ids=["R1's", "Qwen 3's without thoughts"]
)
def test_a_reply_where_an_answer_is_opened_with_a_thought(tmp_path, opening):
    """Which the template leaves out once the conversation goes on: what was opened stays, the reply goes behind it."""
    head = "<|im_start|>assistant\\n"
    template = CHATML.replace(head, head + opening)
    tokenizer = _tokenizer(tmp_path, template)
    start = chat.encode_chat(tokenizer, TALK[:1], add_generation_prompt=True)
    assert template != CHATML and "[INST]" in _words(start)
    reply = _words(chat.make_reply_encoder(tokenizer)("bye"))
    assert reply[:8] == ["\n", "<|im_start|>", "user", "\n", "bye", "<|im_end|>", "\n", "<|im_start|>"]
    assert reply[8:] == _words(start)[_words(start).index("assistant") :]
    with pytest.raises(UserError, match="rewrites earlier turns"):  # what was not opened so cannot be imitated
        chat.encode_dialogue(tokenizer, TALK[:2])


def test_a_reply_where_an_answer_begins_with_a_blank(tmp_path):
    tokenizer = _tokenizer(tmp_path, BOS_EVERY_TURN)
    assert _words(chat.make_reply_encoder(tokenizer)("bye")) == ["[INST]", "bye", "[/INST]"]


def test_the_end_of_a_turn_is_the_one_of_several_ends_that_the_template_writes(tmp_path):
    """Llama 3 and Gemma name the end of a text before it."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [13, 2]}))
    tokenizer = _tokenizer(tmp_path, CHATML)
    assert tokenizer.eos_ids == (2, 13) and WORDS.index("<|im_end|>") == 2
    context = text_contexts.text_context(tokenizer, tokens=9, summaries=1, summary_tokens=2, ask="you", go_on="bye")
    assert _words(context.instruction)[:5] == ["<|im_end|>", "\n", "<|im_start|>", "user", "\n"]


def test_a_turn_that_was_cut_off_ends_before_the_next(tmp_path):
    """An action of as many tokens as there may be has no end: the template's is read behind it, and is not trained."""
    tokenizer = _tokenizer(tmp_path, CHATML)
    world = TextEnv(lambda *_: 0, lambda state, text: TextStepResult(0, "bye", 0.0, False), lambda s: s, first=str)
    sizes = {"action_tokens": 2, "observation_tokens": 12, "encode": chat.make_reply_encoder(tokenizer)}
    row = Problem("own", TALK[:1], "", {}, 0, "")
    env = text_envs.given(world, [row], [0], tokenizer, chat=True, **sizes).env
    said, end = tokenizer.encode("hello you"), tokenizer.eos_ids[0]
    start = chat.encode_chat(tokenizer, TALK[:1], add_generation_prompt=True)
    whole = chat.encode_chat(tokenizer, TALK, add_generation_prompt=True)
    assert start + said + env.step(0, said).tokens == whole
    assert start + [*said, end] + env.step(0, [*said, end]).tokens == whole


@pytest.mark.parametrize("rewriting", [False, True])
def test_all_answers_of_a_conversation_are_imitated(tmp_path, rewriting):
    """In one row where the template only appends; where it shows the last answer in another way, in a row for each."""
    last = "('hi\\n' if loop.last and message.role == 'assistant' else '') + message.content"
    tokenizer = _tokenizer(tmp_path, CHATML.replace("message.content", last) if rewriting else CHATML)
    said = [*TALK, {"role": "assistant", "content": "you"}]
    rows = chat.imitated(tokenizer, said)
    shown = [[word for word, is_said in zip(_words(ids), mask, strict=True) if is_said] for ids, mask in rows]
    if not rewriting:
        assert shown == [["hello", "you", "<|im_end|>", "you", "<|im_end|>"]]
        assert rows[0][0] == chat.encode_chat(tokenizer, said)
        return
    assert shown == [["hi", "\n", "hello", "you", "<|im_end|>"], ["hi", "\n", "you", "<|im_end|>"]]
    assert [ids for ids, _ in rows] == [chat.encode_chat(tokenizer, said[:2]), chat.encode_chat(tokenizer, said)]


def test_a_template_that_rewrites_history_is_refused(tmp_path):
    tokenizer = _tokenizer(tmp_path, "{{ messages | length }} " + CHATML)
    with pytest.raises(UserError, match="rewrites earlier turns"):
        chat.encode_turns(tokenizer, TALK[:2], TALK[2:])
    with pytest.raises(UserError, match="rewrites earlier turns"):  # at once, not in the middle of an episode
        chat.make_reply_encoder(tokenizer)


def test_mask_of_the_assistant_ends_at_its_end_token(tmp_path):
    tokenizer = _tokenizer(tmp_path, CHATML)
    ids, mask = chat.encode_dialogue(tokenizer, [*TALK, {"role": "assistant", "content": "bye you"}])
    assert _words([i for i, m in zip(ids, mask, strict=True) if m]) == [
        "hello", "you", "<|im_end|>", "bye", "you", "<|im_end|>",
    ]  # fmt: skip
    assert ids == chat.encode_chat(tokenizer, [*TALK, {"role": "assistant", "content": "bye you"}])


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML, [], "messages is empty"),
        (CHATML, [{"content": "hi"}], "message 0 has no role"),
        (BOS_EVERY_TURN, [{"role": "system", "content": "x"}], "only user and assistant roles"),
        (
            BOS_EVERY_TURN,
            [{"role": "system", "content": "be\n brief"}, *TALK],
            r"roles \(they begin with 'system: be brief'",
        ),
        ("{% for %}", TALK, "refuses the 3 messages"),
        ("{{ messages[0].content + 1 }}", TALK, "refuses the 3 messages"),
    ],
)
def test_errors_are_clear(template, messages, message):
    with pytest.raises(UserError, match=message):
        chat.render(template, messages)


def test_templates_run_in_a_sandbox():
    with pytest.raises(UserError, match="unsafe"):
        chat.render("{{ ''.__class__.__mro__[1].__subclasses__() }}", TALK)


def test_tokenizer_without_template():
    from jaxrl_llm.models.io import weights

    with pytest.raises(UserError, match="no chat template"):
        chat.encode_chat(tokenizer_module.load(weights.bundled("nano")), TALK)


def test_conventions_of_hugging_face_templates():
    template = (
        "{%- for m in messages %}\n{%- if loop.index0 > 0 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    )
    assert chat.render(template, [{"role": "user", "content": "<é&'>"}, TALK[0]]) == (
        '{"role": "user", "content": "<é&\'>"}'
    )
    assert chat.render("{% if tools %}{{ tools | length }}{% endif %}", TALK, tools=[{"name": "f"}]) == "1"
    assert chat.render("{{ enable_thinking }}", TALK, enable_thinking=False) == "False"
    assert chat.render("{{ 'clock' if strftime_now is defined else 'none' }}", TALK) == "none"


def test_hash_names_the_template():
    assert chat.template_hash(CHATML) != chat.template_hash(CHATML + " ")
    assert len(chat.template_hash(CHATML)) == 64


def test_text_equals_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    _tokenizer(tmp_path, CHATML)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<|im_end|>")
    for template in (CHATML, BOS_EVERY_TURN):
        for prompt in (False, True):
            want = theirs.apply_chat_template(
                TALK, chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
            got = chat.render(template, TALK, add_generation_prompt=prompt, bos_token="<s>", eos_token="<|im_end|>")
            assert got == want


def test_a_prompt_is_text_or_messages(tmp_path):
    tokenizer = _tokenizer(tmp_path, CHATML)
    wrapped = ["<s>", "<|im_start|>", "user", "\n", "hi", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    assert _words(chat.encode_prompt(tokenizer, "hi")) == ["<s>", "hi"]
    assert _words(chat.encode_prompt(tokenizer, TALK[:1])) == wrapped
    assert chat.encode_prompt(tokenizer, "hi", chat=True) == chat.encode_prompt(tokenizer, TALK[:1])
