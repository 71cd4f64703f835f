{{/*
Components of this run by name: values merged over defaults, needed roles, and derived settings.
All other templates loop over this map. It is derived once, and kept beside .Values.
*/}}
{{- define "quartet.components" -}}
{{- if not (hasKey . "quartetComponents") }}{{ $_ := set . "quartetComponents" (include "quartet.deriveComponents" .) }}{{ end -}}
{{- .quartetComponents -}}
{{- end -}}

{{- define "quartet.deriveComponents" -}}
{{- $root := . -}}
{{- $absent := include "quartet.absentRoles" . | fromJsonArray -}}
{{- $componentsByName := dict -}}
{{- $componentOfRole := dict -}}
{{- range $name := list "actor" "critic" "reward" "reference" "generator" "environment" "orchestrator" "gateway" -}}
{{- /* Null removes the default, and so disables the component. */ -}}
{{- $values := default (dict "enabled" false) (get $root.Values.components $name) -}}
{{- $component := mergeOverwrite (deepCopy $root.Values.defaults) (deepCopy $values) -}}
{{- /* A component replaces these maps as a whole, because two merged selectors may match no node. */ -}}
{{- range list "nodeSelector" "affinity" -}}
{{- if hasKey $values . }}{{ $_ := set $component . (get $values .) }}{{ end -}}
{{- end -}}
{{- $roles := list -}}
{{- range default (list $name) $component.roles -}}
{{- if not (has . $absent) }}{{ $roles = append $roles . }}{{ end -}}
{{- end -}}
{{- if and $component.enabled $roles -}}
{{- range $roles -}}
{{- if hasKey $componentOfRole . -}}
{{- fail (printf "components.%s.roles: %s is also in components.%s; disable one of them, or remove the role" $name . (get $componentOfRole .)) -}}
{{- end -}}
{{- $_ := set $componentOfRole . $name -}}
{{- end -}}
{{- $component = mergeOverwrite $component (include "quartet.derived" (dict "root" $root "name" $name "roles" $roles "component" $component) | fromJson) -}}
{{- $_ := set $component "roles" $roles -}}
{{- $_ := set $componentsByName $name $component -}}
{{- end -}}
{{- end -}}
{{- range list "actor" "critic" "reward" "reference" "environment" "orchestrator" -}}
{{- if not (or (has . $absent) (hasKey $componentOfRole .)) -}}
{{- fail (printf "components: no enabled component has the role %s, which this run needs; enable components.%s, or add the role to the roles of another component" . .) -}}
{{- end -}}
{{- end -}}
{{- if include "quartet.hasTraffic" $root -}}
{{- if not (hasKey $componentsByName "generator") -}}
{{- fail "config.environment.kind traffic: generators answer the users; set components.generator.enabled true" -}}
{{- end -}}
{{- $scaling := default dict $componentsByName.generator.autoscaling -}}
{{- if and (eq (default "none" $scaling.kind) "keda") (empty (dig "keda" "query" "" $scaling)) -}}
{{- fail "components.generator.autoscaling.keda.query: empty, and the chart's query counts the responses that a step lacks, which with config.environment.kind traffic wait for rewards; set a query of your own, or kind none" -}}
{{- end -}}
{{- end -}}
{{- if not (hasKey $componentsByName "generator") -}}
{{- if gt (int (dig "rollout" "generators" 0 .Values.config)) 0 -}}
{{- fail "config.rollout.generators: a pod starts no further processes; set it to 0, and set components.generator.enabled true and its replicas" -}}
{{- end -}}
{{- $engine := dig "rollout" "engine" "torch" .Values.config -}}
{{- if not (has $engine (list "torch" "triton")) -}}
{{- fail (printf "config.rollout.engine %s: runs in generators; set components.generator.enabled true, and its image" $engine) -}}
{{- end -}}
{{- end -}}
{{- $componentsByName | toJson -}}
{{- end -}}

