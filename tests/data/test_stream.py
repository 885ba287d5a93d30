"""Streams by Grain: epochs, processes, and a place that can be kept."""

import json

import numpy as np
import pytest

from jaxrl_llm.data.stream import make_stream
from jaxrl_llm.errors import UserError


def _rows(**settings):
    return make_stream(range(10), lambda row: {"row": np.int32(row)}, **settings)


def _next(stream, steps):
    return [next(stream)["row"].tolist() for _ in range(steps)]


def test_every_row_once_an_epoch_in_orders_of_their_own():
    found = sum(_next(_rows(batch=5, seed=1), 6), [])
    epochs = [found[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert found == sum(_next(_rows(batch=5, seed=1), 6), []) != sum(_next(_rows(batch=5, seed=2), 6), [])


def test_a_kept_place_goes_on_there_and_is_json():
    stream = _rows(batch=4)
    _next(stream, 3)
    place = json.loads(json.dumps(stream.get_state()))
    want, again = _next(stream, 5), _rows(batch=4)
    again.set_state(place)
    assert _next(again, 5) == want


def test_processes_share_the_batches_of_one():
    whole = _next(_rows(batch=4), 6)
    parts = [_rows(batch=4, process=(k, 2)) for k in range(2)]
    shares = [_next(part, 6) for part in parts]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == [sorted(batch) for batch in whole]
    assert parts[0].get_state() == parts[1].get_state()  # one note serves all


def test_mistakes():
    with pytest.raises(UserError, match="batch=3 does not divide over 2 processes"):
        _rows(batch=3, process=(0, 2))
    with pytest.raises(UserError, match="the data set is empty"):
        make_stream([], dict, batch=1)
