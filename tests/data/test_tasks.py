import importlib

import numpy as np
import pytest

from experiments.parts import corpus
from experiments.parts.corpus_tasks import sudoku
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.tasks import chain, countdown, keydoor, programs
from jaxrl_llm.errors import UserError
from jaxrl_llm.verifiers import answers
from jaxrl_llm.verifiers import countdown as countdown_verifier
from tests import close
from tests.models_for_tests import nano

NAMES = ("countdown", "chain", "programs", "sudoku", "strings", "relations", "keydoor", "sql", "translation")


def _module(name):
    own = name in ("countdown", "chain", "programs", "keydoor")
    return importlib.import_module(f"{'jaxrl_llm.data.tasks' if own else 'experiments.parts.corpus_tasks'}.{name}")


def _problems(name, n=200, seed=0):
    task, rng = _module(name), np.random.default_rng(seed)
    return [task.make(rng, int(rng.choice(task.LEVELS))) for _ in range(n)]


@pytest.mark.parametrize("name", NAMES)
def test_seeded_and_within_limits(name):
    assert _problems(name) == _problems(name) != _problems(name, seed=1)
    for p in _problems(name):
        assert p.task == name and p.prompt.endswith("=>")
        assert len(p.prompt) + len(p.solution) + 2 <= 96


@pytest.mark.parametrize("name", NAMES)
def test_text_survives_the_tokenizer(name):
    tokenizer = nano()[3]
    for p in _problems(name, 50):
        ids = tokenizer.encode(p.prompt + p.solution)
        assert len(ids) == len(p.prompt + p.solution)
        assert tokenizer.decode(ids) == p.prompt + p.solution


def test_reference_solutions_are_right():
    for p in _problems("countdown"):
        assert countdown_verifier.verify(p.answer, p.solution).value == 1.0, p
    for name in ("chain", "strings", "relations", "sql", "translation"):
        for p in _problems(name):
            assert answers.verify_exact(p.answer, p.solution).value == 1.0, p
    for p in _problems("keydoor"):
        assert keydoor.solves(p.answer["world"], p.solution)
        assert not keydoor.solves(p.answer["world"], p.solution + "l")


def test_chain_by_python_arithmetic():
    for p in _problems("chain"):
        value = p.answer["numbers"][0]
        for operator, number in zip(p.answer["operators"], p.answer["numbers"][1:], strict=True):
            value = {"+": value + number, "-": value - number, "*": value * number}[operator] % p.answer["modulus"]
        assert value == p.answer["value"]
        assert chain.direct(p) == f"#{value}"


def test_programs_pass_their_tests_and_slips_fail_as_often_as_their_values_differ():
    rng = np.random.default_rng(1)
    for p in _problems("programs"):
        scope = {}
        exec(p.answer["start"] + p.solution, scope)  # a generator's own text, no model's
        for check in p.answer["checks"]:
            exec(check, scope)
        shown = [part.split(">") for part in p.prompt[3:-2].split()]
        assert [scope["f"](int(x)) for x, _ in shown] == [int(y) for _, y in shown]
        tried = {}
        exec(p.answer["start"] + programs.flawed(rng, p), tried)
        differs = any(tried["f"](x) != scope["f"](x) for x in (*programs.SHOWN, *programs.HIDDEN))
        assert differs or all(tried["f"](x) == scope["f"](x) for x in range(8))  # the tests tell them apart
    with pytest.raises(UserError, match="not of chain: --data programs"):
        programs.flawed(rng, _problems("chain", 1)[0])


def test_sudoku_grids_are_complete_and_unique():
    assert len(sudoku.all_grids()) == 288  # the known count
    for p in _problems("sudoku", 30):
        shown, full = p.prompt[3:-2], p.solution
        assert all(a in (".", b) for a, b in zip(shown, full, strict=True))


@pytest.mark.slow
def test_splits_never_meet_and_ignore_presentation():
    train = tables.make_split(countdown, split="train", n=300, seed=0, levels=(3,))
    held = tables.make_split(countdown, split="heldout", n=100, seed=5, levels=(3,))
    assert not {p.identity for p in train} & {p.identity for p in held}
    assert len({p.identity for p in train}) == 300
    assert all(tables.is_heldout(p.identity) for p in held)
    with pytest.raises(UserError, match="fewer than n=5000"):
        tables.make_split(countdown, split="heldout", n=5000, seed=0, levels=(2,))


def test_corpus_has_the_stated_share_of_flaws_and_no_held_out_problem():
    rng = np.random.default_rng(0)
    found = {}
    for _ in range(4000):
        prompt, _, flawed = corpus.document(rng)
        found.setdefault(prompt.split(" ")[0], []).append(flawed)
    close.assert_share(np.mean(found["cd"]), 0.5, len(found["cd"]))
    chains = sum((v for k, v in found.items() if k.startswith("m")), [])
    close.assert_share(np.mean(chains), 0.3, len(chains))


def test_packed_rows_hold_whole_documents():
    tokenizer = nano()[3]
    rows = corpus.packed_rows(np.random.default_rng(0), tokenizer, 4, 128)
    for tokens, segments, mask in zip(rows["tokens"], rows["segment_ids"], rows["mask"], strict=True):
        for segment in range(1, segments.max() + 1):
            part = tokens[segments == segment]
            assert part[0] == tokenizer.bos_id and part[-1] == tokenizer.eos_ids[0]
            text = tokenizer.decode(part.tolist())
            response = tokenizer.decode(part[mask[segments == segment]].tolist())
            assert text.endswith("=>" + response)


def test_encoding_left_pads_and_names_long_prompts():
    tokenizer = nano()[3]
    problems = _problems("countdown", 8)
    table = tables.encode_problems(tokenizer, problems, prompt_tokens=24, answers=tables.countdown_answers)
    for k, p in enumerate(problems):
        row = np.asarray(table.tokens[k])[np.asarray(table.valid[k])]
        assert row[0] == tokenizer.bos_id and tokenizer.decode(row.tolist()) == p.prompt
        assert table.valid[k, -1]
    with pytest.raises(UserError, match="limit is 5"):
        tables.encode_problems(tokenizer, problems, prompt_tokens=5)
    with pytest.raises(UserError, match="empty"):
        tables.encode_problems(tokenizer, [])
