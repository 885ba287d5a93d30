#!/usr/bin/env bash
# Installs the test extra into .venv and runs the suite; further arguments go to pytest.
# With none, the slow proofs run as well, after the default suite.
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_project "[test]"
.venv/bin/python -m ruff check jaxrl_llm experiments tests
.venv/bin/python -m pytest -n "${PYTEST_WORKERS:-2}" "${@:---slow}"
