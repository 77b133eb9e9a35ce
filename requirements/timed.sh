#!/usr/bin/env bash
# timed.sh [--silent] HEADING COMMAND...
#
# Prints the heading with the time that the command took last time, runs the command, and prints its time.
# --silent: the command prints nothing for long, so a line every 15 s tells how long it has run. Times: build/times.
set -u
silent=
[ "$1" = --silent ] && silent=yes && shift
heading=$1
shift
record=build/times/$(printf %s "$heading" | tr -c 'A-Za-z0-9.' -)
mkdir -p build/times
last=$(cat "$record" 2>/dev/null)
echo "==> $heading${last:+ (last time $last s)}"

if [ "$silent" ]; then
    while sleep 15 >/dev/null 2>&1; do echo "    ... $SECONDS s"; done &
    trap "kill $! 2>/dev/null" EXIT
fi
SECONDS=0
"$@"
code=$?

if [ $code = 0 ]; then
    echo $SECONDS >"$record"
    echo "    $SECONDS s: $heading"
else
    echo "    failed after $SECONDS s: $heading" >&2
fi
exit $code
