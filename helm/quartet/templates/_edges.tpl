{{/*
All allowed connections, as a list of {from, to, port}. The NetworkPolicies are derived from this list only.
Names are components, redis and test. prometheus, ingress and traffic are pods selected by networkPolicy.prometheus, .ingress and .traffic.
Port 0 means all ports.
*/}}
{{- define "quartet.edges" -}}
{{- $edges := list -}}
{{- $components := include "quartet.components" . | fromJson -}}
{{- range $name, $component := $components -}}
{{- if or $component.model $component.playing -}}
{{- $edges = append $edges (dict "from" "orchestrator" "to" $name "port" 50051) -}}
{{- end -}}
{{- if ne $name "gateway" -}}
{{- if $components.gateway }}{{ $edges = append $edges (dict "from" "gateway" "to" $name "port" 50051) }}{{ end -}}
{{- if $.Values.monitoring.serviceMonitor.enabled }}{{ $edges = append $edges (dict "from" "prometheus" "to" $name "port" 9100) }}{{ end -}}
{{- if $.Values.tests.enabled }}{{ $edges = append $edges (dict "from" "test" "to" $name "port" 9101) }}{{ end -}}
{{- end -}}
{{- /* Generators pull the weights from the actor, or from another generator. */ -}}
{{- if $component.generating -}}
{{- range $source, $other := $components -}}
{{- if or (has "actor" $other.roles) $other.generating }}{{ $edges = append $edges (dict "from" $name "to" $source "port" 50051) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- /* The processes that generate play the episodes. */ -}}
{{- if $component.playing -}}
{{- range $source, $other := $components -}}
{{- if or (has "actor" $other.roles) $other.generating }}{{ $edges = append $edges (dict "from" $source "to" $name "port" 50051) }}{{ end -}}
{{- end -}}
{{- /* Agents call the policy. */ -}}
{{- range include "quartet.agentEndpoints" $ | fromJsonArray }}{{ $edges = append $edges (dict "from" $name "to" . "port" 8090) }}{{ end -}}
{{- end -}}
{{- /* Rendezvous, gloo and NCCL between the pods of one group. gloo and NCCL listen on any free port. */ -}}
{{- if gt (int $component.nodes) 1 }}{{ $edges = append $edges (dict "from" $name "to" $name "port" 0) }}{{ end -}}
{{- /* Users call the policy. */ -}}
{{- if and $component.generating (include "quartet.hasTraffic" $) $.Values.networkPolicy.traffic.namespace -}}
{{- $edges = append $edges (dict "from" "traffic" "to" $name "port" 8090) -}}
{{- end -}}
{{- if $component.usesBuffer }}{{ $edges = append $edges (dict "from" $name "to" "redis" "port" (include "quartet.redisPort" $ | int)) }}{{ end -}}
{{- end -}}
{{- if $components.gateway -}}
{{- if .Values.monitoring.serviceMonitor.enabled }}{{ $edges = append $edges (dict "from" "prometheus" "to" "gateway" "port" 8080) }}{{ end -}}
{{- if .Values.ingress.enabled }}{{ $edges = append $edges (dict "from" "ingress" "to" "gateway" "port" 8080) }}{{ end -}}
{{- if .Values.tests.enabled }}{{ $edges = append $edges (dict "from" "test" "to" "gateway" "port" 8080) }}{{ end -}}
{{- end -}}
{{- $edges | toJson -}}
{{- end -}}
