{{/* Checks of the values: each text, and values that contradict each other or have no effect. */}}
{{- define "quartet.checkValues" -}}
{{- $texts := .Files.Get "files/texts.yaml" | fromYaml -}}
{{- include "quartet.checkTexts" (dict "path" "" "value" .Values "expected" $texts.texts "kinds" $texts.kinds) -}}
{{- $values := .Values -}}
{{- $images := dict "image" $values.image "redis.image" $values.redis.image "downloads.s3Image" $values.downloads.s3Image "downloads.image" $values.downloads.image -}}
{{- $components := dict "defaults" $values.defaults -}}
{{- range $name, $own := $values.components }}{{ $_ := set $components (printf "components.%s" $name) (default dict $own) }}{{ end -}}
{{- range $path, $own := $components -}}
{{- $_ := set $images (printf "%s.image" $path) $own.image -}}
{{- end -}}
{{- range $path, $own := merge (dict "redis" $values.redis) $components -}}
{{- range default list $own.tolerations -}}
{{- if and (eq (default "Equal" .operator) "Exists") .value -}}
{{- fail (printf "%s.tolerations: operator Exists, and value %q, which it does not compare; expected one of them; remove value, or set operator Equal" $path .value) -}}
{{- end -}}
{{- if and (eq (default "Equal" .operator) "Equal") (not .key) -}}
{{- fail (printf "%s.tolerations: no key; expected the key of a taint, or operator Exists for all taints; add one of them" $path) -}}
{{- end -}}
{{- if and (hasKey . "tolerationSeconds") (ne (default "" .effect) "NoExecute") -}}
{{- fail (printf "%s.tolerations: tolerationSeconds, and effect %q; expected effect NoExecute, which alone ends pods; set it, or remove tolerationSeconds" $path (default "" .effect)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $path, $own := $images -}}
{{- $own = default dict $own -}}
{{- $common := has $path (list "redis.image" "downloads.s3Image") | ternary "" $values.image.registry -}}
{{- $before := coalesce $values.imageRegistry $own.registry $common -}}
{{- if and $before (regexMatch `^[^/]*[.:][^/]*/` (default "" $own.repository)) -}}
{{- fail (printf "%s.repository: %q, and the registry %s, which would come before it; expected a repository without a host; set %s.registry to the host, and repository to the rest" $path $own.repository $before $path) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch $texts.kinds.name.pattern (include "quartet.fullname" .)) -}}
{{- fail (printf "release name %q: Services have it in their names; expected %s; install under another name, or set fullnameOverride" .Release.Name $texts.kinds.name.expected) -}}
{{- end -}}
{{- include "quartet.refuseOwned" . -}}
{{- include "quartet.refuseSecrets" . -}}
{{- include "quartet.checkStorage" . -}}
{{- include "quartet.checkScheduling" . -}}
{{- include "quartet.checkLimits" . -}}
{{- include "quartet.checkNoneTwice" (dict "path" "imagePullSecrets" "keys" (list "name") "items" .Values.imagePullSecrets "own" list) -}}
{{- include "quartet.checkNoneTwice" (dict "path" "downloads.env" "keys" (list "name") "items" .Values.downloads.env "own" (list "HOME")) -}}
{{- include "quartet.checkRedis" . -}}
{{- include "quartet.checkUnused" . -}}
{{- include "quartet.checkCredentials" . -}}
{{- if .Values.checks.paths }}{{ include "quartet.checkPaths" . }}{{ end -}}
{{- end -}}

