#!/bin/sh
# Makes what the processes of docker-compose.yml keep secret, once: passwords, tokens, and with QUARTET_TLS=1 certificates.
#
# Each secret is in a volume of its own below /setup, so that a container is given those that it needs and no others. What is
# there already stays. `setup.sh renew-certificates` makes the certificates anew.
set -eu
if [ "${1:-}" = renew-certificates ] && [ "${QUARTET_TLS:-0}" != 1 ]; then
    echo "error: this stack has no certificates: add docker/compose.tls.yaml to COMPOSE_FILE in .env for TLS" >&2
    exit 2
fi
umask 0227 # 0550 and 0440: the owner, and the group that Prometheus and Grafana are put into

draw() { head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; }

# keep FILE TEXT: written whole or not at all.
keep() {
    rm -f "$1.partial"
    printf '%s\n' "$2" > "$1.partial"
    mv "$1.partial" "$1"
}

cd /setup/secrets
for secret in redis/redis_password rpc/rpc_token gateway/gateway_token viewer/gateway_viewer_token grafana/grafana_password; do
    [ -s "$secret" ] || keep "$secret" "$(draw)"
done
# What Quartet sends, and no more; of the password only its digest.
digest=$(tr -d '\n' < redis/redis_password | sha256sum | cut -d ' ' -f 1)
keep redis/users.acl "user default off resetpass resetkeys resetchannels -@all
user quartet on #$digest resetkeys resetchannels ~quartet:* -@all +ping +info +multi +exec +scan +exists +del +get +set +incrby \
+pttl +watch +unwatch +hset +hmget +xgroup|create +xadd +xreadgroup +xack +xdel +xlen"

[ "${QUARTET_TLS:-0}" = 1 ] || exit 0
cd /setup/certificates
whole=true
for process in *; do
    [ -s "$process/ca.crt" ] || whole=false
done
if [ "$whole" = true ] && [ "${1:-}" != renew-certificates ]; then exit 0; fi
# An authority signs all of them or none: broken off in between, it is done again.
rm -f ./*/ca.crt
umask 0077
quartet certificates /tmp/certificates --days "${QUARTET_CERTIFICATE_DAYS:-365}" > /dev/null
umask 0227
for process in *; do
    # The authority's last: where it is, the rest is.
    for file in tls.key tls.crt ca.crt; do
        keep "$process/$file" "$(cat "/tmp/certificates/$process/$file")"
    done
done
echo "certificates: made; every service takes them when it starts"
