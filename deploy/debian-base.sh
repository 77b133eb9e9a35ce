#!/bin/sh
# Builds the equivalent of debian:bookworm-slim from Debian's archive, for machines without access to a registry. They
# need the archive or a mirror (MIRROR=URL), debootstrap, podman and root; for another processor, an emulator (binfmt).
#   deploy/debian-base.sh NAME:TAG linux/amd64|linux/arm64
set -eu
name=$1 architecture=${2#linux/}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

debootstrap --arch="$architecture" --variant=minbase bookworm "$folder" ${MIRROR:+"$MIRROR"} > /dev/null
mirror=$(awk '$1 == "deb" {print $2; exit}' "$folder/etc/apt/sources.list")
cat > "$folder/etc/apt/sources.list" << END
deb $mirror bookworm main
deb $mirror bookworm-updates main
deb ${mirror%/debian}/debian-security bookworm-security main
END
# Removes documentation except copyrights, and translations, now and from packages that are installed later.
printf 'path-exclude /usr/share/%s/*\n' doc man info locale lintian > "$folder/etc/dpkg/dpkg.cfg.d/slim"
printf 'path-include /usr/share/doc/*/copyright\n' >> "$folder/etc/dpkg/dpkg.cfg.d/slim"
find "$folder/usr/share/doc" -type f ! -name copyright -delete
for path in man info locale lintian; do
  rm -rf "$folder/usr/share/$path"/*
done
rm -rf "$folder"/var/lib/apt/lists/* "$folder"/var/cache/apt/* "$folder"/var/log/*
mkdir -p "$folder/var/lib/apt/lists/partial" "$folder/var/cache/apt/archives/partial"
tar -C "$folder" --create . | podman import --os linux --arch "$architecture" --change 'CMD ["sh"]' --change \
  'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$name"
