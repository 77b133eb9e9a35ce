#!/bin/sh
# dist.sh FOLDER PYTHON ARM HEADERS VERSIONS ARCHITECTURE...
#
# Builds wheels of the committed state in FOLDER, for x86_64 or aarch64; on another processor for the latter with the
# tools that arm.sh unpacked into ARM. For each, one for every version of Python, and faster ones with the engine
# compiled for each of VERSIONS, such as "3.11 3.13", whose headers are there: those of PYTHON, those that headers.sh
# unpacked into HEADERS, or those of an interpreter on PATH. They run with glibc 2.28, which auditwheel checks. Two
# builds of one commit give the same bytes, so those that are there already stay.
set -eu
mkdir -p "$1" && folder=$(cd "$1" && pwd)
python=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
arm=$(cd "$3" 2>/dev/null && pwd) || arm=$3
headers=$(cd "$4" 2>/dev/null && pwd) || headers=$4
versions=$5
shift 5
own=$("$python" -c 'import sysconfig; print(sysconfig.get_python_version())')
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) && export SOURCE_DATE_EPOCH
commit=$(git rev-parse HEAD)
source=$folder/source
[ "$(cat "$folder/commit" 2>/dev/null)" = "$commit" ] || rm -f "$folder"/*.whl
echo "$commit" >"$folder/commit"
[ -z "$(git status --porcelain --untracked-files=no)" ] || echo "==> the wheels are of the last commit, without the uncommitted changes"

# Processor, kind of engine, version of Python, prefix of the compilers' names, flags for the headers of Python.
wheel() {
    rm -rf "$source" && mkdir "$source" && git archive HEAD | tar -x -C "$source"
    (cd "$source" && ANTIPHON_PLATFORM=manylinux_2_28_$1 ANTIPHON_ENGINE=$2 ANTIPHON_PYTHON=$3 CC=$4gcc CXX=$4g++ \
        LDSHARED="$4gcc -shared -s" CFLAGS="-g0 -DNDEBUG -fwrapv $5" \
        "$python" -m hatchling build --target wheel --directory "$folder") >"$folder/log" 2>&1 ||
        { tail -n 20 "$folder/log"; exit 1; }
    rm -rf "$source"
}

# Processor, version of Python: prints flags for its headers, which the build finds itself for its own Python.
flags() {
    [ "$1 $2" != "$(uname -m) $own" ] || return 0
    for include in "$headers/$2" "$arm/there/usr/include"; do
        [ ! -e "$include/$1-linux-gnu/python$2/pyconfig.h" ] || { echo "-I$include/python$2 -I$include"; return 0; }
    done
    [ "$1" = "$(uname -m)" ] || return 1
    include=$("python$2" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null) &&
        [ -e "$include/Python.h" ] && echo "-I$include"
}

# Whether a wheel is there: tag of Python, processor.
is_built() {
    ls "$folder"/*-"$1"-*"$2.whl" >/dev/null 2>&1
}

for architecture in "$@"; do
    prefix=""
    if [ "$architecture" != "$(uname -m)" ]; then
        if [ "$architecture" != aarch64 ] || [ ! -e "$arm/.installed" ]; then
            echo "no wheels for $architecture: this machine has no compiler for it"
            continue
        fi
        prefix=$arm/bin/aarch64-
    fi
    is_built py3-none "$architecture" || wheel "$architecture" source "$own" "$prefix" ""
    for version in $versions; do
        is_built "cp$(echo "$version" | tr -d .)" "$architecture" && continue
        include=$(flags "$architecture" "$version") || {
            echo "no compiled engine for Python $version on $architecture, but its sources: no headers of that Python"
            continue
        }
        wheel "$architecture" compiled "$version" "$prefix" "$include"
    done
done
for built in "$folder"/*.whl; do
    shown=$("$python" -m auditwheel show "$built")
    echo "$shown" | grep -Eq "\"manylinux_2_(1[0-9]|2[0-8])_" || { echo "$shown"; exit 1; }
done
"$python" -m twine check --strict "$folder"/*.whl
(cd "$folder" && sha256sum ./*.whl)
