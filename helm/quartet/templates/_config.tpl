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
{{- toYaml $found -}}
{{- end -}}
