"""Reinforcement learning of language models as pure functions in JAX; ``jaxrl --help`` lists the commands."""

__version__ = "0.1.0"
