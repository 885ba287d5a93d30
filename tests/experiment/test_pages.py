"""A page a paper: what the file says, what the record says, and links that lead somewhere."""

import json
import pathlib
import re

import pytest

from jaxrl_llm.experiment import doctor
from jaxrl_llm.experiment.evidence import pages, records, systems, verdicts

ROOT = pathlib.Path(__file__).resolve().parents[2]


def page(slug, folder):
    file = systems.experiment_file(slug, ROOT)
    (system,) = [s for s in systems.listed(ROOT) if s.slug == slug]
    return pages.page(system, doctor.load(file), folder, ROOT)


def test_fields_of_a_docstring():
    text = "One.\n\nPaper:     A, B.\nClaim:     it is\n           better.\nEquations: A_i = r_i\nRun:       x\n"
    assert pages.section(text, "Claim") == "it is\nbetter." and pages.section(text, "Equations") == "A_i = r_i"
    assert pages.section(text, "Run") == "x" and pages.section(text, "Expect") == ""


@pytest.mark.parametrize("slug", ["igpo", "dr_grpo", "nsr"])
def test_a_page_says_claim_arms_verdict_interval_and_cost(slug, tmp_path):
    text = page(slug, ROOT / "docs" / "papers" / "family")
    record, *others = systems.records_of(systems.experiment_file(slug, ROOT).parent.name, slug, ROOT)
    assert f"## Verdict: {record['claim']['verdict']}" in text and "**primary**" in text and "Cost: " in text
    assert text.count("\n## Verdict on ") == len(others)
    assert ("(old instrument)" in text) == records.is_old(record)
    assert all(f"| {name} | " in text for name in record["arms"])
    for link in re.findall(r"\]\((\.\./[^)]+)\)", text):
        assert (ROOT / "docs" / "papers" / "family" / link).resolve().exists(), link


def test_a_page_says_neighbouring_rates_controls_and_what_was_not_kept():
    record = systems.records_of("agents", "igpo", ROOT)[0]
    bounds = {"mean": -0.01, "low": -0.03, "high": 0.01, "n": 8}
    record["instrument"] |= {
        "registered_in": "0123456789ab",
        "first_seed": 100,
        "tries": 1,
        "withheld": ["-0.1, 8 seeds"],
        "neighbours": [
            {"side": "lower", "rates": {"igpo": 3e-4, "grpo": 1e-3}, "verdict": "undecided", **bounds},
            {
                "side": "higher",
                "rates": {"igpo": 1e-3, "grpo": 3e-3},
                "verdict": "test bed invalid",
                **bounds,
                "bed": ["eval/success of grpo: the baseline gains nothing"],
            },
        ],  # fmt: skip
        "controls": [{"name": "scrambled", "text": "eval/success, end - start", "bounds": bounds}],
    }
    text = "\n".join(pages._judged(record, "figure.png"))
    assert "- at the next lower rates (igpo 0.0003, grpo 0.001): undecided, -0.01 [-0.03, +0.01] (n=8)\n" in text
    assert "- at the next higher rates (igpo 0.001, grpo 0.003): test bed invalid, -0.01 [-0.03, +0.01] (n=8); " in text
    assert "(n=8); eval/success of grpo: the baseline gains nothing" in text
    assert "- control scrambled, eval/success, end - start: -0.01 [-0.03, +0.01] (n=8)" in text
    assert "- seen before and not kept: -0.1, 8 seeds" in text
    assert "before the first seed (100), committed in `0123456789ab`; earlier records of this file: 1;" in text


def test_a_page_says_which_parts_compare_rates_too():
    """One arm was tuned and the other was not: a difference at unlike rates is no ablation."""
    record = systems.records_of("preference", "negative_synthetic", ROOT)[0]
    text = "\n".join(pages._judged(record, "figure.png"))
    assert "Parts whose arms trained at unlike rates" in text
    assert "- step_dpo at 0.00025 against dpo at 0.001, in eval/broken" in text
    assert "against rft at" not in text  # both were tuned


def test_a_page_says_what_was_seen_where_no_record_stands():
    text = page("safe_constraints", ROOT / "docs" / "papers" / "family")
    assert "\nSeen, and not kept as a record:\n\n- capo - listed in shifted/violations -0.042" in text
    told = page("igpo", ROOT / "docs" / "papers" / "family")
    assert "Seen, and not kept" not in told and "- seen before and not kept: igpo - grpo" in told


def test_a_paper_whose_record_is_withdrawn_waits_for_another():
    waiting = pages.index(ROOT).partition("## What a record would cost")[2]
    assert "[agents/spa_rl](agents/spa_rl.md)" in waiting
    assert "(agents/igpo.md)" not in waiting


def test_a_rate_at_which_a_seed_diverged_has_no_mean():
    record = systems.records_of("agents", "igpo", ROOT)[0]
    curves = {"grpo": {"0.001": [0.5, 0.7], "0.01": [0.5, None]}}
    tuned = {"metric": "reward/mean", "seeds": 2, "curves": curves, "best": {"grpo": 1e-3}, "at_the_edge": []}
    record["instrument"] |= {"tuned": tuned}
    assert "| grpo | 0.6 | diverged | 0.001 |" in "\n".join(pages._judged(record, "figure.png"))


