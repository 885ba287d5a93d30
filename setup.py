"""What setup.cfg cannot say: an installed copy carries the experiments inside the package.

In a checkout they are the folder ``experiments`` beside it, run as ``python -m experiments...``. In a wheel they lie
under ``jaxrl_llm/_checkout``, so that no top-level package of that name is claimed; ``jaxrl run SLUG`` finds either.
"""

import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py


class WithExperiments(build_py):
    """Copies the experiments into the package that is built; an editable install reads those of the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source in sorted(pathlib.Path("experiments").rglob("*")):
            if source.suffix in (".py", ".tsv"):
                target = pathlib.Path(self.build_lib) / "jaxrl_llm" / "_checkout" / source
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))


setup(cmdclass={"build_py": WithExperiments})
