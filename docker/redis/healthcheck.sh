#!/bin/sh
# Health check: ping Redis as the user of the services.
set -eu
folder=/run/certificates/redis
if [ -s "$folder/ca.crt" ]; then
    set -- --tls --cacert "$folder/ca.crt" --cert "$folder/tls.crt" --key "$folder/tls.key"
fi
REDISCLI_AUTH=$(cat /run/secrets/redis/redis_password)
export REDISCLI_AUTH
[ "$(redis-cli "$@" --no-auth-warning --user quartet ping)" = PONG ]
