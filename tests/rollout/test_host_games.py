"""Games of other packages: the packages themselves where they are there, and stand-ins of their interfaces."""

import random
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.envs import text_games
from jaxrl_llm.errors import UserError
from tests.models_for_tests import byte_tokenizer

NO_SEED = np.zeros((2,), np.uint32)


# --- TextWorld: a box with a coin


class _Box:
    """TextWorld's interface: open a box, take the coin."""

    closed = 0

    def __init__(self, path, wrappers):
        self.path, self.wrappers, self.facts, self.score = path, wrappers, ["closed(box)"], 0

    def reset(self):
        return self._state(" | $$ |\n\nA box.\n\n>    -= Kitchen =-0/1")

    def step(self, command):
        said = "That's not a verb I recognise."
        if command == "open box" and self.facts == ["closed(box)"]:
            self.facts, self.score, said = ["open(box)"], 1, "You open the box."
        elif command == "take coin" and self.facts == ["open(box)"]:
            self.facts, self.score, said = ["in(coin, I)"], 4, "You take the coin."
        return self._state(f"\n{said}\n\n\n>   -= Kitchen =-0/2"), self.score, False

    def _state(self, said):
        return {"feedback": said, "won": self.score == 4, "lost": False, "score": self.score, "max_score": 4,
                "facts": self.facts, "admissible_commands": ["look", "open box"]}  # fmt: skip

    def close(self):
        _Box.closed += 1


def _stand_in(monkeypatch):
    def start(path, told, wrappers):
        if path == "nowhere":
            raise OSError("Unable to find game 'nowhere'.")
        return _Box(path, wrappers)

    module = types.SimpleNamespace(EnvInfos=lambda **asked: asked, start=start)
    monkeypatch.setitem(sys.modules, "textworld", module)


def test_textworld_games(monkeypatch, tmp_path):
    _stand_in(monkeypatch)
    world = text_games.textworld_env(write=text_games.with_commands)
    game = world.reset(NO_SEED, "coin.z8")
    said = world.step(game, "dance")
    assert said.text == "That's not a verb I recognise.\nYou can: look; open box" and said.reward == 0.0
    assert world.identity(said.state) == world.identity(game)  # nothing happened
    said = world.step(said.state, " open\nbox ")
    assert said.reward == 0.25 and not said.done and world.identity(said.state) != world.identity(game)
    said = world.step(said.state, "take coin")
    assert (said.reward, said.done) == (0.75, True)
    world.close(said.state)
    assert _Box.closed == 1
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    out = text_games.game_texts(world, ["coin.z8"], tokenizer, action_tokens=16, observation_tokens=64)
    shown = tokenizer.decode(np.asarray(out.problems.tokens[0])[np.asarray(out.problems.valid[0])].tolist())
    assert shown == "A box.\nYou can: look; open box" and out.tasks == ["coin.z8"] and _Box.closed == 2
    with pytest.raises(UserError, match="game nowhere cannot be read: .*; make one with tw-make"):
        world.reset(NO_SEED, "nowhere")


def test_what_is_no_command_costs(monkeypatch):
    """Off the reward of that turn alone; what a step pays that is one stays as it was."""
    _stand_in(monkeypatch)
    plain, dear = text_games.textworld_env(), text_games.textworld_env(penalty=0.1)
    paid = []
    for world in (plain, dear):
        state, paid_here = world.reset(NO_SEED, "coin.z8"), []
        for text in ("dance", " open\nbox ", "look", "OPEN BOX"):
            said = world.step(state, text)
            state = said.state
            paid_here.append(said.reward)
        paid.append(paid_here)
    assert paid == [[0.0, 0.25, 0.0, 0.0], [-0.1, 0.25, 0.0, -0.1]]


@pytest.mark.parametrize("said", ["save", "Restore", "look. save", "transcripts on", "script", "QUIT", "\\ save"])
def test_what_the_interpreter_would_do_itself_is_not_played(monkeypatch, said):
    """It would write files, and an episode could go on where another one was."""
    _stand_in(monkeypatch)
    world = text_games.textworld_env(penalty=0.1)
    game = world.reset(NO_SEED, "coin.z8")
    monkeypatch.setattr(game.env, "step", lambda command: pytest.fail(f"{command} was played"))
    heard = world.step(game, said)
    assert (heard.text, heard.reward, heard.done) == ("That is no command of the game.\nA box.", -0.1, False)
    assert heard.state is game


@pytest.mark.parametrize(
    "said, played", [("\0look", "look"), ("\\h", "h"), ("a\x1bb\0 c", "a b c"), ("take manuscript",) * 2]
)
def test_a_line_has_nothing_that_an_interpreter_waits_behind(monkeypatch, said, played):
    _stand_in(monkeypatch)
    world = text_games.textworld_env()
    game = world.reset(NO_SEED, "coin.z8")
    heard, step = [], game.env.step
    monkeypatch.setattr(game.env, "step", lambda command: heard.append(command) or step(command))
    world.step(game, said)
    assert heard == [played]


