"""Runs of one method share their compiled programs: a run that goes on, or is compared, need not compile again."""

import functools

import pytest

from jaxrl_llm.train import fused, host, offline


def _once(make):
    """``make`` whose programs are those of the last call with the same arguments, which are known by identity."""
    kept = {}

    @functools.wraps(make)
    def made(*given, **named):
        key = tuple(map(id, given)), tuple((name, id(value)) for name, value in named.items())
        if key not in kept:
            kept[key] = make(*given, **named), given, named  # kept with them, so that nothing else has their id
        return kept[key][0]

    return made


@pytest.fixture(scope="package", autouse=True)
def programs():
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((host, "make_host_loop"), (offline, "make_run"), (fused, "make_run")):
            patch.setattr(module, name, _once(getattr(module, name)))
        yield