{{/*
Refuse a generator whose image lacks its engine, or whose GPUs the engine does not use. An image with a repository, tag or digest of the
generator may have any engine. Arguments: root and component.
*/}}
{{- define "quartet.checkGenerator" -}}
{{- $rollout := default dict .root.Values.config.rollout -}}
{{- $engine := default "torch" $rollout.engine -}}
{{- $gpus := int .component.gpus -}}
{{- if has $engine (list "vllm" "tensorrt-llm") -}}
{{- $image := .component.image -}}
{{- $own := default dict (default dict .root.Values.components.generator).image -}}
{{- if and (has $image.variant (list "cuda" "cpu")) (not (or $image.digest $own.repository $own.tag)) -}}
{{- fail (printf "components.generator.image.variant: %s, but config.rollout.engine is %s, which this image does not contain; set components.generator.image.variant to %s, an image of docker/Dockerfile.generator" $image.variant $engine $engine) -}}
{{- end -}}
{{- $section := replace "-" "_" $engine -}}
{{- $size := int (default 1 (default dict (get $rollout $section)).tensor_parallel_size) -}}
{{- if and (gt $gpus 0) (ne $gpus $size) -}}
{{- fail (printf "components.generator.gpus: %d, and config.rollout.%s.tensor_parallel_size: %d; expected the same number, because one engine uses the GPUs of a pod; change one of them" $gpus $section $size) -}}
{{- end -}}
{{- else if gt $gpus 1 -}}
{{- fail (printf "components.generator.gpus: %d, but config.rollout.engine is %s, which uses at most one GPU of a pod; set gpus to 1, and replicas to the number of generators" $gpus $engine) -}}
{{- end -}}
{{- end -}}

{{/* Settings of the chart and the config that would be without effect, or that the config lacks. */}}
{{- define "quartet.checkUnused" -}}
{{- $generator := default dict .Values.components.generator -}}
{{- if and (hasKey $generator "replicas") (gt (int $generator.replicas) 1) (not $generator.enabled) -}}
{{- fail (printf "components.generator.replicas: %d, but components.generator.enabled is false, so the actor generates; set enabled true, or remove replicas" (int $generator.replicas)) -}}
{{- end -}}
{{- $turns := int (dig "rollout" "max_turns" 0 .Values.config) -}}
{{- $environment := default dict .Values.config.environment -}}
{{- if and (gt $turns 0) (eq (default "class" $environment.kind) "class") (not $environment.class_name) -}}
{{- fail (printf "config.environment.class_name: missing; rollout.max_turns %d needs an environment; name its class, or set max_turns 0" $turns) -}}
{{- end -}}
{{- end -}}

{{/* "true" if users send requests to the policy, as has_traffic of the config tree. */}}
{{- define "quartet.hasTraffic" -}}
{{- $kind := dig "environment" "kind" "class" .Values.config -}}
{{- if and (eq $kind "traffic") (gt (int (dig "rollout" "max_turns" 0 .Values.config)) 0) }}true{{ end -}}
{{- end -}}

{{/* Roles that this run does not need, as has_critic, has_reward, has_reference and has_environment_service of the config tree. */}}
{{- define "quartet.absentRoles" -}}
{{- $absent := list -}}
{{- $withCritic := (.Files.Get "files/estimators.json" | fromJson).with_critic -}}
{{- $custom := default dict (dig "algorithm" "custom_estimator" dict .Values.config) -}}
{{- if not (or (has (dig "algorithm" "estimator" "gae" .Values.config) $withCritic) $custom.needs_critic) }}{{ $absent = append $absent "critic" }}{{ end -}}
{{- if eq (dig "reward" "source" "model" .Values.config) "none" }}{{ $absent = append $absent "reward" }}{{ end -}}
{{- $lora := dig "actor" "lora" nil .Values.config -}}
{{- if and (not (kindIs "invalid" $lora)) (empty (dig "reference" "model" "" .Values.config)) }}{{ $absent = append $absent "reference" }}{{ end -}}
{{- if or (include "quartet.hasTraffic" .) (not (gt (int (dig "rollout" "max_turns" 0 .Values.config)) 0)) -}}
{{- $absent = append $absent "environment" -}}
{{- end -}}
{{- $absent | toJson -}}
{{- end -}}

