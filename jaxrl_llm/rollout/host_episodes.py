"""Episodes of several turns in Python worlds: slots that decode together, refilled as soon as an episode is over.

A fixed number of slots has caches on the device (``rollout.host_slots``). Whoever's turn it is to act is decoded, some
tokens at a time without coming back to the host; whoever waits for the world does not take part, and holds nobody up:
worlds answer in threads (``rollout.hands``). An episode that is over leaves its slot to the next one of the batch. What
comes back are the ``Trajectories`` of ``rollout.episodes``: token ids are only appended, and keys are folded by the
column of the episode, so that neither the slot nor the time at which a world answers changes what is sampled.
"""

import collections
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxrl_llm.rollout.hands import Done, Hands
from jaxrl_llm.rollout.host_record import Record, trajectories_of
from jaxrl_llm.rollout.host_slots import Device, Layout, make_programs
from jaxrl_llm.rollout.host_worlds import Heard, HostEnv
from jaxrl_llm.rollout.sample import check_sampling
from jaxrl_llm.types import Key, Params, Policy, Trajectories

_UNBEGUN = object()  # the state before the world has begun
_POLL_S = 0.05  # how often deadlines are looked at while nothing else happens


class Played(NamedTuple):
    """A batch of episodes and how it went."""

    trajectories: Trajectories
    figures: dict[str, float]
    failures: dict[int, str]  # why, by row, for those that are invalid


class HostEpisodes(NamedTuple):
    """``play(params, prompts, valid, keys, problem_ids) -> Played``; ``compiled()`` counts programs."""

    play: Callable[..., Played]
    compiled: Callable[[], int]


def only_on_host(*_: Any) -> Trajectories:
    """The ``rollout`` slot of an ``Online`` whose world is in Python; nothing calls it where the world is given.

    Raises:
      ValueError: where it is called after all.
    """
    raise ValueError("this method's world is in Python: train it with host.make_host_loop(online, world=...)")


class _Rules(NamedTuple):
    """What ends an action, and an episode."""

    end_ids: tuple[int, ...]
    turn_s: float | None
    episode_s: float | None
    clock: Callable[[], float]


def _check(numbers: dict[str, int], seconds: dict[str, float | None]) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    for name, limit in seconds.items():
        if limit is not None and not limit > 0:
            raise ValueError(f"{name}={limit} must be positive, or None for no deadline")


