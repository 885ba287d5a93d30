"""The public lists of the array packages: complete, without a second meaning, and importable with jax alone."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import jaxrl_llm.advantages
import jaxrl_llm.losses

PACKAGES = (jaxrl_llm.losses, jaxrl_llm.advantages)


def _defined(package):
    """Public functions and classes by name, with the modules that define them."""
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name, value in vars(module).items():
            own = (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
            if own and not name.startswith("_"):
                found.setdefault(name, []).append(module)
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_the_list_is_complete_and_sorted(package):
    defined = _defined(package)
    assert sorted(set(defined) - set(package.__all__)) == [], "add it to the list, or begin its name with _"
    assert sorted(set(package.__all__) - set(defined)) == [], "these are gone"
    assert list(package.__all__) == sorted(set(package.__all__))
    for name, modules in defined.items():
        assert len(modules) == 1, f"{name} is defined by {[m.__name__ for m in modules]}"
        assert getattr(package, name) is getattr(modules[0], name)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_a_name_of_the_list_hides_no_module(package):
    modules = {info.name for info in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__)
    for name in modules:
        assert inspect.ismodule(getattr(package, name))


def test_the_faces_need_jax_and_jaxtyping_alone():
    """Every other installed distribution is hidden; what jax itself needs comes with it."""
    code = (
        "import sys\n"
        "for name in ('flax', 'optax', 'orbax', 'tyro', 'safetensors', 'ray', 'matplotlib', 'tokenizers', 'yaml',\n"
        "             'sympy', 'jinja2', 'transformers', 'torch', 'pandas', 'requests'): sys.modules[name] = None\n"
        "from jaxrl_llm import advantages, losses, reduce, logprobs\n"
        "import jax.numpy as jnp\n"
        "one = jnp.ones((1, 2))\n"
        "terms = losses.clipped_policy_loss(-one, -one, one, one > 0)\n"
        "print(float(reduce.tokens(terms.loss, one > 0)))\n"
        "mine = {m.split('.')[1] for m in sys.modules if m.startswith('jaxrl_llm.')}\n"
        "assert mine <= {'advantages', 'losses', 'reduce', 'logprobs', 'types', 'curriculum', 'metrics'}, mine\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "-1.0"