{{/* Settings derived from the name and roles of a component. */}}
{{- define "quartet.derived" -}}
{{- $root := .root -}}{{- $name := .name -}}{{- $roles := .roles -}}{{- $component := .component -}}
{{- $trained := or (has "actor" $roles) (has "critic" $roles) -}}
{{- $scoring := and (not $trained) (or (has "reward" $roles) (has "reference" $roles)) -}}
{{- $generating := has "generator" $roles -}}
{{- $playing := has "environment" $roles -}}
{{- $nodes := int (default 1 $component.nodes) -}}
{{- $ranks := max 1 (int $component.gpus) (int (default 1 (default dict (get (default dict $root.Values.config.services) (first $roles))).processes)) -}}
{{- $grouped := and (or $trained $scoring) (gt (mul $nodes $ranks) 1) -}}
{{- if and $grouped (gt (len $roles) 1) -}}
{{- fail (printf "components.%s.roles: %s, with %d ranks; expected one role, because a role of several ranks needs a separate pod; move the other roles to other components, or set nodes and gpus to 1" $name (join ", " $roles) (mul $nodes $ranks)) -}}
{{- end -}}
{{- if and (gt (int $component.replicas) 1) (gt $nodes 1) -}}
{{- fail (printf "components.%s.replicas: %d, and nodes: %d; expected one of them to be 1; lower it" $name (int $component.replicas) $nodes) -}}
{{- end -}}
{{- if and (gt (int $component.replicas) 1) (not $scoring) (not $generating) (ne $name "gateway") -}}
{{- fail (printf "components.%s.replicas: %d; expected 1: only reward, reference, generator and gateway may have several replicas, without actor and critic in the same pod" $name (int $component.replicas)) -}}
{{- end -}}
{{- $scaling := dig "autoscaling" "kind" "none" $component -}}
{{- if and (ne $scaling "none") (not $scoring) (not $generating) -}}
{{- fail (printf "components.%s.autoscaling: a pod with actor or critic cannot be scaled; set kind none" $name) -}}
{{- end -}}
{{- if and (ne $scaling "none") (gt $nodes 1) -}}
{{- fail (printf "components.%s.autoscaling: a role of several nodes cannot be scaled; set kind none, or nodes 1" $name) -}}
{{- end -}}
{{- if ne $scaling "none" -}}
{{- if gt (int $component.replicas) 1 -}}
{{- fail (printf "components.%s.replicas: %d, and autoscaling.kind: %s; expected 1, because the autoscaler sets the number of pods; remove it, and set autoscaling.minReplicas" $name (int $component.replicas) $scaling) -}}
{{- end -}}
{{- $chartMetric := eq $scaling "keda" | ternary (empty (dig "keda" "query" "" $component.autoscaling)) (hasPrefix "quartet_" (dig "hpa" "metric" "" $component.autoscaling)) -}}
{{- if and $chartMetric $root.Values.networkPolicy.enabled (not $root.Values.monitoring.serviceMonitor.enabled) -}}
{{- fail (printf "components.%s.autoscaling.kind: %s, but monitoring.serviceMonitor.enabled is false, so Prometheus may not read its metrics; set it to true" $name $scaling) -}}
{{- end -}}
{{- $min := int $component.autoscaling.minReplicas -}}{{- $max := int $component.autoscaling.maxReplicas -}}
{{- if gt $min $max -}}
{{- $path := printf "components.%s.autoscaling" $name -}}
{{- fail (printf "%s.minReplicas: %d, and %s.maxReplicas: %d; expected minReplicas to be at most maxReplicas; lower it, or raise maxReplicas" $path $min $path $max) -}}
{{- end -}}
{{- end -}}
{{- $workload := "Deployment" -}}
{{- if eq $name "orchestrator" }}{{ $workload = "Job" }}{{ else if gt $nodes 1 }}{{ $workload = $root.Values.workerGroups.leaderWorkerSet | ternary "LeaderWorkerSet" "StatefulSet" }}{{ end -}}
{{- $times := default dict $root.Values.config.timeouts -}}
{{- $longest := 10 -}}
{{- /* torchrun kills its ranks 30 seconds after SIGTERM. */ -}}
{{- if gt $nodes 1 }}{{ $longest = 20 -}}
{{- else if has "actor" $roles }}{{ $longest = max (dig "generate_seconds" 1800 $times) (dig "update_seconds" 1800 $times) -}}
{{- else if $trained }}{{ $longest = max (dig "update_seconds" 1800 $times) (dig "score_seconds" 600 $times) -}}
{{- else if $scoring }}{{ $longest = dig "score_seconds" 600 $times }}{{ end -}}
{{- /* Longer calls are not worth the wait: with the process its models end, and the run returns to the last committed step. */ -}}
{{- $longest = min 120 $longest -}}
{{- $drain := kindIs "invalid" $component.drainSeconds | ternary $longest $component.drainSeconds -}}
{{- $grace := kindIs "invalid" $component.terminationGracePeriodSeconds | ternary (add $drain 30) $component.terminationGracePeriodSeconds -}}
{{- if lt (int $grace) (int $drain) -}}
{{- fail (printf "components.%s.terminationGracePeriodSeconds: %d, and drainSeconds: %d; expected more than drainSeconds, or Kubernetes kills the process during its calls; raise it, or lower drainSeconds" $name (int $grace) (int $drain)) -}}
{{- end -}}
{{- $period := int $component.probes.startup.periodSeconds -}}
{{- $patience := $component.probes.startup.failureThreshold -}}
{{- $load := or $trained $scoring $generating $playing | ternary (dig "load_seconds" 600 $times) 300 -}}
{{- if kindIs "invalid" $patience }}{{ $patience = max 3 (ceil (divf $load $period)) }}{{ end -}}
{{- dict
  "name" $name
  "fullname" (printf "%s-%s" (include "quartet.fullname" $root) $name)
  "process" (first $roles)
  "trained" $trained
  "scoring" $scoring
  "generating" $generating
  "playing" $playing
  "replicated" (and (or $scoring $generating) (eq $nodes 1))
  "model" (or $trained $scoring $generating)
  "nodes" $nodes
  "ranks" $ranks
  "sharedMemory" (default ($grouped | ternary $root.Values.workerGroups.sharedMemory "") $component.sharedMemory)
  "workload" $workload
  "drainSeconds" (int $drain)
  "terminationGracePeriodSeconds" (int $grace)
  "probes" (dict "startup" (dict "failureThreshold" (int $patience)))
  "caching" (and (has "reward" $roles) (eq (include "quartet.hasJudge" $root) "true"))
  "readsRuns" (or
    (and (has "reference" $roles) (not (empty (dig "reference" "sync_steps" "" $root.Values.config))))
    (eq (include "quartet.readsModelOfRun" (dict "root" $root "roles" $roles "mounts" $component.extraVolumeMounts)) "true"))
  "usesBuffer" (or (has "actor" $roles) (has "critic" $roles) $generating (has $name (list "orchestrator" "gateway")))
  "image" (mergeOverwrite (deepCopy $root.Values.image) (deepCopy (default dict $component.image)))
  | toJson -}}
{{- end -}}