def test_a_caption_names_problems_only_where_they_were_counted():
    arm = {"seeds": [0, 1], "updates": 3, "rollouts": 24, "problems": {}}
    record = {"arms": {"a": arm}, "settings": {"eval_problems": 512, "eval_samples": 4}, "instrument": {"tail": 3}}
    said = "2 seeds; {}, mean of the last 3 evaluations; 3 updates and 24 rollouts a seed; not tuned"
    assert records.caption(record) == said.format("own measurement")
    counted = record | {"arms": {"a": arm | {"problems": {"problems/right": ["x"]}}}}
    assert records.caption(counted) == said.format("512 problems x 4 samples")


def test_the_title_of_a_figure_names_the_bed_of_a_second_record():
    record = {"experiment": "policy_gradient.nsr", "claim": {"verdict": "supported here"}, "instrument": {"tail": 3}}
    assert records.title(record | {"command": "python -m x --record"}) == "policy_gradient.nsr: supported here"
    second = record | {"command": "python -m x --bed nano_1 --model nano_1"}
    assert records.title(second) == "policy_gradient.nsr on nano_1: supported here"


def test_the_committed_pages_are_up_to_date():
    folder = ROOT / "docs" / "papers"
    # links lead from where a page lies, so that it is made for its committed place
    for path in folder.glob("*/*.md"):
        assert path.read_text() == page(path.stem, path.parent), f"{path}: run python -m jaxrl_llm.experiment pages"
    assert (folder / "index.md").read_text() == pages.index(ROOT), "run python -m jaxrl_llm.experiment pages"
    there = {path.stem for path in folder.glob("*/*.md")}
    wanted = {s.slug for s in systems.listed(ROOT) if systems.experiment_file(s.slug, ROOT) is not None}
    assert there == wanted, "run python -m jaxrl_llm.experiment pages"


def test_pages_of_files_that_are_gone_go(tmp_path, monkeypatch):
    kept = systems.System("agents", "igpo", "IGPO", "2510.14967")
    monkeypatch.setattr(systems, "listed", lambda root: [kept])
    old = tmp_path / "agents" / "gone.md"
    old.parent.mkdir()
    old.write_text("of a file that is no more\n")
    written = pages.write(ROOT, tmp_path)
    assert written == [tmp_path / "agents" / "igpo.md", tmp_path / "index.md"] and not old.exists()
    assert "(agents/igpo.md)" in written[1].read_text()


def test_the_index_orders_what_has_no_record_by_its_cost():
    text = pages.index(ROOT).partition("## What a record would cost")[2]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "minutes" not in line]
    assert [float(row[0][2:]) for row in rows] == sorted(float(row[0][2:]) for row in rows)
    assert "agents/igpo" not in text and "hybridflow" not in text, "they have one"
    assert rows and {row[2] for row in rows} <= {"pilot", records.OLD, "withdrawn record"}


def test_the_cost_of_a_record_is_that_of_a_pilot_or_of_what_a_record_took(monkeypatch):
    kept = [systems.System("policy_gradient", slug, slug, "") for slug in ("nsr", "rover", "egsw", "tempo")]
    monkeypatch.setattr(systems, "listed", lambda root: kept)
    row = {"processor minutes of a record": "21", "problem": "too near chance"}
    monkeypatch.setattr(pages.pilot, "kept_at", lambda root: {"policy_gradient/tempo": row})
    old = {"claim": {"verdict": "undecided"}, "arms": {"a": {"seconds": 90}, "b": {"seconds": 30}}}
    fresh = old | {"instrument": {"tail": 3}}
    withdrawn = fresh | {"claim": {"verdict": verdicts.WITHDRAWN}, "arms": {"a": {"seconds": 600}}}
    made = {"nsr": [fresh], "rover": [withdrawn], "egsw": [old], "tempo": [withdrawn]}
    monkeypatch.setattr(systems, "records_of", lambda family, slug, root: made[slug])
    rows = [line.split(" | ") for line in pages.index(ROOT).splitlines() if line.startswith("| ")][1:]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("| 2", records.OLD, "none |"),
        ("| 10", "withdrawn record", "none |"),
        ("| 21", "pilot", "says no (21 min): too near chance |"),
    ]


def test_withdrawn_verdicts_say_why():
    reasons = records.withdrawn(ROOT)
    slugs = {"nsr", "spa_rl", "deepresearcher", "tricks_or_traps", "cyclealign", "pairwise_rl", "agro", "l2s_merging"}
    assert slugs <= {name.split("/")[1] for name, registered in reasons if not registered}
    seen = 0
    for path, _ in records.committed(ROOT):
        record = json.loads(path.read_text())
        if reason := records.reason_withdrawn(path, record):
            assert record["claim"]["verdict"] == "withdrawn" and record["claim"]["bed"][0] == reason, path
            seen += 1
    assert seen >= len(slugs)


def test_the_pilot_of_a_withdrawn_record_says_nothing():
    for verdict, said in (("withdrawn", "none"), ("undecided", "passes")):
        record = {"instrument": {"pilot": {"problems": []}}, "claim": {"verdict": verdict}}
        assert systems.piloted("analysis/no_such", {}, [record]) == said


def test_no_committed_record_speaks_of_confidence_or_is_unjudged_by_the_algebra():
    for path, _ in records.committed(ROOT):
        assert '"confidence"' not in path.read_text().partition('"claim"')[2], path
