{{/*
Checks of texts in the values. The schema checks keys and types; its message for a text would be a regular expression.
*/}}
{{- define "quartet.checkValues" -}}
{{- $quantity := dict "pattern" `^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$` "expected" "a number with a unit of Kubernetes, such as 500m, 2Gi or 1.5Ti" -}}
{{- $name := dict "pattern" `^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$` "expected" "at most 63 lower case letters, digits and -, with a letter first, such as my-run" -}}
{{- $size := dict "pattern" `^([0-9]*[1-9][0-9]*(\.[0-9]+)?|[0-9]+\.[0-9]*[1-9][0-9]*)(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$` "expected" "a positive number with a unit of Kubernetes, such as 2Gi or 1.5Ti" -}}
{{- $requiredSize := merge (dict "required" true) $size -}}
{{- $object := dict "pattern" `^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$` "expected" "the name of an object of Kubernetes, of lower case letters, digits, - and ., such as training" -}}
{{- $label := dict "pattern" `^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$` "expected" "at most 63 lower case letters, digits, - and ., such as training" -}}
{{- $class := dict "pattern" `^(-|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)$` "expected" "the name of a StorageClass (kubectl get storageclass), or - for a volume without a class" -}}
{{- $path := dict "pattern" `^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$` "expected" "a folder in the volume, such as team/models, of letters, digits, ., - and _, without .. and without / at its ends" -}}
{{- $registry := dict "pattern" `^[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]+)?(/[a-z0-9._-]+)*/?$` "expected" "a host without a scheme, such as registry.example.com or registry.example.com:5000/mirror" -}}
{{- $repository := dict "required" true "pattern" `^[a-z0-9]+([._-]+[a-z0-9]+)*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$` "expected" "lower case names with / between them, such as ml/quartet" -}}
{{- $tag := dict "pattern" `^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$` "expected" "letters, digits, ., - and _, such as 0.1.0" -}}
{{- $device := dict "pattern" `^[a-z0-9.-]+/[A-Za-z0-9._-]+$` "expected" "a name with a domain, such as nvidia.com/gpu (kubectl describe node)" -}}
{{- $digest := dict "pattern" `^sha256:[0-9a-f]{64}$` "expected" "sha256: and 64 hexadecimal digits, as in docker images --digests" -}}
{{- $duration := dict "pattern" `^([0-9]+(h|m|s))+$` "expected" "hours, minutes and seconds, such as 720h or 1h30m" -}}
{{- $cidr := dict "pattern" `^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])){3}/(3[0-2]|[12]?[0-9])|(([0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4})*)?::([0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4})*)?|([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4})/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$` "expected" "an address and the length of its prefix, such as 10.20.0.0/24, or 10.20.0.5/32 for one address" -}}
{{- $secretKey := dict "required" true "pattern" `^[A-Za-z0-9._-]{1,253}$` "expected" "a key of a Secret, of letters, digits, ., - and _, such as password" -}}
{{- $labelKey := dict "required" true "pattern" `^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$` "expected" "the key of a label of Kubernetes, such as team or example.com/team" -}}
{{- $labelValue := dict "pattern" `^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$` "expected" "at most 63 letters, digits, ., - and _, such as team-a" -}}
{{- $volume := dict "required" true "pattern" `^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$` "expected" "at most 63 lower case letters, digits and -, such as shared-data" -}}
{{- $resource := dict "pattern" `^(cpu|memory|ephemeral-storage|hugepages-[0-9A-Za-z]+|[a-z0-9.-]+/.+)$` "expected" "cpu, memory, ephemeral-storage, hugepages-SIZE, or a name with a domain, such as rdma/hca; for GPUs, set gpus of the component" -}}
{{- $host := dict "pattern" `^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*$` "expected" "a host name in lower case without scheme, port and wildcard, such as quartet.example.com" -}}
{{- $values := .Values -}}
{{- $texts := list
  (list "config.run.name" (default dict $values.config.run).name (dict "pattern" `^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$` "expected" "at most 64 letters, digits, ., _ and -, with a letter or digit first, such as my-run-1"))
  (list "nameOverride" $values.nameOverride $name)
  (list "fullnameOverride" $values.fullnameOverride $name)
  (list "redis.maxmemory" $values.redis.maxmemory (dict "required" true "pattern" `^[0-9]*[1-9][0-9]*(b|kb?|mb?|gb?)?$` "expected" "a positive number with a unit of Redis, such as 512mb or 6gb"))
  (list "redis.persistence.size" $values.redis.persistence.size $requiredSize)
  (list "redis.persistence.storageClassName" $values.redis.persistence.storageClassName $class)
  (list "redis.priorityClassName" $values.redis.priorityClassName $object)
  (list "scheduling.gang.queue" $values.scheduling.gang.queue $label)
  (list "scheduling.schedulerName" $values.scheduling.schedulerName $object)
  (list "serviceAccount.name" $values.serviceAccount.name $object)
  (list "gateway.tokens.existingSecret" $values.gateway.tokens.existingSecret $object)
  (list "traffic.keys.existingSecret" $values.traffic.keys.existingSecret $object)
  (list "security.rpcToken.existingSecret" $values.security.rpcToken.existingSecret $object)
  (list "redis.password.existingSecret" $values.redis.password.existingSecret $object)
  (list "redis.external.existingSecret" $values.redis.external.existingSecret $object)
  (list "downloads.existingSecret" $values.downloads.existingSecret $object)
  (list "gateway.tokens.operatorKey" $values.gateway.tokens.operatorKey $secretKey)
  (list "gateway.tokens.viewerKey" $values.gateway.tokens.viewerKey $secretKey)
  (list "traffic.keys.operatorKey" $values.traffic.keys.operatorKey $secretKey)
  (list "traffic.keys.viewerKey" $values.traffic.keys.viewerKey $secretKey)
  (list "security.rpcToken.key" $values.security.rpcToken.key $secretKey)
  (list "redis.password.key" $values.redis.password.key $secretKey)
  (list "redis.external.key" $values.redis.external.key $secretKey)
  (list "scheduling.colocation.topologyKey" $values.scheduling.colocation.topologyKey $labelKey)
  (list "imageRegistry" $values.imageRegistry $registry)
  (list "workerGroups.sharedMemory" $values.workerGroups.sharedMemory $size)
  (list "security.tls.certManager.duration" $values.security.tls.certManager.duration $duration)
  (list "security.tls.certManager.renewBefore" $values.security.tls.certManager.renewBefore $duration)
  (list "monitoring.serviceMonitor.interval" $values.monitoring.serviceMonitor.interval (dict "pattern" `^[0-9]+(ms|s|m|h)$` "expected" "a number with a unit, such as 10s"))
  (list "ingress.host" $values.ingress.host $host) -}}
{{- if regexMatch `(^|\.)[0-9]+$|^.{254}` (default "" $values.ingress.host) -}}
{{- fail (printf "ingress.host: %q; expected %s; correct it" $values.ingress.host $host.expected) -}}
{{- end -}}
{{- range $folder, $claim := $values.storage -}}
{{- $claim = default dict $claim -}}
{{- $where := printf "storage.%s" $folder -}}
{{- $texts = append $texts (list (printf "%s.size" $where) $claim.size (eq $folder "claim" | ternary $requiredSize $size)) -}}
{{- $texts = append $texts (list (printf "%s.storageClassName" $where) $claim.storageClassName $class) -}}
{{- $texts = append $texts (list (printf "%s.subPath" $where) $claim.subPath $path) -}}
{{- range $key := list "existingClaim" "volumeName" }}{{ $texts = append $texts (list (printf "%s.%s" $where $key) (get $claim $key) $object) }}{{ end -}}
{{- end -}}
{{- range default list $values.redis.external.cidrs }}{{ $texts = append $texts (list "redis.external.cidrs" . $cidr) }}{{ end -}}
{{- range default list $values.networkPolicy.dns.cidrs }}{{ $texts = append $texts (list "networkPolicy.dns.cidrs" . $cidr) }}{{ end -}}
{{- $images := dict "image" $values.image "redis.image" $values.redis.image "downloads.s3Image" $values.downloads.s3Image "downloads.image" $values.downloads.image -}}
{{- $components := dict "defaults" $values.defaults -}}
{{- range $name, $own := $values.components }}{{ $_ := set $components (printf "components.%s" $name) (default dict $own) }}{{ end -}}
{{- $resources := dict "defaults" $values.defaults.resources "redis" $values.redis.resources "tests" $values.tests.resources -}}
{{- $_ := set $resources "downloads" $values.downloads.resources -}}
{{- $_ := set $resources "loader" $values.loader.resources -}}
{{- range $path, $own := $components -}}
{{- $_ := set $resources $path $own.resources -}}
{{- $_ := set $images (printf "%s.image" $path) $own.image -}}
{{- $texts = append $texts (list (printf "%s.gpuResource" $path) $own.gpuResource $device) -}}
{{- range $key := list "priorityClassName" "runtimeClassName" }}{{ $texts = append $texts (list (printf "%s.%s" $path $key) (get $own $key) $object) }}{{ end -}}
{{- $texts = append $texts (list (printf "%s.sharedMemory" $path) $own.sharedMemory $size) -}}
{{- $texts = append $texts (list (printf "%s.temporarySpace" $path) $own.temporarySpace (hasKey $own "temporarySpace" | ternary $requiredSize $size)) -}}
{{- range $field := list "labels" "nodeSelector" "annotations" "serviceAnnotations" -}}
{{- range $key, $text := default dict (get $own $field) -}}
{{- $texts = append $texts (list (printf "%s.%s" $path $field) $key $labelKey) -}}
{{- if has $field (list "labels" "nodeSelector") }}{{ $texts = append $texts (list (printf "%s.%s.%s" $path $field $key) $text $labelValue) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range default list $own.topologySpreadConstraints }}{{ $texts = append $texts (list (printf "%s.topologySpreadConstraints.topologyKey" $path) .topologyKey $labelKey) }}{{ end -}}
{{- range default list $own.extraVolumes }}{{ $texts = append $texts (list (printf "%s.extraVolumes.name" $path) .name $volume) }}{{ end -}}
{{- range default list $own.tolerations -}}
{{- if and (eq (default "Equal" .operator) "Exists") .value -}}
{{- fail (printf "%s.tolerations: operator Exists, and value %q, which it does not compare; expected one of them; remove value, or set operator Equal" $path .value) -}}
{{- end -}}
{{- if and (eq (default "Equal" .operator) "Equal") (not .key) -}}
{{- fail (printf "%s.tolerations: no key; expected the key of a taint, or operator Exists for all taints; add one of them" $path) -}}
{{- end -}}
{{- end -}}
{{- range default list $own.extraEgress -}}
{{- range default list .to -}}
{{- $block := default dict .ipBlock -}}
{{- range concat (list (default "0.0.0.0/0" $block.cidr)) (default list $block.except) }}{{ $texts = append $texts (list (printf "%s.extraEgress.to.ipBlock" $path) . $cidr) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if hasKey (default dict $own.autoscaling) "hpa" }}{{ $texts = append $texts (list (printf "%s.autoscaling.hpa.target" $path) $own.autoscaling.hpa.target $size) }}{{ end -}}
{{- $threshold := dict "pattern" `^([0-9]*[1-9][0-9]*(\.[0-9]+)?|[0-9]+\.[0-9]*[1-9][0-9]*)$` "expected" "a positive number, such as \"32\"" -}}
{{- $texts = append $texts (list (printf "%s.autoscaling.keda.threshold" $path) (default dict (default dict $own.autoscaling).keda).threshold $threshold) -}}
{{- end -}}
{{- $maps := dict "redis.annotations" $values.redis.annotations "ingress.annotations" $values.ingress.annotations "serviceAccount.annotations" $values.serviceAccount.annotations -}}
{{- range $path, $own := $maps -}}
{{- range $key, $_ := default dict $own }}{{ $texts = append $texts (list $path $key $labelKey) }}{{ end -}}
{{- end -}}
{{- range $path, $own := $images -}}
{{- $own = default dict $own -}}
{{- $texts = append $texts (list (printf "%s.registry" $path) $own.registry $registry) -}}
{{- $texts = append $texts (list (printf "%s.tag" $path) $own.tag $tag) -}}
{{- $texts = append $texts (list (printf "%s.digest" $path) $own.digest $digest) -}}
{{- if hasKey $own "repository" -}}
{{- $texts = append $texts (list (printf "%s.repository" $path) $own.repository $repository) -}}
{{- $common := has $path (list "redis.image" "downloads.s3Image") | ternary "" $values.image.registry -}}
{{- $before := coalesce $values.imageRegistry $own.registry $common -}}
{{- if and $before (regexMatch `^[^/]*[.:][^/]*/` (default "" $own.repository)) -}}
{{- fail (printf "%s.repository: %q, and the registry %s, which would come before it; expected a repository without a host; set %s.registry to the host, and repository to the rest" $path $own.repository $before $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $path, $own := $resources -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $key, $value := default dict (get (default dict $own) $kind) -}}
{{- $texts = append $texts (list (printf "%s.resources.%s" $path $kind) $key $resource) -}}
{{- $texts = append $texts (list (printf "%s.resources.%s.%s" $path $kind $key) $value $quantity) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $texts -}}
{{- $text := index . 1 | default "" | toString -}}
{{- /* A number such as 0.5, or a large one without an exponent. */ -}}
{{- if kindIs "float64" (index . 1) }}{{ $text = printf "%.3f" (index . 1) | trimSuffix ".000" }}{{ end -}}
{{- if and (or $text (index . 2).required) (not (regexMatch (index . 2).pattern $text)) -}}
{{- fail (printf "%s: %q; expected %s; correct it" (index . 0) $text (index . 2).expected) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch $name.pattern (include "quartet.fullname" .)) -}}
{{- fail (printf "release name %q: Services have it in their names; expected %s; install under another name, or set fullnameOverride" .Release.Name $name.expected) -}}
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
