{{/* Claims, volumes and mounts of the folders models, data and runs. */}}

{{/*
Where each folder is: {folder: {claim, subPath, volume, readOnly, created}}. A pod that only reads mounts the whole volume read-only if
`readOnly` is set. `created` is the path of the values from which the chart creates the claim, or "".
*/}}
{{- define "quartet.folders" -}}
{{- $fullname := include "quartet.fullname" . -}}
{{- $common := .Values.storage.claim -}}
{{- $folders := dict -}}
{{- range $name := list "models" "data" "runs" -}}
{{- $own := get $.Values.storage $name -}}
{{- $folder := dict "volume" $name "subPath" (default "" $own.subPath) "readOnly" false "created" "" -}}
{{- if $own.existingClaim -}}
{{- $_ := set $folder "claim" $own.existingClaim -}}
{{- $_ := set $folder "readOnly" true -}}
{{- else if $own.size -}}
{{- $_ := set $folder "claim" (printf "%s-%s" $fullname $name) -}}
{{- $_ := set $folder "created" (printf "storage.%s" $name) -}}
{{- $_ := set $folder "readOnly" (eq (default $common.accessModes $own.accessModes | join ",") "ReadOnlyMany") -}}
{{- else -}}
{{- $_ := set $folder "claim" (default (printf "%s-storage" $fullname) $common.existingClaim) -}}
{{- $_ := set $folder "volume" "storage" -}}
{{- $_ := set $folder "subPath" (default $name $own.subPath) -}}
{{- if not $common.existingClaim }}{{ $_ := set $folder "created" "storage.claim" }}{{ end -}}
{{- end -}}
{{- $_ := set $folders $name $folder -}}
{{- end -}}
{{- $folders | toJson -}}
{{- end -}}

{{/* Claims that the chart creates: {name: {path, size, storageClassName, accessModes, volumeName}}. */}}
{{- define "quartet.createdClaims" -}}
{{- $claims := dict -}}
{{- $common := .Values.storage.claim -}}
{{- range $name, $folder := include "quartet.folders" . | fromJson -}}
{{- if $folder.created -}}
{{- $own := get $.Values.storage (trimPrefix "storage." $folder.created) -}}
{{- $_ := set $claims $folder.claim (dict
  "path" $folder.created
  "size" $own.size
  "storageClassName" (default $common.storageClassName $own.storageClassName | default "")
  "accessModes" (default $common.accessModes $own.accessModes)
  "volumeName" (default "" $own.volumeName)) -}}
{{- end -}}
{{- end -}}
{{- $claims | toJson -}}
{{- end -}}

{{/* "true" if a pod mounts a ReadWriteOnce claim of the chart, which serves the pods of one node. Arguments: root and folders. */}}
{{- define "quartet.mountsDisk" -}}
{{- $created := include "quartet.createdClaims" .root | fromJson -}}
{{- $all := include "quartet.folders" .root | fromJson -}}
{{- $disks := list -}}
{{- range $name, $_ := .folders -}}
{{- $claim := get $created (get $all $name).claim -}}
{{- if and $claim (eq (join "," $claim.accessModes) "ReadWriteOnce") }}{{ $disks = append $disks $name }}{{ end -}}
{{- end -}}
{{- if $disks }}true{{ end -}}
{{- end -}}

{{/*
One volume for each distinct claim: some kubelets never start a pod with two volumes of one claim. Arguments: root and folders
({name: whether the pod only reads it}).
*/}}
{{- define "quartet.claimVolumes" -}}
{{- $all := include "quartet.folders" .root | fromJson -}}
{{- $folders := .folders -}}
{{- $volumes := dict -}}
{{- range $name := list "models" "data" "runs" -}}
{{- if hasKey $folders $name -}}
{{- $folder := get $all $name -}}
{{- $volume := default (dict "name" $folder.volume "readOnly" true) (get $volumes $folder.claim) -}}
{{- /* A volume of the chart stays writable, because the kubelet creates its subfolders. */ -}}
{{- $_ := set $volume "readOnly" (and $volume.readOnly $folder.readOnly (get $folders $name)) -}}
{{- $_ := set $volumes $folder.claim $volume -}}
{{- end -}}
{{- end -}}
{{- range $claim, $volume := $volumes }}
- name: {{ $volume.name }}
  persistentVolumeClaim:
    claimName: {{ $claim | quote }}
    {{- if $volume.readOnly }}
    readOnly: true
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Mounts of these folders below /quartet. Arguments: root and folders. */}}
{{- define "quartet.claimMounts" -}}
{{- $all := include "quartet.folders" .root | fromJson -}}
{{- $folders := .folders -}}
{{- $volumes := dict -}}
{{- range $name := list "models" "data" "runs" -}}
{{- if hasKey $folders $name -}}
{{- $folder := get $all $name -}}
{{- if not (hasKey $volumes $folder.claim) }}{{ $_ := set $volumes $folder.claim $folder.volume }}{{ end }}
- name: {{ get $volumes $folder.claim }}
  mountPath: /quartet/{{ $name }}
  {{- with $folder.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
  {{- if get $folders $name }}
  readOnly: true
  {{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Notes on the volumes: how they are filled, and what uninstall keeps. */}}
{{- define "quartet.storageNotes" -}}
{{- $fullname := include "quartet.fullname" . -}}
{{- $namespace := .Release.Namespace -}}
{{- $kept := keys (include "quartet.createdClaims" . | fromJson) | sortAlpha -}}
{{- if .Values.redis.enabled }}{{ $kept = append $kept (printf "data-%s-redis-0" $fullname) }}{{ end -}}
{{- if .Values.downloads.sources }}
Pods wait until these files are downloaded: {{ keys .Values.downloads.sources | sortAlpha | join ", " }}. To follow:

  kubectl --namespace {{ $namespace }} logs --follow --all-containers job/{{ include "quartet.downloadJob" . }}
{{ end -}}
{{- if .Values.loader.enabled }}
To copy the folders models and data of your machine into the volumes, and to remove the loader:

  tar --create models/* data/* | kubectl --namespace {{ $namespace }} exec --stdin deployment/{{ $fullname }}-loader -- \
    tar --extract --directory /quartet
  helm --namespace {{ $namespace }} upgrade {{ .Release.Name }} CHART --reuse-values --set loader.enabled=false
{{ end -}}
{{- range $component := include "quartet.components" . | fromJson -}}
{{- if gt (int $component.nodes) 1 -}}
{{- range $name, $claim := include "quartet.createdClaims" $ | fromJson -}}
{{- if not (has "ReadWriteMany" $claim.accessModes) }}
{{ $component.name }} has pods on {{ $component.nodes }} nodes, but the claim {{ $name }} is {{ join ", " $claim.accessModes }}. Pods on other nodes cannot start, unless
{{ $claim.path }}.accessModes is [ReadWriteMany].
{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $kept }}
`helm uninstall` keeps these claims, with models, checkpoints and the buffer of the run. To delete them as well, after the uninstall:

  kubectl --namespace {{ $namespace }} delete persistentvolumeclaim {{ join " " $kept }}
{{ end -}}
{{- end -}}
