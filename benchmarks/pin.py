"""Pins what every experiment computes: the first two steps of every arm, to the last bit, of two checkouts.

Run it in each checkout on the same machine and compare what it wrote; a move, a rename or a merge changes nothing:

    python -m benchmarks.pin --out before.json          # in the first checkout
    python -m benchmarks.pin --out after.json           # in the second
    python -m benchmarks.pin --compare before.json after.json

Bits differ between processors, so the files are compared on one machine and are not committed. A run that was ended
goes on with the experiments that its file lacks.
"""

import argparse
import dataclasses
import gc
import importlib
import json
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

from jaxrl_llm.experiment import arms, loop  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]


def experiments() -> list[str]:
    """``<family>/<slug>`` of every experiment file."""
    files = (ROOT / "experiments").glob("*/*.py")
    kept = [p for p in files if not p.name.startswith("_") and p.parent.name not in ("parts", "beds")]
    return sorted(str(p.relative_to(ROOT / "experiments").with_suffix("")) for p in kept)


def exact(value):
    """Nested lists with every float as its hexadecimal digits, so that equal text means equal bits."""
    if isinstance(value, dict):
        return {k: exact(v) for k, v in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [exact(v) for v in value]
    return value.hex() if isinstance(value, float) else value


def pin(name: str) -> dict:
    """Metrics and curves of every arm of an experiment after its two smoke steps, one seed."""
    module = importlib.import_module("experiments." + name.replace("/", "."))
    base = arms.preset(module, smoke=True, model=module.Settings().model)
    out = {}
    for arm, settings in arms.resolve(module, base, ()).items():
        plan = module.build(settings)
        result = dataclasses.asdict(loop.run_arm(plan, settings, [0]))
        out[arm] = exact({k: result[k] for k in ("metrics", "curves", "rollouts", "tokens", "updates")})
    return out


def compare(first: pathlib.Path, second: pathlib.Path) -> int:
    """Prints what differs and returns how many experiments do."""
    before, after = (json.loads(p.read_text()) for p in (first, second))
    missing = sorted(before.keys() ^ after.keys())
    differ = [name for name in before if name in after and before[name] != after[name]]
    for name in differ:
        parts = [arm for arm in before[name] if before[name][arm] != after[name].get(arm)]
        print(f"{name}: {', '.join(parts) or 'other arms'}")
    print(f"{len(before.keys() & after.keys()) - len(differ)} equal, {len(differ)} differ, in one only: {missing}")
    return len(differ) + len(missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("pin.json"))
    parser.add_argument("--compare", type=pathlib.Path, nargs=2)
    parser.add_argument("names", nargs="*", help="<family>/<slug>; none: all")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in experiments()]:
        parser.error(f"{unknown[0]} is no experiment; give for example {experiments()[0]}")
    if missing := [path for path in options.compare or () if not path.is_file()]:
        parser.error(f"--compare {missing[0]} is not there; make it with --out, in the checkout to compare")
    if options.compare:
        sys.exit(1 if compare(*options.compare) else 0)
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time is compilation of what runs once
    done = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for name in options.names or experiments():
        if name in done:
            continue
        try:
            done[name] = pin(name)
        except Exception as error:  # what fails in both checkouts is pinned as well
            done[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(name, "error" if "error" in done[name] else "", flush=True)
        options.out.write_text(json.dumps(done))
        jax.clear_caches()
        gc.collect()


if __name__ == "__main__":
    main()
