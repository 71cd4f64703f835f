{{/* Pod of a component. Arguments: root, component and part ("", or leader or worker of a LeaderWorkerSet). */}}
{{- define "quartet.pod" -}}
{{- $root := .root -}}{{- $component := .component -}}{{- $part := default "" .part -}}
{{- $gateway := eq $component.name "gateway" -}}
{{- $folders := include "quartet.mountedFolders" $component | fromJson -}}
metadata:
  labels:
    {{- include "quartet.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $component.name }}
    {{- if eq $component.workload "Deployment" }}
    {{- with include "quartet.queueLabel" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with $component.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "quartet.configData" $root | sha256sum }}
    {{- with include "quartet.gangAnnotations" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $component.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "quartet.serviceAccount" $root | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if eq $component.workload "Job" }}
  restartPolicy: Never
  {{- end }}
  terminationGracePeriodSeconds: {{ $component.terminationGracePeriodSeconds }}
  securityContext: {{- include "quartet.podSecurity" (dict "root" $root "user" 10001) | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "quartet.scheduling" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- $filling := dict "root" $root "component" $component "folders" $folders }}
  {{- with printf "%s\n%s" (include "quartet.waitForDownloads" $filling) (include "quartet.waitForFiles" $filling) | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ $component.name }}
      image: {{ include "quartet.image" (dict "image" $component.image "version" $root.Chart.AppVersion "registry" $root.Values.imageRegistry) }}
      imagePullPolicy: {{ $component.image.pullPolicy }}
      workingDir: /quartet
      command: {{- include "quartet.command" . | nindent 8 }}
      args: {{- include "quartet.arguments" $component | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
        {{- if not $root.Values.security.fixedUsers }}
        # The user that the platform assigns has no name.
        - {name: USER, value: quartet}
        {{- end }}
        {{- with include "quartet.groupEnvironment" $component }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $component.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- if $gateway }}
        - {name: http, containerPort: 8080}
        {{- else }}
        - {name: grpc, containerPort: 50051}
        - {name: metrics, containerPort: 9100}
        - {name: health, containerPort: 9101}
        {{- if has $component.name (include "quartet.agentEndpoints" $root | fromJsonArray) }}
        - {name: policy, containerPort: 8090}
        {{- end }}
        {{- end }}
        {{- if gt (int $component.nodes) 1 }}
        - {name: rendezvous, containerPort: {{ int $root.Values.workerGroups.port }}}
        {{- end }}
      {{- if ne $part "worker" }}
      {{- range $kind := list "startup" "readiness" "liveness" }}
      {{ $kind }}Probe:
        {{- if and $gateway (eq $kind "liveness") }}
        # At its connection limit the gateway responds with 503 to every request. A restart would not help.
        tcpSocket: {port: 8080}
        {{- else if $gateway }}
        # The kubelet uses the address of the pod, which the gateway does not accept as a host name.
        httpGet:
          path: /healthz
          port: 8080
          scheme: {{ $root.Values.security.tls.enabled | ternary "HTTPS" "HTTP" }}
          httpHeaders: [{name: Host, value: localhost}]
        {{- else if eq $component.workload "StatefulSet" }}
        {{- include "quartet.groupProbe" . | nindent 8 }}
        {{- else }}
        grpc: {port: 9101}
        {{- end }}
        {{- toYaml (index $component.probes $kind) | nindent 8 }}
      {{- end }}
      {{- end }}
      resources: {{- include "quartet.resources" . | nindent 8 }}
      securityContext: {{- include "quartet.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/quartet, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if $root.Values.security.tls.enabled }}
        - {name: certificates, mountPath: /certificates/{{ $component.process }}, readOnly: true}
        {{- end }}
        {{- if include "quartet.secretSources" . }}
        - {name: secrets, mountPath: /run/secrets/quartet, readOnly: true}
        {{- end }}
        {{- with include "quartet.claimMounts" (dict "root" $root "folders" $folders) | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if $component.sharedMemory }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- if include "quartet.nodeDirectory" . }}
        - {name: sockets, mountPath: /quartet/sockets}
        {{- end }}
        {{- with $component.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "quartet.fullname" $root }}-config}
    - name: tmp
      emptyDir: {sizeLimit: {{ $component.temporarySpace }}}
    {{- if $root.Values.security.tls.enabled }}
    - name: certificates
      secret:
        secretName: {{ include "quartet.certificateSecret" (dict "root" $root "process" $component.process) }}
        defaultMode: 0440
    {{- end }}
    {{- with include "quartet.secretSources" . | trim }}
    - name: secrets
      projected:
        defaultMode: 0440
        sources: {{- . | nindent 10 }}
    {{- end }}
    {{- with include "quartet.claimVolumes" (dict "root" $root "folders" $folders) | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $component.sharedMemory }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ . }}}
    {{- end }}
    {{- with include "quartet.nodeDirectory" . }}
    - name: sockets
      hostPath: {path: {{ . | quote }}, type: DirectoryOrCreate}
    {{- end }}
    {{- with $component.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Folder of the node through which this component shares weights. Arguments: root and component. */}}
{{- define "quartet.nodeDirectory" -}}
{{- $generator := (include "quartet.components" .root | fromJson).generator -}}
{{- if and $generator (or .component.generating (has "actor" .component.roles)) }}{{ $generator.nodeDirectory }}{{ end -}}
{{- end -}}

{{/* Command. It names tini explicitly, so that it does not depend on the entrypoint of the image. Arguments: root and component. */}}
{{- define "quartet.command" -}}
{{- $component := .component -}}
{{- if gt (int $component.nodes) 1 -}}
{{- include "quartet.torchrun" . -}}
{{- else -}}
{{- list "tini" "--" "python" "-m" (eq $component.name "gateway" | ternary "quartet.gateway" "quartet.services") | toYaml -}}
{{- end -}}
{{- end -}}

{{- define "quartet.arguments" -}}
{{- $arguments := list "--config" "/etc/quartet/config.yaml" "--config" "/etc/quartet/deployment.yaml" -}}
{{- if ne .name "gateway" -}}
{{- $arguments = concat .roles $arguments (list "--set" (printf "timeouts.drain_seconds=%d" (int .drainSeconds))) -}}
{{- end -}}
{{- toYaml $arguments -}}
{{- end -}}

{{/* Folders that a component needs: {folder: whether it only reads it}. */}}
{{- define "quartet.mountedFolders" -}}
{{- $folders := dict -}}
{{- if or .model .playing (eq .name "orchestrator") }}{{ $_ := set $folders "models" true }}{{ end -}}
{{- if eq .name "orchestrator" }}{{ $_ := set $folders "data" true }}{{ end -}}
{{- $writes := or .caching (and .usesBuffer (not .generating)) -}}
{{- if or $writes .readsRuns }}{{ $_ := set $folders "runs" (not $writes) }}{{ end -}}
{{- toJson $folders -}}
{{- end -}}

{{/* Secrets that a component needs, as files. Arguments: root and component. */}}
{{- define "quartet.secretSources" -}}
{{- $root := .root -}}{{- $component := .component -}}
{{- $fullname := include "quartet.fullname" $root -}}
{{- $sources := list -}}
{{- if $root.Values.security.rpcToken.enabled -}}
{{- $token := $root.Values.security.rpcToken -}}
{{- $sources = append $sources (dict "name" (default (printf "%s-rpc-token" $fullname) $token.existingSecret) "items" (list (dict "key" $token.key "path" "rpc_token"))) -}}
{{- end -}}
{{- $password := include "quartet.redisSecret" $root -}}
{{- if and $component.usesBuffer $password -}}
{{- $sources = append $sources (dict "name" $password "items" (list (dict "key" (include "quartet.redisSecretKey" $root) "path" "redis_password"))) -}}
{{- end -}}
{{- if eq $component.name "gateway" -}}
{{- $tokens := $root.Values.gateway.tokens -}}
{{- $items := list (dict "key" $tokens.operatorKey "path" "gateway_token") (dict "key" $tokens.viewerKey "path" "gateway_viewer_token") -}}
{{- $sources = append $sources (dict "name" (include "quartet.gatewaySecret" $root) "items" $items) -}}
{{- end -}}
{{- if and $component.generating (include "quartet.hasTraffic" $root) -}}
{{- $keys := $root.Values.traffic.keys -}}
{{- $items := list (dict "key" $keys.operatorKey "path" "traffic_operators") (dict "key" $keys.viewerKey "path" "traffic_viewers") -}}
{{- $sources = append $sources (dict "name" (include "quartet.trafficSecret" $root) "items" $items) -}}
{{- end -}}
{{- range $sources }}
- secret: {{- toYaml . | nindent 4 }}
{{- end -}}
{{- end -}}

{{- define "quartet.gatewaySecret" -}}
{{- default (printf "%s-gateway-tokens" (include "quartet.fullname" .)) .Values.gateway.tokens.existingSecret -}}
{{- end -}}

{{- define "quartet.trafficSecret" -}}
{{- default (printf "%s-traffic-keys" (include "quartet.fullname" .)) .Values.traffic.keys.existingSecret -}}
{{- end -}}

{{/* Scheduling of a pod. */}}
{{- define "quartet.placement" -}}
{{- range $key := list "runtimeClassName" "priorityClassName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $ $key }}
{{ $key }}:{{ kindIs "string" . | ternary (printf " %q" .) (toYaml . | nindent 2) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Security context for Pod Security "restricted", with a read-only root file system. Arguments: root and the user id. */}}
{{- define "quartet.podSecurity" -}}
runAsNonRoot: true
{{- if .root.Values.security.fixedUsers }}
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "quartet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
