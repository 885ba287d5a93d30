"""Episodes of several turns in Python worlds: slots that decode together, refilled as soon as an episode is over.

A fixed number of slots has caches on the device (``rollout.host.slots``). Whoever's turn it is to act is decoded, some
tokens at a time without coming back to the host; whoever waits for the world does not take part, and holds nobody up:
worlds answer in threads (``threads``). An episode that is over leaves its slot to the next one of the batch. What
comes back are the ``Trajectories`` of ``multi_turn``: token ids are only appended, and keys are folded by the
column of the episode, so that neither the slot nor the time at which a world answers changes what is sampled.
Where an episode outgrows its context the policy writes a summary, and its slot begins again with the prompt and that.
"""

import collections
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.rollout.host.env import HostEnv
from jaxrl_llm.rollout.host.recorder import Record, trajectories_of, written_of
from jaxrl_llm.rollout.host.slots import Device, Layout, make_programs
from jaxrl_llm.rollout.host.threads import Done, Hands
from jaxrl_llm.rollout.host.turns import UNBEGUN, Episode, Rules, begin_env, close_env, most_tokens, ruled, take_turn
from jaxrl_llm.rollout.sample import check_sampling
from jaxrl_llm.rollout.turns.contexts import WRITTEN, Context, check, widest
from jaxrl_llm.types import Key, Params, Policy, Trajectories

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


@jax.jit
def _seeds(keys: Key) -> Array:
    """Of the worlds, as in ``rollout.turns.multi_turn``."""
    return jax.vmap(lambda k: jax.random.key_data(jax.random.fold_in(jax.random.fold_in(k, 0x3A7D), 0)))(keys)


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
    context: Context = Context(),
    pad_id: int = 0,
    temperature: float = 1.0,
    decode_tokens: int = 8,
    read_tokens: Sequence[int] = (16, 64, 256),
    rows_at_once: int = 8,
    turn_s: float | None = None,
    episode_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> HostEpisodes:
    """As ``multi_turn.make_episodes``, for a world in Python; ``train.host`` trains on it.

    An exception of the world, an invalid answer, or a deadline that passes makes the episode invalid, with a reason;
    the others go on. ``RunStopped`` is no episode's: it is raised here. ``extras`` hold the ``Turns`` of
    ``multi_turn``. A world that waits costs nothing; one that computes much in Python holds up the host, and belongs
    into a process of its own (``envs.processes``). With a limited ``context`` these are the episodes of
    ``summaries.make_episodes``, in caches no longer than the longest sub-trajectory.

    ``figures``: ``world/occupancy``, the share of the slots' time in which they held an episode that was not over;
    ``world/decoding``, the share of the decoded places that were some episode's token; ``world/waiting``, the share of
    the episodes' time that their world took; ``world/failed_fraction`` and ``world/seconds``, from the first
    episode's beginning.

    Args:
      tasks: of the whole ``Problems`` table, one a row.
      slots: episodes under way at the same time.
      context: how much of an episode is seen at once; its ``rule`` gets NumPy arrays.
      decode_tokens: tokens of an action that are decoded before the host looks again: a world is asked that much
        later, and the host is less in the way.
      read_tokens: sizes of the pieces in which observations are read; each is a program, compiled at the first call.
      rows_at_once: observations that are read, and episodes that are begun, in one go.
      turn_s: seconds that the world may take for an answer, or to begin.
      episode_s: seconds that an episode may take.
      clock: for tests.

    Raises:
      UserError: where several processes run: when a world answers decides what the devices compute next, and each
        process would decide for itself.
    """
    if jax.process_count() > 1:
        raise UserError(f"{jax.process_count()} processes: episodes of a world in Python are played by one; run "
                        "without --hosts")  # fmt: skip
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
    seen = min(max_new_tokens, widest(context, env, prompt_tokens=0, turns=max_turns))
    layout = Layout(slots, group_size, max_new_tokens, seen, pad_id, sizes, min(rows_at_once, slots))
    rules = Rules(context, tuple(end_ids), turn_s, episode_s, clock)
    programs = make_programs(
        policy, action_tokens=most_tokens(env, context), max_new_tokens=max_new_tokens, decode_tokens=decode_tokens,
        end_ids=rules.end_ids, pad_id=pad_id, temperature=temperature,
    )  # fmt: skip

    def play(
        params: Params, tokens: Array, valid: Array, keys: Key, problem_ids: Array, turns: Array | int | None = None
    ) -> Played:
        rows = tokens.shape[0] * group_size
        if keys.shape != (rows,):
            raise ValueError(f"keys has shape {keys.shape}; one key per sequence is ({rows},)")
        check(context, tokens.shape[1])
        limit = max_turns if turns is None else min(int(turns), max_turns)
        ids = np.repeat(np.asarray(problem_ids, np.int32), group_size)
        device = Device(layout, programs, params, programs.prefill(params, tokens, valid), keys, tokens.shape[1])
        record = Record.of(rows, layout, max_turns, policy.vocab_size)
        given = [(seed, tasks[int(i)]) for seed, i in zip(np.asarray(_seeds(keys)), ids, strict=True)]
        shown = [line[there].tolist() for line, there in zip(np.asarray(tokens), np.asarray(valid), strict=True)]
        with Hands() as hands:
            driver = _Driver(env, rules, device, record, given, shown, hands, limit)
            try:
                driver.run()
            finally:  # where the run ends early, worlds are in the middle of their episodes
                for slot in list(driver.live):
                    driver.leave(slot)
        if not record.valid.any():
            warnings.warn(f"no episode was valid; the first: {next(iter(record.failures.values()))}", stacklevel=2)
        found = trajectories_of(record, tokens, valid, ids, layout)
        if context.tokens is not None:
            found.extras[WRITTEN] = written_of(record, tokens)
        return Played(found, driver.figures(), record.failures)

    return HostEpisodes(play, programs.compiled)


