#!/bin/sh
# Makes what debian:bookworm-slim is, from Debian's archive, as an image of this machine: for machines that reach the
# archive (or a mirror of it: MIRROR=URL) and no registry. Needs debootstrap, podman and root.
#   deploy/debian-base.sh NAME:TAG
set -eu
name=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

debootstrap --variant=minbase bookworm "$folder" ${MIRROR:+"$MIRROR"} > /dev/null
mirror=$(awk '$1 == "deb" {print $2; exit}' "$folder/etc/apt/sources.list")
cat > "$folder/etc/apt/sources.list" << END
deb $mirror bookworm main
deb $mirror bookworm-updates main
deb ${mirror%/debian}/debian-security bookworm-security main
END
# What makes it slim: no documentation but copyrights, no translations, now and of what is installed later.
printf 'path-exclude /usr/share/%s/*\n' doc man info locale lintian > "$folder/etc/dpkg/dpkg.cfg.d/slim"
printf 'path-include /usr/share/doc/*/copyright\n' >> "$folder/etc/dpkg/dpkg.cfg.d/slim"
find "$folder/usr/share/doc" -type f ! -name copyright -delete
for path in man info locale lintian; do
  rm -rf "$folder/usr/share/$path"/*
done
rm -rf "$folder"/var/lib/apt/lists/* "$folder"/var/cache/apt/* "$folder"/var/log/*
mkdir -p "$folder/var/lib/apt/lists/partial" "$folder/var/cache/apt/archives/partial"
tar -C "$folder" --create . | podman import --change 'CMD ["sh"]' --change \
  'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$name"
