"""Models behind an address, played by a server here: cache, replay, budget, retries, failures."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl_llm.errors import DataError, RunStopped, UserError
from jaxrl_llm.tools import endpoints
from tests.endpoint_for_tests import serving
from tests.waits import soon

pytest.importorskip("openai")


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_PAUSE_S", 0.05)
    with serving(monkeypatch) as server:
        yield server


def _said(text):
    return [{"role": "user", "content": text}]


def test_a_question_is_asked_once_and_replayed_without_a_network(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    path = tmp_path / "kept" / "replies.jsonl"
    chat = endpoints.make_chat(server.address, "m", cache=path, key_variable="JUDGE_KEY", seed=3)
    assert [chat(_said("one")), chat(_said("one")), chat(_said("two"))] == ["ONE", "ONE", "TWO"]
    assert [s["messages"][0]["content"] for s in server.seen] == ["one", "two"]
    assert server.seen[0]["path"] == "/v1/chat/completions" and server.seen[0]["key"] == "Bearer secret-key"
    assert (server.seen[0]["seed"], server.seen[0]["temperature"], server.seen[0]["model"]) == (3, 0.0, "m")
    assert "secret-key" not in path.read_text()
    with path.open("a") as file:
        file.write('{"key": "cut')  # by a crash
    again = endpoints.make_chat("http://nowhere.invalid", "m", cache=path, seed=3, replay=True)
    assert again(_said("two")) == "TWO" and len(path.read_text().splitlines()) == 2
    with pytest.raises(endpoints.Unanswered, match="holds no reply to .*three.*drop replay"):
        again(_said("three"))
    other = endpoints.make_chat("http://nowhere.invalid", "m", cache=path, seed=4, replay=True)
    with pytest.raises(endpoints.Unanswered):
        other(_said("two"))


def test_other_draws_are_other_samples_of_a_model_that_samples(server, tmp_path):
    warm = endpoints.make_chat(server.address, "m", cache=tmp_path / "a", temperature=1.0, seed=5)
    for draw in (0, 1, 1, 2):
        warm(_said("one"), draw)
    assert [s["seed"] for s in server.seen] == [5, 6, 7]
    cold = endpoints.make_chat(server.address, "m", cache=tmp_path / "b", temperature=0.0, seed=5)
    for draw in (0, 1, 2):
        cold(_said("one"), draw)
    assert [s["seed"] for s in server.seen[3:]] == [5]
    draws = {endpoints.draw_of([a, b]) for a in range(30) for b in range(30)}
    assert len(draws) == 900 and max(draws) < 2**31 and endpoints.draw_of([2**32 - 1] * 2) >= 0


def test_passing_trouble_is_tried_again_and_a_refused_question_is_no_reply(server, tmp_path):
    told = []
    chat = endpoints.make_chat(
        server.address, "m", cache=tmp_path / "a", budget=endpoints.Budget(retries=2), tell=told.append
    )
    server.plan = [503, 429]
    assert chat(_said("one")) == "ONE" and len(server.seen) == 3
    server.plan = [400]
    assert endpoints.ask_all(chat, [_said("a"), _said("b")], workers=1) == [None, "B"]
    assert len((tmp_path / "a").read_text().splitlines()) == 2, "failures are not kept"
    assert not told
    for status in (401, 403, 404):
        server.plan = [status]
        with pytest.raises(RunStopped, match="m at http://127.*check the address, the model's name and the key"):
            chat(_said(f"two {status}"))


@pytest.mark.parametrize("trouble", ["away", "500", "429", "page", "cut", "other"])
def test_a_lost_endpoint_is_waited_for_and_that_is_said_once(server, tmp_path, trouble):
    told = []
    budget = endpoints.Budget(retries=0)
    chat = endpoints.make_chat(server.address, "m", cache=tmp_path / "a", budget=budget, tell=told.append)
    assert chat(_said("zero")) == "ZERO"
    if trouble == "away":
        server.down()
    else:
        server.plan = [{"500": 500, "429": 429}.get(trouble, trouble)] * 10_000
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(chat, _said(f"w{k}")) for k in range(4)]
        assert soon(lambda: told)
        assert not any(one.done() for one in asked)
        if trouble == "away":
            server.up()
        else:
            server.plan = []
        assert [one.result(30) for one in asked] == ["W0", "W1", "W2", "W3"]
    assert len(told) == 2 and "is lost" in told[0] and "the run waits and asks again" in told[0]
    assert "answers again after" in told[1]


def test_patience_ends_and_an_address_that_never_answered_is_a_mistake(server, tmp_path):
    budget = endpoints.Budget(retries=0, patience_s=0.2)
    chat = endpoints.make_chat(server.address, "m", cache=tmp_path / "a", budget=budget)
    assert chat(_said("zero")) == "ZERO"
    server.plan = [500] * 10_000
    with pytest.raises(RunStopped, match="lost for more than --endpoint-patience-s 0.2 .*run again when it is back"):
        chat(_said("one"))
    never = endpoints.make_chat(server.address, "m", cache=tmp_path / "b", budget=budget)
    with pytest.raises(UserError, match="m at http://127.* does not answer .*start it, or correct the address"):
        never(_said("one"))


@pytest.mark.parametrize("kind, budget", [("requests 2", endpoints.Budget(requests=2)),
                                          ("tokens 10", endpoints.Budget(tokens=10))])  # fmt: skip
def test_the_budget_holds_and_kept_replies_cost_nothing(server, tmp_path, kind, budget):
    chat = endpoints.make_chat(server.address, "m", cache=tmp_path / "a", budget=budget)
    assert [chat(_said(t)) for t in "aabb"] == ["A", "A", "B", "B"]
    with pytest.raises(RunStopped, match=f"is spent: 2 requests, 10 tokens; raise --endpoint-{kind} and run again"):
        chat(_said("c"))
    assert [chat(_said(t)) for t in "ab"] == ["A", "B"]
    again = endpoints.make_chat(server.address, "m", cache=tmp_path / "a", budget=budget)
    assert [again(_said(t)) for t in "abcd"] == ["A", "B", "C", "D"]  # the kept ones are not paid for again


def test_no_more_at_once_than_allowed_and_no_limit_by_zero(server, tmp_path):
    server.wait_s = 0.05
    budget = endpoints.Budget(requests=0, tokens=0, concurrency=3)
    chat = endpoints.make_chat(server.address, "m", cache=tmp_path / "a", budget=budget)
    assert len(endpoints.ask_all(chat, [_said(f"w{k}") for k in range(24)], workers=12)) == 24
    assert server.most == 3


def test_equal_questions_of_one_call_are_asked_once(server, tmp_path):
    chat = endpoints.make_chat(server.address, "m", cache=tmp_path / "a", budget=endpoints.Budget())
    server.wait_s = 0.02  # long enough for all to be under way at once
    assert endpoints.ask_all(chat, [_said(t) for t in "abaab"], workers=5) == ["A", "B", "A", "A", "B"]
    assert len(server.seen) == 2


def test_a_question_that_several_ask_at_once_is_paid_for_once(server, tmp_path):
    """The responses of a group are often equal, and each is judged in a thread of its own."""
    chat = endpoints.make_chat(server.address, "m", cache=tmp_path / "a", budget=endpoints.Budget(requests=1))
    server.wait_s = 0.1  # long enough for all to be under way at once
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda _: chat(_said("a")), range(6))) == ["A"] * 6
    assert len(server.seen) == 1 and len((tmp_path / "a").read_text().splitlines()) == 1


def test_flags_reach_the_endpoint(server, tmp_path):
    settings = endpoints.Settings(
        endpoint_temperature=0.3, endpoint_seed=7, endpoint_reply_tokens=9, endpoint_requests=1
    )
    chat = endpoints.from_settings(settings, server.address, "m", cache=tmp_path / "a")
    chat(_said("one"), 2)
    sent = {k: server.seen[0][k] for k in ("temperature", "seed", "max_tokens")}
    assert sent == {"temperature": 0.3, "seed": 9, "max_tokens": 9}
    with pytest.raises(RunStopped, match="--endpoint-requests 1"):
        chat(_said("two"))
    assert endpoints.Settings().endpoint_temperature == 1.0  # tau-bench's users
    for wrong in ({"endpoint_temperature": -0.1}, {"endpoint_temperature": float("nan")}, {"endpoint_timeout_s": 0.0},
                  {"endpoint_concurrency": 0}, {"endpoint_requests": -1}, {"endpoint_reply_tokens": 0}):  # fmt: skip
        flag = next(iter(wrong)).replace("_", "-")
        with pytest.raises(UserError, match=f"--{flag} .* must be"):
            endpoints.from_settings(endpoints.Settings(**wrong), server.address, "m", cache=tmp_path / "a")


def test_many_at_a_time_stay_in_order(server, tmp_path):
    chat = endpoints.make_chat(server.address, "m", cache=tmp_path / "a")
    words = [f"w{k}" for k in range(24)]
    assert endpoints.ask_all(chat, [_said(w) for w in words]) == [w.upper() for w in words]
    assert len(endpoints.Cache(tmp_path / "a").replies) == 24


def test_mistakes(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UserError, match="https://api.example.com/v1 wants a key; .* variable OPENAI_API_KEY"):
        endpoints.make_chat("https://api.example.com/v1", "m", cache=tmp_path / "a")
    with pytest.raises(UserError, match="cannot be used"):
        endpoints.make_chat("http://localhost/v1", "m", cache=tmp_path)
    (tmp_path / "bad").write_text("{}\n")
    with pytest.raises(DataError, match="bad:1: not a kept reply"):
        endpoints.make_chat("http://localhost/v1", "m", cache=tmp_path / "bad")
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[endpoints\]'"):
        endpoints.make_chat("http://localhost/v1", "m", cache=tmp_path / "a")


def test_a_model_goes_on_behind_a_text_or_token_ids(server, tmp_path):
    server.reply = lambda request: str(request["prompt"]) + "!"
    path = tmp_path / "kept.jsonl"
    complete = endpoints.make_completion(server.address, "m", cache=path, temperature=1.0, max_tokens=7, seed=5)
    assert complete("one") == endpoints.Written("one!", True)
    assert complete([3, 4], 2) == endpoints.Written("[3, 4]!", True)
    assert complete([3, 4], 2) == complete([3, 4], 2) and len(server.seen) == 2  # kept
    assert [s["path"] for s in server.seen] == ["/v1/completions"] * 2
    assert [(s["seed"], s["max_tokens"]) for s in server.seen] == [(5, 7), (7, 7)]
    server.finish = "length"
    assert complete("two") == endpoints.Written("two!", False)
    server.plan = [400]
    with pytest.raises(endpoints.Unanswered, match="m at .*no"):
        complete("three")
    again = endpoints.make_completion(server.address, "m", cache=path, temperature=1.0, max_tokens=7, seed=5)
    assert again("two") == endpoints.Written("two!", False) and len(server.seen) == 4


def test_what_is_asked_in_the_middle_of_a_step_is_of_one_process(monkeypatch):
    endpoints.check_one_process("--judge http://x")
    monkeypatch.setattr(endpoints.jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="^--judge http://x is asked in the middle of a step, .* run without --hosts$"):
        endpoints.check_one_process("--judge http://x")


def test_half_of_a_character_is_a_question_mark(tmp_path, monkeypatch):
    """A reply that was cut inside an emoji is asked about again, as a message of the next question."""
    with serving(monkeypatch, reply=lambda request: "a\ud83d") as server:
        chat = endpoints.make_chat(server.address, "m", cache=tmp_path / "replies.jsonl")
        assert chat(_said("one")) == "a?"
        assert chat([*_said("one"), {"role": "assistant", "content": chat(_said("one"))}, *_said("two")]) == "a?"
