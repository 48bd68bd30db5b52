#!/usr/bin/env bash
# Builds a container from a base image that stays the same: jetson/image.sh jp6|jp7 [docker build's options]
#
# A tag is whatever its owner makes of it. The first build asks for the digest that the tag of
# Dockerfile.jp6 has, and writes it to jetson/base-images.txt; every later one takes that image, or
# none. Keep the file, or delete its line to take what the tag means today. Unproven on a board.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
file=$here/Dockerfile.${1:?jp6 or jp7}
[ -f "$file" ] || { echo "there is no $file" >&2; exit 1; }
digests=${EDGE_BASE_IMAGES:-$here/base-images.txt}
tag=$(sed -n 's/^ARG BASE=//p' "$file")
image=$(sed -n "s|^$tag ||p" "$digests" 2>/dev/null || true)
if [ -z "$image" ]; then
  docker pull --platform linux/arm64 "$tag"
  image=$(docker image inspect --format '{{join .RepoDigests "\n"}}' "$tag" | grep -F "${tag%:*}@" | head -n 1 || true)
  [[ $image =~ @sha256:[0-9a-f]{64}$ ]] || { echo "docker tells no digest of $tag" >&2; exit 1; }
  echo "$tag $image" >> "$digests"
  echo "note: $tag is $image from now on ($digests)" >&2
fi
exec docker build -f "$file" --build-arg "BASE=$image" -t "edge:$1" "${@:2}" "$here/.."
