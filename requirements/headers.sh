#!/bin/sh
# headers.sh FOLDER VERSION...
#
# Unpacks into FOLDER/VERSION the headers of these versions of Python, such as 3.13, for x86-64 and 64-bit Arm: for
# wheels with the engine compiled for them. Without root, from releases of Debian after this machine's. Never fails:
# prints what cannot be had.
set -u
mkdir -p "$1" && folder=$(cd "$1" && pwd)
shift
missing=$(for version; do [ -e "$folder/$version" ] || echo "$version"; done)
[ -n "$missing" ] || exit 0

# Lists of packages of our own, as for arm.sh. The older release of Debian has the older headers of the same version:
# what is compiled with them runs with all later ones.
work=$(mktemp -d "$folder/work.XXXXXX") && trap 'rm -rf "$work"' EXIT && mkdir -p "$work/lists/partial" || exit 0
mirror=$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -m1 '/debian/*$')
for release in trixie forky; do echo "deb $mirror $release main"; done >"$work/sources"
: >"$work/none"
apt() {
    apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Debug::NoLocking=1 -o APT::Sandbox::User= \
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/lists" -o Dir::State::status="$work/none" \
        -o Dir::Etc::sourcelist="$work/sources" -o Dir::Etc::sourceparts=- -o APT::Default-Release=trixie \
        -o APT::Architecture=amd64 -o APT::Architectures=amd64,arm64 "$@"
}

unpack() {
    rm -rf "$work/$1" && mkdir "$work/$1" && cd "$work/$1" &&
        apt download "libpython$1-dev:amd64" "libpython$1-dev:arm64" &&
        for archive in *.deb; do dpkg --fsys-tarfile "$archive" | tar -x ./usr/include || return 1; done &&
        mv usr/include "$folder/$1"
}

apt update 2>"$folder/log"
for version in $missing; do
    unpack "$version" 2>>"$folder/log" || echo "==> no headers of Python $version: they cannot be fetched"
done
