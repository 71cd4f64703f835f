{{/* What the chart lays over the run's config: where everything is and how it is let in. */}}
{{- define "quartet.deployment" -}}
{{- $root := . -}}
{{- $tls := .Values.security.tls.enabled -}}
{{- if not (or $tls .Values.security.allowPlaintext) -}}
{{- fail "security.tls.enabled: false, so everything would travel in plaintext; say so with security.allowPlaintext true, inside a network that you trust" -}}
{{- end -}}
{{- $components := include "quartet.components" . | fromJson -}}
{{- $services := dict -}}
{{- range $name, $component := $components -}}
{{- range $role := $component.roles -}}
{{- if ne $role "gateway" -}}
{{- $service := dict "listen" "0.0.0.0:50051" "metrics" "0.0.0.0:9100" "health" "0.0.0.0:9101" -}}
{{- $_ := set $service "address" (printf "%s:50051" $component.fullname) -}}
{{- if $component.model }}{{ $_ := set $service "devices" (until (int $component.gpus)) }}{{ end -}}
{{- $_ := set $services $role $service -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $gateway := dict "listen" "0.0.0.0:8080" "start_runs" false "allowed_hosts" (include "quartet.gatewayHosts" . | fromJsonArray) -}}
{{- $_ := set $gateway "token_file" "/run/secrets/quartet/gateway_token" -}}
{{- $_ := set $gateway "viewer_token_file" "/run/secrets/quartet/gateway_viewer_token" -}}
{{- if $tls }}{{ $gateway = merge $gateway (dict "certificate" "/certificates/gateway/tls.crt" "key" "/certificates/gateway/tls.key") }}{{ end -}}
{{- with .Values.gateway.requestsPerSecond }}{{ $_ := set $gateway "requests_per_second" . }}{{ end -}}
{{- $buffer := dict "url" (include "quartet.redisUrl" .) -}}
{{- if include "quartet.redisSecret" . }}{{ $_ := set $buffer "password_file" "/run/secrets/quartet/redis_password" }}{{ end -}}
{{- $security := dict "certificates" ($tls | ternary "/certificates" nil) "allow_plaintext" (not $tls) -}}
{{- if .Values.security.rpcToken.enabled }}{{ $_ := set $security "token_file" "/run/secrets/quartet/rpc_token" }}{{ end -}}
{{- $found := dict "run" (dict "directory" "runs") "services" $services "buffer" $buffer "security" $security -}}
{{- if $components.gateway }}{{ $_ := set $found "gateway" $gateway }}{{ end -}}
{{- include "quartet.refuseOverlaid" (dict "given" .Values.config "laid" $found "path" "config") -}}
{{- if not (kindIs "invalid" (dig "timeouts" "drain" nil .Values.config)) -}}
{{- fail "config.timeouts.drain: the chart sets it for each component; leave it out, and see components.NAME.drainSeconds" -}}
{{- end -}}
{{- if and $components.gateway (not (dig "gateway" "enabled" true .Values.config)) -}}
{{- fail "config.gateway.enabled: the chart starts the gateway; leave it out, and set components.gateway.enabled false" -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/*
Refuses what would be lost below the chart's own: any value of the config that differs from it, but null and an empty list.
Takes given, laid and path.
*/}}
{{- define "quartet.refuseOverlaid" -}}
{{- $instead := dict "run" "storage.runs" "services" "components" "buffer" "redis" "security" "security" "gateway" "gateway and ingress" -}}
{{- $path := .path -}}
{{- range $key, $given := .given -}}
{{- $place := printf "%s.%s" $path $key -}}
{{- if hasKey $.laid $key -}}
{{- $laid := get $.laid $key -}}
{{- if kindIs "map" $laid -}}
{{- include "quartet.refuseOverlaid" (dict "given" $given "laid" $laid "path" $place) -}}
{{- else if not (or (kindIs "invalid" $given) (eq (toJson $given) "[]") (eq (toJson $given) (toJson $laid))) -}}
{{- fail (printf "%s: the chart sets it; leave it out, and see %s of the values" $place (get $instead (index (splitList "." $place) 1))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
