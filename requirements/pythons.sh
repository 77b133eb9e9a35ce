#!/usr/bin/env bash
# Prepares an environment .venv-VERSION for each version of Python, and prints the paths of their interpreters.
#
#     requirements/pythons.sh 3.12 3.13
#
# An environment has the packages of pythons.lock, and the engine is compiled for it. Never fails: a version without an
# interpreter on PATH, or without packages, is reported and left out. All versions are prepared at the same time, because
# most steps keep only one core busy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

report() {
    echo "==> the service is not tested with Python $1: $2" >&2
}

# PYENV_VERSION is for a shim of pyenv, which otherwise fails if the version is not active.
interpreter() {
    local candidate
    for candidate in $(type -aP "python$1"); do
        if PYENV_VERSION=$1 "$candidate" -c 'import ensurepip, venv; print(__import__("sys").executable)' 2>/dev/null; then
            return
        fi
    done
    return 1
}

prepare() {
    local version=$1 folder=.venv-$1 stamp=.venv-$1/.installed python
    if ! [[ -x $folder/bin/python && $stamp -nt requirements/pythons.lock ]]; then
        python=$(interpreter "$version") || { report "$version" "no python$version runs"; return; }
        echo "==> locked packages for Python $version in $folder" >&2
        rm -rf "$folder"
        if ! "$python" -m venv "$folder" || ! "$folder/bin/python" -m pip --disable-pip-version-check --quiet --quiet \
            --retries 1 install --no-compile --no-deps --require-hashes -r requirements/pythons.lock; then
            rm -rf "$folder"
            report "$version" "its packages cannot be installed"
            return
        fi
        touch "$stamp"
    fi
    "$folder/bin/python" hatch_build.py engine >&2
    echo "$folder/bin/python"
}

for version in "$@"; do
    prepare "$version" &
done
wait