{{/*
Texts that are not of their kind in files/texts.yaml. Arguments: path and value, and of the file: kinds, and what is expected at the path,
the name of a kind or a map.
*/}}
{{- define "quartet.checkTexts" -}}
{{- $kinds := .kinds -}}{{- $path := .path -}}{{- $value := .value -}}
{{- if kindIs "string" .expected -}}
{{- $text := default "" $value | toString -}}
{{- /* A number such as 0.5, or a large one without an exponent. */ -}}
{{- if kindIs "float64" $value }}{{ $text = printf "%.3f" $value | trimSuffix ".000" }}{{ end -}}
{{- $kind := get $kinds .expected -}}
{{- $refused := and $kind.refused (regexMatch (default "" $kind.refused) $text) -}}
{{- if and (or $text $kind.required) (or $refused (not (regexMatch $kind.pattern $text))) -}}
{{- fail (printf "%s: %q; expected %s; correct it" $path $text $kind.expected) -}}
{{- end -}}
{{- else -}}
{{- range $key, $expected := .expected -}}
{{- if eq $key "{key}" -}}
{{- range $name, $_ := $value }}{{ include "quartet.checkTexts" (dict "path" $path "value" $name "expected" $expected "kinds" $kinds) }}{{ end -}}
{{- else if eq $key "*" -}}
{{- range $name, $below := $value -}}
{{- $where := kindIs "slice" $value | ternary $path (printf "%s.%v" $path $name) -}}
{{- include "quartet.checkTexts" (dict "path" $where "value" $below "expected" $expected "kinds" $kinds) -}}
{{- end -}}
{{- else if and (kindIs "map" $value) (hasKey $value $key) -}}
{{- $where := printf "%s.%s" $path $key | trimPrefix "." -}}
{{- include "quartet.checkTexts" (dict "path" $where "value" (get $value $key) "expected" $expected "kinds" $kinds) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Two entries of a list that are equal in some keys, which Kubernetes refuses. Arguments: path, keys, items, and `own`, those of the chart.
*/}}
{{- define "quartet.checkNoneTwice" -}}
{{- $seen := .own -}}
{{- range default list .items -}}
{{- $entry := . -}}
{{- $found := list -}}
{{- range $.keys }}{{ $found = append $found (get $entry . | toString) }}{{ end -}}
{{- $value := join ", " $found -}}
{{- if has $value $seen -}}
{{- fail (printf "%s: two entries with %s %s, or the chart has one; expected one; remove or rename the other" $.path (join ", " $.keys) $value) -}}
{{- end -}}
{{- $seen = append $seen $value -}}
{{- end -}}
{{- end -}}

