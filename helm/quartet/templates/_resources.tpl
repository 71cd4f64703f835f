{{/*
CPU, memory and ephemeral storage of every container. A preset in files/resources.json comes from the planner's arithmetic, see
src/quartet/planner/helm_values.py. Values of a component replace those of the preset, resource by resource.
*/}}

{{/* Resources of a component. Arguments: root and component. GPUs are requested by their limit. */}}
{{- define "quartet.resources" -}}
{{- $component := .component -}}
{{- $given := default dict $component.resources -}}
{{- $requests := default dict $given.requests | deepCopy -}}
{{- $limits := default dict $given.limits | deepCopy -}}
{{- range $resource, $amounts := include "quartet.presetResources" . | fromJson -}}
{{- if not (or (hasKey $requests $resource) (hasKey $limits $resource)) -}}
{{- $_ := set $requests $resource $amounts.requests -}}
{{- $_ := set $limits $resource $amounts.limits -}}
{{- end -}}
{{- end -}}
{{- if not (or $requests.memory $limits.memory $component.model) -}}
{{- fail (printf "components.%s.resources: no memory, and no preset applies to a pod without a model; set components.%s.resources.limits.memory, or leave its resources out for the default" $component.name $component.name) -}}
{{- end -}}
{{- if not (or $requests.memory $limits.memory) -}}
{{- fail (printf "components.%s.resources: no memory, and no resourcesPreset; set defaults.resourcesPreset to the size of the policy, such as 7b, or give the resources that quartet plan CONFIG --gpus GPUS --helm-values FILE computes" $component.name) -}}
{{- end -}}
{{- $space := include "quartet.mebibytes" $component.temporarySpace | int -}}
{{- if not (or (hasKey $requests "ephemeral-storage") (hasKey $limits "ephemeral-storage")) -}}
{{- /* The files in /tmp, and the logs of the container. */ -}}
{{- $_ := set $requests "ephemeral-storage" (include "quartet.quantity" $space) -}}
{{- $_ := set $limits "ephemeral-storage" (include "quartet.quantity" (add $space 1024)) -}}
{{- end -}}
{{- if gt (int $component.gpus) 0 }}{{ $_ := set $limits $component.gpuResource (int $component.gpus) }}{{ end -}}
{{- include "quartet.completeResources" (dict "requests" $requests "limits" $limits "claims" $given.claims) -}}
{{- end -}}

{{/* A memory limit equals the request if only one of them is given, and so does a request. CPU may have no limit. */}}
{{- define "quartet.completeResources" -}}
{{- $requests := .requests -}}{{- $limits := .limits -}}
{{- if and $requests.memory (not $limits.memory) }}{{ $_ := set $limits "memory" $requests.memory }}{{ end -}}
{{- range list "cpu" "memory" "ephemeral-storage" -}}
{{- if and (get $limits .) (not (get $requests .)) }}{{ $_ := set $requests . (get $limits .) }}{{ end -}}
{{- end -}}
{{- $resources := dict "requests" $requests "limits" $limits -}}
{{- with .claims }}{{ $_ := set $resources "claims" . }}{{ end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Resources of a container that is no component. Null removes a default of its values. */}}
{{- define "quartet.otherResources" -}}
{{- include "quartet.completeResources" (dict "requests" (default dict .requests | deepCopy) "limits" (default dict .limits | deepCopy)) -}}
{{- end -}}

