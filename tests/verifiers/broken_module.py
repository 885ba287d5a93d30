"""A verifier whose module asks for a package that is not there."""


def prepare():
    raise ImportError("needs sometool: pip install 'jaxrl_llm[tasks]'")


def verify(answer, response):
    return 1.0, True, ""
