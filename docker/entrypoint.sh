#!/bin/sh
# Entrypoint of the image: `docker run quartet services actor`, `... gateway`, or any other command such as `... quartet generate ...`.
#
# Without --config, services and the gateway load /quartet/config.yaml and the layers in /quartet/deployment, in the order of their names.
# A service that sees several GPUs (NVIDIA_VISIBLE_DEVICES=4,5) uses all of them. In the container their indices start at 0.
set -eu

case "${1:-}" in
    services | gateway) ;;
    *) exec "$@" ;;
esac
case " $* " in
    *" --config "* | *" --config="* | *" --runs "* | *" --help "*) exec python -m "quartet.$@" ;;
esac
set -- "$@" --config config.yaml
for layer in deployment/*.yaml; do
    if [ -d "$layer" ]; then
        echo "error: $layer: is a folder, which Docker creates if the file to mount does not exist; for *-roles-*.yaml correct" \
            "QUARTET_ROLES in .env, for *-generation-*.yaml QUARTET_GENERATION, remove the folder from docker/deployment, and start the stack again" >&2
        exit 2
    fi
    [ -e "$layer" ] && set -- "$@" --config "$layer"
done
case "$1:${NVIDIA_VISIBLE_DEVICES:-}" in
    services:*,*)
        last=$(echo "$NVIDIA_VISIBLE_DEVICES" | tr -cd , | wc -c)
        set -- "$@" --set "services.$2.devices=[$(seq -s , 0 "$last")]"
        ;;
esac
exec python -m "quartet.$@"
