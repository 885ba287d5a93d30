"""``python -m jaxrl_llm``: trains by GRPO; with a first word, another command of the front door."""

import sys

COMMANDS = {
    "train": "reinforcement learning of a model on verifiable problems (also without a word)",
    "plan": "mesh, memory and roofline of a model on a TPU slice, without a TPU",
    "view": "one page to read the rollouts of a run",
    "doctor": "checks of a model folder before a run",
    "papers": "compare, sweep and check the experiments",
}


def main(words: list[str] | None = None) -> int:
    """Runs the command that the first word names, the training job where it names none; returns the exit code."""
    words = sys.argv[1:] if words is None else words
    name, rest = (words[0], words[1:]) if words and words[0] in COMMANDS else ("train", words)
    # a command loads what it needs and no more: half of the seconds of a short one are imports
    if name == "plan":
        from jaxrl_llm.run import plan

        return plan.cli(rest)
    if name == "view":
        from jaxrl_llm.run.records import view

        return view.main(rest)
    if name == "doctor":
        from jaxrl_llm.run import doctor

        return doctor.cli(rest)
    if name == "papers":
        from jaxrl_llm.experiment import __main__ as papers

        return papers.main(rest)
    if words and words[0] in ("help", "commands"):
        width = max(map(len, COMMANDS))
        print("\n".join(f"{word:{width}s}  {text}" for word, text in COMMANDS.items()))
        return 0
    from jaxrl_llm.run import grpo

    return grpo.cli(rest)


if __name__ == "__main__":
    sys.exit(main())
