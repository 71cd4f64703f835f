{{/* Names, labels and images. */}}

{{- define "quartet.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Selector labels. They never change for a release. */}}
{{- define "quartet.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "quartet.labels" -}}
{{ include "quartet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: quartet
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "quartet.serviceAccount" -}}
{{- default (include "quartet.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{/*
Image reference. Arguments: the merged image settings, the default tag, and the registry of all images. The digests of a released chart
apply to the repository that they name.
*/}}
{{- define "quartet.image" -}}
{{- $image := .image -}}
{{- $name := $image.repository -}}
{{- with default $image.registry .registry }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end -}}
{{- $digest := $image.digest -}}
{{- if not (or $digest $image.tag) }}{{ $digest = dig $image.repository (default "" $image.variant) "" (default dict $image.digests) }}{{ end -}}
{{- if $digest -}}
{{- printf "%s@%s" $name $digest -}}
{{- else -}}
{{- printf "%s:%s%s" $name (default .version $image.tag) (empty $image.variant | ternary "" (printf "-%s" $image.variant)) -}}
{{- end -}}
{{- end -}}

{{/* DNS names of a Service inside the cluster. Arguments: root and name. */}}
{{- define "quartet.serviceNames" -}}
{{- $namespace := .root.Release.Namespace -}}
{{ list .name (printf "%s.%s" .name $namespace) (printf "%s.%s.svc" .name $namespace) (printf "%s.%s.svc.cluster.local" .name $namespace) | toJson }}
{{- end -}}
