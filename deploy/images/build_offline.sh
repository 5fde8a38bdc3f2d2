#!/bin/sh
# Builds cpu.Dockerfile, or with IMAGE=cuda the other one, where no registry of images can be reached, as root: the base image is made of Debian's packages
# (bookworm has the Python of python:3.11-slim-bookworm), and buildah runs each line in a chroot. Then the image's
# `outrider serve demo` answers one request. Needs buildah, debootstrap and 20 GB; PIP_* and /etc/pip.conf name a mirror.
#   deploy/images/build_offline.sh [SCRATCH FOLDER]
set -eu
cd "$(dirname "$0")/../.."
scratch=${1:-/var/tmp/outrider-image}
image=${IMAGE:-cpu}  # cuda: BUILD_OPTIONS="--build-arg TORCH_INDEX=..." where torch's own index cannot be reached
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
base=docker.io/library/python:3.11-slim-bookworm
mkdir -p "$scratch"
export BUILDAH_ISOLATION=chroot
buildah="buildah --storage-driver vfs --root $scratch/storage --runroot $scratch/run"
if [ ! -e "$scratch/root/usr/bin/python3" ]; then
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$scratch/root" "$mirror"
fi
ln -sf python3 "$scratch/root/usr/bin/python"
if ! $buildah inspect --type image "$base" >/dev/null 2>&1; then
    container=$($buildah from scratch)
    $buildah add --quiet "$container" "$scratch/root" /
    $buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    $buildah commit --quiet --rm "$container" "$base"
fi
# shellcheck disable=SC2086  # options are words
$buildah build --pull=never ${BUILD_OPTIONS:-} --file "deploy/images/$image.Dockerfile" --tag "outrider:$image" .
container=$($buildah from --pull=never "outrider:$image")
if [ "$image" = cpu ] && $buildah run "$container" -- sh -c 'command -v gcc'; then
    echo "a compiler in the last stage" >&2
    exit 1
fi
$buildah run "$container" -- sh -c '
    test "$(id -u)" = 1000
    outrider serve demo --no-ray --port 8765 --grpc-port 0 & server=$!
    for _ in $(seq 120); do wget -q -O - http://127.0.0.1:8765/ready && break; sleep 1; done
    wget -q -O - --header "Content-Type: application/json" --post-data \
        "{\"prompt\": \"def main():\", \"max_tokens\": 8, \"temperature\": 0}" http://127.0.0.1:8765/v1/completions
    kill -INT $server; wait $server'
$buildah rm "$container" >/dev/null
