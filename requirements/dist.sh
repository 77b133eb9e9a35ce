#!/bin/sh
# dist.sh FOLDER PYTHON ARM ARCHITECTURE...
#
# Builds wheels of the committed state in FOLDER, for x86_64 or aarch64; on another processor for the latter with the
# tools that arm.sh unpacked into ARM. For each, one with the engine compiled for the version of PYTHON, and one for
# every other. They run with glibc 2.28, which auditwheel checks. Two builds of one commit give the same bytes, so those
# that are there already stay.
set -eu
mkdir -p "$1" && folder=$(cd "$1" && pwd)
python=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
arm=$(cd "$3" 2>/dev/null && pwd) || arm=$3
shift 3
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) && export SOURCE_DATE_EPOCH
commit=$(git rev-parse HEAD)
source=$folder/source
[ "$(cat "$folder/commit" 2>/dev/null)" = "$commit" ] || rm -f "$folder"/*.whl
echo "$commit" >"$folder/commit"
[ -z "$(git status --porcelain --untracked-files=no)" ] || echo "==> the wheels have none of the changes after the last commit"

# Processor, kind of engine, prefix of the compilers' names, flags for the headers of Python.
wheel() {
    rm -rf "$source" && mkdir "$source" && git archive HEAD | tar -x -C "$source"
    (cd "$source" && ANTIPHON_PLATFORM=manylinux_2_28_$1 ANTIPHON_ENGINE=$2 CC=$3gcc CXX=$3g++ \
        LDSHARED="$3gcc -shared -s" CFLAGS="-g0 -DNDEBUG -fwrapv $4" \
        "$python" -m hatchling build --target wheel --directory "$folder") >"$folder/log" 2>&1 ||
        { tail -n 20 "$folder/log"; exit 1; }
    rm -rf "$source"
}

for architecture in "$@"; do
    prefix="" flags=""
    if [ "$architecture" != "$(uname -m)" ]; then
        if [ "$architecture" != aarch64 ] || [ ! -e "$arm/.installed" ]; then
            echo "no wheels for $architecture: this machine has no compiler for it"
            continue
        fi
        prefix=$arm/bin/aarch64-
        include=$("$arm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
        flags="-I$include -I${include%/*}"
    fi
    for kind in compiled source; do
        tag=py3-none
        [ $kind = source ] || tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
        ls "$folder"/*-"$tag"-*"$architecture.whl" >/dev/null 2>&1 || wheel "$architecture" $kind "$prefix" "$flags"
    done
done
for built in "$folder"/*.whl; do
    shown=$("$python" -m auditwheel show "$built")
    echo "$shown" | grep -Eq "\"manylinux_2_(1[0-9]|2[0-8])_" || { echo "$shown"; exit 1; }
done
"$python" -m twine check --strict "$folder"/*.whl
(cd "$folder" && sha256sum ./*.whl)