class _Driver:
    """Plays a batch to its end."""

    def __init__(
        self, env: HostEnv, rules: Rules, device: Device, record: Record, given: list, shown: list, hands: Hands,
        limit: int,
    ):  # fmt: skip
        self.env, self.rules, self.device, self.record = env, rules, device, record
        self.given, self.prompts, self.hands, self.limit = given, shown, hands, limit
        self.most = most_tokens(env, rules.context)
        self.slots, self.new = device.layout.slots, device.layout.max_new_tokens
        self.queue = collections.deque(range(len(given)))
        self.live: dict[int, Episode] = {}
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
            self.live[slot] = Episode(row, self.rules.clock())
            self.ask(slot, begin_env, self.live[slot].opened, self.env.reset, *self.given[row])

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

    def answered(self, done: Done, episode: Episode) -> list:
        """One answer; what is to be read of it."""
        self.waited += self.rules.clock() - episode.asked
        episode.ticket, row, turn = 0, episode.row, episode.turn
        if isinstance(done.error, RunStopped):
            raise done.error
        if done.error is not None:
            self.fail(done.slot, f"{type(done.error).__name__}: {done.error}")
            return []
        if episode.state is UNBEGUN:
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
        action, episode.turn, episode.action = len(episode.action), turn + 1, []
        tokens, context = heard.tokens[: self.env.observation_tokens], self.rules.context
        behind = len(self.prompt_of(episode)) + episode.place + len(tokens)
        if context.tokens is None or behind <= context.tokens:
            return self.shown(done.slot, episode, tokens)
        if episode.part > context.summaries:
            self.over(done.slot)
            return []
        if context.rule is not None:
            return self.resumed(done.slot, episode, ruled(context, tokens, self.env.observation_tokens))
        if context.drop:  # what the device has seen of it is written over before anything can look there
            self.record.remove(episode.row, episode.columns - action, episode.columns)
            episode.place, tokens = episode.place - action, []
            episode.read = episode.place
        episode.writing = True
        return self.shown(done.slot, episode, [*tokens, *context.instruction])

    def prompt_of(self, episode: Episode) -> list[int]:
        """The tokens that its episode begins with."""
        return self.prompts[episode.row // self.device.layout.group_size]

    def written(self, episode: Episode, tokens: list[int], logp: np.ndarray | None = None) -> list[int]:
        """The record of tokens behind what is there, as many as there is room for, which are returned."""
        tokens, at = tokens[: self.new - episode.columns], episode.columns
        place = len(self.prompt_of(episode)) + episode.place
        self.record.append(episode.row, at, episode.turn, tokens, logp, part=episode.part, place=place)
        if logp is not None:
            self.record.wrote[episode.row, at : at + len(tokens)] = episode.writing
        episode.columns, episode.place = at + len(tokens), episode.place + len(tokens)
        return tokens

    def shown(self, slot: int, episode: Episode, tokens: list[int]) -> list:
        """The record of an observation; the device need not read it where nothing can follow."""
        place, tokens = episode.place, self.written(episode, tokens)
        if episode.columns >= self.new:
            self.over(slot)
            return []
        episode.read = episode.place
        return [(slot, episode.row, place, tokens)] if tokens else []

    def computed(self, slot: int, episode: Episode) -> None:
        """The record of the experts of a sub-trajectory that is over, from its slot."""
        sizes = len(self.prompt_of(episode)), self.device.width, episode.read
        self.record.computed(episode.row, episode.part, *sizes, self.device.experts(slot))

    def resumed(self, slot: int, episode: Episode, summary: list[int]) -> list:
        """The next sub-trajectory: the prompt, which the device still has, and the summary."""
        self.computed(slot, episode)
        prompt, episode.part = self.prompt_of(episode), episode.part + 1
        episode.writing, episode.action, episode.place, episode.read = False, [], -len(prompt), -len(prompt)
        self.written(episode, prompt)
        if episode.columns >= self.new:
            self.over(slot)
            return []
        self.device.seat([(slot, episode.row)])
        return self.shown(slot, episode, [*summary, *self.rules.context.resume])

    def decode(self) -> None:
        """Some tokens for all whose turn it is; complete actions go to their worlds."""
        acting = {slot: episode for slot, episode in self.live.items() if not episode.ticket}
        if not acting:
            return
        step, place, row, length = np.zeros((4, self.slots), np.int32)
        active = np.zeros(self.slots, bool)
        for slot, episode in self.live.items():  # also of those who wait: the device pads where their next token comes
            step[slot], place[slot], row[slot] = episode.columns, episode.place, episode.row
            length[slot], active[slot] = self.most - self.longest(episode) + len(episode.action), slot in acting
        tokens, logp, taken, steps = self.device.decode(step, place, row, length, active)
        self.decoded, self.places = self.decoded + int(taken.sum()), self.places + int(steps) * self.slots
        observed = []
        for slot, episode in acting.items():
            count = int(taken[slot].sum())
            new = self.written(episode, [int(token) for token in tokens[slot, :count]], logp[slot, :count])
            episode.read = episode.place
            episode.action = episode.action + new
            ended = new[-1] in self.rules.end_ids or len(episode.action) >= self.longest(episode)
            if ended and not episode.writing:
                self.record.taken[episode.row, episode.turn] = True
                self.record.end[episode.row, episode.turn] = episode.columns - 1
                self.ask(slot, take_turn, self.env, episode.state, episode.action, self.record.vocabulary)
            elif episode.columns >= self.new:
                self.over(slot)
            elif ended:
                observed += self.resumed(slot, episode, episode.action)
        self.device.read(observed)

    def longest(self, episode: Episode) -> int:
        """Tokens of what it may write now."""
        return self.rules.context.summary_tokens if episode.writing else self.env.action_tokens

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
        """The episode has ended."""
        self.computed(slot, self.live[slot])
        self.leave(slot)

    def leave(self, slot: int) -> None:
        """The slot is free; its world closes in its thread, before the next one begins there."""
        episode = self.live.pop(slot)
        self.lived += self.rules.clock() - episode.begun
        if self.env.close is not None:
            self.hands.call(slot, close_env, self.env.close, episode.opened)
