#!/bin/sh
# arm.sh FOLDER PYTHON
#
# Unpacks into FOLDER what builds for 64-bit Arm and runs the result on this machine: Debian's cross compiler and QEMU,
# Debian's Python for that processor, and the packages of requirements/image.lock for it, which the pip of PYTHON
# fetches. Without root. Never fails: prints what cannot be had, and the tests of that processor are skipped.
set -u
LOCK=$(cd "$(dirname "$0")" && pwd)/image.lock
PYTHON=$2
mkdir -p "$1" && folder=$(cd "$1" && pwd)
STAMP=$folder/.installed
LISTS=$folder/lists
# Lists of packages of our own: those of the machine may be old or missing, and they belong to root. For apt, THERE is a
# machine on which nothing is installed, and HERE is this one without any of these tools.
OPTIONS="-qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Debug::NoLocking=1 -o APT::Sandbox::User="
HERE="$OPTIONS -o Dir::State::lists=$LISTS/here -o Dir::Cache=$LISTS/here -o Dir::State::status=$LISTS/others"
THERE="$OPTIONS -o Dir::State::lists=$LISTS/there -o Dir::Cache=$LISTS/there -o Dir::State::status=$LISTS/none
       -o APT::Architecture=arm64 -o APT::Architectures=arm64"

[ "$STAMP" -nt "$LOCK" ] && [ "$STAMP" -nt "$0" ] && exit 0
if [ "$(uname -m)" != x86_64 ] || ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "==> no tools for 64-bit Arm: they need a Debian on x86-64; its tests are skipped"
    exit 0
fi

# Folder, options of apt-get, packages: unpacks them with the packages that they need. The options are words, on purpose.
unpack() {
    archives=$(mktemp -d "$folder/archives.XXXXXX") && mkdir -p "$1" &&
        names=$(apt-get $2 --print-uris --no-install-recommends install $3 | sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p") &&
        [ -n "$names" ] && (cd "$archives" && apt-get $2 download $names) &&
        for archive in "$archives"/*.deb; do dpkg -x "$archive" "$1" || return 1; done
    code=$?
    rm -rf "$archives"
    return $code
}

# Unpacked programs look for their libraries, and the linker for libc, where installed packages have them.
wrap() {
    sed -i 's#/usr/aarch64-linux-gnu/lib/##g' "$folder/here/usr/aarch64-linux-gnu/lib/libc.so" && mkdir -p "$folder/bin"
    cat >"$folder/bin/aarch64-g++" <<'RUN'
#!/bin/sh
here=${0%/bin/*}/here/usr
export LD_LIBRARY_PATH="$here/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$here/bin/aarch64-linux-gnu-${0##*-}" "$@"
RUN
    cp "$folder/bin/aarch64-g++" "$folder/bin/aarch64-gcc"
    cat >"$folder/bin/python" <<'RUN'
#!/bin/sh
root=${0%/bin/*}
export PYTHONPATH="$root/site${PYTHONPATH:+:$PYTHONPATH}"
exec "$root/here/usr/bin/qemu-aarch64-static" -L "$root/there" "$root/there/usr/bin/python3" "$@"
RUN
    chmod +x "$folder/bin/"*
}

# QEMU shows the file of this machine otherwise, and ONNX Runtime's search for the processor's kind ends the process.
describe_processor() {
    mkdir -p "$folder/there/proc" && for processor in 0 1; do
        printf 'processor\t: %s\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics ' $processor
        printf 'fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs\nCPU implementer\t: 0x41\nCPU architecture: 8\n'
        printf 'CPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
    done >"$folder/there/proc/cpuinfo"
}

packages() {
    version=$("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || return 1
    platforms=$(printf -- '--platform manylinux_2_%s_aarch64 ' 17 24 26 27 28 31 34)
    "$PYTHON" -m pip --disable-pip-version-check --quiet --quiet install --target "$folder/site" $platforms \
        --platform manylinux2014_aarch64 --python-version "$version" --implementation cp --only-binary :all: --no-deps \
        --no-compile --require-hashes -r "$LOCK"
}

install() {
    rm -rf "$folder/here" "$folder/there" "$folder/site" "$LISTS"
    mkdir -p "$LISTS/here/partial" "$LISTS/there/partial" && : >"$LISTS/none"
    awk 'BEGIN { RS = ""; ORS = "\n\n" } $2 !~ /aarch64|-cross|^qemu/' /var/lib/dpkg/status >"$LISTS/others"
    apt-get $HERE update && unpack "$folder/here" "$HERE" "g++-aarch64-linux-gnu qemu-user-static" &&
        apt-get $THERE update && unpack "$folder/there" "$THERE" "python3 libpython3-dev libstdc++6" &&
        wrap && describe_processor && packages && "$folder/bin/python" -c 'import onnxruntime' && touch "$STAMP"
    code=$?
    rm -rf "$LISTS"
    return $code
}

install 2>"$folder/log" || {
    echo "==> no tools for 64-bit Arm: they cannot be fetched or run; its tests are skipped"
    tail -n 3 "$folder/log"
}
