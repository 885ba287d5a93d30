"""Stop strings against a search in the joined text, over real tokenizers and through the compiled rollout."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.data.token_bytes import token_bytes
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout import stop as stops
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.run import parts
from tests.models_for_tests import nano

TEXTS = ["the answer is 42\n\nUser: and?", "naïve café – 東京 <b>bold</b>\r\n", "aaab aab ab END", " \t  x  = 1"] * 3
ROOM = {"vocab_size": 512, "padded_vocab_size": 512}  # for the tokens of any tokenizer here
LENGTH, END_ID, STOP_STRING = 0, 1, 2  # the values of ``finish_reasons``


def finish_reasons(trajectories, eos_ids):
    """Why each response ended: ``truncated`` tells the first reason from the others, its last token those two."""
    width = trajectories.tokens.shape[1]
    last = width - 1 - np.argmax(np.asarray(trajectories.mask)[:, ::-1], axis=1)
    token = np.take_along_axis(np.asarray(trajectories.tokens), last[:, None], axis=1)
    ended = np.any(token == np.asarray(list(eos_ids))[None, :], axis=1)
    return np.where(trajectories.truncated, LENGTH, np.where(ended, END_ID, STOP_STRING))


@functools.cache
def byte_level(folder):
    import tokenizers as hf

    model = hf.Tokenizer(hf.models.BPE())
    model.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = hf.decoders.ByteLevel()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        TEXTS, hf.trainers.BpeTrainer(vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    )
    model.add_tokens(["<b>"])
    return _stored(folder, model)


@functools.cache
def metaspace(folder):
    import tokenizers as hf

    pieces = ["<unk>", "<|end|>", *[f"<0x{b:02X}>" for b in range(256)], "▁", "a", "b", "▁a", "ab", "▁ab", "\n", "▁E"]
    model = hf.Tokenizer(hf.models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    d = hf.decoders
    model.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])
    model.add_special_tokens(["<unk>", "<|end|>"])
    return _stored(folder, model)


def _stored(folder, model):
    folder.mkdir(parents=True)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return tokenizers.load(folder)


@pytest.fixture(params=["sentencepiece", "byte_level", "metaspace"], scope="module")
def tokenizer(request, tmp_path_factory):
    if request.param == "sentencepiece":
        return nano()[3]
    return {"byte_level": byte_level, "metaspace": metaspace}[request.param](tmp_path_factory.mktemp("t") / "f")


def test_joined_bytes_are_the_decoded_text(tokenizer):
    texts = token_bytes(tokenizer)
    assert len(texts) == tokenizer.vocab_size and not any(texts[i] for i in tokenizer.eos_ids)
    rng, blank = np.random.default_rng(0), tokenizer.encode("a")
    for _ in range(200):
        ids = [*blank, *rng.integers(0, tokenizer.vocab_size, 12).tolist()]
        joined = b"".join(texts[i] for i in ids)
        decoded = tokenizer.decode(ids)
        if "\ufffd" in decoded:  # random bytes are no text: libraries write one mark for one or for several of them
            continue
        assert joined.decode().lstrip(" ") == decoded.lstrip(" ")


def _walk(stop, ids):
    """Index of the token that completes a stop string, by the automaton; None when none does."""
    state = stops.start(1)
    for t, token in enumerate(ids):
        state, found = stops.advance(stop, state, jnp.asarray([token], jnp.int32))
        if bool(found[0]):
            return t
    return None


def _search(strings, texts, ids):
    """The same by brute force: the first prefix whose text holds a stop string."""
    for t in range(len(ids)):
        joined = b"".join(texts[i] for i in ids[: t + 1])
        if any(s.encode() in joined for s in strings):
            return t
    return None


SETS = {
    "one": ["ab"], "overlap": ["aab", "ab a", "aaa"], "inside": ["b", "abab"], "long": ["a a b a a c"],
    "unicode": ["京", "é", "–"], "lines": ["\n\n", "User:"], "self": ["aabaaab"],
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_automaton_equals_a_search_in_the_text(tokenizer, name):
    texts = token_bytes(tokenizer)
    stop = stops.make_stop_strings(SETS[name], texts, vocab_size=tokenizer.vocab_size + 3)
    letters = {b for s in SETS[name] for b in s.encode()}
    # tokens made of the letters of the stop strings: matches, and near misses, are frequent
    pool = [i for i, text in enumerate(texts) if text and set(text) <= letters | set(b" ab")]
    pool += [tokenizer.vocab_size + 1, *tokenizer.eos_ids]  # ids without a text split no match
    rng = np.random.default_rng(1)
    rows = rng.choice(pool, (300, 24)).astype(np.int32)
    step = jax.jit(lambda s, x: stops.advance(stop, s, x))
    state, first = stops.start(300), np.full(300, 99)
    for t in range(24):
        state, found = step(state, jnp.asarray(rows[:, t]))
        first[np.asarray(found) & (first == 99)] = t
    padded = [*texts, b"", b"", b""]
    want = [_search(SETS[name], padded, row.tolist()) for row in rows]
    assert first.tolist() == [99 if w is None else w for w in want]


def test_across_tokens_and_with_text_behind():
    texts = [b"<", b"/a", b"nswer>", b"ans", b"</answer> and more", b"\xe6\x9d", b"\xb1\xe4\xba\xac!"]
    stop = stops.make_stop_strings(["</answer>", "東京"], texts, vocab_size=8)
    assert _walk(stop, [3, 0, 1, 2, 3]) == 3
    assert _walk(stop, [0, 1, 0, 1, 2]) == 4  # falls back to the second beginning
    assert _walk(stop, [3, 4]) == 1
    assert _walk(stop, [5, 6]) == 1  # a character cut into two tokens
    assert _walk(stop, [0, 7, 1, 2]) == 3  # 7 is a row of vocabulary padding
    assert _walk(stop, [0, 1, 3, 2]) is None


# rollouts ---------------------------------------------------------------------------------------------------------

ALPHABET = "1=2,a"


def _policy():
    """The nano model with logits that favour few characters alike, and the end id."""
    policy, params, config, tokenizer = nano()
    allowed = [tokenizer.encode(c)[0] for c in ALPHABET] + [tokenizer.eos_ids[0]]
    logits = jnp.full((config.padded_vocab_size,), -jnp.inf).at[jnp.asarray(allowed)].set(0.0)
    logits = logits.at[tokenizer.eos_ids[0]].set(-2.0)
    return policy._replace(unembed=lambda p, h: jnp.broadcast_to(logits, (*h.shape[:-1], logits.size))), params


def _roll(strings, *, new=10, groups=16, prompts=("1=", "2,a1=2", "a"), seed=0, early_exit=True):
    policy, params = _policy()
    _, _, config, tokenizer = nano()
    stop = stops.make_stop_strings(strings, token_bytes(tokenizer), vocab_size=config.padded_vocab_size)
    ids = [tokenizer.encode(p) for p in prompts]
    width = max(map(len, ids))
    tokens = jnp.asarray([[0] * (width - len(x)) + x for x in ids], jnp.int32)
    valid = jnp.asarray([[False] * (width - len(x)) + [True] * len(x) for x in ids])
    keys = jax.random.split(jax.random.key(seed), len(ids) * groups)
    out = jax.jit(
        lambda *a: generate(
            policy, *a, group_size=groups, max_new_tokens=new, eos_ids=tokenizer.eos_ids, stop=stop,
            early_exit=early_exit,
        )
    )(params, tokens, valid, keys)  # fmt: skip
    return out, width


@pytest.mark.parametrize("strings", [["1=2"], ["=2,", "22", "a=a"], ["1"]], ids=["one", "several", "single"])
def test_rollout_stops_where_the_text_says(strings):
    """Ragged prompts, whose own text holds or begins a stop string, never count."""
    tokenizer = nano()[3]
    out, width = _roll(strings)
    texts, reasons = token_bytes(tokenizer), finish_reasons(out, tokenizer.eos_ids)
    for row, kept, cut, reason in zip(*map(np.asarray, (out.tokens, out.mask, out.truncated)), reasons, strict=True):
        assert not kept[:width].any()
        response, n = row[width:].tolist(), int(kept.sum())
        assert kept[width : width + n].all()  # one run from the first response token, its last token inside
        found = _search(strings, texts, response[:n])
        end = response[n - 1] in tokenizer.eos_ids
        assert not any(i in tokenizer.eos_ids for i in response[: n - 1])
        assert found in (None, n - 1)
        assert reason == (1 if end else 2 if found is not None else 0)
        assert bool(cut) == (reason == 0) and (reason > 0 or n == 10)
        assert not any(response[n:])
    assert set(reasons) == {0, 1, 2} or strings == ["1"]


def test_scan_equals_early_exit_and_a_stop_that_never_comes_changes_nothing():
    both = [_roll(["=2", "aa"], early_exit=flag)[0] for flag in (True, False)]
    jax.tree.map(np.testing.assert_array_equal, *both)
    never, other = _roll(["xyz"])[0], _roll(["qqqq", "zz"])[0]
    jax.tree.map(np.testing.assert_array_equal, never, other)


@pytest.mark.parametrize("new", [1, 2])
def test_shortest_responses(new):
    out, width = _roll(["1", "a"], new=new)
    tokenizer = nano()[3]
    reasons = finish_reasons(out, tokenizer.eos_ids)
    first = np.asarray(out.tokens)[:, width]
    at_once = np.isin(first, [tokenizer.encode(c)[0] for c in "1a"])
    assert at_once.any() and (reasons[at_once] == 2).all() and (out.mask.sum(axis=1)[at_once] == 1).all()
    assert np.asarray(out.sampler_logp)[at_once, width].max() < 0  # the stopping token carries its log-probability
    if new == 1:
        assert (reasons[~at_once & ~np.isin(first, tokenizer.eos_ids)] == 0).all()


def test_one_program_for_stop_strings_of_one_size():
    policy, params = _policy()
    _, _, config, tokenizer = nano()
    make = functools.partial(stops.make_stop_strings, token_bytes=token_bytes(tokenizer))
    prompts, valid = jnp.asarray([[5, 6], [7, 6]], jnp.int32), jnp.ones((2, 2), bool)

    @jax.jit
    def roll(stop, keys):
        return generate(
            policy, params, prompts, valid, keys, group_size=2, max_new_tokens=4, eos_ids=(2,), stop=stop
        ).mask

    for seed, strings in enumerate((["1=2"], ["2=1"], ["a=2"])):
        roll(make(strings, vocab_size=config.padded_vocab_size), jax.random.split(jax.random.key(seed), 4))
    assert roll._cache_size() == 1


def test_rollout_maker_takes_stop_strings():
    model = parts.load_model("nano")
    rollout = parts.make_rollout(model, group_size=4, max_new_tokens=12, temperature=1.0, stop=["\n", ","])
    ids = model.tokenizer.encode("1 2 3 = 6")
    tokens = jnp.asarray([ids], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    out = jax.jit(rollout)(model.params, tokens, jnp.ones_like(tokens, bool), keys, jnp.zeros((1,), jnp.int32))
    for text in parts.responses(model.tokenizer, out):
        assert "," not in text[:-1]


def test_a_special_token_is_no_text_to_stop_at(tmp_path):
    """Unless it ends a response by itself: the text is never decoded, so the flag would do nothing."""
    model = parts.load_model("nano")
    model = model._replace(tokenizer=byte_level(tmp_path / "f"), config=dataclasses.replace(model.config, **ROOM))
    make = functools.partial(parts.make_rollout, group_size=1, max_new_tokens=2, temperature=1.0)
    assert make(model, stop=["<b>", "a<|end|>"])
    (end,) = model.tokenizer.eos_ids
    other = model._replace(tokenizer=model.tokenizer._replace(eos_ids=(end + 1,)))
    with pytest.raises(UserError, match=rf"--stop 'a<.end.>' holds the special token {end}"):
        make(other, stop=["<b>", "a<|end|>"])


def test_mistakes_are_named(tmp_path):
    texts = [b"a", b"b"]
    for strings in ([], ["a", ""], "ab"):
        with pytest.raises(ValueError, match="stop="):
            stops.make_stop_strings(strings, texts, vocab_size=2)
    with pytest.raises(ValueError, match="vocab_size=1"):
        stops.make_stop_strings(["a"], texts, vocab_size=1)
    with pytest.raises(UserError, match=r"tokenizer\.json or tokenizer\.model"):
        token_bytes(nano()[3]._replace(files=()))
    tokenizer = metaspace(tmp_path / "f")
    stored = json.loads((tmp_path / "f" / "tokenizer.json").read_text())
    stored["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "f" / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="WordPiece"):
        token_bytes(tokenizer)
    shutil.rmtree(tmp_path / "f")
