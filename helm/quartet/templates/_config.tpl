{{/* Config layer of the chart: addresses, credentials and the buffer. It overrides the config of the run. */}}
{{- define "quartet.deployment" -}}
{{- $root := . -}}
{{- $tls := .Values.security.tls.enabled -}}
{{- if not (or $tls .Values.security.allowPlaintext) -}}
{{- fail "security.tls.enabled: false, so all traffic would be plaintext; set security.allowPlaintext true if you trust the network, or enable TLS" -}}
{{- end -}}
{{- $components := include "quartet.components" . | fromJson -}}
{{- $services := dict -}}
{{- range $name, $component := $components -}}
{{- range $role := $component.roles -}}
{{- if ne $role "gateway" -}}
{{- $service := dict "listen" "0.0.0.0:50051" "metrics_listen" "0.0.0.0:9100" "health_listen" "0.0.0.0:9101" -}}
{{- $address := printf "%s:50051" $component.fullname -}}
{{- /* The name resolves to every generator. */ -}}
{{- if $component.generating }}{{ $_ := set $services "generators" (list $address) }}{{ else }}{{ $_ := set $service "address" $address }}{{ end -}}
{{- if $component.model }}{{ $_ := set $service "devices" (until (int $component.gpus)) }}{{ end -}}
{{- if gt (int $component.nodes) 1 }}{{ $_ := set $service "nodes" (int $component.nodes) }}{{ end -}}
{{- $_ := set $services $role $service -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $gateway := dict "listen" "0.0.0.0:8080" "start_runs" false "allowed_hosts" (include "quartet.gatewayHosts" . | fromJsonArray) -}}
{{- $_ := set $gateway "token_file" "/run/secrets/quartet/gateway_token" -}}
{{- $_ := set $gateway "viewer_token_file" "/run/secrets/quartet/gateway_viewer_token" -}}
{{- if $tls }}{{ $gateway = merge $gateway (dict "certificate_file" "/certificates/gateway/tls.crt" "key_file" "/certificates/gateway/tls.key") }}{{ end -}}
{{- with .Values.gateway.maxRequestsPerSecond }}{{ $_ := set $gateway "max_requests_per_second" . }}{{ end -}}
{{- $buffer := dict "url" (include "quartet.redisUrl" .) -}}
{{- if include "quartet.redisSecret" . }}{{ $_ := set $buffer "password_file" "/run/secrets/quartet/redis_password" }}{{ end -}}
{{- $security := dict "certificates" ($tls | ternary "/certificates" nil) "allow_plaintext" (not $tls) -}}
{{- if .Values.security.rpcToken.enabled }}{{ $_ := set $security "token_file" "/run/secrets/quartet/rpc_token" }}{{ end -}}
{{- $found := dict "run" (dict "directory" "runs") "services" $services "buffer" $buffer "security" $security -}}
{{- if $components.gateway }}{{ $_ := set $found "gateway" $gateway }}{{ end -}}
{{- with $components.generator }}
{{- $rollout := dict "generators" 0 -}}
{{- if .nodeDirectory }}{{ $_ := set $rollout "share_directory" "/quartet/sockets" }}{{ end -}}
{{- $_ := set $found "rollout" $rollout -}}
{{- end -}}
{{- if include "quartet.agentEndpoints" . | fromJsonArray -}}
{{- /* Agents get the address of the pod, and users that of a Service. */ -}}
{{- $environment := dict "agent" (dict "listen" "0.0.0.0:8090") -}}
{{- if include "quartet.hasTraffic" . -}}
{{- $folder := "/run/secrets/quartet" -}}
{{- $keys := dict "viewer_keys_file" (printf "%s/traffic_viewers" $folder) "operator_keys_file" (printf "%s/traffic_operators" $folder) -}}
{{- $_ := set $environment "traffic" $keys -}}
{{- end -}}
{{- $_ := set $found "environment" $environment -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* Refuse settings that the chart controls, even if it does not set them with these values. Null and an empty list are accepted. */}}
{{- define "quartet.refuseOwned" -}}
{{- $config := .Values.config -}}
{{- $instead := dict "run" "storage.runs" "services" "components" "buffer" "redis" "security" "security" "environment" "components" -}}
{{- $_ := set $instead "gateway" "gateway, ingress and components.gateway.enabled" -}}
{{- $_ := set $instead "timeouts" "components.NAME.drainSeconds" -}}
{{- $_ := set $instead "environment.traffic" "traffic.keys" -}}
{{- $environment := default dict $config.environment -}}
{{- $owned := dict "buffer" $config.buffer "security" $config.security -}}
{{- $_ := set $owned "environment.agent" (pick (default dict $environment.agent) "listen" "advertise") -}}
{{- $_ := set $owned "environment.traffic" (pick (default dict $environment.traffic) "viewer_keys_file" "operator_keys_file") -}}
{{- $_ := set $owned "run" (pick (default dict $config.run) "directory") -}}
{{- $_ := set $owned "timeouts" (pick (default dict $config.timeouts) "drain_seconds") -}}
{{- $free := empty .Values.gateway.maxRequestsPerSecond | ternary "max_requests_per_second" "" -}}
{{- $_ := set $owned "gateway" (omit (default dict $config.gateway) $free) -}}
{{- $_ := set $owned "services" (pick (default dict $config.services) "generators") -}}
{{- range $role, $service := omit (default dict $config.services) "generators" -}}
{{- $_ := set $owned (printf "services.%s" $role) (omit (default dict $service) "num_threads" "processes" "parallel" "offload") -}}
{{- end -}}
{{- $problems := list -}}
{{- range $section, $keys := $owned -}}
{{- range $key, $given := $keys -}}
{{- if not (or (kindIs "invalid" $given) (eq (toJson $given) "[]")) -}}
{{- $problems = append $problems (printf "config.%s.%s: the chart sets it; remove it, and see %s of the values" $section $key (default (get $instead (first (splitList "." $section))) (get $instead $section))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $problems }}{{ fail (join "\n" .) }}{{ end -}}
{{- end -}}

{{/* Refuse a telemetry address with a user or password before it is stored in a ConfigMap, as the config does. Does not quote it. */}}
{{- define "quartet.refuseSecrets" -}}
{{- $telemetry := default dict .Values.config.telemetry -}}
{{- $addresses := dict "otlp_endpoint" $telemetry.otlp_endpoint "mlflow.tracking_uri" (default dict $telemetry.mlflow).tracking_uri -}}
{{- range $key, $address := $addresses -}}
{{- if regexMatch `(?is)://([^/]*@|[^/:]*:(/|[0-9]*[^0-9/]).*@)|[?&#][^=&]*(password|%)[^=&]*=` (default "" $address) -}}
{{- fail (printf "config.telemetry.%s: contains a user, a password or an option with an escaped name; give user and password in the environment (components.NAME.env), as OTEL_EXPORTER_OTLP_HEADERS, or as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