{{/*
"true" if a component reads a model in the folder of runs. Arguments: root, roles and mounts, which are extraVolumeMounts of the
component. By default the reference has the actor's model.
*/}}
{{- define "quartet.readsModelOfRun" -}}
{{- $readers := dict "actor" (list "actor" "generator" "environment") "critic" (list "critic") "reward" (list "reward") "reference" (list "reference") -}}
{{- if not (dig "reference" "model" "" .root.Values.config) -}}
{{- $_ := set $readers "actor" (append $readers.actor "reference") -}}
{{- end -}}
{{- $found := false -}}
{{- range $read := include "quartet.readPaths" .root | fromJsonArray -}}
{{- if and $read.model (hasPrefix "/quartet/runs/" $read.absolute) -}}
{{- $own := false -}}
{{- range default list $.mounts }}{{ if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" $read.absolute) }}{{ $own = true }}{{ end }}{{ end -}}
{{- range $role := index $readers (splitList "." $read.key | first) }}{{ if and (has $role $.roles) (not $own) }}{{ $found = true }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* Components that serve the policy to agents or users, as a list of names: generators, or else the actor. */}}
{{- define "quartet.agentEndpoints" -}}
{{- $names := list -}}
{{- $components := include "quartet.components" . | fromJson -}}
{{- if has (dig "environment" "kind" "class" .Values.config) (list "agent" "traffic") -}}
{{- range $name, $component := $components -}}
{{- if or $component.generating (and (has "actor" $component.roles) (not $components.generator)) }}{{ $names = append $names $name }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* "true" if a language model judges responses. Its cache is in the folder of the run. */}}
{{- define "quartet.hasJudge" -}}
{{- $reward := default dict .Values.config.reward -}}
{{- $judges := eq (default "" $reward.source) "judge" -}}
{{- range default list $reward.parts }}{{ if eq (default "" .source) "judge" }}{{ $judges = true }}{{ end }}{{ end -}}
{{- $judges -}}
{{- end -}}