def test_alfworld_games_are_textworld_games_with_names(monkeypatch):
    _stand_in(monkeypatch)
    made = types.SimpleNamespace(AlfredDemangler=lambda shuffle: ("names", shuffle))
    for name in ("fast_downward", "alfworld", "alfworld.agents", "alfworld.agents.environment"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "alfworld.agents.environment.alfred_tw_env", made)
    world = text_games.alfworld_env()
    game = world.reset(NO_SEED, "game.tw-pddl")
    assert game.env.wrappers == [("names", False)]
    assert world.step(game, "open box").text == "You open the box.\nYou can: look; open box"


def test_textworld_itself(monkeypatch, tmp_path):
    textworld = pytest.importorskip("textworld")
    maker = textworld.GameMaker()
    kitchen = maker.new_room("kitchen")
    maker.set_player(kitchen)
    box, coin = maker.new(type="c", name="box"), maker.new(type="o", name="coin")
    maker.add_fact("closed", box)
    kitchen.add(box)
    box.add(coin)
    maker.quests = [maker.new_quest_using_commands(["open box", "take coin from box"])]
    options = textworld.GameOptions()
    options.path = str(tmp_path / "coin.z8")
    path = textworld.generator.compile_game(maker.build(), options)
    world = text_games.textworld_env()
    game = world.reset(NO_SEED, path)
    shown = text_games.feedback(game.state)
    assert "box" in shown and "$" not in shown and "TextWorld" in shown.split("\n")[0]  # neither banner nor prompt
    assert "-= Kitchen =-0/1" not in shown
    said = world.step(game, "dance")
    assert not said.done and world.identity(said.state) == world.identity(game)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    for text in ("save", "script", "look. restore"):
        said = world.step(said.state, text)
        assert said.text.startswith("That is no command of the game.\n") and world.identity(
            said.state
        ) == world.identity(game)
    assert sorted(tmp_path.iterdir()) == before  # nothing was written
    said = world.step(said.state, "Open box")
    assert said.text == "You open the box, revealing a coin." and world.identity(said.state) != world.identity(game)
    said = world.step(said.state, "take coin from box")
    assert (said.reward, said.done) == (1.0, True)
    world.close(said.state)


# --- TextArena


class _Dice:
    """TextArena's interface: two players add what they throw; Python's own generator throws. Five points win."""

    def reset(self, num_players, seed):
        random.seed(seed)
        self.points, self.turn, self.news = (
            [0] * num_players,
            0,
            [[(-1, "Throw.", "PROMPT")] for _ in range(num_players)],
        )
        self.done = False

    def get_observation(self):
        shown, self.news[self.turn] = self.news[self.turn], []
        return self.turn, shown

    def step(self, action):
        for news in self.news:
            news += [(self.turn, action, "PLAYER_ACTION")]
        if "throw" in action:
            self.points[self.turn] += random.randint(1, 3)
        self.done = self.points[self.turn] >= 5
        for news in self.news:
            news += [(-1, f"{self.points}", "GAME_BOARD")]
        self.turn = (self.turn + 1) % len(self.points) if not self.done else self.turn
        return self.done, {}

    def close(self):
        return {k: 1 if p >= 5 else -1 for k, p in enumerate(self.points)}, {}


@pytest.fixture()
def arena(monkeypatch):
    class Wrapper:
        def __init__(self, env):
            self.env = env

    known = {"Dice-v0": 1, "Dice-v0-raw": 1}
    module = types.SimpleNamespace(
        Wrapper=Wrapper, make=lambda name: Wrapper(Wrapper(_Dice())) if name == "Dice-v0-raw" else None,
        envs=types.SimpleNamespace(registration=types.SimpleNamespace(ENV_REGISTRY=known)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "textarena", module)


def _play(world, seed):
    match, shown = world.reset(NO_SEED, seed), []
    while True:
        said = world.step(match, "I throw")
        if said.done:
            return shown, said.reward
        shown.append(said.text)


def test_textarena_games_draw_as_if_alone(arena):
    world = text_games.textarena_env("Dice-v0", players=2, opponent=lambda text: "throw " + text[-6:])
    alone = [_play(world, seed) for seed in range(16)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: _play(world, seed), range(16)))
    assert together == alone
    assert len({str(x) for x in alone}) > 3 and {x[1] for x in alone} == {1.0, -1.0}
    shown = alone[0][0][0]
    assert "I throw" not in shown and "Player 1: throw" in shown  # what one said oneself is in the sequence already


def test_textarena_games_do_not_mind_what_other_threads_draw(arena):
    world, over = text_games.textarena_env("Dice-v0"), threading.Event()
    alone = [_play(world, seed) for seed in range(16)]
    everyones = random.random  # not the name, which is the game's while it is played

    def draw():  # beartype does it at every call that it checks
        while not over.is_set():
            everyones()

    noise = threading.Thread(target=draw)
    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    noise.start()
    try:
        assert [_play(world, seed) for seed in range(16)] == alone
    finally:
        over.set()
        noise.join()
        sys.setswitchinterval(often)


