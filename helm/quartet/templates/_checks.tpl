{{/*
Checks of the cluster, before Helm changes anything. They are silent if Helm only renders, because `lookup` finds nothing then.
*/}}
{{- define "quartet.checks" -}}
{{- /* A cluster lists its kinds; the built-in list of Helm has API versions only. */ -}}
{{- if .Capabilities.APIVersions.Has "v1/Pod" -}}
{{- include "quartet.checkKinds" . -}}
{{- include "quartet.checkClaims" . -}}
{{- include "quartet.checkRedisStorage" . -}}
{{- include "quartet.checkWorkloads" . -}}
{{- include "quartet.checkReplicas" . -}}
{{- if .Values.checks.clusterObjects -}}
{{- include "quartet.checkNames" . -}}
{{- include "quartet.checks.clusterObjects" . -}}
{{- include "quartet.checkExisting" . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Workloads of the release with other names: new ones would start beside them, with empty claims. */}}
{{- define "quartet.checkNames" -}}
{{- range $kind := list "Deployment" "StatefulSet" -}}
{{- range default list (lookup "apps/v1" $kind $.Release.Namespace "").items -}}
{{- $labels := default dict .metadata.labels -}}
{{- $component := get $labels "app.kubernetes.io/component" -}}
{{- $installed := eq (get (default dict .metadata.annotations) "meta.helm.sh/release-name") $.Release.Name -}}
{{- $own := and $installed (eq (get $labels "app.kubernetes.io/part-of") "quartet") -}}
{{- $expected := printf "%s-%s" (include "quartet.fullname" $) $component -}}
{{- if and $own $component (ne .metadata.name $expected) -}}
{{- fail (printf "nameOverride: %q, fullnameOverride: %q: the release has the %s %s, and would get %s beside it, with new and empty volumes; keep the names of the installation, or install another release" (default "" $.Values.nameOverride) (default "" $.Values.fullnameOverride) $kind .metadata.name $expected) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Objects of the namespace that the values name, and that pods would wait for. */}}
{{- define "quartet.checkExisting" -}}
{{- $values := .Values -}}
{{- $components := include "quartet.components" . | fromJson -}}
{{- $named := list (list "ServiceAccount" "serviceAccount.name" $values.serviceAccount.name) -}}
{{- $secrets := dict -}}
{{- if $components.gateway }}{{ $_ := set $secrets "gateway.tokens.existingSecret" $values.gateway.tokens.existingSecret }}{{ end -}}
{{- if include "quartet.hasTraffic" . }}{{ $_ := set $secrets "traffic.keys.existingSecret" $values.traffic.keys.existingSecret }}{{ end -}}
{{- if $values.security.rpcToken.enabled }}{{ $_ := set $secrets "security.rpcToken.existingSecret" $values.security.rpcToken.existingSecret }}{{ end -}}
{{- if $values.downloads.sources }}{{ $_ := set $secrets "downloads.existingSecret" $values.downloads.existingSecret }}{{ end -}}
{{- if $values.redis.enabled }}{{ $_ := set $secrets "redis.password.existingSecret" $values.redis.password.existingSecret }}
{{- else }}{{ $_ := set $secrets "redis.external.existingSecret" $values.redis.external.existingSecret }}{{ end -}}
{{- if and $values.security.tls.enabled (eq $values.security.tls.source "existing") -}}
{{- range $process, $name := $values.security.tls.existingSecrets }}{{ $_ := set $secrets (printf "security.tls.existingSecrets.%s" $process) $name }}{{ end -}}
{{- end -}}
{{- range $path, $name := $secrets }}{{ $named = append $named (list "Secret" $path $name) }}{{ end -}}
{{- range $values.imagePullSecrets }}{{ $named = append $named (list "Secret" "imagePullSecrets" .name) }}{{ end -}}
{{- range $name, $folder := include "quartet.folders" . | fromJson -}}
{{- $own := (get $values.storage $name).existingClaim -}}
{{- if not $folder.created }}{{ $named = append $named (list "PersistentVolumeClaim" (printf "storage.%s.existingClaim" (empty $own | ternary "claim" $name)) $folder.claim) }}{{ end -}}
{{- end -}}
{{- range $named -}}
{{- $kind := index . 0 -}}{{- $name := default "" (index . 2) -}}
{{- if and $name (not (lookup "v1" $kind $.Release.Namespace $name)) -}}
{{- fail (printf "%s: the namespace %s has no %s %s; create it before, or correct the name (kubectl --namespace %s get %s). If it is created later, set checks.clusterObjects false" (index . 1) $.Release.Namespace $kind $name $.Release.Namespace (lower $kind)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
The replicas of a live workload, if somebody else has set them, with kubectl scale or an autoscaler of theirs, and they differ. Server-side
apply would then stop at this workload, after others have changed. Without the field it keeps their number. Arguments: root, version, kind,
name and replicas.
*/}}
{{- define "quartet.scaledByHand" -}}
{{- $live := lookup .version .kind .root.Release.Namespace .name -}}
{{- $applied := false -}}{{- $theirs := false -}}
{{- range dig "metadata" "managedFields" list (default dict $live) -}}
{{- $spec := dig "fieldsV1" "f:spec" dict . -}}
{{- if and (eq .operation "Apply") (or (hasKey $spec "f:template") (hasKey $spec "f:leaderWorkerTemplate")) }}{{ $applied = true }}
{{- else if hasKey $spec "f:replicas" }}{{ $theirs = true }}{{ end -}}
{{- end -}}
{{- if and $applied $theirs (ne (int $live.spec.replicas) (int .replicas)) }}{{ $live.spec.replicas }}{{ end -}}
{{- end -}}

{{/* Workloads of a fixed number of pods, which somebody has scaled. */}}
{{- define "quartet.checkReplicas" -}}
{{- $fullname := include "quartet.fullname" . -}}
{{- $fixed := list -}}
{{- if .Values.redis.enabled }}{{ $fixed = append $fixed (dict "version" "apps/v1" "kind" "StatefulSet" "name" (printf "%s-redis" $fullname) "replicas" 1) }}{{ end -}}
{{- if .Values.loader.enabled }}{{ $fixed = append $fixed (dict "version" "apps/v1" "kind" "Deployment" "name" (printf "%s-loader" $fullname) "replicas" 1) }}{{ end -}}
{{- range $component := include "quartet.components" . | fromJson -}}
{{- if eq $component.workload "StatefulSet" -}}
{{- $fixed = append $fixed (dict "version" "apps/v1" "kind" "StatefulSet" "name" $component.fullname "replicas" $component.nodes) -}}
{{- else if eq $component.workload "LeaderWorkerSet" -}}
{{- $fixed = append $fixed (dict "version" "leaderworkerset.x-k8s.io/v1" "kind" "LeaderWorkerSet" "name" (include "quartet.groupService" $component) "replicas" 1) -}}
{{- end -}}
{{- end -}}
{{- range $fixed -}}
{{- $scaled := include "quartet.scaledByHand" (merge (dict "root" $) .) -}}
{{- if $scaled -}}
{{- fail (printf "the %s %s has %s replicas, which Helm has not set, and needs %d; set them before the upgrade: kubectl --namespace %s scale %s %s --replicas %d" .kind .name $scaled (int .replicas) $.Release.Namespace (lower .kind) .name (int .replicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Custom resources whose definitions are not installed. */}}
{{- define "quartet.checkKinds" -}}
{{- $needed := list -}}
{{- if and .Values.security.tls.enabled (eq .Values.security.tls.source "cert-manager") -}}
{{- $needed = append $needed (list "cert-manager.io/v1/Certificate" "security.tls.source: cert-manager" "cert-manager" "set security.tls.source to chart or existing") -}}
{{- end -}}
{{- if .Values.monitoring.serviceMonitor.enabled -}}
{{- $needed = append $needed (list "monitoring.coreos.com/v1/ServiceMonitor" "monitoring.serviceMonitor.enabled: true" "the Prometheus Operator" "set monitoring.serviceMonitor.enabled false") -}}
{{- end -}}
{{- if .Values.monitoring.prometheusRule.enabled -}}
{{- $needed = append $needed (list "monitoring.coreos.com/v1/PrometheusRule" "monitoring.prometheusRule.enabled: true" "the Prometheus Operator" "set monitoring.prometheusRule.enabled false") -}}
{{- end -}}
{{- if eq .Values.scheduling.gang.kind "volcano" -}}
{{- $needed = append $needed (list "scheduling.volcano.sh/v1beta1/PodGroup" "scheduling.gang.kind: volcano" "Volcano" "set scheduling.gang.kind to none") -}}
{{- end -}}
{{- if and (eq .Values.scheduling.gang.kind "kueue") (not (include "quartet.queueVersion" .)) -}}
{{- $needed = append $needed (list "kueue.x-k8s.io/v1beta1/LocalQueue" "scheduling.gang.kind: kueue" "Kueue" "set scheduling.gang.kind to none") -}}
{{- end -}}
{{- range $name, $component := include "quartet.components" . | fromJson -}}
{{- if eq (dig "autoscaling" "kind" "none" $component) "keda" -}}
{{- $needed = append $needed (list "keda.sh/v1alpha1/ScaledObject" (printf "components.%s.autoscaling.kind: keda" $name) "KEDA" "set kind to none or hpa") -}}
{{- end -}}
{{- if eq $component.workload "LeaderWorkerSet" -}}
{{- $needed = append $needed (list "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet" "workerGroups.leaderWorkerSet: true" "LeaderWorkerSet" "set workerGroups.leaderWorkerSet false") -}}
{{- end -}}
{{- end -}}
{{- range $needed -}}
{{- if not ($.Capabilities.APIVersions.Has (index . 0)) -}}
{{- fail (printf "%s needs %s, but this cluster has no %s; install %s, or %s" (index . 1) (index . 0) (base (index . 0)) (index . 2) (index . 3)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* API version of the LocalQueues of the cluster. Empty if it has none. */}}
{{- define "quartet.queueVersion" -}}
{{- range list "kueue.x-k8s.io/v1beta1" "kueue.x-k8s.io/v1beta2" -}}
{{- if $.Capabilities.APIVersions.Has (printf "%s/LocalQueue" .) }}{{ . }} {{ end -}}
{{- end -}}
{{- end -}}

{{/* Claims of the chart that exist with other fields, which Kubernetes does not change. */}}
{{- define "quartet.checkClaims" -}}
{{- range $name, $claim := include "quartet.createdClaims" . | fromJson -}}
{{- $live := (lookup "v1" "PersistentVolumeClaim" $.Release.Namespace $name).spec -}}
{{- if $live -}}
{{- $instead := printf "or delete the claim with its files, or set %s.existingClaim to another one" $claim.path -}}
{{- if ne (sortAlpha $live.accessModes | join ", ") (sortAlpha $claim.accessModes | join ", ") -}}
{{- fail (printf "%s.accessModes: [%s], but the claim %s exists with [%s], and Kubernetes does not change that; set it to [%s], %s" $claim.path (join ", " $claim.accessModes) $name (join ", " $live.accessModes) (join ", " $live.accessModes) $instead) -}}
{{- end -}}
{{- range $key := list "storageClassName" "volumeName" -}}
{{- $existing := default "" (get $live $key) -}}
{{- if and (get $claim $key) $existing (ne (get $claim $key) $existing) -}}
{{- fail (printf "%s.%s: %s, but the claim %s exists with %s, and Kubernetes does not change that; set it to %s, %s" $claim.path $key (get $claim $key) $name $existing $existing $instead) -}}
{{- end -}}
{{- end -}}
{{- $before := $live.resources.requests.storage -}}
{{- $difference := subf (include "quartet.bytes" $claim.size | float64) (include "quartet.bytes" $before | float64) -}}
{{- if lt $difference 0.0 -}}
{{- fail (printf "%s.size: %v, but the claim %s exists with %v, and Kubernetes does not shrink it; set it to %v or more" $claim.path $claim.size $name $before $before) -}}
{{- end -}}
{{- if and (gt $difference 0.0) $live.storageClassName $.Values.checks.clusterObjects -}}
{{- $class := lookup "storage.k8s.io/v1" "StorageClass" "" $live.storageClassName -}}
{{- if and $class (not $class.allowVolumeExpansion) -}}
{{- fail (printf "%s.size: %v, but the claim %s exists with %v, and its StorageClass %s does not expand volumes; set it to %v, or set allowVolumeExpansion in that StorageClass if its driver supports it" $claim.path $claim.size $name $before $live.storageClassName $before) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The claim template of Redis' StatefulSet, which Kubernetes does not change. */}}
{{- define "quartet.checkRedisStorage" -}}
{{- if .Values.redis.enabled -}}
{{- $name := printf "%s-redis" (include "quartet.fullname" .) -}}
{{- $live := (lookup "apps/v1" "StatefulSet" .Release.Namespace $name).spec -}}
{{- if $live -}}
{{- $persistence := .Values.redis.persistence -}}
{{- $template := (first $live.volumeClaimTemplates).spec -}}
{{- $given := dict "size" (toString $persistence.size) "storageClassName" (default "" $persistence.storageClassName | trimPrefix "-") "accessModes" (join ", " $persistence.accessModes) -}}
{{- $before := dict "size" (toString $template.resources.requests.storage) "storageClassName" (default "" $template.storageClassName) "accessModes" (join ", " $template.accessModes) -}}
{{- range $key, $value := $given -}}
{{- $existing := get $before $key -}}
{{- $same := eq $value $existing -}}
{{- if eq $key "size" }}{{ $same = eq (include "quartet.bytes" $value) (include "quartet.bytes" $existing) }}{{ end -}}
{{- if not $same -}}
{{- $remedy := printf "end the run, delete the StatefulSet %s and the claim data-%s-0 with its buffer, and upgrade" $name $name -}}
{{- if eq $key "size" -}}
{{- $remedy = printf "to enlarge it, change the size of the claim data-%s-0 (kubectl patch), delete the StatefulSet %s with --cascade=orphan, and upgrade" $name $name -}}
{{- end -}}
{{- fail (printf "redis.persistence.%s: %q, but the StatefulSet %s exists with %q, and Kubernetes does not change that; set it to %q. Otherwise, %s" $key $value $name $existing $existing $remedy) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Selectors of workloads, and the address of a Service that becomes headless. */}}
{{- define "quartet.checkWorkloads" -}}
{{- $label := "app.kubernetes.io/name" -}}
{{- range $name, $component := include "quartet.components" . | fromJson -}}
{{- if has $component.workload (list "Deployment" "StatefulSet") -}}
{{- $live := (lookup "apps/v1" $component.workload $.Release.Namespace $component.fullname).spec -}}
{{- $existing := dig "selector" "matchLabels" $label "" (default dict $live) -}}
{{- $given := default $.Chart.Name $.Values.nameOverride -}}
{{- if and $existing (ne $existing $given) -}}
{{- fail (printf "nameOverride: %q, but the %s %s exists with the label %s=%s, and Kubernetes does not change its selector; set it to %q, or install another release" $given $component.workload $component.fullname $label $existing $existing) -}}
{{- end -}}
{{- end -}}
{{- if $component.replicated -}}
{{- $address := dig "spec" "clusterIP" "" (lookup "v1" "Service" $.Release.Namespace $component.fullname) -}}
{{- if not (has $address (list "" "None")) -}}
{{- fail (printf "components.%s: now has a headless Service, but the Service %s exists with the address %s, and Kubernetes does not change that; delete it before the upgrade: kubectl --namespace %s delete service %s" $name $component.fullname $address $.Release.Namespace $component.fullname) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Classes that the values name or need, and the queue of Kueue. Classes are objects of the whole cluster: without permission to get them,
Helm reports "forbidden" for a line of this template; then set checks.clusterObjects false.
*/}}
{{- define "quartet.checks.clusterObjects" -}}
{{- if eq .Values.scheduling.gang.kind "kueue" -}}
{{- $queue := .Values.scheduling.gang.queue -}}
{{- $version := include "quartet.queueVersion" . | splitList " " | first -}}
{{- if and $queue (not (lookup $version "LocalQueue" .Release.Namespace $queue)) -}}
{{- fail (printf "scheduling.gang.queue: the namespace %s has no LocalQueue %s; create it, or correct the name (kubectl --namespace %s get localqueue)" .Release.Namespace $queue .Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- $users := dict -}}
{{- range $name, $component := include "quartet.components" . | fromJson -}}
{{- $_ := set $users (printf "components.%s" $name) $component -}}
{{- end -}}
{{- if .Values.redis.enabled }}{{ $_ := set $users "redis" (include "quartet.redisPlacement" . | fromYaml) }}{{ end -}}
{{- range $path, $placement := $users -}}
{{- $class := default "" $placement.priorityClassName -}}
{{- if and $class (not (lookup "scheduling.k8s.io/v1" "PriorityClass" "" $class)) -}}
{{- fail (printf "%s.priorityClassName: this cluster has no PriorityClass %s; create it (kubectl create priorityclass %s --value 1000), or correct or remove it there or in defaults" $path $class $class) -}}
{{- end -}}
{{- $class = default "" $placement.runtimeClassName -}}
{{- if and $class (not (lookup "node.k8s.io/v1" "RuntimeClass" "" $class)) -}}
{{- fail (printf "%s.runtimeClassName: this cluster has no RuntimeClass %s; install what provides it (for nvidia, the GPU Operator), or correct or remove it there or in defaults" $path $class) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled .Values.ingress.className -}}
{{- if not (lookup "networking.k8s.io/v1" "IngressClass" "" .Values.ingress.className) -}}
{{- fail (printf "ingress.className: this cluster has no IngressClass %s; install its controller, or correct the name (kubectl get ingressclass)" .Values.ingress.className) -}}
{{- end -}}
{{- end -}}
{{- $claims := dict -}}
{{- range $name, $claim := include "quartet.createdClaims" . | fromJson -}}
{{- $exists := lookup "v1" "PersistentVolumeClaim" $.Release.Namespace $name -}}
{{- $_ := set $claims $claim.path (merge (dict "exists" (not (empty $exists))) $claim) -}}
{{- end -}}
{{- if .Values.redis.enabled -}}
{{- $exists := lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-redis" (include "quartet.fullname" .)) -}}
{{- $_ := set $claims "redis.persistence" (merge (dict "exists" (not (empty $exists))) .Values.redis.persistence) -}}
{{- end -}}
{{- range $path, $claim := $claims -}}
{{- include "quartet.checkStorageClass" (dict "path" $path "claim" $claim) -}}
{{- end -}}
{{- end -}}

{{/* The StorageClass of a claim exists, and its driver has the access modes. Arguments: path and claim. */}}
{{- define "quartet.checkStorageClass" -}}
{{- $path := .path -}}{{- $claim := .claim -}}
{{- $class := dict -}}
{{- if eq "-" (default "" $claim.storageClassName) -}}
{{- else if $claim.storageClassName -}}
{{- $class = lookup "storage.k8s.io/v1" "StorageClass" "" $claim.storageClassName -}}
{{- /* Without a class, a volume of this class may exist. */ -}}
{{- if not (or $class $claim.volumeName) -}}
{{- fail (printf "%s.storageClassName: this cluster has no StorageClass %s; correct the name (kubectl get storageclass), or set \"\" for the default one" $path $claim.storageClassName) -}}
{{- end -}}
{{- else if not $claim.exists -}}
{{- range default list (lookup "storage.k8s.io/v1" "StorageClass" "" "").items -}}
{{- if eq (dig "metadata" "annotations" "storageclass.kubernetes.io/is-default-class" "" .) "true" }}{{ $class = . }}{{ end -}}
{{- end -}}
{{- if not $class -}}
{{- fail (printf "%s.storageClassName: empty, but this cluster has no default StorageClass, so the claim would stay Pending; set it to one of kubectl get storageclass" $path) -}}
{{- end -}}
{{- end -}}
{{- /* Drivers of disks, whose file systems are mounted on one node. Two of them share a disk that no pod writes. */ -}}
{{- $readable := list "pd.csi.storage.gke.io" "rbd.csi.ceph.com" -}}
{{- $disks := concat $readable (list "rancher.io/local-path" "openebs.io/local" "local.csi.openebs.io" "topolvm.io" "ebs.csi.aws.com"
  "disk.csi.azure.com" "cinder.csi.openstack.org" "dobs.csi.digitalocean.com" "csi.hetzner.cloud" "linodebs.csi.linode.com") -}}
{{- $driver := default "" $class.provisioner -}}
{{- $mode := "" -}}
{{- range $claim.accessModes -}}
{{- if and (eq . "ReadWriteMany") (has $driver $disks) }}{{ $mode = . }}{{ end -}}
{{- if and (eq . "ReadOnlyMany") (has $driver $disks) (not (has $driver $readable)) }}{{ $mode = . }}{{ end -}}
{{- end -}}
{{- if and $mode (not $claim.volumeName) -}}
{{- fail (printf "%s.accessModes: %s, but the StorageClass %s (%s) has volumes for one node only; set %s.storageClassName to one of a shared file system (NFS, CephFS, EFS, Filestore, Azure Files), or accessModes to [ReadWriteOnce] if all pods are on one node" $path $mode $class.metadata.name $driver $path) -}}
{{- end -}}
{{- end -}}

{{/* Number of bytes of a quantity such as 1.5Ti, as text. */}}
{{- define "quartet.bytes" -}}
{{- $text := toString . -}}
{{- if kindIs "float64" . }}{{ $text = printf "%.3f" . }}{{ end -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $factors := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
  "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (trimSuffix $unit $text | float64) (get $factors $unit) -}}
{{- end -}}
