"""Rollouts as a page: text is data, mistakes are one line, a browser shows every row."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import lookup
from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.run.records import transcripts, view
from jaxrl_llm.train.methods.builders import make_estimate, score_tokens
from jaxrl_llm.train.online import Online, init_state
from tests import close

HOSTILE = "</script><script>document.title='taken'</script><b>&amp;"


def _record(**changes):
    record = {
        "step": 3, "group": 0, "problem": 1, "reward": 1.0, "valid": True, "truncated": False,
        "tokens": ["2+2=", "4", ""], "mask": [0, 1, 1], "sampler_logp": [0.0, -0.5, -0.1], "logp": [0.0, -0.4, -0.1],
        "advantage": [0.0, 1.0, 1.0],
    }  # fmt: skip
    return record | changes


def _run(tmp_path, *records):
    (tmp_path / view.FILE).write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(tmp_path)


@pytest.fixture(scope="module")
def game():
    """Two groups of episodes with their turns, and a method that trains on them."""
    arena = lookup.make_lookup(turns=3)
    params = jax.jit(arena.policy.init)(jax.random.key(0))
    ids = jnp.arange(2, dtype=jnp.int32)
    rollout = arenas.arena_episodes(arena, arena.train, group_size=4)
    rows = rollout(
        params, arena.train.tokens[:2], arena.train.valid[:2], sample_keys(jax.random.key(1), 0, ids, 4), ids
    )
    rewards = multi_turn.episode_rewards({}, rows)

    def advantages(rows, rewards):
        return group.per_token(group.dr_grpo_advantages(rewards.value, rows.group_ids), rows.mask)

    method = Online(
        arena.policy, arena.train, make_uniform(), 2, 4, rollout, multi_turn.episode_rewards,
        make_estimate(arena.policy, advantages), lambda params, batch: (jnp.zeros(()), {}), optax.sgd(0.0),
    )  # fmt: skip
    state = init_state(method, params, jax.random.key(2))

    def decode(ids):
        return "".join(lookup.ALPHABET[i] for i in ids)

    return arena, params, rows, rewards, method, state, decode


@pytest.fixture(scope="module")
def played(game):
    """The game, transcribed as training would."""
    arena, params, rows, rewards, method, state, decode = game
    look = transcripts.make_look(method, decode, rows=4)
    logp, _ = jax.jit(partial(score_tokens, arena.policy))(params, rows)
    return rows, rewards, np.asarray(logp), look(state, rows, rewards, 7)


def test_advantages_of_other_rows_are_not_shown(game, played):
    """A batch that is filled over several rollouts has as many rows as one, and they are others."""
    _, _, rows, rewards, method, state, decode = game
    rewards = rewards._replace(value=jnp.arange(8, dtype=jnp.float32))

    def rolled(*given):
        batch = method.estimate(*given)
        return jax.tree.map(lambda x: jnp.roll(x, 3, axis=0) if x.ndim else x, batch)

    own, other = (
        [any(r["advantage"]) for r in transcripts.make_look(one, decode, rows=8)(state, rows, rewards, 7)]
        for one in (method, method._replace(estimate=rolled))
    )
    tokens = np.asarray(rows.tokens)
    same = [np.array_equal(*pair) for pair in zip(tokens, np.roll(tokens, 3, axis=0), strict=True)]
    assert all(own) and not all(same)
    assert not any(seen for seen, equal in zip(other, same, strict=True) if not equal)


def test_records_hold_what_was_sampled_and_judged(played):
    rows, rewards, logp, records = played
    assert len(records) == 4 and {r["group"] for r in records} == {0} and {r["step"] for r in records} == {7}
    for b, record in enumerate(records):
        columns = np.flatnonzero(rows.segment_ids[b])
        text = "".join(lookup.ALPHABET[i] for i in np.asarray(rows.tokens[b])[columns])
        assert "".join(record["tokens"]) == text and record["reward"] == float(rewards.value[b])
        mask = np.asarray(rows.mask[b])[columns]
        np.testing.assert_array_equal(record["mask"], mask)
        close.assert_printed(logp[b, columns][mask], np.asarray(record["logp"])[mask], 3)
        assert not np.asarray(record["sampler_logp"])[~mask].any()
        assert len(record["turn_rewards"]) == int(np.asarray(rows.extras["turns/taken"][b]).sum())
    assert any(0 in r["mask"][r["mask"].index(1) :] for r in records), "observations are outside the mask"


def test_bytes_of_one_character_share_its_text():
    def decode(ids):
        return bytes(ids).decode(errors="replace")

    assert transcripts.pieces(decode, list("a€b".encode())) == ["a", "", "", "€", "b"]
    assert transcripts.pieces(decode, [0xE2, 0x82]) == ["", "\ufffd"]
    assert "".join(transcripts.pieces(decode, [0xFF] * 9)) == "\ufffd" * 9


def test_the_text_of_a_model_is_never_markup(tmp_path):
    page = view.page([_record(tokens=[HOSTILE, "4", ""])], "a<b")
    assert HOSTILE not in page and page.count("</script>") == 2 and "a&lt;b" in page
    held = re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(held)[0]["tokens"][0] == HOSTILE
    assert not re.search(r'(src|href)="?https?:', page), "the page needs no network"


def test_the_page_runs_its_own_script_and_nothing_else():
    page = view.page([_record(tokens=[HOSTILE, "{{TITLE}}", "{{POLICY}}"])], '{{DATA}}" onload=x')
    held = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1])
    rules = {rule.split()[0]: rule.split()[1:] for rule in held.split("; ")}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    for tag in ("script", "style"):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert len(texts) == 1 and rules[f"{tag}-src"] == [f"'sha256-{digest}'" for digest in digests]
    # nothing that the policy would stop stands in the page, and it comes before all it rules
    assert not re.search(r"<[^>]*\s(on\w+|style)\s*=", page.split('<script id="data"')[0])
    assert page.index("Content-Security-Policy") < page.index("<style>")
    tokens = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])[0]["tokens"]
    assert tokens == [HOSTILE, "{{TITLE}}", "{{POLICY}}"] and "<h1>{{DATA}}&quot; onload=x</h1>" in page


def test_the_folder_of_an_experiment_names_that_of_a_seed(tmp_path, capsys):
    seed = tmp_path / "seeds" / "grpo" / "seed_0"
    seed.mkdir(parents=True)
    run = _run(seed, _record())
    assert view.main([str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"has no episodes.jsonl; give the folder of one of its seeds: {seed}\n" in err and err.count("\n") == 1
    assert view.main([run]) == 0


def test_the_command(tmp_path, capsys):
    run = _run(tmp_path, _record())
    with (tmp_path / view.FILE).open("a") as file:
        file.write('{"step": 4, "gro')  # cut by a crash
    assert view.main([run]) == 0 and (tmp_path / view.PAGE).is_file()
    assert view.main([run, "--out", str(tmp_path / "other.html")]) == 0
    assert capsys.readouterr().out.count("written: ") == 2
    assert view.main(["--help"]) == 0


def test_no_argument_is_the_newest_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert view.main([]) == 2
    err = capsys.readouterr().err
    assert "no run with rollouts under runs/; train first" in err and err.count("\n") == 1
    for age, name in enumerate(["runs/new", "runs/old/seeds/grpo/seed_0"]):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        _run(folder, _record())
        os.utime(folder / view.FILE, (1e9 - age, 1e9 - age))
    assert view.main([]) == 0 and (tmp_path / "runs/new" / view.PAGE).is_file()
    assert view.main(["--out", "other.html"]) == 0 and (tmp_path / "other.html").is_file()
    assert not (tmp_path / "runs/old/seeds/grpo/seed_0" / view.PAGE).exists()


@pytest.mark.parametrize(
    ("lines", "words", "said"),
    [
        (None, [], "has no episodes.jsonl; give the folder of a run"),
        ("", [], "holds no rollouts yet"),
        ("{\n", [], "episodes.jsonl:1: not JSON"),
        (
            json.dumps(_record()) + '\n{"a": "\udcff"}\n',
            [],
            "jsonl:2: not UTF-8 (invalid start byte at byte 7); delete",
        ),
        ('{"step": 1}\n', [], "episodes.jsonl:1: lacks group, reward"),
        (json.dumps(_record(mask=[1])) + "\n", [], "episodes.jsonl:1: lists of different length"),
        (json.dumps(_record()) + "\n", ["--out", "/nowhere/page.html"], "cannot write /nowhere/page.html"),
        (json.dumps(_record()) + "\n", ["--oot", "x"], "usage: "),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, lines, words, said):
    if lines is not None:
        (tmp_path / view.FILE).write_bytes(lines.encode(errors="surrogateescape"))
    assert view.main([str(tmp_path), *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("google-chrome")), reason="no Chromium here")
@pytest.mark.timeout(180)
def test_in_a_browser(tmp_path, played):
    others = [_record(step=1, tokens=[HOSTILE, "4", ""]), _record(step=1, group=1), _record(step=1, valid=False)]
    run = _run(tmp_path, *others, *played[3])
    view.write(run)
    browser = shutil.which("chromium") or shutil.which("google-chrome")

    def shown(place):
        words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
        url = f"file://{tmp_path / view.PAGE}#{place}"
        return subprocess.run([browser, *words, url], capture_output=True, text=True, timeout=120, check=True).stdout

    page = shown("step=1&colour=ratio")
    assert page.count("<article>") == 2 and "2 samples of one prompt, mean reward 1.000" in page
    assert 'class="invalid">invalid' in page and "ratio 1.105" in page
    assert "<title>taken" not in page and "&lt;/script&gt;" in page
    page = shown("step=7&colour=advantage")
    assert page.count("<article>") == 4 and 'class="observation"' in page and 'class="prompt"' in page
    assert page.count('class="action') == sum(sum(r["mask"]) for r in played[3])
