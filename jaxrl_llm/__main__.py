"""``jaxrl`` or ``python -m jaxrl_llm``: trains by GRPO; with a first word, another command of the front door."""

import difflib
import errno
import sys
from collections.abc import Sequence

import jaxrl_llm
from jaxrl_llm.run import quiet, stop

COMMANDS = {
    "train": "reinforcement learning of a model on verifiable problems (also without a word)",
    "sft": "supervised fine-tuning on the responses of a file",
    "dpo": "training on preferences: any pair or single-response loss",
    "online-dpo": "preferences of the policy's own responses, drawn and judged while it trains",
    "ppo": "reinforcement learning with a critic: PPO, VAPO's advantages",
    "reward-model": "a reward model from preferences",
    "distil": "on-policy distillation from one teacher or several",
    "eval": "a model or a run on problems: avg@k, pass@k, maj@k with intervals",
    "chat": "talk to a model",
    "serve": "a model behind an OpenAI-compatible address",
    "run": "an experiment: run SLUG",
    "plan": "mesh, memory and roofline of a model on a TPU slice, without a TPU",
    "view": "one page to read the rollouts of a run",
    "doctor": "checks of a model folder before a run",
    "papers": "compare, sweep and check the experiments",
}

# What the file system has against a name as such. A disk that is full or broken, a file that a run misses and a
# connection that is lost are no mistakes of a command line: they keep their own messages, or their traceback.
OF_NAMES = (
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of ``arguments`` (None: those of the process); its exit code."""
    quiet.quieten()
    stop.watch_output()
    try:
        with stop.interruptible("stopped"):
            return _command(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is None or error.errno not in OF_NAMES:
            raise
        print(f"error: {error.filename}: {error.strerror}; give another file or folder", file=sys.stderr)
        return 2


def _command(words: list[str]) -> int:
    # a command loads what it needs and no more: half of the seconds of a short one are imports
    match words:
        case ["--version"]:
            print(f"jaxrl_llm {jaxrl_llm.__version__}")
            return 0
        case ["commands"]:
            width = max(map(len, COMMANDS))
            print("\n".join(f"{word:{width}s}  {text}" for word, text in COMMANDS.items()))
            return 0
        case ["run", *rest]:
            from jaxrl_llm.experiment import locate

            return locate.run(rest)
        case ["sft" | "dpo" | "online-dpo" | "ppo" | "reward-model" | "distil" as name, *rest]:
            from jaxrl_llm.experiment import cli
            from jaxrl_llm.jobs import distil, dpo, online_dpo, ppo, reward_model, sft

            jobs = {
                "sft": sft,
                "dpo": dpo,
                "online-dpo": online_dpo,
                "ppo": ppo,
                "reward-model": reward_model,
                "distil": distil,
            }
            job = jobs[name]
            return cli.main(job.__name__, rest) or 0
        case ["eval", *rest]:
            from jaxrl_llm.run.commands import evaluate_model

            return evaluate_model.cli(rest)
        case ["chat", *rest]:
            from jaxrl_llm.run.commands import chat

            return chat.cli(rest)
        case ["serve", *rest]:
            from jaxrl_llm.run.commands import serve

            return serve.cli(rest)
        case ["plan", *rest]:
            from jaxrl_llm.run import plan

            return plan.cli(rest)
        case ["view", *rest]:
            from jaxrl_llm.run.records import view

            return view.main(rest)
        case ["doctor", *rest]:
            from jaxrl_llm.run.commands import doctor

            return doctor.cli(rest)
        case ["papers", *rest]:
            from jaxrl_llm.experiment import __main__ as papers

            return papers.main(rest)
    if words and not words[0].startswith("-") and words[0] != "train":
        near = difflib.get_close_matches(words[0], [*COMMANDS, "commands"], 1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        print(f"error: no command {words[0]!r}{hint} jaxrl commands lists them", file=sys.stderr)
        return 2
    with stop.before_the_run():
        from jaxrl_llm.jobs import grpo

        return grpo.cli(words[1:] if words[:1] == ["train"] else words)


if __name__ == "__main__":
    sys.exit(main())