{{/* Processes with a certificate, and the names in it: {process: [names]}. */}}
{{- define "quartet.processes" -}}
{{- $root := . -}}
{{- $fullname := include "quartet.fullname" . -}}
{{- $namesByProcess := dict "operator" (list "operator.quartet") -}}
{{- range $name, $component := include "quartet.components" . | fromJson -}}
{{- $names := list -}}
{{- range $component.roles }}{{ $names = append $names (printf "%s.quartet" .) }}{{ end -}}
{{- if eq $name "gateway" -}}
{{- $names = concat $names (include "quartet.gatewayHosts" $root | fromJsonArray) (list "localhost") -}}
{{- end -}}
{{- if and $component.generating (include "quartet.hasTraffic" $root) -}}
{{- $names = concat $names (include "quartet.serviceNames" (dict "root" $root "name" (printf "%s-traffic" $fullname)) | fromJsonArray) (list "localhost") -}}
{{- end -}}
{{- $_ := set $namesByProcess $component.process ($names | uniq) -}}
{{- end -}}
{{- if .Values.redis.enabled -}}
{{- $_ := set $namesByProcess "redis" (concat (list "redis.quartet" "redis" "localhost") (include "quartet.serviceNames" (dict "root" . "name" (printf "%s-redis" $fullname)) | fromJsonArray)) -}}
{{- end -}}
{{- if .Values.monitoring.serviceMonitor.enabled }}{{ $_ := set $namesByProcess "prometheus" (list "prometheus.quartet") }}{{ end -}}
{{- $namesByProcess | toJson -}}
{{- end -}}

{{/* Name of the Secret with the certificate of a process. Arguments: root and process. */}}
{{- define "quartet.certificateSecret" -}}
{{- $tls := .root.Values.security.tls -}}
{{- if eq $tls.source "existing" -}}
{{- if not (hasKey $tls.existingSecrets .process) -}}
{{- fail (printf "security.tls.existingSecrets.%s: missing; set it to a Secret with tls.crt, tls.key and ca.crt, or change security.tls.source" .process) -}}
{{- end -}}
{{- get $tls.existingSecrets .process -}}
{{- else -}}
{{- printf "%s-certificate-%s" (include "quartet.fullname" .root) .process -}}
{{- end -}}
{{- end -}}

{{/* Host names that the gateway accepts. */}}
{{- define "quartet.gatewayHosts" -}}
{{- $names := include "quartet.serviceNames" (dict "root" . "name" (printf "%s-gateway" (include "quartet.fullname" .))) | fromJsonArray -}}
{{- $names = concat $names (default list .Values.gateway.allowedHosts) -}}
{{- if and .Values.ingress.enabled .Values.ingress.host }}{{ $names = append $names .Values.ingress.host }}{{ end -}}
{{- $names | uniq | toJson -}}
{{- end -}}