{{/* CPU and memory of the preset of a component: {resource: {requests, limits}}. Empty without a preset or a model role. */}}
{{- define "quartet.presetResources" -}}
{{- $root := .root -}}{{- $component := .component -}}
{{- $result := dict -}}
{{- if and $component.resourcesPreset $component.model -}}
{{- $file := $root.Files.Get "files/resources.json" | fromJson -}}
{{- $preset := get (get $file $component.resourcesPreset) (gt (int $component.gpus) 0 | ternary "gpu" "cpu") -}}
{{- $ranks := int $component.ranks -}}
{{- $memory := 0.0 -}}
{{- range $role := $component.roles -}}
{{- $models := eq $role "reward" | ternary (include "quartet.rewardModels" $root | int) 1 -}}
{{- $entry := get $preset.roles (eq $models 0 | ternary "function" $role) -}}
{{- $service := default dict (get (default dict $root.Values.config.services) $role) -}}
{{- $parts := divf (dig "parallel" "replicate" 1 $service) (int $component.nodes) -}}
{{- $loading := mulf $entry.load $models (gt (int (dig "parallel" "tensor" 1 $service)) 1 | ternary $ranks $parts) -}}
{{- $copies := mulf $entry.state (minf 1.0 $parts) -}}
{{- if and (eq $role "actor") (include "quartet.hasGenerators" $root) }}{{ $copies = addf $copies (mulf $entry.version (add 2 (dig "max_off_policy_steps" 0 (default dict $root.Values.config.rollout)))) }}{{ end -}}
{{- if dig "offload" "optimizer" false $service }}{{ $copies = addf $copies (mulf $entry.moments $parts) }}{{ end -}}
{{- $memory = addf $memory (mulf $entry.process $ranks) (maxf $loading $copies) -}}
{{- end -}}
{{- $size := ceil $memory | int -}}
{{- $step := gt $size 4096 | ternary 1024 64 -}}
{{- $size = mul $step (ceil (divf $size $step) | int) -}}
{{- /* /dev/shm counts towards the limit. */ -}}
{{- with $component.sharedMemory }}{{ $size = add $size (include "quartet.mebibytes" . | int) }}{{ end -}}
{{- $quantity := include "quartet.quantity" $size -}}
{{- $result = dict "memory" (dict "requests" $quantity "limits" $quantity) -}}
{{- $cpus := dict -}}
{{- range $kind, $millicpus := $preset.millicpus }}{{ $_ := set $cpus $kind (printf "%dm" (mul (int $millicpus) $ranks)) }}{{ end -}}
{{- $_ := set $result "cpu" $cpus -}}
{{- end -}}
{{- toJson $result -}}
{{- end -}}

{{/* Number of reward models in the process of the reward. */}}
{{- define "quartet.rewardModels" -}}
{{- $reward := default dict .Values.config.reward -}}
{{- $source := default "model" $reward.source -}}
{{- $models := eq $source "model" | ternary 1 0 -}}
{{- if eq $source "ensemble" -}}
{{- range default list $reward.parts }}{{ if eq (default "model" .source) "model" }}{{ $models = add1 $models }}{{ end }}{{ end -}}
{{- end -}}
{{- $models -}}
{{- end -}}

{{/* "true" if there are generators in separate pods. */}}
{{- define "quartet.hasGenerators" -}}
{{- if dig "enabled" false (default dict .Values.components.generator) }}true{{ end -}}
{{- end -}}

{{/* Resources of Redis. Its memory follows from maxmemory: it forks to rewrite its append-only file. */}}
{{- define "quartet.redisResources" -}}
{{- $given := default dict .Values.redis.resources -}}
{{- $requests := default dict $given.requests | deepCopy -}}
{{- $limits := default dict $given.limits | deepCopy -}}
{{- if not (or $requests.memory $limits.memory) -}}
{{- $size := divf (include "quartet.redisBytes" . | float64) 1048576 | ceil | int -}}
{{- $_ := set $requests "memory" (include "quartet.quantity" (add $size 64)) -}}
{{- $_ := set $limits "memory" (include "quartet.quantity" (add (mul 2 $size) 64)) -}}
{{- end -}}
{{- include "quartet.completeResources" (dict "requests" $requests "limits" $limits) -}}
{{- end -}}

{{/* Number of bytes of redis.maxmemory, as text. */}}
{{- define "quartet.redisBytes" -}}
{{- $text := .Values.redis.maxmemory -}}
{{- $factors := dict "" 1 "b" 1 "k" 1000 "kb" 1024 "m" 1000000 "mb" 1048576 "g" 1000000000 "gb" 1073741824 -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (get $factors (regexFind "[a-z]*$" $text)) -}}
{{- end -}}

{{/* MiB of a quantity of Kubernetes, such as 8Gi or 500M, rounded up. */}}
{{- define "quartet.mebibytes" -}}
{{- divf (include "quartet.bytes" . | float64) 1048576 | ceil | int -}}
{{- end -}}

{{/* A quantity of Kubernetes for a number of MiB. */}}
{{- define "quartet.quantity" -}}
{{- $size := int . -}}
{{- eq (mod $size 1024) 0 | ternary (printf "%dGi" (div $size 1024)) (printf "%dMi" $size) -}}
{{- end -}}
