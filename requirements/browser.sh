#!/bin/sh
# browser.sh FOLDER
#
# Unpacks headless Chromium, the libraries that this machine lacks and a font into FOLDER, from Debian packages: without
# root. FOLDER/usr/bin/chromium-headless-shell then runs it. Does nothing if PATH has a Chromium. Never fails: prints
# what cannot be had, and the tests in a browser are skipped.
set -u
mkdir -p "$1" && folder=$(cd "$1" && pwd)
PACKAGES="chromium-headless-shell fonts-dejavu-core"
PROGRAM=$folder/usr/bin/chromium-headless-shell
LISTS=$folder/lists
# Lists of packages of our own: those of the machine may be old or missing, and they belong to root.
APT="-qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Debug::NoLocking=1
     -o Dir::State::lists=$LISTS -o Dir::Cache=$LISTS -o APT::Sandbox::User="

for program in chromium-headless-shell chromium google-chrome; do
    command -v "$program" >/dev/null && exit 0
done
[ -x "$PROGRAM" ] && exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "==> no Chromium, and no apt to get it with: the tests in a browser are skipped"
    exit 0
fi

# The packages, and the packages they need that are not installed. The options are words, on purpose.
fetch() {
    mkdir -p "$LISTS/partial" && apt-get $APT update &&
        names=$(apt-get $APT --print-uris --no-install-recommends install $PACKAGES |
            sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p") &&
        [ -n "$names" ] && apt-get $APT download $names
}

# Programs in unpacked packages look for libraries and fonts where an installed package has them.
wrap() {
    libraries=$(find "$folder" -name '*.so*' -path '*/lib*' -printf '%h\n' | sort -u | sed "s|^$folder/|\$root/|" |
        tr '\n' ':')
    cat >"$folder/fonts.conf" <<FONTS
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig><dir>/usr/share/fonts</dir><dir>$folder/usr/share/fonts</dir><cachedir>$folder/font-cache</cachedir></fontconfig>
FONTS
    mkdir -p "$folder/usr/bin" && rm -f "$PROGRAM" && cat >"$PROGRAM" <<RUN
#!/bin/sh
root=\${0%/usr/bin/*}
export LD_LIBRARY_PATH="$libraries\${LD_LIBRARY_PATH:-}" FONTCONFIG_FILE="\$root/fonts.conf"
exec "\$root/usr/lib/chromium/chromium-headless-shell" "\$@"
RUN
    chmod +x "$PROGRAM"
}

unpack() {
    archives=$(mktemp -d "$folder/archives.XXXXXX")
    (cd "$archives" && fetch && for archive in *.deb; do dpkg -x "$archive" "$folder" || exit 1; done)
    has_failed=$?
    rm -rf "$archives" "$LISTS"
    [ "$has_failed" = 0 ] && wrap && "$PROGRAM" --version >/dev/null || { rm -f "$PROGRAM"; return 1; }
}

echo "==> headless Chromium, from Debian packages, in $folder"
unpack 2>/dev/null || echo "==> no Chromium: it cannot be fetched or run; the tests in a browser are skipped"
