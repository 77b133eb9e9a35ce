#!/bin/sh
# unpack.sh FOLDER PACKAGE=PROGRAM...
#
# Unpacks Debian packages into FOLDER, for programs that are not on this machine: without root, and without the
# services that `apt-get install` would start. Never fails: what cannot be had is told on standard output.
set -u
mkdir -p "$1" && folder=$(cd "$1" && pwd)
shift
PATH=$PATH:/usr/sbin:$folder/usr/bin:$folder/usr/sbin
OPTIONS="-qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20"
# For a machine whose lists of packages are old or gone: lists of our own, since its belong to root.
OWN="$OPTIONS -o Dir::State::lists=$folder/lists -o Dir::Cache=$folder/lists"

# Into the current folder. The options are words, on purpose.
fetch() {
    apt-get $OPTIONS download "$1" || {
        mkdir -p "$folder/lists/partial" && apt-get $OWN update && apt-get $OWN download "$1"
    }
}

# Package, program. The packages' own requirements are libraries that most machines have; what does not run goes.
unpack() {
    archives=$(mktemp -d "$folder/archives.XXXXXX")
    (cd "$archives" && fetch "$1" && dpkg -x "$1"_*.deb "$folder")
    rm -rf "$archives" "$folder/lists"
    "$2" --version >/dev/null || "$2" -v || {
        rm -f "$folder/usr/bin/$2" "$folder/usr/sbin/$2"
        return 1
    }
}

# Alertmanager stops where it does not find its default templates, and Debian's program looks for them in the folder of
# an installed package. In the unpacked program that path becomes another one of the same length: descriptor 9, as
# which a script in the program's place opens the unpacked folder.
relocate_alertmanager() {
    program=$folder/usr/bin/prometheus-alertmanager moved=$folder/usr/libexec/prometheus-alertmanager
    installed=/usr/share/prometheus/alertmanager descriptor=/proc/self/fd/9///////////////////
    grep -q "$installed" "$program" 2>/dev/null || return 0
    mkdir -p "$folder/usr/libexec"
    LC_ALL=C sed "s|$installed|$descriptor|g" "$program" >"$moved" && chmod +x "$moved" && cat >"$program" <<'EOF'
#!/bin/sh
usr=${0%/*}/..
exec "$usr/libexec/prometheus-alertmanager" "$@" 9<"$usr/share/prometheus/alertmanager"
EOF
}

for wanted; do
    package=${wanted%=*} program=${wanted#*=}
    command -v "$program" >/dev/null && continue
    if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
        echo "==> no $program, and no apt to get it with: its tests are skipped"
        continue
    fi
    echo "==> $program, from the Debian package $package, in $folder"
    unpack "$package" "$program" 2>/dev/null || echo "==> no $program: it cannot be fetched or run; its tests are skipped"
done
relocate_alertmanager
