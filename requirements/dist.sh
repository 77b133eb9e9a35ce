#!/bin/sh
# dist.sh FOLDER PYTHON ARM
#
# Builds wheels of the committed state in FOLDER: for x86-64 and, with the tools that arm.sh unpacked into ARM, for 64-bit
# Arm; of each one with the engine compiled for the version of PYTHON, and one for every other. They run with glibc 2.28,
# which auditwheel checks. Two builds of one commit give the same bytes.
set -eu
mkdir -p "$1" && folder=$(cd "$1" && pwd)
python=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
arm=$(cd "$3" 2>/dev/null && pwd) || arm=$3
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) && export SOURCE_DATE_EPOCH
source=$folder/source
rm -f "$folder"/*.whl

# Processor, prefix of its compilers' names, flags for the headers of Python.
wheels() {
    for engine in compiled source; do
        rm -rf "$source" && mkdir "$source" && git archive HEAD | tar -x -C "$source"
        (cd "$source" && ANTIPHON_PLATFORM=manylinux_2_28_$1 ANTIPHON_ENGINE=$engine CC=$2gcc CXX=$2g++ \
            LDSHARED="$2gcc -shared -s" CFLAGS="-g0 -DNDEBUG -fwrapv $3" \
            "$python" -m build --wheel --no-isolation --outdir "$folder") >"$folder/log" 2>&1 ||
            { tail -n 20 "$folder/log"; exit 1; }
        rm -rf "$source"
    done
}

wheels x86_64 "" ""
if [ -e "$arm/.installed" ]; then
    include=$("$arm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    wheels aarch64 "$arm/bin/aarch64-" "-I$include -I${include%/*}"
fi
for built in "$folder"/*.whl; do
    shown=$("$python" -m auditwheel show "$built")
    echo "$shown" | grep -Eq "\"manylinux_2_(1[0-9]|2[0-8])_" || { echo "$shown"; exit 1; }
done
"$python" -m twine check --strict "$folder"/*.whl
(cd "$folder" && sha256sum ./*.whl)
