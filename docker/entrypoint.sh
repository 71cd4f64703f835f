#!/bin/sh
# `docker run quartet services actor`, `... gateway`, `... quartet generate ...`; anything else is run as it stands.
#
# Services and the gateway that are given no --config take the run's, /quartet/config.yaml, and lay over it what is in
# /quartet/deployment, in the order of the names.
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
        echo "error: $layer: is a folder, which Docker made because there was no such file to mount; for *-roles-*.yaml correct" \
            "QUARTET_ROLES in .env, remove the folder from docker/deployment, and bring the stack up again" >&2
        exit 2
    fi
    [ -e "$layer" ] && set -- "$@" --config "$layer"
done
exec python -m "quartet.$@"
