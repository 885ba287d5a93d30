"""Ray actors as workers: every role a process of its own, on any machine of the cluster, with its own JAX runtime."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxrl_llm.asynchronous.workers import Reply
from jaxrl_llm.errors import UserError, broken


def load_ray() -> Any:
    """Ray itself.

    Raises:
      UserError: where it is not installed, or cannot be imported.
    """
    try:
        import ray
    except ImportError as error:
        why = broken("ray", error).removeprefix(", which ") or "is not installed"
        raise UserError(f"ray {why}; pip install 'jaxrl_llm[distributed]'") from error
    return ray


class Holder:
    """The state of a role in its process, as a Ray actor."""

    def __init__(self, make: Callable[[], Any]):
        self._state = make()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(state, *arguments)``."""
        return function(self._state, *arguments)


def _aside(actor: Any, function: Callable[..., Any], timeout_s: float, *arguments: Any) -> Any:
    import ray  # in the process of the worker that asks

    call = actor.call.options(concurrency_group="aside")  # threads of its own, while the main one trains
    return ray.get(call.remote(function, *arguments), timeout=timeout_s)


class RayWorkers:
    """A ``Workers`` on the cluster that ``ray.init`` has joined; joins a new one of this machine if there is none.

    Actors are never restarted by Ray, nor calls repeated: the conductor does both, since it knows what was done.

    Args:
      options: Ray's options of the actors of each role (``roll``, ``score``, ``refer``, ``learn``): CPUs, chips,
        node, environment, for example ``{"learn": {"resources": {"TPU": 4}}, "roll": {"num_cpus": 2}}``.
    """

    def __init__(self, options: Mapping[str, Mapping[str, Any]] | None = None):
        self._ray = load_ray()
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False)
        self._options = {role: dict(found) for role, found in (options or {}).items()}
        self._class = self._ray.remote(concurrency_groups={"aside": 4})(Holder)
        self._actors: dict[str, Any] = {}
        self._calls: dict[Any, tuple[str, int]] = {}
        self._tickets = 0

    def start(self, name: str, role: str, make: Callable[[], Any]) -> None:
        """See ``Workers``."""
        options = {"num_cpus": 0} | self._options.get(role, {}) | {"max_restarts": 0, "max_task_retries": 0}
        self._actors[name] = self._class.options(**options).remote(make)

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> int:
        """See ``Workers``."""
        return self._ticket(name, self._actors[name].call.remote(function, *arguments))

    def _ticket(self, name: str, reference: Any) -> int:
        self._tickets += 1
        self._calls[reference] = name, self._tickets
        return self._tickets

    def beside(self, name: str, function: Callable[..., Any], *arguments: Any) -> int:
        """See ``Workers``."""
        beside = self._actors[name].call.options(concurrency_group="aside")
        return self._ticket(name, beside.remote(function, *arguments))

    def aside(self, name: str, function: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
        """See ``Workers``."""
        return partial(_aside, self._actors[name], function, timeout_s)

    def wait(self, timeout_s: float) -> list[Reply]:
        """See ``Workers``."""
        if not self._calls:
            time.sleep(timeout_s)
            return []
        calls = list(self._calls)
        ended, _ = self._ray.wait(calls, num_returns=1, timeout=timeout_s)
        if ended:  # and whatever else has
            ended, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        return [self._reply(reference) for reference in ended]

    def _reply(self, reference: Any) -> Reply:
        name, ticket = self._calls.pop(reference)
        errors = self._ray.exceptions
        try:
            # values are kept here, not where they were made: that machine may be lost
            return Reply(ticket, self._ray.get(reference))
        except errors.RayTaskError as error:
            return Reply(ticket, error=error.cause if isinstance(error.cause, Exception) else error)
        except errors.RayError as error:  # the actor or the machine of the value is gone
            return Reply(ticket, error=error, dead=True)

    def kill(self, name: str) -> None:
        """See ``Workers``."""
        self._ray.kill(self._actors.pop(name), no_restart=True)
        self._calls = {reference: call for reference, call in self._calls.items() if call[0] != name}

    def close(self) -> None:
        """See ``Workers``."""
        for name in list(self._actors):
            self.kill(name)
