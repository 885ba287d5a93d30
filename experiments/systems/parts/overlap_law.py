"""How long generation and training take together: one after the other, or apart with a bound on staleness."""

from collections.abc import Callable, Sequence


def makespan(generate_s: Sequence[float | int], train_s: Sequence[float | int], *, staleness: int) -> float:
    """Seconds until the last update of a generator and a trainer on devices of their own.

    Batch ``i`` is generated after batch ``i - 1`` and after update ``i - 1 - staleness``, whose weights it may use;
    update ``i`` begins after update ``i - 1`` and batch ``i``. ``staleness`` 0 is lockstep: the sum of all.

    Args:
      generate_s: seconds of each batch.
      train_s: seconds of each update.
      staleness: how many updates older the weights of a batch may be than those it trains.

    >>> makespan([3, 3, 3], [2, 2, 2], staleness=0), makespan([3, 3, 3], [2, 2, 2], staleness=1)
    (15.0, 11.0)
    """
    if len(generate_s) != len(train_s):
        raise ValueError(f"generate_s has {len(generate_s)} batches, train_s {len(train_s)} updates; give one of each")
    if staleness < 0:
        raise ValueError(f"staleness={staleness} must not be negative")
    made, done = 0.0, [0.0] * len(train_s)
    for i, (generate, train) in enumerate(zip(generate_s, train_s, strict=True)):
        weights = done[i - 1 - staleness] if i - 1 - staleness >= 0 else 0.0
        made = max(made, weights) + float(generate)
        done[i] = max(done[i - 1] if i else 0.0, made) + float(train)
    return done[-1] if done else 0.0


def lockstep_seconds(generate_s: Callable[[int], float], train_s: Callable[[int], float], devices: int) -> float:
    """``T_gen(N) + T_train(N)``: a step where all devices generate, then all train."""
    return generate_s(devices) + train_s(devices)


def best_split(generate_s: Callable[[int], float], train_s: Callable[[int], float], devices: int) -> tuple[int, float]:
    """``min over n of max(T_gen(n), T_train(N - n))``: devices that generate, and the seconds of a step.

    From "LlamaRL", arXiv:2505.24034: with linear scaling it equals ``lockstep_seconds``; it is below where
    fewer devices for a role are faster each, for example because the memory that the other role frees makes larger
    batches possible.

    >>> best_split(lambda n: 30 / n, lambda n: 20 / n, 10)
    (6, 5.0)
    >>> lockstep_seconds(lambda n: 30 / n, lambda n: 20 / n, 10)
    5.0
    """
    if devices < 2:
        raise ValueError(f"devices={devices} must be at least 2: one for each role")
    times = {n: max(generate_s(n), train_s(devices - n)) for n in range(1, devices)}
    best = min(times, key=times.__getitem__)
    return best, times[best]
