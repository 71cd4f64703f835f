{{/* Where Redis is, and how one gets in. */}}

{{/* The url of the buffer, without a password. */}}
{{- define "quartet.redisUrl" -}}
{{- if .Values.redis.enabled -}}
{{- printf "%s://quartet@%s-redis:6379/0" (.Values.security.tls.enabled | ternary "rediss" "redis") (include "quartet.fullname" .) -}}
{{- else -}}
{{- $url := required "redis.external.url: needed where redis.enabled is false; such as rediss://quartet@redis.example:6379/0" .Values.redis.external.url -}}
{{- /* Neither message quotes the url: nor may the schema, so it has no pattern. Templates cannot unescape an option's name. */ -}}
{{- if regexMatch `://[^/?#]*:[^/?#]*@|(?i)[?&][^=&]*(password|%)[^=&]*=` $url -}}
{{- fail "redis.external.url: holds a password, or an option whose name is escaped; put the password into a Secret and name that in redis.external.existingSecret" -}}
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

{{/* The Secret with the password; empty where an external Redis wants none. */}}
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

{{/* The users. PASSWORD stands for the digest, which the container puts in when it starts. */}}
{{- define "quartet.redisUsers" -}}
user default off resetpass resetkeys resetchannels -@all
{{- /* What src/quartet/buffer sends, and no more: tests/helm runs the real buffer against it. */}}
user quartet on #PASSWORD resetkeys resetchannels ~quartet:{{ dig "run" "name" "run" .Values.config }}:* -@all +ping +info +multi +exec +scan +exists +del +get +set +incrby +pttl +watch +unwatch +hset +hmget +xgroup|create +xadd +xreadgroup +xack +xdel +xlen
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
# Nobody gets in without a user: the default one is off.
protected-mode no
aclfile /run/redis/users.acl
dir /data
appendonly yes
appendfsync everysec
# A crash cuts the file's last command off; all before it is whole.
aof-load-truncated yes
save ""
maxmemory {{ .Values.redis.maxmemory }}
maxmemory-policy noeviction
{{- end -}}
