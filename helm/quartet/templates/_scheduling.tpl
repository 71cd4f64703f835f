{{/*
Placement of the pods of a run: near each other, and all of them or none. The labels are those of Kueue's pod groups and the annotation is
that of Volcano.
*/}}

{{/* Scheduling of the pod of a component. Arguments: root and component. */}}
{{- define "quartet.scheduling" -}}
{{- $root := .root -}}{{- $component := deepCopy .component -}}
{{- $colocation := $root.Values.scheduling.colocation -}}
{{- if and $component.model (ne $colocation.mode "none") -}}
{{- $term := dict "topologyKey" $colocation.topologyKey "labelSelector" (include "quartet.modelSelector" $root | fromJson) -}}
{{- $affinity := default dict $component.affinity -}}
{{- $podAffinity := default dict $affinity.podAffinity -}}
{{- if eq $colocation.mode "required" -}}
{{- $key := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $_ := set $podAffinity $key (append (default list (get $podAffinity $key)) $term) -}}
{{- else -}}
{{- $key := "preferredDuringSchedulingIgnoredDuringExecution" -}}
{{- $_ := set $podAffinity $key (append (default list (get $podAffinity $key)) (dict "weight" 100 "podAffinityTerm" $term)) -}}
{{- end -}}
{{- $_ := set $affinity "podAffinity" $podAffinity -}}
{{- $_ := set $component "affinity" $affinity -}}
{{- end -}}
{{- /* Without a selector a constraint matches no pod. */ -}}
{{- $constraints := list -}}
{{- range default list $component.topologySpreadConstraints -}}
{{- $labels := merge (dict "app.kubernetes.io/component" $component.name) (include "quartet.selector" $root | fromYaml) -}}
{{- $constraints = append $constraints (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $labels))) -}}
{{- end -}}
{{- $_ := set $component "topologySpreadConstraints" $constraints -}}
{{- include "quartet.placement" $component -}}
{{- with include "quartet.schedulerName" . }}
schedulerName: {{ . }}
{{- end }}
{{- end -}}

{{- define "quartet.schedulerName" -}}
{{- if .component.model -}}
{{- default (eq .root.Values.scheduling.gang.kind "volcano" | ternary "volcano" "") .root.Values.scheduling.schedulerName -}}
{{- end -}}
{{- end -}}

{{/* Selector of all pods of this release that have models. */}}
{{- define "quartet.modelSelector" -}}
{{- $names := list -}}
{{- range $name, $component := include "quartet.components" . | fromJson }}{{ if $component.model }}{{ $names = append $names $name }}{{ end }}{{ end -}}
{{- $expression := dict "key" "app.kubernetes.io/component" "operator" "In" "values" $names -}}
{{- dict "matchLabels" (include "quartet.selector" . | fromYaml) "matchExpressions" (list $expression) | toJson -}}
{{- end -}}

{{/* "true" if the number of pods of a component does not change during a run. Argument: the component. */}}
{{- define "quartet.hasFixedPods" -}}
{{- if and .model (not .generating) (eq (dig "autoscaling" "kind" "none" .) "none") }}true{{ end -}}
{{- end -}}

{{/* Pods that must start together: those with models, and at least one generator. A pod group of Kueue has exactly those of fixed number. */}}
{{- define "quartet.gangSize" -}}
{{- $size := 0 -}}
{{- $volcano := eq .Values.scheduling.gang.kind "volcano" -}}
{{- range $name, $component := include "quartet.components" . | fromJson -}}
{{- if include "quartet.hasFixedPods" $component -}}
{{- $size = add $size (mul (int $component.replicas) (int $component.nodes)) -}}
{{- else if and $volcano $component.model -}}
{{- $size = add $size (eq (dig "autoscaling" "kind" "none" $component) "none" | ternary 1 (dig "autoscaling" "minReplicas" 1 $component | int)) -}}
{{- end -}}
{{- end -}}
{{- $size -}}
{{- end -}}

{{/* Labels of a pod for gang scheduling. Arguments: root and component. */}}
{{- define "quartet.gangLabels" -}}
{{- $gang := .root.Values.scheduling.gang -}}
{{- if and (eq $gang.kind "kueue") .component.model -}}
kueue.x-k8s.io/queue-name: {{ required "scheduling.gang.queue: empty; kind kueue needs the name of a LocalQueue of this namespace" $gang.queue }}
{{- if include "quartet.hasFixedPods" .component }}
kueue.x-k8s.io/pod-group-name: {{ include "quartet.fullname" .root }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Annotations of a pod for gang scheduling. Arguments: root and component. */}}
{{- define "quartet.gangAnnotations" -}}
{{- $gang := .root.Values.scheduling.gang -}}
{{- if and (eq $gang.kind "kueue") (include "quartet.hasFixedPods" .component) -}}
kueue.x-k8s.io/pod-group-total-count: {{ include "quartet.gangSize" .root | quote }}
{{- else if and (eq $gang.kind "volcano") .component.model -}}
scheduling.k8s.io/group-name: {{ include "quartet.fullname" .root }}
{{- end -}}
{{- end -}}
