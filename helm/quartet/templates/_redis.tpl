{{/* Address and credentials of Redis. */}}

{{/* URL of the buffer, without the password. */}}
{{- define "quartet.redisUrl" -}}
{{- if .Values.redis.enabled -}}
{{- printf "%s://quartet@%s-redis:6379/0" (.Values.security.tls.enabled | ternary "rediss" "redis") (include "quartet.fullname" .) -}}
{{- else -}}
{{- $url := required "redis.external.url: required if redis.enabled is false, such as rediss://quartet@redis.example:6379/0" .Values.redis.external.url -}}
{{- /* The URL may contain a password, so the messages do not quote it. The schema would, so it has no pattern. Escaped option names are
refused because templates cannot unescape them. */ -}}
{{- if regexMatch `://[^/?#]*:[^/?#]*@|(?i)[?&][^=&]*(password|%)[^=&]*=` $url -}}
{{- fail "redis.external.url: contains a password, or an option with an escaped name; store the password in a Secret, and set redis.external.existingSecret" -}}
{{- end -}}
{{- if not (regexMatch `^rediss?://([^:/?#@\s]*@)?(\[[^\]/?#@\s]+\]|[^\[\]:/?#@\s]+)(:[0-9]{1,5})?(/[0-9]*)?(\?[^#\s]*)?$` $url) -}}
{{- fail "redis.external.url: expected redis://USER@HOST:PORT/DB, or rediss:// for TLS, with numbers for PORT and DB, without a fragment" -}}
{{- end -}}
{{- $url -}}
{{- end -}}
{{- end -}}

{{- define "quartet.redisPort" -}}
{{- if .Values.redis.enabled -}}
6379
{{- else -}}
{{- regexFind ":[0-9]+([/?]|$)" (include "quartet.redisUrl" .) | trimAll ":/?" | default "6379" -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret with the password. Empty if an external Redis needs none. */}}
{{- define "quartet.redisSecret" -}}
{{- if .Values.redis.enabled -}}
{{- default (printf "%s-redis" (include "quartet.fullname" .)) .Values.redis.password.existingSecret -}}
{{- else -}}
{{- .Values.redis.external.existingSecret -}}
{{- end -}}
{{- end -}}

{{- define "quartet.redisSecretKey" -}}
{{- .Values.redis.enabled | ternary .Values.redis.password.key .Values.redis.external.key -}}
{{- end -}}

{{/* Scheduling of Redis: the keys of `redis` over those of `defaults`. Redis needs no GPU, so it takes no runtime class. */}}
{{- define "quartet.redisPlacement" -}}
{{- $placement := dict -}}
{{- range $key := list "priorityClassName" "nodeSelector" "tolerations" "affinity" -}}
{{- $source := kindIs "invalid" (index $.Values.redis $key) | ternary $.Values.defaults $.Values.redis -}}
{{- with get $source $key }}{{ $_ := set $placement $key . }}{{ end -}}
{{- end -}}
{{- include "quartet.placement" $placement | trim -}}
{{- end -}}

{{/*
ACL users. The container replaces PASSWORD by the digest when it starts. The keys of all runs of this release are permitted, because
they have the same pods and password. So another run.name leaves Redis as it is.
*/}}
{{- define "quartet.redisUsers" -}}
{{- /* Nobody can connect as the default user. But Redis loads the append-only file as it, and drops transactions that it may not execute. */ -}}
user default off resetpass ~* &* +@all
{{- /* Only the commands that src/quartet/buffer sends. tests/helm runs the real buffer with this list. */}}
user quartet on #PASSWORD resetkeys resetchannels ~quartet:* -@all +ping +info +multi +exec +scan +exists +del +unlink +get +set +incrby +expire +pttl +watch +unwatch +hset +hsetnx +hget +hmget +hgetall +hexists +hkeys +hdel +sadd +smembers +zadd +zcard +zscore +zrange +zrangebyscore +zrem +xgroup|create +xadd +xreadgroup +xack +xdel +xlen
{{- end -}}


{{- define "quartet.redisConfig" -}}
{{- if .Values.security.tls.enabled -}}
port 0
tls-port 6379
tls-cert-file /certificates/redis/tls.crt
tls-key-file /certificates/redis/tls.key
tls-ca-cert-file /certificates/redis/ca.crt
tls-auth-clients yes
tls-protocols "TLSv1.2 TLSv1.3"
{{- else -}}
port 6379
{{- end }}
bind * -::*
# Clients need a user: the default user is disabled.
protected-mode no
aclfile /run/redis/users.acl
dir /data
appendonly yes
appendfsync everysec
# A crash may truncate the last command in the file. All earlier commands are intact.
aof-load-truncated yes
save ""
maxmemory {{ .Values.redis.maxmemory }}
maxmemory-policy noeviction
{{- end -}}
