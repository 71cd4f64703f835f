#!/bin/sh
# Generate the secrets of docker-compose.yml once: passwords, tokens, and with QUARTET_TLS=1 certificates.
#
# Each secret has a separate volume below /setup, so that a container gets only the secrets that it needs. Existing secrets are kept.
# `setup.sh renew-certificates` replaces the certificates.
set -eu
case "${1:-}" in
    "" | renew-certificates) ;;
    *)
        echo "error: setup.sh: unknown argument $1; expected none, or renew-certificates" >&2
        exit 2
        ;;
esac
case "${QUARTET_CERTIFICATE_DAYS:-365}" in
    [1-9] | [1-9][0-9] | [1-9][0-9][0-9] | [1-3][0-9][0-9][0-9]) ;;
    *)
        echo "error: QUARTET_CERTIFICATE_DAYS in .env: ${QUARTET_CERTIFICATE_DAYS}; expected a number of days from 1 to 3650" >&2
        exit 2
        ;;
esac
if [ "${1:-}" = renew-certificates ] && [ "${QUARTET_TLS:-0}" != 1 ]; then
    echo "error: this stack has no certificates: to use TLS, add docker/compose.tls.yaml to COMPOSE_FILE in .env" >&2
    exit 2
fi
umask 0227 # 0550 and 0440: access for the owner, and for the group of Prometheus and Grafana

random_secret() { head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; }

# write_atomically FILE TEXT
write_atomically() {
    rm -f "$1.partial"
    printf '%s\n' "$2" > "$1.partial"
    mv "$1.partial" "$1"
}

cd /setup/secrets
for secret in redis/redis_password rpc/rpc_token gateway/gateway_token viewer/gateway_viewer_token grafana/grafana_password \
    traffic/viewer_keys traffic/operator_keys; do
    [ -s "$secret" ] || write_atomically "$secret" "$(random_secret)"
done
# The ACL allows only the commands that Quartet uses, and contains the digest of the password. Nobody can connect as the default user.
# But Redis loads the append-only file as it, and drops transactions that it may not execute.
digest=$(tr -d '\n' < redis/redis_password | sha256sum | cut -d ' ' -f 1)
write_atomically redis/users.acl "user default off resetpass ~* &* +@all
user quartet on #$digest resetkeys resetchannels ~quartet:* -@all +ping +info +multi +exec +scan +exists +del +unlink +get +set \
+incrby +expire +pttl +watch +unwatch +hset +hsetnx +hget +hmget +hgetall +hexists +hkeys +hdel +sadd +smembers +zadd +zcard +zscore \
+zrange +zrangebyscore +zrem +xgroup|create +xadd +xreadgroup +xack +xdel +xlen"

[ "${QUARTET_TLS:-0}" = 1 ] || exit 0
cd /setup/certificates
complete=true
for process in *; do
    [ -s "$process/ca.crt" ] || complete=false
done
if [ "$complete" = true ] && [ "${1:-}" != renew-certificates ]; then exit 0; fi
umask 0077
quartet certificates /tmp/certificates --days "${QUARTET_CERTIFICATE_DAYS:-365}" > /dev/null
umask 0227
# All certificates come from one authority. If this is interrupted, all are created again.
rm -f ./*/ca.crt
for process in *; do
    # ca.crt is written last, so that it marks a complete certificate.
    for file in tls.key tls.crt ca.crt; do
        write_atomically "$process/$file" "$(cat "/tmp/certificates/$process/$file")"
    done
done
echo "certificates: created; services load them when they start"
