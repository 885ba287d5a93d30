# shellcheck shell=bash
# Makes or reuses .venv and installs the project into it: `install_project ""` or `install_project "[test]"`.
# PYTHON chooses the interpreter (default python3); the install is skipped while setup.cfg and the constraints are
# unchanged. Versions are those with which the suite passes: constraints/py311.txt for Python 3.11, constraints/py312.txt
# for later ones; CONSTRAINTS=FILE takes others, CONSTRAINTS=none the newest.
install_project() {
    local extra="$1" stamp constraints pinned=()
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
    if [ ! -x .venv/bin/python ]; then
        "${PYTHON:-python3}" -m venv .venv || {
            echo "could not make .venv: install the venv module (Debian: apt-get install python3-venv)" >&2
            exit 2
        }
    fi
    constraints="${CONSTRAINTS:-}"
    if [ -z "$constraints" ]; then
        constraints="$(.venv/bin/python -c 'import sys
print("" if sys.version_info < (3, 11) else "constraints/py311.txt" if sys.version_info < (3, 12) else "constraints/py312.txt")')"
        if [ -z "$constraints" ]; then
            echo "error: .venv has $(.venv/bin/python -V), and 3.11 is needed; remove .venv and set PYTHON=python3.11" >&2
            exit 2
        fi
    fi
    if [ "$constraints" != none ]; then
        if [ ! -f "$constraints" ]; then
            echo "error: CONSTRAINTS=$constraints does not exist; give a file, or none" >&2
            exit 2
        fi
        pinned=(--constraint "$constraints")
    fi
    stamp=".venv/.installed$(echo "$extra" | tr -dc '[:lower:]')"
    if [ ! -e "$stamp" ] || [ setup.cfg -nt "$stamp" ] || [ "$(cat "$stamp")" != "$constraints" ] ||
        { [ "$constraints" != none ] && [ "$constraints" -nt "$stamp" ]; }; then
        .venv/bin/python -m pip install --quiet --disable-pip-version-check "${pinned[@]}" -e ".$extra" || exit 2
        echo "$constraints" >"$stamp"
    fi
}
