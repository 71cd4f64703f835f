{{/*
Checks of texts in the values. The schema checks keys and types; its message for a text would be a regular expression.
*/}}
{{- define "quartet.checkValues" -}}
{{- $quantity := dict "pattern" `^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$` "expected" "a number with a unit of Kubernetes, such as 500m, 2Gi or 1.5Ti" -}}
{{- $name := dict "pattern" `^[a-z]([a-z0-9-]*[a-z0-9])?$` "expected" "lower case letters, digits and -, with a letter first, such as my-run" -}}
{{- $digest := dict "pattern" `^sha256:[0-9a-f]{64}$` "expected" "sha256: and 64 hexadecimal digits, as in docker images --digests" -}}
{{- $duration := dict "pattern" `^([0-9]+(h|m|s))+$` "expected" "hours, minutes and seconds, such as 720h or 1h30m" -}}
{{- $cidr := dict "pattern" `^((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])){3}/(3[0-2]|[12]?[0-9])|[0-9a-fA-F:]*:[0-9a-fA-F:.]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$` "expected" "an address and the length of its prefix, such as 10.20.0.0/24, or 10.20.0.5/32 for one address" -}}
{{- $resource := dict "pattern" `^(cpu|memory|ephemeral-storage|hugepages-[0-9A-Za-z]+|[a-z0-9.-]+/.+)$` "expected" "cpu, memory, ephemeral-storage, hugepages-SIZE, or a name with a domain, such as rdma/hca; for GPUs, set gpus of the component" -}}
{{- $host := dict "pattern" `^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*$` "expected" "a host name in lower case without scheme, port and wildcard, such as quartet.example.com" -}}
{{- $values := .Values -}}
{{- $texts := list
  (list "nameOverride" $values.nameOverride $name)
  (list "fullnameOverride" $values.fullnameOverride $name)
  (list "image.digest" $values.image.digest $digest)
  (list "redis.image.digest" $values.redis.image.digest $digest)
  (list "downloads.s3Image.digest" $values.downloads.s3Image.digest $digest)
  (list "redis.maxmemory" $values.redis.maxmemory (dict "pattern" `^[0-9]+(b|kb?|mb?|gb?)?$` "expected" "a number with a unit of Redis, such as 512mb or 6gb"))
  (list "redis.persistence.size" $values.redis.persistence.size $quantity)
  (list "workerGroups.sharedMemory" $values.workerGroups.sharedMemory $quantity)
  (list "defaults.sharedMemory" $values.defaults.sharedMemory $quantity)
  (list "defaults.temporarySpace" $values.defaults.temporarySpace $quantity)
  (list "security.tls.certManager.duration" $values.security.tls.certManager.duration $duration)
  (list "security.tls.certManager.renewBefore" $values.security.tls.certManager.renewBefore $duration)
  (list "monitoring.serviceMonitor.interval" $values.monitoring.serviceMonitor.interval (dict "pattern" `^[0-9]+(ms|s|m|h)$` "expected" "a number with a unit, such as 10s"))
  (list "ingress.host" $values.ingress.host $host) -}}
{{- if regexMatch `(^|\.)[0-9]+$|^.{254}` (default "" $values.ingress.host) -}}
{{- fail (printf "ingress.host: %q; expected %s; correct it" $values.ingress.host $host.expected) -}}
{{- end -}}
{{- range $folder, $claim := $values.storage -}}
{{- $texts = append $texts (list (printf "storage.%s.size" $folder) (default dict $claim).size $quantity) -}}
{{- end -}}
{{- range default list $values.redis.external.cidrs }}{{ $texts = append $texts (list "redis.external.cidrs" . $cidr) }}{{ end -}}
{{- range default list $values.networkPolicy.dns.cidrs }}{{ $texts = append $texts (list "networkPolicy.dns.cidrs" . $cidr) }}{{ end -}}
{{- $resources := dict "defaults" $values.defaults.resources "redis" $values.redis.resources "tests" $values.tests.resources -}}
{{- $_ := set $resources "downloads" $values.downloads.resources -}}
{{- $_ := set $resources "loader" $values.loader.resources -}}
{{- range $component, $own := $values.components -}}
{{- $own = default dict $own -}}
{{- $path := printf "components.%s" $component -}}
{{- $_ := set $resources $path $own.resources -}}
{{- $texts = append $texts (list (printf "%s.image.digest" $path) (default dict $own.image).digest $digest) -}}
{{- $texts = append $texts (list (printf "%s.sharedMemory" $path) $own.sharedMemory $quantity) -}}
{{- $texts = append $texts (list (printf "%s.temporarySpace" $path) $own.temporarySpace $quantity) -}}
{{- $threshold := dict "pattern" `^([0-9]*[1-9][0-9]*(\.[0-9]+)?|[0-9]+\.[0-9]*[1-9][0-9]*)$` "expected" "a positive number, such as \"32\"" -}}
{{- $texts = append $texts (list (printf "%s.autoscaling.keda.threshold" $path) (default dict (default dict $own.autoscaling).keda).threshold $threshold) -}}
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
{{- if kindIs "float64" (index . 1) }}{{ $text = printf "%.0f" (index . 1) }}{{ end -}}
{{- if and $text (not (regexMatch (index . 2).pattern $text)) -}}
{{- fail (printf "%s: %q; expected %s; correct it" (index . 0) $text (index . 2).expected) -}}
{{- end -}}
{{- end -}}
{{- include "quartet.checkLimits" . -}}
{{- end -}}

{{/* A request above its limit: Kubernetes refuses such pods. */}}
{{- define "quartet.checkLimits" -}}
{{- $resources := dict "redis" .Values.redis.resources "tests" .Values.tests.resources "downloads" .Values.downloads.resources "loader" .Values.loader.resources -}}
{{- range $name, $component := include "quartet.components" . | fromJson }}{{ $_ := set $resources (printf "components.%s" $name) $component.resources }}{{ end -}}
{{- range $path, $own := $resources -}}
{{- $limits := default dict (default dict $own).limits -}}
{{- range $key, $value := default dict (default dict $own).requests -}}
{{- if hasKey $limits $key -}}
{{- if gt (include "quartet.bytes" $value | float64) (include "quartet.bytes" (get $limits $key) | float64) -}}
{{- fail (printf "%s.resources.requests.%s: %v, and limits.%s: %v; expected a request of at most the limit; lower it, or raise the limit" $path $key $value $key (get $limits $key)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