def test_situations_are_all_that_was_said(arena):
    world = text_games.textarena_env("Dice-v0")
    match, other = world.reset(NO_SEED, 1), world.reset(NO_SEED, 1)
    assert world.identity(match) == world.identity(other)
    world.step(match, "pass")
    assert world.identity(match) != world.identity(other)


def test_textarena_mistakes(arena, monkeypatch):
    with pytest.raises(UserError, match="no TextArena game 'Dice-v9'; there are Dice-v0, Dice-v0-raw"):
        text_games.textarena_env("Dice-v9")
    with pytest.raises(UserError, match="players=2 need an opponent"):
        text_games.textarena_env("Dice-v0", players=2)
    with pytest.raises(UserError, match="seat=1 is not among players=1"):
        text_games.textarena_env("Dice-v0", seat=1)
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UserError, match=r"need textarena: pip install 'jaxrl_llm\[games\]'"):
        text_games.textarena_env("Dice-v0")


def test_textarena_itself(tmp_path):
    pytest.importorskip("textarena")
    world = text_games.textarena_env("GuessTheNumber-v0")
    match, low, high = world.reset(NO_SEED, 3), 1, 20
    assert "between 1 and 20" in match.told[0]
    for turn in range(6):  # halving
        middle = (low + high) // 2
        said = world.step(match, f"[{middle}]")
        if said.done:
            break
        assert said.text.count("The target number is") == 1, turn
        low, high = (middle + 1, high) if "higher" in said.text else (low, middle - 1)
    assert (said.reward, said.done) == (1.0, True)
    said = world.step(world.reset(NO_SEED, 3), "no number")
    assert "invalid move" in said.text and not said.done
    board = text_games.textarena_env("TicTacToe-v0", players=2, seat=1, opponent=lambda text: "[0]")
    match = board.reset(NO_SEED, 0)
    assert "Player 0: [0]" in match.told[0]
    said = board.step(match, "[4]")  # the other asks for its own square, twice, and loses
    assert (said.reward, said.done) == (1.0, True)


def test_without_the_packages_the_remedy_is_named(monkeypatch):
    for name in ("textworld", "alfworld", "fast_downward", "appworld"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"need textworld: pip install 'jaxrl_llm\[games\]'"):
        text_games.textworld_env()
    with pytest.raises(UserError, match=r"pip install alfworld 'textworld\[pddl\]'"):
        text_games.alfworld_env()
    with pytest.raises(UserError, match="pip install appworld; appworld install; appworld download data"):
        text_games.appworld_env()


# --- AppWorld


class _AppWorld:
    """AppWorld's interface: the code is looked at, not run."""

    live, made = 0, []

    def __init__(self, task_id, experiment_name, **settings):
        if task_id == "broken":
            raise RuntimeError("no such task")
        _AppWorld.made.append((task_id, experiment_name, settings))
        _AppWorld.live += 1
        self.code = ""

    def execute(self, code):
        self.code = code
        return f"ran {code}"

    def task_completed(self):
        return "complete_task" in self.code

    def evaluate(self):
        return types.SimpleNamespace(success="right" in self.code)

    def close(self):
        _AppWorld.live -= 1


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```",
        "First\n```bash\nls\n```\nthen\n```Python3\nprint(1)\n```\nwhich shows\n```\n1\n```",
        "1. Log in:\r\n   ```python\r\n   print(1)\r\n   ```",
        "```python\nprint(1)",
        "print(1)",
    ],
)
def test_the_code_of_an_action(text):
    assert text_games.code_of(text) == "print(1)"


def test_appworld(monkeypatch):
    monkeypatch.setitem(sys.modules, "appworld", types.SimpleNamespace(AppWorld=_AppWorld))
    for nowhere in ([], [""]):  # this process would execute what the model writes
        with pytest.raises(UserError, match="AppWorld executes the Python that a model writes.*--servers http"):
            text_games.appworld_env(addresses=nowhere)
    world = text_games.appworld_env(addresses=["http://localhost:1"], max_interactions=7)
    apps = world.reset(NO_SEED, "82e2fac_1")
    assert _AppWorld.made == [
        ("82e2fac_1", "jaxrl_llm", {"remote_environment_url": "http://localhost:1", "max_interactions": 7})
    ]
    said = world.step(apps, "I look.\n```python\nprint(1)\n```")
    assert said.text == "ran print(1)" and not said.done and world.identity(said.state) != world.identity(apps)
    for code, reward in (("complete_task('right')", 1.0), ("complete_task('no')", 0.0)):
        assert world.step(said.state, code)[2:4] == (reward, True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.reset, NO_SEED, "82e2fac_2")
        with pytest.raises(TimeoutError):
            waiting.result(0.1)  # the one server is taken
        world.close(said.state)
        world.close(waiting.result(10))
    with pytest.raises(RuntimeError):
        world.reset(NO_SEED, "broken")
    world.close(world.reset(NO_SEED, "82e2fac_3"))  # what failed to begin has let go of the server
    assert _AppWorld.live == 0
