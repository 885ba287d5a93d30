"""Games of other packages as worlds for ``rollout.host.driver``: TextWorld, ALFWorld, TextArena and AppWorld.

Each is imported where it is used, and asked for by name where it is not there:

* TextWorld and TextArena are the extra ``games``. Both were played on Python 3.11 without a network.
* ALFWorld (``pip install alfworld``) plays its games in TextWorld's PDDL engine, whose planner, the package
  fast-downward-textworld, has no wheel and compiles C++. Its games are read by ``data.agent_formats``.
* AppWorld (``pip install appworld``, then ``appworld install`` and ``appworld download data``) brings its apps in an
  encrypted bundle and its data from the network. Its tasks are read by ``data.agent_formats``.

The last two are driven through their documented interfaces, and were tested against stand-ins of these.
"""

import contextlib
import dataclasses
import queue
import random
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.envs.text import Given, as_begun
from jaxrl_llm.errors import UserError, broken, extra_module
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult, text_identity
from jaxrl_llm.verifiers.fences import PYTHON, blocks, written_in

# --- TextWorld and ALFWorld


class _Game(NamedTuple):
    """A game under way and what it showed last."""

    env: Any
    state: Any
    score: float


def feedback(state: Any) -> str:
    """What a game says, without the banner of its first page and the prompt behind every one.

    >>> feedback({"feedback": " | $$ |\\n\\nYou see a box.\\n\\n>      -= Kitchen =-0/1"})
    'You see a box.'
    """
    text = re.sub(r"\n>[^\n]*\Z", "", state["feedback"].rstrip("\n"))
    lines = (line.rstrip() for line in text.split("\n") if not re.fullmatch(r"[ _|/\\$>]*[|$_][ _|/\\$>]*", line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def with_commands(state: Any) -> str:
    """``feedback`` and all that can be done now, as ALFWorld's agents are shown it."""
    return f"{feedback(state)}\nYou can: {'; '.join(state['admissible_commands'])}"


# the interpreter's own words, to the six letters that the oldest games read of a word: it would write and read files of
# this user's, so that one episode goes on where another one was, or leave the game
_OF_INTERPRETER = frozenset("save restor script transc record replay quit q restar".split())
NO_COMMAND = "That is no command of the game.\n"


def _command(text: str) -> str:
    """A text as one line that an interpreter reads: it waits for ever behind a NUL, or behind a backslash in front."""
    return " ".join("".join(c if c.isprintable() and c != "\\" else " " for c in text).split())


def _leaves_game(command: str) -> bool:
    """Whether one of the words, wherever it stands in a line of several commands, is the interpreter's own.

    >>> _leaves_game("look. SAVE"), _leaves_game("transcripts on"), _leaves_game("take manuscript")
    (True, True, False)
    """
    return any(word[:6] in _OF_INTERPRETER for word in re.findall(r"[a-z]+", command.lower()))


def _textworld() -> Any:
    return extra_module("textworld", "TextWorld games need", "games")


def textworld_env(
    *, write: Callable[[Any], str] = feedback, wrappers: Callable[[], Sequence[Any]] = tuple, penalty: float = 0.0
) -> TextEnv:
    """Games of TextWorld's files: ``.z8`` and ``.ulx`` as ``tw-make`` writes them, ``.z3`` to ``.z8`` of others.

    A task is the path of a game. Every step pays what it adds to the score, as a share of the most that can be had; a
    game that is won or lost is over. The situation is what is true in the game, and what it said where it does not
    tell. TextWorld bears one thread: several episodes at once are played by ``processes.in_processes``.

    What would not be played but done by the interpreter (saving, restoring, keeping a transcript, leaving) is answered
    ``NO_COMMAND`` and what was shown last, unless the game lists it among its commands.

    Args:
      write: a state of the game to text: ``feedback`` or ``with_commands``.
      wrappers: TextWorld's wrappers of one episode's game.
      penalty: taken off what a step pays whose text is none of the commands that the game takes now.

    Raises:
      UserError: without the package; ``reset`` raises it for a file that is not there.
    """
    textworld = _textworld()
    told = textworld.EnvInfos(
        admissible_commands=True, won=True, lost=True, score=True, max_score=True, facts=True, extras=[]
    )

    def reset(seed: np.ndarray, path: str) -> _Game:
        try:
            env = textworld.start(str(path), told, list(wrappers()))
        except OSError as error:
            raise UserError(f"game {path} cannot be read: {error}; make one with tw-make") from error
        return _Game(env, env.reset(), 0.0)

    def step(game: _Game, text: str) -> TextStepResult:
        command, known = _command(text), game.state.get("admissible_commands") or ()
        lost = penalty * (command not in known) if penalty else 0.0
        if command not in known and _leaves_game(command):
            return TextStepResult(game, NO_COMMAND + write(game.state), 0.0 - lost, False)
        state, score, done = game.env.step(command)
        paid = (float(score) - game.score) / (state.get("max_score") or 1) - lost
        after = _Game(game.env, state, float(score))
        return TextStepResult(after, write(state), paid, bool(done or state["won"] or state["lost"]))

    def identity(game: _Game) -> int:
        facts = game.state.get("facts")
        return text_identity("\n".join(sorted(map(str, facts))) if facts else write(game.state))

    return TextEnv(reset, step, identity, lambda game: game.env.close(), lambda game: write(game.state))


def alfworld_env(*, write: Callable[[Any], str] = with_commands, penalty: float = 0.0) -> TextEnv:
    """The household games of ALFWorld; a task is the path of a ``game.tw-pddl``, reaching the goal pays 1.

    ``penalty`` as for ``textworld_env``.

    Raises:
      UserError: without one of the packages that it needs.
    """
    try:
        import fast_downward  # noqa: F401  TextWorld asks for it only when a game is loaded
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    except ImportError as error:
        raise UserError(
            f"ALFWorld games need alfworld and textworld[pddl] ({error}): pip install alfworld 'textworld[pddl]'"
        ) from error
    return textworld_env(write=write, wrappers=lambda: [AlfredDemangler(shuffle=False)], penalty=penalty)


def game_texts(
    world: TextEnv,
    paths: Sequence[str],
    tokenizer: Tokenizer,
    **how: Any,
) -> Given:
    """A ``textworld_env`` or ``alfworld_env`` with a problem a game; ``how`` as for ``text.as_begun``."""
    return as_begun(world, "textworld", paths, tokenizer, **how)


# --- TextArena

_TABLE = threading.Lock()  # a game's modules have one name for the generator, and episodes run in several threads


class _Luck(random.Random):
    """A game's own generator, with what else games ask of Python's module of that name."""

    Random, SystemRandom = random.Random, random.SystemRandom


@dataclasses.dataclass
class _Match:
    """A game with its own generator, and all that was shown and said in it."""

    env: Any
    luck: _Luck
    drawers: list[Any]
    told: list[str]

    @contextlib.contextmanager
    def drawing(self) -> Iterator[Any]:
        """The game, whose package draws from this game's generator meanwhile; whoever else draws does so elsewhere."""
        with _TABLE:
            for module in self.drawers:
                module.random = self.luck
            try:
                yield self.env
            finally:
                for module in self.drawers:
                    module.random = random


def _drawers(env: Any) -> list[Any]:
    """The modules of a game's package that draw by the name of Python's generator."""
    package = type(env).__module__.split(".")[0]
    with _TABLE:
        return [
            module
            for name, module in list(sys.modules.items())
            if name.split(".")[0] == package and getattr(module, "random", None) is random
        ]


def _arena_maker(name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    textarena = extra_module("textarena", "TextArena games need", "games")
    known = textarena.envs.registration.ENV_REGISTRY
    if name not in known:
        near = sorted(other for other in known if other.split("-")[0].lower() == name.split("-")[0].lower())
        raise UserError(f"no TextArena game {name!r}; {'there are ' + ', '.join(near) if near else 'see its registry'}")
    plain = f"{name}-raw" if f"{name}-raw" in known else name

    def make() -> Any:
        env = textarena.make(plain, **settings)
        while isinstance(env, textarena.Wrapper):  # they repeat all that was said before, at every turn
            env = env.env
        return env

    return make


def _shown(player: int, messages: Sequence[tuple[int, str, Any]]) -> str:
    """What is new to a player: not what they said themselves."""
    lines = [text.strip() if who < 0 else f"Player {who}: {text.strip()}" for who, text, _ in messages if who != player]
    return "\n".join(line for line in lines if line)


def textarena_env(
    name: str, *, players: int = 1, seat: int = 0, opponent: Callable[[str], str] | None = None, **settings: Any
) -> TextEnv:
    """A game of TextArena; a task is the seed of ``reset``, what the game pays the player at its end is the reward.

    The episodes of several threads draw as if each were alone: the same seed and the same moves are the same game, but
    for games that draw from NumPy's generator (IteratedStagHunt of TextArena 0.7).

    Args:
      name: as TextArena registers it, for example ``GuessTheNumber-v0``. Some games fetch lists of words at their first
        use; those need a network once.
      players: at the table; ``seat`` is the policy's.
      opponent: what all others say to what they are shown.
      settings: the game's own.

    Raises:
      UserError: without the package, for an unknown game, or for others at the table and no ``opponent``.
    """
    if not 0 <= seat < players:
        raise UserError(f"seat={seat} is not among players={players}")
    if players > 1 and opponent is None:
        raise UserError(f"players={players} need an opponent: a function from what they are shown to what they say")
    make = _arena_maker(name, settings)

    def to_seat(match: _Match, done: bool) -> str | None:
        """Lets the others play until it is the policy's turn; None where the game is over before."""
        while not done:
            with match.drawing() as env:
                player, messages = env.get_observation()
            text = _shown(player, messages)
            if player == seat:
                match.told.append(text)
                return text
            answer = opponent(text)
            with match.drawing() as env:
                done, _ = env.step(action=answer)
        return None

    def reset(seed: np.ndarray, task: int) -> _Match:
        game = make()
        match = _Match(game, _Luck(int(task)), _drawers(game), [])
        with match.drawing() as env:
            env.reset(num_players=players, seed=int(task))
        if to_seat(match, False) is None:
            raise UserError(f"{name} with seed {task} is over before seat={seat} has a turn; choose another seat")
        return match

    def step(match: _Match, text: str) -> TextStepResult:
        match.told.append(text)
        with match.drawing() as env:
            done, _ = env.step(action=text)
        shown = to_seat(match, bool(done))
        if shown is not None:
            return TextStepResult(match, shown, 0.0, False)
        rewards, _ = match.env.close()
        return TextStepResult(match, "", float((rewards or {}).get(seat, 0.0)), True)

    return TextEnv(reset, step, lambda match: text_identity("\n".join(match.told)), first=lambda match: match.told[0])


def textarena_texts(
    world: TextEnv,
    seeds: Sequence[int],
    tokenizer: Tokenizer,
    **how: Any,
) -> Given:
    """A ``textarena_env`` with a problem a seed; ``how`` as for ``text.as_begun``."""
    return as_begun(world, "textarena", [int(seed) for seed in seeds], tokenizer, **how)


# --- AppWorld


def code_of(text: str) -> str:
    """The last block between fences, or all of a text without one; blocks in Python count first.

    >>> code_of("Let me log in.\\n```python\\nprint(1)\\n```"), code_of("print(2)")
    ('print(1)', 'print(2)')
    """
    return textwrap.dedent((written_in(PYTHON, blocks(text)) or [text])[-1]).strip()


class _Apps(NamedTuple):
    """An AppWorld under way, where it runs, and the code of the episode so far."""

    world: Any
    address: str
    code: tuple[str, ...]


def passed(tracker: Any) -> float:
    """1 where every test of a task passes, else 0."""
    return float(tracker.success)


def appworld_env(
    *,
    addresses: Sequence[str] = (),
    worth: Callable[[Any], float] = passed,
    name: str = "jaxrl_llm",
    **settings: Any,
) -> TextEnv:
    """AppWorld's apps: an action is Python code, what it prints is shown; a task is a ``task_id``.

    The task ends when the code calls ``apis.supervisor.complete_task``, and pays what AppWorld's tests say then.

    Args:
      addresses: of environment servers (``appworld serve environment --port 8000``), each for one episode at a time.
        They execute what the model writes with the rights of whoever started them: start them in a container.
        Episodes wait for a free one; a deadline that passes while they do loses it.
      worth: of AppWorld's tracker of tests; ``passed``, or a share of them.
      name: of the experiment, below which AppWorld writes its logs.
      settings: further arguments of ``AppWorld``.

    Raises:
      UserError: without the package, or without addresses: this process executes nothing that a model writes.
    """
    try:
        import appworld
    except ImportError as error:
        raise UserError(
            f"AppWorld needs appworld{broken('appworld', error)}: pip install appworld; appworld install; appworld "
            "download data"
        ) from error
    if not addresses or not all(addresses):
        raise UserError(
            "AppWorld executes the Python that a model writes, which this process does not: start "
            "`appworld serve environment --port 8000` in a container and give --servers http://localhost:8000"
        )
    free: queue.Queue[str] = queue.Queue()
    for address in addresses:
        free.put(address)

    def reset(seed: np.ndarray, task: str) -> _Apps:
        address = free.get()
        try:
            where = {"task_id": task, "experiment_name": name, "remote_environment_url": address}
            return _Apps(appworld.AppWorld(**where, **settings), address, ())
        except BaseException:
            free.put(address)
            raise

    def step(apps: _Apps, text: str) -> TextStepResult:
        after = apps._replace(code=(*apps.code, code_of(text)))
        shown = apps.world.execute(after.code[-1])
        if apps.world.task_completed():
            return TextStepResult(after, "", worth(apps.world.evaluate()), True)
        return TextStepResult(after, str(shown), 0.0, False)

    def close(apps: _Apps) -> None:
        try:
            apps.world.close()
        finally:
            free.put(apps.address)

    return TextEnv(reset, step, lambda apps: text_identity("\n\n".join(apps.code)), close)