def make_host_episodes(
    policy: Policy,
    env: HostEnv,
    tasks: Sequence[Any],
    *,
    group_size: int,
    max_turns: int,
    max_new_tokens: int,
    end_ids: Sequence[int],
    slots: int,
    pad_id: int = 0,
    temperature: float = 1.0,
    decode_tokens: int = 8,
    read_tokens: Sequence[int] = (16, 64, 256),
    rows_at_once: int = 8,
    turn_s: float | None = None,
    episode_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> HostEpisodes:
    """As ``episodes.make_episodes``, for a world in Python; ``train.host`` trains on it.

    An exception of the world, an invalid answer, or a deadline that passes makes the episode invalid, with a reason;
    the others go on. ``extras`` hold the ``Turns`` of ``rollout.episodes``. A world that waits costs nothing; one that
    computes much in Python holds up the host, and belongs into a process of its own.

    ``figures``: ``world/occupancy``, the share of the slots' time in which they held an episode that was not over;
    ``world/decoding``, the share of the decoded places that were some episode's token; ``world/waiting``, the share of
    the episodes' time that their world took; ``world/failed_fraction`` and ``world/seconds``, from the first
    episode's beginning.

    Args:
      tasks: of the whole ``Problems`` table, one a row.
      slots: episodes under way at the same time.
      decode_tokens: tokens of an action that are decoded before the host looks again: a world is asked that much
        later, and the host is less in the way.
      read_tokens: sizes of the pieces in which observations are read; each is a program, compiled at the first call.
      rows_at_once: observations that are read, and episodes that are begun, in one go.
      turn_s: seconds that the world may take for an answer, or to begin.
      episode_s: seconds that an episode may take.
      clock: for tests.
    """
    check_sampling(temperature, None, None, None)
    sizes = tuple(sorted({min(size, env.observation_tokens) for size in read_tokens}))
    _check(
        {
            "group_size": group_size, "max_turns": max_turns, "max_new_tokens": max_new_tokens, "slots": slots,
            "decode_tokens": decode_tokens, "read_tokens": min(sizes, default=0), "rows_at_once": rows_at_once,
            "action_tokens": env.action_tokens, "observation_tokens": env.observation_tokens,
        },
        {"turn_s": turn_s, "episode_s": episode_s},
    )  # fmt: skip
    layout = Layout(slots, group_size, max_new_tokens, pad_id, sizes, min(rows_at_once, slots))
    rules = _Rules(tuple(end_ids), turn_s, episode_s, clock)
    programs = make_programs(
        policy, action_tokens=env.action_tokens, max_new_tokens=max_new_tokens, decode_tokens=decode_tokens,
        end_ids=rules.end_ids, pad_id=pad_id, temperature=temperature,
    )  # fmt: skip
    seeds = jax.jit(
        jax.vmap(lambda k: jax.random.key_data(jax.random.fold_in(jax.random.fold_in(k, 0x3A7D), 0)))  # as ``episodes``
    )

    def play(
        params: Params, tokens: Array, valid: Array, keys: Key, problem_ids: Array, turns: Array | int | None = None
    ) -> Played:
        rows = tokens.shape[0] * group_size
        if keys.shape != (rows,):
            raise ValueError(f"keys has shape {keys.shape}; one key per sequence is ({rows},)")
        limit = max_turns if turns is None else min(int(turns), max_turns)
        ids = np.repeat(np.asarray(problem_ids, np.int32), group_size)
        device = Device(layout, programs, params, programs.prefill(params, tokens, valid), keys, tokens.shape[1])
        record = Record.of(rows, layout, max_turns, policy.vocab_size)
        given = [(seed, tasks[int(i)]) for seed, i in zip(np.asarray(seeds(keys)), ids, strict=True)]
        with Hands() as hands:
            driver = _Driver(env, rules, device, record, given, hands, limit)
            driver.run()
        if not record.valid.any():
            warnings.warn(f"no episode was valid; the first: {next(iter(record.failures.values()))}", stacklevel=2)
        return Played(trajectories_of(record, tokens, valid, ids, layout), driver.figures(), record.failures)

    return HostEpisodes(play, programs.compiled)


@dataclasses.dataclass
class _Episode:
    """What is going on in a slot."""

    row: int
    begun: float
    asked: float = 0.0  # when the world was asked, where it has not answered yet
    ticket: int = 0  # of that call; 0: it is the policy's turn
    state: Any = _UNBEGUN
    columns: int = 0  # behind the prompt
    turn: int = 0
    action: list[int] = dataclasses.field(default_factory=list)


def _in_32_bits(number: int) -> int:
    return (int(number) + 2**31) % 2**32 - 2**31


def _step(env: HostEnv, state: Any, action: list[int], vocabulary: int) -> tuple[int, Heard]:
    """In the world's thread: an answer that makes no sense fails here, as an exception does."""
    identity = _in_32_bits(env.identity(state))
    heard = env.step(state, action)
    tokens, reward = [int(token) for token in heard.tokens], float(heard.reward)
    if heard.valid and not math.isfinite(reward):
        raise ValueError(f"reward={reward} is not finite")
    if tokens and not (0 <= min(tokens) and max(tokens) < vocabulary):
        raise ValueError(f"an observation has tokens outside the vocabulary of {vocabulary}")
    return identity, heard._replace(tokens=tokens, reward=reward, mark=_in_32_bits(heard.mark))


def _close(close: Callable[[Any], None], state: Any) -> None:
    try:
        close(state)
    except Exception as error:  # the episode is over, and whatever it was worth
        warnings.warn(f"a world did not close: {type(error).__name__}: {error}", stacklevel=1)


class _Driver:
    """Plays a batch to its end."""

    def __init__(
        self, env: HostEnv, rules: _Rules, device: Device, record: Record, given: list, hands: Hands, limit: int
    ):
        self.env, self.rules, self.device, self.record = env, rules, device, record
        self.given, self.hands, self.limit = given, hands, limit
        self.slots, self.new = device.layout.slots, device.layout.max_new_tokens
        self.queue = collections.deque(range(len(given)))
        self.live: dict[int, _Episode] = {}
        self.began = self.ended = rules.clock()
        self.lived = self.waited = 0.0  # seconds, of all episodes together
        self.decoded = self.places = 0

    def run(self) -> None:
        """Until every episode is over."""
        while self.queue or self.live:
            self.seat()
            self.hear()
            self.expire()
            self.decode()
        self.ended = self.rules.clock()

    def figures(self) -> dict[str, float]:
        seconds = self.ended - self.began
        return {
            "world/occupancy": self.lived / max(self.slots * seconds, 1e-9),
            "world/decoding": self.decoded / max(self.places, 1),
            "world/waiting": self.waited / max(self.lived, 1e-9),
            "world/failed_fraction": len(self.record.failures) / len(self.given),
            "world/seconds": seconds,
        }

    def seat(self) -> None:
        """Free slots take the next episodes."""
        free = [slot for slot in range(self.slots) if slot not in self.live]
        seated = [(slot, self.queue.popleft()) for slot in free[: len(self.queue)]]
        self.device.seat(seated)
        for slot, row in seated:
            self.live[slot] = _Episode(row, self.rules.clock())
            self.ask(slot, self.env.reset, *self.given[row])

    def ask(self, slot: int, function: Callable, *arguments: Any) -> None:
        """The world is asked, in the slot's thread."""
        episode = self.live[slot]
        episode.asked, episode.ticket = self.rules.clock(), self.hands.call(slot, function, *arguments)

    def hear(self) -> None:
        """Takes all answers that are there; where nobody can be decoded, waits for one."""
        timed = self.rules.turn_s is not None or self.rules.episode_s is not None
        waits = all(episode.ticket for episode in self.live.values())
        done = self.hands.done((_POLL_S if timed else None) if waits else 0.0)
        observed = []
        while done is not None:
            episode = self.live.get(done.slot)
            if episode is not None and episode.ticket == done.ticket:  # else it came too late
                observed += self.answered(done, episode)
            done = self.hands.done(0.0)
        self.device.read(observed)

    def answered(self, done: Done, episode: _Episode) -> list:
        """One answer; what is to be read of it."""
        self.waited += self.rules.clock() - episode.asked
        episode.ticket, row, turn = 0, episode.row, episode.turn
        if done.error is not None:
            self.fail(done.slot, f"{type(done.error).__name__}: {done.error}")
            return []
        if episode.state is _UNBEGUN:
            episode.state = done.value
            return []
        identity, heard = done.value
        self.record.identity[row, turn] = identity
        if not heard.valid:
            self.fail(done.slot, heard.reason or "the world failed")
            return []
        self.record.reward[row, turn], self.record.done[row] = heard.reward, bool(heard.done)
        self.record.mark[row, turn] = heard.mark
        episode.state = heard.state
        if heard.done or heard.cut or turn + 1 >= self.limit:
            self.over(done.slot)
            return []
        episode.turn, episode.action = turn + 1, []
        return self.shown(done.slot, episode, heard.tokens[: self.env.observation_tokens])

    def shown(self, slot: int, episode: _Episode, tokens: list[int]) -> list:
        """The record of an observation; the device need not read it where nothing can follow."""
        at = episode.columns
        tokens = tokens[: self.new - at]
        self.record.append(episode.row, at, episode.turn, tokens)
        episode.columns += len(tokens)
        if episode.columns >= self.new:
            self.over(slot)
            return []
        return [(slot, episode.row, at, tokens)] if tokens else []

    def decode(self) -> None:
        """Some tokens for all whose turn it is; complete actions go to their worlds."""
        acting = {slot: episode for slot, episode in self.live.items() if not episode.ticket}
        if not acting:
            return
        step, row, length = np.zeros((3, self.slots), np.int32)
        active = np.zeros(self.slots, bool)
        for slot, episode in self.live.items():  # also of those who wait: the device pads where their next token comes
            step[slot], row[slot], length[slot] = episode.columns, episode.row, len(episode.action)
            active[slot] = slot in acting
        tokens, logp, taken, steps = self.device.decode(step, row, length, active)
        self.decoded, self.places = self.decoded + int(taken.sum()), self.places + int(steps) * self.slots
        for slot, episode in acting.items():
            count = int(taken[slot].sum())
            new = [int(token) for token in tokens[slot, :count]]
            self.record.append(episode.row, episode.columns, episode.turn, new, logp[slot, :count])
            episode.columns, episode.action = episode.columns + count, episode.action + new
            if new[-1] in self.rules.end_ids or len(episode.action) >= self.env.action_tokens:
                self.record.taken[episode.row, episode.turn] = True
                self.record.end[episode.row, episode.turn] = episode.columns - 1
                self.ask(slot, _step, self.env, episode.state, episode.action, self.record.vocabulary)
            elif episode.columns >= self.new:
                self.over(slot)

    def expire(self) -> None:
        """Episodes whose time is up fail; a world that was being waited for is left to itself."""
        now, rules = self.rules.clock(), self.rules
        for slot, episode in list(self.live.items()):
            late = ""
            if rules.turn_s is not None and episode.ticket and now - episode.asked > rules.turn_s:
                late = f"the world did not answer within turn_s={rules.turn_s:g}"
            if rules.episode_s is not None and now - episode.begun > rules.episode_s:
                late = f"the episode was not over within episode_s={rules.episode_s:g}"
            if late and episode.ticket:
                self.waited += now - episode.asked
            if late:
                self.fail(slot, late)
                if episode.ticket:
                    self.hands.give_up(slot)

    def fail(self, slot: int, reason: str) -> None:
        """The episode is invalid, which is no zero."""
        row = self.live[slot].row
        self.record.valid[row], self.record.done[row], self.record.failures[row] = False, False, reason
        self.over(slot)

    def over(self, slot: int) -> None:
        """The slot is free; its world closes in its thread, before the next one begins there."""
        episode = self.live.pop(slot)
        self.lived += self.rules.clock() - episode.begun
        if self.env.close is not None and episode.state is not _UNBEGUN:
            self.hands.call(slot, _close, self.env.close, episode.state)