{{/* Values of claims that would be ignored, or that no volume satisfies. */}}
{{- define "quartet.checkStorage" -}}
{{- $storage := .Values.storage -}}
{{- range $name := list "models" "data" "runs" -}}
{{- $own := get $storage $name -}}
{{- range $key := list "size" "storageClassName" "accessModes" "volumeName" -}}
{{- if and (get $own $key) $own.existingClaim -}}
{{- fail (printf "storage.%s.%s: given beside existingClaim %s, which has its own; expected one of them; remove the other" $name $key $own.existingClaim) -}}
{{- else if and (get $own $key) (not $own.size) -}}
{{- fail (printf "storage.%s.%s: given without size, so the folder is on storage.claim; set storage.%s.size for a separate claim, or storage.claim.%s instead" $name $key $name $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $runs := (include "quartet.folders" . | fromJson).runs.created -}}
{{- range $claim := include "quartet.createdClaims" . | fromJson -}}
{{- if and (eq $claim.path $runs) (eq (join "," $claim.accessModes) "ReadOnlyMany") -}}
{{- fail (printf "%s.accessModes: ReadOnlyMany, but the run writes to this claim; expected ReadWriteOnce or ReadWriteMany; change it, or give storage.runs another claim" $claim.path) -}}
{{- end -}}
{{- if and $claim.volumeName (not $claim.storageClassName) -}}
{{- fail (printf "%s.volumeName: %s, without storageClassName, so the claim gets the default class, which the volume may not have; set storageClassName to the class of the volume, or to - if it has none" $claim.path $claim.volumeName) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quartet.checkScheduling" -}}
{{- $scheduling := .Values.scheduling -}}{{- $gang := .Values.scheduling.gang -}}
{{- if and $gang.queue (eq $gang.kind "none") -}}
{{- fail (printf "scheduling.gang.queue: %s, but scheduling.gang.kind is none; set kind to kueue or volcano, or remove the queue" $gang.queue) -}}
{{- end -}}
{{- if or (and (eq $gang.kind "kueue") (eq $scheduling.schedulerName "volcano")) (and (eq $gang.kind "volcano") (eq $scheduling.schedulerName "default-scheduler")) -}}
{{- fail (printf "scheduling.schedulerName: %s, but scheduling.gang.kind is %s, which this scheduler does not serve; remove one of them" $scheduling.schedulerName $gang.kind) -}}
{{- end -}}
{{- end -}}

{{/* Keys of a component that Kubernetes refuses, or that break the chart's own selectors. Arguments: root, name and component. */}}
{{- define "quartet.checkComponent" -}}
{{- $path := printf "components.%s" .name -}}{{- $component := .component -}}
{{- range $key, $_ := default dict $component.labels -}}
{{- if has $key (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") -}}
{{- fail (printf "%s.labels: %s; expected other labels, because Services and NetworkPolicies select pods by this one; remove it, or use nameOverride" $path $key) -}}
{{- end -}}
{{- end -}}
{{- if eq .name "generator" }}{{ include "quartet.checkGenerator" . }}{{ end -}}
{{- $names := list "config" "tmp" "certificates" "secrets" "storage" "models" "data" "runs" "shared-memory" "sockets" -}}
{{- include "quartet.checkNoneTwice" (dict "path" (printf "%s.extraVolumes" $path) "keys" (list "name") "items" $component.extraVolumes "own" $names) -}}
{{- range default list $component.extraVolumes }}{{ $names = append $names .name }}{{ end -}}
{{- $paths := list "/etc/quartet" "/tmp" (printf "/certificates/%s" $component.process) "/run/secrets/quartet" "/quartet/models" "/quartet/data" "/quartet/runs" "/quartet/sockets" "/dev/shm" -}}
{{- range default list $component.extraVolumeMounts -}}
{{- if not (has .name $names) -}}
{{- fail (printf "%s.extraVolumeMounts: the pod has no volume %s; expected one of %s; correct the name, or add the volume to extraVolumes" $path .name (sortAlpha $names | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- include "quartet.checkNoneTwice" (dict "path" (printf "%s.extraVolumeMounts" $path) "keys" (list "mountPath") "items" $component.extraVolumeMounts "own" $paths) -}}
{{- $variables := list "HOME" -}}
{{- if not .root.Values.security.fixedUsers }}{{ $variables = append $variables "USER" }}{{ end -}}
{{- if eq $component.workload "StatefulSet" }}{{ $variables = append $variables "NODE_RANK" }}{{ end -}}
{{- include "quartet.checkNoneTwice" (dict "path" (printf "%s.env" $path) "keys" (list "name") "items" $component.env "own" $variables) -}}
{{- include "quartet.checkNoneTwice" (dict "path" (printf "%s.topologySpreadConstraints" $path) "keys" (list "topologyKey" "whenUnsatisfiable") "items" $component.topologySpreadConstraints "own" list) -}}
{{- if and (gt (int $component.nodes) 1) (has (int .root.Values.workerGroups.port) (list 50051 9100 9101)) -}}
{{- fail (printf "workerGroups.port: %d, which %s serves otherwise; expected another port, such as 29500" (int .root.Values.workerGroups.port) .name) -}}
{{- end -}}
{{- /* The controllers make labels of at most 63 letters from the name, the number of the group and a hash. */ -}}
{{- $group := include "quartet.groupService" $component -}}
{{- if and (eq $component.workload "LeaderWorkerSet") (gt (len $group) 50) -}}
{{- fail (printf "%s: its LeaderWorkerSet is named %s, %d letters; expected at most 50; set fullnameOverride to a shorter name than %s" $path $group (len $group) (include "quartet.fullname" .root)) -}}
{{- end -}}
{{- $own := default dict (dig .name "image" dict .root.Values.components) -}}
{{- $image := .root.Values.image -}}
{{- range $key := list "repository" "tag" "variant" -}}
{{- /* A process without a model runs in each image of the project. */ -}}
{{- if and (or $component.model (ne $key "variant")) $image.digest (get $own $key) (not $own.digest) (ne (get $own $key) (get $image $key)) -}}
{{- fail (printf "%s.image.%s: %s, and image.digest, which is of another image; expected its own digest; set %s.image.digest, or image.digests for each variant in place of image.digest" $path $key (get $own $key) $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Resources that Kubernetes refuses, or that are too small for what the container uses. */}}
{{- define "quartet.checkLimits" -}}
{{- $resources := dict "redis" .Values.redis.resources "tests" .Values.tests.resources "downloads" .Values.downloads.resources "loader" .Values.loader.resources -}}
{{- range $name, $component := include "quartet.components" . | fromJson -}}
{{- $path := printf "components.%s" $name -}}
{{- $given := default dict $component.resources -}}
{{- $_ := set $resources $path (dict "requests" (omit (default dict $given.requests) $component.gpuResource) "limits" $given.limits) -}}
{{- $gpus := int $component.gpus -}}
{{- range $kind := list "limits" "requests" -}}
{{- $given := get (default dict (get (default dict $component.resources) $kind)) $component.gpuResource -}}
{{- if and $given (ne (toString $given) (toString $gpus)) -}}
{{- fail (printf "%s.resources.%s.%s: %v, and gpus: %d; expected gpus only, which sets it; remove it, and set %s.gpus" $path $kind $component.gpuResource $given $gpus $path) -}}
{{- end -}}
{{- end -}}
{{- include "quartet.checkSpace" (dict "path" $path "resources" $component.resources "resource" "memory" "key" "sharedMemory" "size" $component.sharedMemory) -}}
{{- include "quartet.checkSpace" (dict "path" $path "resources" $component.resources "resource" "ephemeral-storage" "key" "temporarySpace" "size" $component.temporarySpace) -}}
{{- include "quartet.checkComponent" (dict "root" $ "name" $name "component" $component) -}}
{{- end -}}
{{- range $path, $own := $resources -}}
{{- $limits := default dict (default dict $own).limits -}}
{{- range $key, $value := default dict (default dict $own).requests -}}
{{- $limit := get $limits $key -}}
{{- $difference := 0.0 -}}
{{- if $limit }}{{ $difference = subf (include "quartet.bytes" $value | float64) (include "quartet.bytes" $limit | float64) }}{{ end -}}
{{- if gt $difference 0.0 -}}
{{- fail (printf "%s.resources.requests.%s: %v, and limits.%s: %v; expected a request of at most the limit; lower it, or raise the limit" $path $key $value $key $limit) -}}
{{- end -}}
{{- if and (contains "/" $key) (or (not $limit) (ne $difference 0.0)) -}}
{{- fail (printf "%s.resources.requests.%s: %v, and limits.%s: %v; expected both to be equal, because Kubernetes does not share such devices; set limits.%s" $path $key $value $key (default "none" $limit) $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $limit := dig "limits" "memory" "" (default dict .Values.redis.resources) -}}
{{- if and .Values.redis.enabled $limit -}}
{{- if lt (include "quartet.bytes" $limit | float64) (include "quartet.redisBytes" . | float64) -}}
{{- fail (printf "redis.resources.limits.memory: %v, and redis.maxmemory: %s; expected about twice maxmemory, because Redis forks; raise it, or lower maxmemory" $limit .Values.redis.maxmemory) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A limit below the volume that counts towards it. Arguments: path, resources, resource, and key and size of the volume. */}}
{{- define "quartet.checkSpace" -}}
{{- $resources := default dict .resources -}}
{{- $limit := default (get (default dict $resources.requests) .resource) (get (default dict $resources.limits) .resource) -}}
{{- if and $limit .size -}}
{{- if le (include "quartet.bytes" $limit | float64) (include "quartet.bytes" .size | float64) -}}
{{- fail (printf "%s.resources.limits.%s: %v, and %s: %v; expected more than %s, which counts towards the limit; raise it, or lower %s" .path .resource $limit .key .size .key .key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A claim that Redis cannot write, or that is smaller than its data. */}}
{{- define "quartet.checkRedis" -}}
{{- $persistence := .Values.redis.persistence -}}
{{- if .Values.redis.enabled -}}
{{- if eq (join "," $persistence.accessModes) "ReadOnlyMany" -}}
{{- fail "redis.persistence.accessModes: ReadOnlyMany, but Redis writes to this claim; expected ReadWriteOnce; change it" -}}
{{- end -}}
{{- if lt (include "quartet.bytes" $persistence.size | float64) (include "quartet.redisBytes" . | float64) -}}
{{- fail (printf "redis.persistence.size: %v, and redis.maxmemory: %s; expected about twice maxmemory, because Redis rewrites its append-only file beside the old one; raise it, or lower maxmemory" $persistence.size .Values.redis.maxmemory) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Tokens and an issuer that would not be those that the values seem to name. */}}
{{- define "quartet.checkCredentials" -}}
{{- $tokens := .Values.gateway.tokens -}}
{{- if eq $tokens.operatorKey $tokens.viewerKey -}}
{{- fail (printf "gateway.tokens.viewerKey: %s, which is also operatorKey, so viewers would be operators; expected another key; change one of them" $tokens.viewerKey) -}}
{{- end -}}
{{- $keys := .Values.traffic.keys -}}
{{- if eq $keys.operatorKey $keys.viewerKey -}}
{{- fail (printf "traffic.keys.viewerKey: %s, which is also operatorKey, so users could give rewards; expected another key; change one of them" $keys.viewerKey) -}}
{{- end -}}
{{- $tls := .Values.security.tls -}}
{{- $issuer := default dict $tls.certManager.issuerRef -}}
{{- if and $tls.enabled (eq $tls.source "cert-manager") (or $issuer.kind $issuer.group) (not $issuer.name) -}}
{{- fail "security.tls.certManager.issuerRef.name: missing beside kind or group; set it to the name of the issuer, or set issuerRef to {} for an authority of the release" -}}
{{- end -}}
{{- end -}}
