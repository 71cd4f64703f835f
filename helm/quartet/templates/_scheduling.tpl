{{/* Placement of the pods of a run: near each other, and together. The label is that of Kueue, and the annotation that of Volcano. */}}

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

{{/* Pods of a gang of Volcano: those with models whose number is fixed, and the smallest number of the others. */}}
{{- define "quartet.gangSize" -}}
{{- $size := 0 -}}
{{- range $name, $component := include "quartet.components" . | fromJson -}}
{{- $scaling := dig "autoscaling" "kind" "none" $component -}}
{{- if and $component.model (ne $scaling "none") -}}
{{- $size = add $size (int $component.autoscaling.minReplicas) -}}
{{- else if $component.model -}}
{{- $size = add $size ($component.generating | ternary 1 (mul (int $component.replicas) (int $component.nodes))) -}}
{{- end -}}
{{- end -}}
{{- $size -}}
{{- end -}}

{{/*
Label with the queue of Kueue. Arguments: root and component. On a StatefulSet or LeaderWorkerSet, Kueue admits its pods together. On the
pod of a Deployment, it admits each pod. There is no pod group over the Deployments: Kueue would not admit a pod that replaces another one.
*/}}
{{- define "quartet.queueLabel" -}}
{{- $gang := .root.Values.scheduling.gang -}}
{{- if and (eq $gang.kind "kueue") .component.model -}}
kueue.x-k8s.io/queue-name: {{ required "scheduling.gang.queue: empty; kind kueue needs the name of a LocalQueue of this namespace" $gang.queue }}
{{- end -}}
{{- end -}}

{{/* Annotation of a pod that belongs to the PodGroup of Volcano. Arguments: root and component. */}}
{{- define "quartet.gangAnnotations" -}}
{{- if and (eq .root.Values.scheduling.gang.kind "volcano") .component.model -}}
scheduling.k8s.io/group-name: {{ include "quartet.fullname" .root }}
{{- end -}}
{{- end -}}
