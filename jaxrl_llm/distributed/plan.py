"""``python -m jaxrl_llm.distributed.plan``: the command of ``jaxrl_llm.planning``.

A plan is made of models and of the training step, which lie above this package: the name is here, the work is there.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.run.plan", run_name="__main__")
