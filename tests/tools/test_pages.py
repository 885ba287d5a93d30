"""Pages: what a reading agent sees and when it leaves, several queries at once, a model behind an address as reader."""

import json

import numpy as np
import pytest

from jaxrl_llm.envs import tool_question
from jaxrl_llm.errors import DataError, RunStopped, UserError
from jaxrl_llm.run import catalog
from jaxrl_llm.tools import boxes, endpoints, pages, schema
from jaxrl_llm.tools.calls import of_functions
from tests.endpoint_for_tests import PROXIES, Server

FILLER = "Nothing of note happens here for a long while. " * 60
LIMA = pages.Page("w/peru", "Peru", f"Peru lies in the west. {FILLER}The capital of Peru is Lima. {FILLER}")
ULM = pages.Page("w/ulm", "Ulm", "Ulm lies on the Danube. Its minster is high.")


def by_title(query, count):
    return [k for k, page in enumerate((LIMA, ULM)) if page.title.lower() in query.lower()][:count]


def test_segments_hold_all_words_in_order_and_no_more_than_their_size():
    for text in (LIMA.text, "x" * 5001, "One.\n\nTwo? " + "y" * 30):
        found = pages.segments(text, size=25)
        assert all(0 < len(part) <= 25 for part in found)
        assert "".join("".join(found).split()) == "".join(text.split())
    with pytest.raises(ValueError, match="size=0"):
        pages.segments("x", size=0)


def test_a_reader_goes_on_with_its_notes_until_it_has_enough_and_leaves_what_brings_nothing():
    page, seen = pages.Page("u", "", " ".join(f"Part {k}. {'z' * 1990}." for k in range(9))), []

    def reader(notes_at, enough):
        def read(goal, notes, segment):
            seen.append((goal, notes))
            place = len(seen) - 1
            return pages.Note(f"n{place}" if place in notes_at else "", place != enough)

        return read

    assert pages.browse(page, "g", reader({0, 2}, 3)) == "n0\nn2"
    assert seen == [("g", ()), ("g", ("n0",)), ("g", ("n0",)), ("g", ("n0", "n2"))]
    seen.clear()
    assert pages.browse(page, "g", reader(set(), -1)) == "the page says nothing about that"
    assert len(seen) == pages.PATIENCE
    assert pages.browse(ULM, "minster", pages.first_segment) == ULM.text


def test_both_tools_take_several_at_once_and_refuse_what_is_no_list():
    box = pages.pages_box([LIMA, ULM], by_title)
    found = box.run("web_search", {"queries": ["about Peru", "about Ulm", "about Rome"]}).text.split("\n\n")
    assert found[0].startswith("Results of 'about Peru':\n[1] Peru (w/peru)\nPeru lies in the west.")
    assert "[1] Ulm (w/ulm)" in found[1] and found[2].endswith("nothing was found")
    assert len(found[0]) < 300  # a search shows beginnings, not pages
    goal = {"goal": "the high minster"}
    found = box.run("web_browse", {"urls": ["w/ulm", "w/rome"]} | goal)
    assert found.text == "w/ulm: Its minster is high.\n\nw/rome: no such page"
    for wrong in ({"queries": 3}, {"queries": []}, {"queries": ["q"] * 6}):
        assert box.run("web_search", wrong).error
    assert [item.name for item in box.tools] == ["web_search", "web_browse"]


def test_on_a_bad_day_every_query_lacks_its_best_hit():
    box = pages.pages_box([LIMA, ULM], lambda query, count: [0, 1] if query == "a" else [1, 0])
    bad = tool_question.noisy(box, np.random.default_rng(0), astray=1.0)
    text = bad.run("web_search", {"queries": ["a", "b"]}).text
    assert "[1] " not in text and text.index("(w/ulm)") < text.index("(w/peru)")


def test_a_model_behind_an_address_reads_each_segment(tmp_path, monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)

    def reply(request):
        shown = request["messages"][-1]["content"]
        return (
            "Lima is the capital.\nSTOP"
            if "capital of Peru is" in shown.split("Next segment:")[1]
            else "NOTHING\nCONTINUE"
        )

    server = Server(reply)
    try:
        chat = endpoints.make_chat(server.address, "reads", cache=tmp_path / "kept.jsonl")
        box = pages.pages_box([LIMA, ULM], by_title, pages.make_reader(chat))
        said = box.run("web_browse", {"urls": ["w/peru"], "goal": "capital"})
        assert said.text == "w/peru: Lima is the capital."
        asked = [request["messages"][0]["content"] for request in server.seen]
        assert len(asked) == 2 and all("Goal: capital" in text and "Notes so far:\nnone" in text for text in asked)
    finally:
        server.down()


def test_a_budget_that_is_spent_ends_the_run_and_no_episode():
    def spent(**given):
        raise RunStopped("the budget is spent")

    box = of_functions([(schema.tool("web_browse", "reads"), spent)])
    with pytest.raises(RunStopped, match="the budget is spent"):
        box.run("web_browse", {})


def test_a_corpus_and_flags_that_do_not_serve(tmp_path):
    path = tmp_path / "pages.jsonl"
    path.write_text("\n".join(json.dumps({"title": p.title, "url": p.url, "text": p.text}) for p in (LIMA, ULM)))
    assert pages.read_corpus(path) == [LIMA, ULM]
    pytest.importorskip("bm25s")
    box = boxes.opened(f"calculator,pages={path}")
    assert {item.name for item in box.tools} == {"calculate", "web_search", "web_browse"}
    assert "(w/ulm)" in box.run("web_search", {"queries": ["minster Danube"]}).text.split("[2]")[0]
    for line, said in (("{", "not JSON"), ('{"title": "x"}', "needs text"), ("", "holds no pages")):
        path.write_text(line)
        with pytest.raises(DataError, match=said):
            pages.read_corpus(path)
    # a line is what ends with a line feed: other ends of lines stand inside of texts; a mark and a blank line are none
    path.write_bytes(b"\xef\xbb\xbf" + '{"text": "a\u2028b\x85c"}\n\n'.encode())
    assert [page.text for page in pages.read_corpus(path)] == ["a\u2028b\x85c"]
    assert boxes.documents(path) == ["a\u2028b\x85c"]
    path.write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(DataError, match=":1: not UTF-8"):
        pages.read_corpus(path)
    path.write_text('{"text": "a", "url": "u"}\n{"text": "b", "url": "u"}')
    with pytest.raises(DataError, match="two pages have one url"):
        pages.read_corpus(path)
    half = type("Given", (), {"reader": "http://localhost:1/v1", "reader_model": ""})
    with pytest.raises(UserError, match="belong together"):
        catalog.page_reader(half)
