{{/* Filling of the volumes: downloads by a Job, and copies through a loader pod. */}}

{{/* Arguments of quartet.model_files.downloads for targets in some folders. Arguments: root and folders. */}}
{{- define "quartet.downloadArguments" -}}
{{- include "quartet.checkDownloads" .root -}}
{{- $arguments := list -}}
{{- $folders := .folders -}}
{{- range $target, $source := .root.Values.downloads.sources -}}
{{- if has (first (splitList "/" $target)) $folders }}{{ $arguments = append $arguments (printf "%s=%s" $target $source) }}{{ end -}}
{{- end -}}
{{- $arguments | toJson -}}
{{- end -}}

{{/* Init container of a component: waits for the downloads that it mounts. Arguments: root, component and folders. */}}
{{- define "quartet.waitForDownloads" -}}
{{- $component := .component -}}
{{- $arguments := include "quartet.downloadArguments" (dict "root" .root "folders" (keys .folders)) | fromJsonArray -}}
{{- if $arguments -}}
- name: wait-for-downloads
  image: {{ include "quartet.image" (dict "image" $component.image "version" .root.Chart.AppVersion "registry" .root.Values.imageRegistry) }}
  imagePullPolicy: {{ $component.image.pullPolicy }}
  workingDir: /quartet
  command: [tini, --, python, -m, quartet.model_files.downloads, --wait]
  args: {{- toYaml $arguments | nindent 4 }}
  env:
    - {name: HOME, value: /tmp}
  # Less than those of the component, so that a quota counts nothing more.
  resources: {{- include "quartet.otherResources" .root.Values.loader.resources | nindent 4 }}
  securityContext: {{- include "quartet.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- include "quartet.claimMounts" . | trim | nindent 4 }}
{{- end -}}
{{- end -}}

{{/*
Init container of the orchestrator: waits until the models and data of the config exist, by a download or a copy. Otherwise each start
without them would count towards backoffLimit. The other pods restart without a limit. Arguments: root, component and folders.
*/}}
{{- define "quartet.waitForFiles" -}}
{{- $component := .component -}}
{{- $paths := include "quartet.configuredPaths" .root | fromJsonArray -}}
{{- if and (eq $component.name "orchestrator") $paths -}}
- name: wait-for-files
  image: {{ include "quartet.image" (dict "image" $component.image "version" .root.Chart.AppVersion "registry" .root.Values.imageRegistry) }}
  imagePullPolicy: {{ $component.image.pullPolicy }}
  workingDir: /quartet
  command: [tini, --, sh, -ec]
  args:
    - for path; do until [ -e "$path" ]; do echo "waiting for $path"; sleep 10; done; done
    - wait-for-files
    {{- toYaml $paths | nindent 4 }}
  resources: {{- include "quartet.otherResources" .root.Values.loader.resources | nindent 4 }}
  securityContext: {{- include "quartet.containerSecurity" . | nindent 4 }}
  volumeMounts: {{- include "quartet.claimMounts" . | trim | nindent 4 }}
{{- end -}}
{{- end -}}

{{/* Paths of the config in the folders models and data, as a list. Data comes last, as in a copy of both folders. */}}
{{- define "quartet.configuredPaths" -}}
{{- $local := list -}}
{{- range include "quartet.readPaths" . | fromJsonArray -}}
{{- if regexMatch `^/quartet/(models|data)/` .absolute }}{{ $local = append $local .path }}{{ end -}}
{{- end -}}
{{- $local | uniq | toJson -}}
{{- end -}}

{{/* Models and data that the config names: [{key, path, absolute, model}]. `absolute` is the path in a pod, if it is a path. */}}
{{- define "quartet.readPaths" -}}
{{- $config := .Values.config -}}
{{- $absent := include "quartet.absentRoles" . | fromJsonArray -}}
{{- $models := list -}}
{{- range $role := list "actor" "critic" "reward" "reference" -}}
{{- $service := default dict (get $config $role) -}}
{{- if not (has $role $absent) -}}
{{- $models = append $models (list (printf "%s.model" $role) $service.model) -}}
{{- if eq $role "reward" -}}
{{- $models = append $models (list "reward.tokenizer" $service.tokenizer) -}}
{{- range $index, $part := default list $service.parts }}{{ $models = append $models (list (printf "reward.parts[%d].model" $index) $part.model) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $data := default dict $config.data -}}
{{- $files := list (list "data.prompts" $data.prompts) (list "data.validation" $data.validation) -}}
{{- $sets := dict "data.validation_set" (default dict $data.validation_set) -}}
{{- range $index, $set := default list $data.sets }}{{ $_ := set $sets (printf "data.sets[%d]" $index) $set }}{{ end -}}
{{- range $where, $set := $sets -}}
{{- range $key := list "path" "dataset" }}{{ $files = append $files (list (printf "%s.%s" $where $key) (get $set $key)) }}{{ end -}}
{{- end -}}
{{- $found := list -}}
{{- range $index, $entry := concat $models $files -}}
{{- with index $entry 1 -}}
{{- $absolute := hasPrefix "/" . | ternary . (printf "/quartet/%s" .) | clean -}}
{{- $found = append $found (dict "key" (index $entry 0) "path" . "absolute" $absolute "model" (lt $index (len $models))) -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/*
Refuse a model or a data file that no volume has. Pods reach neither the Hub nor files of your machine. The folder runs has policies of
earlier runs. Pods with a model do not mount the folder data.
*/}}
{{- define "quartet.checkPaths" -}}
{{- $mounts := list -}}
{{- range $own := append (values .Values.components) .Values.defaults -}}
{{- range default list (default dict $own).extraVolumeMounts }}{{ $mounts = append $mounts (printf "%s/" (trimSuffix "/" .mountPath)) }}{{ end -}}
{{- end -}}
{{- range include "quartet.readPaths" . | fromJsonArray -}}
{{- $absolute := printf "%s/" .absolute -}}
{{- $mounted := regexMatch (.model | ternary `^/quartet/(models|runs)/` `^/quartet/(models|data|runs)/`) $absolute -}}
{{- range $mounts }}{{ if hasPrefix . $absolute }}{{ $mounted = true }}{{ end }}{{ end -}}
{{- if not $mounted -}}
{{- $hub := and (regexMatch `^[\w.-]+/[\w.-]+$` .path) (or .model (hasSuffix ".dataset" .key)) -}}
{{- $source := "SOURCE" -}}
{{- if $hub }}{{ $source = printf "hf://%s%s" (.model | ternary "" "datasets/") .path }}{{ end -}}
{{- $target := printf "%s/%s" (.model | ternary "models" "data") (base .path) -}}
{{- fail (printf "config.%s: %q; expected a path on a volume of the chart, such as %s; set it to this path, and downloads.sources to {%s: %s} or copy the files with the loader. If the pods read it elsewhere, such as in their image, or on the Hub by extraEgress, set checks.paths false" .key .path $target $target $source) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Copies from S3 beside the targets. quartet.model_files.downloads renames them. Only the types of files that it takes, too. */}}
{{- define "quartet.copyFromS3" -}}
{{- $patterns := list "*.safetensors" "*.json" "*.jinja" "*.txt" "*.model" "*.tiktoken" "*.jsonl" "*.csv" "*.parquet" "*.arrow" -}}
{{- range $pattern := list "jsonl" "json" "csv" "parquet" "arrow" "txt" -}}
{{- $patterns = concat $patterns (list (printf "*.%s.gz" $pattern) (printf "*.%s.zst" $pattern)) -}}
{{- end -}}
{{- $filter := printf "--exclude '*'" -}}
{{- range $patterns }}{{ $filter = printf "%s --include '%s'" $filter . }}{{ end -}}
{{- range $target, $source := .Values.downloads.sources -}}
{{- if hasPrefix "s3://" $source -}}
{{- $partial := printf "%s/.%s.partial" (dir $target) (base $target) -}}
{{- if hasSuffix "/" $source }}
[ -e '{{ $target }}' ] || { mkdir -p '{{ dir $target }}'; aws s3 sync --no-progress {{ $filter }} '{{ $source }}' '{{ $partial }}'; }
{{- else }}
[ -e '{{ $target }}' ] || { mkdir -p '{{ dir $target }}'; aws s3 cp --no-progress '{{ $source }}' '{{ $partial }}'; }
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Scheduling of the pods that fill volumes: that of the actor, because a volume may be bound to the node of its first pod. They need no
GPU, so they take no runtime class. Arguments: root and folders.
*/}}
{{- define "quartet.fillingPlacement" -}}
{{- range include "quartet.components" .root | fromJson -}}
{{- if has "actor" .roles -}}
{{- $placement := pick . "priorityClassName" "nodeSelector" "tolerations" -}}
{{- $affinity := pick (default dict .affinity) "nodeAffinity" -}}
{{- if include "quartet.mountsDisk" $ -}}
{{- $affinity = include "quartet.colocated" (dict "root" $.root "affinity" $affinity) | fromJson -}}
{{- end -}}
{{- $_ := set $placement "affinity" $affinity -}}
{{- include "quartet.placement" $placement | trim -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fields of these pods besides containers and volumes. Arguments: root and folders. */}}
{{- define "quartet.fillingPod" -}}
serviceAccountName: {{ include "quartet.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- include "quartet.podSecurity" (dict "root" .root "user" 10001) | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "quartet.fillingPlacement" . }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Image of the pods that fill volumes. */}}
{{- define "quartet.fillingImage" -}}
{{- mergeOverwrite (deepCopy .Values.image) (deepCopy (default dict .Values.downloads.image)) | toJson -}}
{{- end -}}

{{/* Name of the Job of the current downloads. */}}
{{- define "quartet.downloadJob" -}}
{{- printf "%s-download-%s" (include "quartet.fullname" .) (include "quartet.downloadSpec" . | sha256sum | trunc 8) -}}
{{- end -}}

{{/* Fields of the Job that cannot be changed. */}}
{{- define "quartet.downloadSpec" -}}
{{- $pod := dict "root" . "folders" (dict "models" false "data" false) "image" (include "quartet.fillingImage" . | fromJson) -}}
{{- include "quartet.podFailurePolicy" (dict "name" "download") }}
template: {{- include "quartet.downloadPod" $pod | nindent 2 }}
{{- end -}}

{{/* Pod of the Job. Arguments: root, folders and image. */}}
{{- define "quartet.downloadPod" -}}
{{- $root := .root -}}{{- $downloads := .root.Values.downloads -}}
metadata:
  labels:
    {{- include "quartet.selector" $root | nindent 4 }}
    app.kubernetes.io/component: download
spec:
  {{- include "quartet.fillingPod" . | nindent 2 }}
  restartPolicy: Never
  terminationGracePeriodSeconds: 10
  {{- with include "quartet.copyFromS3" $root | trim }}
  initContainers:
    - name: copy-from-s3
      image: {{ include "quartet.image" (dict "image" $downloads.s3Image "version" "" "registry" $root.Values.imageRegistry) }}
      imagePullPolicy: {{ $downloads.s3Image.pullPolicy }}
      workingDir: /quartet
      command: [sh, -ec]
      args:
        - |
          {{- . | nindent 10 }}
      env:
        - {name: HOME, value: /tmp}
        {{- if $downloads.existingSecret }}
        - {name: AWS_SHARED_CREDENTIALS_FILE, value: /run/secrets/downloads/aws_credentials}
        {{- end }}
        {{- with $downloads.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- include "quartet.downloadContainer" $ | nindent 6 }}
  {{- end }}
  containers:
    - name: download
      image: {{ include "quartet.image" (dict "image" .image "version" $root.Chart.AppVersion "registry" $root.Values.imageRegistry) }}
      imagePullPolicy: {{ .image.pullPolicy }}
      workingDir: /quartet
      command: [tini, --, python, -m, quartet.model_files.downloads]
      args: {{- include "quartet.downloadArguments" (dict "root" $root "folders" (keys .folders)) | fromJsonArray | toYaml | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
        {{- with $downloads.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- include "quartet.downloadContainer" . | nindent 6 }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 10Gi}
    {{- with $downloads.existingSecret }}
    - name: secrets
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- include "quartet.claimVolumes" . | trim | nindent 4 }}
{{- end -}}

{{- define "quartet.downloadContainer" -}}
resources: {{- include "quartet.otherResources" .root.Values.downloads.resources | nindent 2 }}
securityContext: {{- include "quartet.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if .root.Values.downloads.existingSecret }}
  - {name: secrets, mountPath: /run/secrets/downloads, readOnly: true}
  {{- end }}
  {{- include "quartet.claimMounts" . | trim | nindent 2 }}
{{- end -}}

{{/* Refuse sources that quartet.model_files.downloads or a shell would misread. A source that may contain a password is not quoted. */}}
{{- define "quartet.checkDownloads" -}}
{{- $folders := include "quartet.folders" . | fromJson -}}
{{- $targets := keys (default dict .Values.downloads.sources) -}}
{{- range $target, $source := .Values.downloads.sources -}}
{{- if not (regexMatch `^(models|data)(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$` $target) -}}
{{- fail (printf "downloads.sources: target %q; expected a path below models or data, such as models/policy, of letters, digits, dots, - and _; correct it" $target) -}}
{{- end -}}
{{- if regexMatch `[?@]` (regexReplaceAll `^hf://[^?@]*@[\w.-]+` $source "") -}}
{{- fail (printf "downloads.sources: the source of %s contains a user or a query, and may be a credential; expected an address without; store the credential in a Secret, and set downloads.existingSecret" $target) -}}
{{- end -}}
{{- if not (or
  (regexMatch `^hf://([\w.-]+/[\w.-]+|datasets/[\w.-]+/[\w.-]+)(@[\w.-]+)?$` $source)
  (regexMatch `^hf://datasets/[\w.-]+/[\w.-]+(@[\w.-]+)?/[\w./-]+$` $source)
  (regexMatch `^https://[A-Za-z0-9.-]+(:[0-9]+)?/[\w.~%/+=,-]+(#sha256=[0-9a-f]{64})?$` $source)
  (regexMatch `^s3://[a-z0-9.-]+/[\w./=+-]+$` $source)) -}}
{{- fail (printf "downloads.sources: %s: %q; expected hf://OWNER/NAME[@REVISION], hf://datasets/OWNER/NAME[@REVISION][/FILE], https://HOST/FILE[#sha256=DIGEST], s3://BUCKET/FILE or s3://BUCKET/FOLDER/; correct it" $target $source) -}}
{{- end -}}
{{- $port := regexFind `^https://[^/]+:[0-9]+/` $source | regexFind `[0-9]+/$` | trimSuffix "/" -}}
{{- $allowed := or (not $port) (not $.Values.networkPolicy.enabled) -}}
{{- range $.Values.downloads.egress -}}
{{- if not .ports }}{{ $allowed = true }}{{ end -}}
{{- range .ports }}{{ if eq (toString .port) $port }}{{ $allowed = true }}{{ end }}{{ end -}}
{{- end -}}
{{- if not $allowed -}}
{{- fail (printf "downloads.sources: %s: port %s, which no rule of downloads.egress allows; expected port 443; add a rule to downloads.egress" $target $port) -}}
{{- end -}}
{{- range $targets -}}
{{- if hasPrefix (printf "%s/" .) $target -}}
{{- fail (printf "downloads.sources: %s is inside %s, which is another target; expected separate folders; choose another one" $target .) -}}
{{- end -}}
{{- end -}}
{{- $folder := first (splitList "/" $target) -}}
{{- $path := (get $folders $folder).created -}}
{{- if and $path (eq (default $.Values.storage.claim.accessModes (get $.Values.storage (trimPrefix "storage." $path)).accessModes | join ",") "ReadOnlyMany") -}}
{{- fail (printf "%s.accessModes: ReadOnlyMany, but downloads.sources writes %s; expected ReadWriteOnce or ReadWriteMany; change it, or remove the download" $path $target) -}}
{{- end -}}
{{- end -}}
{{- end -}}
