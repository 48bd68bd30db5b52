#!/usr/bin/env bash
# Build a container from a pinned base image: jetson/image.sh jp6|jp7 [options of docker build]
#
# The owner of a tag can move it. The first build looks up the digest of the Dockerfile's tag and
# writes it to jetson/base-images.txt; later builds use that image or fail. Keep the file, or delete
# its line to use the image that the tag names today. Unproven on a board.
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
  [[ $image =~ @sha256:[0-9a-f]{64}$ ]] || { echo "docker reports no digest for $tag" >&2; exit 1; }
  echo "$tag $image" >> "$digests"
  echo "note: $tag is pinned to $image in $digests" >&2
fi
exec docker build -f "$file" --build-arg "BASE=$image" -t "edge:$1" "${@:2}" "$here/.."
