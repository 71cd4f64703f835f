{{/* Placement of the pods of a run: near each other, and together. The label is that of Kueue, and the annotation that of Volcano. */}}

{{/* Scheduling of the pod of a component. Arguments: root and component. */}}
{{- define "quartet.scheduling" -}}
{{- $root := .root -}}{{- $component := deepCopy .component -}}
{{- $folders := include "quartet.mountedFolders" $component | fromJson -}}
{{- if or $component.model (include "quartet.mountsDisk" (dict "root" $root "folders" $folders)) -}}
{{- $_ := set $component "affinity" (include "quartet.colocated" (dict "root" $root "affinity" $component.affinity) | fromJson) -}}
{{- end -}}
{{- $_ := set $component "affinity" (include "quartet.packed" (dict "root" $root "component" $component) | fromJson) -}}
{{- /* Without a selector a constraint matches no pod. */ -}}
{{- $constraints := list -}}
{{- range default list $component.topologySpreadConstraints -}}
{{- $labels := merge (dict "app.kubernetes.io/component" $component.name) (include "quartet.selector" $root | fromYaml) -}}
{{- $default := dict "labelSelector" (dict "matchLabels" $labels) -}}
{{- $constraints = append $constraints (hasKey . "labelSelector" | ternary . (merge (deepCopy .) $default)) -}}
{{- end -}}
{{- $_ := set $component "topologySpreadConstraints" $constraints -}}
{{- include "quartet.placement" $component -}}
{{- with include "quartet.schedulerName" . }}
schedulerName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/*
An affinity, with a term for pods with models if scheduling.colocation is on. Arguments: root and affinity. Pods without models have it if
they share a volume for one node. They wait for the first pod with a model, whose GPUs choose the node.
*/}}
{{- define "quartet.colocated" -}}
{{- $colocation := .root.Values.scheduling.colocation -}}
{{- $affinity := deepCopy (default dict .affinity) -}}
{{- if ne $colocation.mode "none" -}}
{{- $term := dict "topologyKey" $colocation.topologyKey "labelSelector" (include "quartet.modelSelector" .root | fromJson) -}}
{{- if eq $colocation.mode "preferred" }}{{ $term = dict "weight" 100 "podAffinityTerm" $term }}{{ end -}}
{{- $key := printf "%sDuringSchedulingIgnoredDuringExecution" $colocation.mode -}}
{{- $podAffinity := default dict $affinity.podAffinity -}}
{{- $_ := set $podAffinity $key (append (default list (get $podAffinity $key)) $term) -}}
{{- $_ := set $affinity "podAffinity" $podAffinity -}}
{{- end -}}
{{- toJson $affinity -}}
{{- end -}}

{{/*
The affinity of a component, if a group needs several nodes: it prefers nodes with other pods of few GPUs, and nodes that are too small for
the group, by the label of the GPU Operator. Elsewhere, such pods could leave the group no whole node, and its first pods would wait for the
others for good. Arguments: root and component.
*/}}
{{- define "quartet.packed" -}}
{{- $affinity := deepCopy (default dict .component.affinity) -}}
{{- $few := list -}}{{- $smallest := 0 -}}
{{- range $name, $component := include "quartet.components" .root | fromJson -}}
{{- if gt (int $component.nodes) 1 }}{{ $smallest = eq $smallest 0 | ternary (int $component.gpus) (min $smallest $component.gpus | int) }}
{{- else if and $component.model (gt (int $component.gpus) 0) }}{{ $few = append $few $name }}{{ end -}}
{{- end -}}
{{- if and $smallest (has .component.name $few) -}}
{{- $key := "preferredDuringSchedulingIgnoredDuringExecution" -}}
{{- $expression := dict "key" "app.kubernetes.io/component" "operator" "In" "values" $few -}}
{{- $selector := dict "matchLabels" (include "quartet.selector" .root | fromYaml) "matchExpressions" (list $expression) -}}
{{- $term := dict "weight" 100 "podAffinityTerm" (dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $selector) -}}
{{- $podAffinity := default dict $affinity.podAffinity -}}
{{- $_ := set $podAffinity $key (append (default list (get $podAffinity $key)) $term) -}}
{{- $_ := set $affinity "podAffinity" $podAffinity -}}
{{- $smaller := dict "key" (printf "%s.count" .component.gpuResource) "operator" "Lt" "values" (list (toString $smallest)) -}}
{{- $term = dict "weight" 100 "preference" (dict "matchExpressions" (list $smaller)) -}}
{{- $nodeAffinity := default dict $affinity.nodeAffinity -}}
{{- $_ := set $nodeAffinity $key (append (default list (get $nodeAffinity $key)) $term) -}}
{{- $_ := set $affinity "nodeAffinity" $nodeAffinity -}}
{{- end -}}
{{- toJson $affinity -}}
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
kueue.x-k8s.io/queue-name: {{ required "scheduling.gang.queue: empty; kind kueue needs the name of a LocalQueue of this namespace" $gang.queue | quote }}
{{- end -}}
{{- end -}}

{{/* Annotation of a pod that belongs to the PodGroup of Volcano. Arguments: root and component. */}}
{{- define "quartet.gangAnnotations" -}}
{{- if and (eq .root.Values.scheduling.gang.kind "volcano") .component.model -}}
scheduling.k8s.io/group-name: {{ include "quartet.fullname" .root | quote }}
{{- end -}}
{{- end -}}
