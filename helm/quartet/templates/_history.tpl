{{/* Finished Jobs of earlier configs, whose pods hold the logs of their runs. */}}

{{/* The newest finished Jobs of the orchestrator in the cluster, as a list. Empty if Helm only renders. */}}
{{- define "quartet.finishedJobs" -}}
{{- $jobs := dict -}}
{{- range default list (lookup "batch/v1" "Job" .Release.Namespace "").items -}}
{{- $labels := default dict .metadata.labels -}}
{{- $finished := false -}}
{{- range default list (default dict .status).conditions -}}
{{- if and (has .type (list "Complete" "Failed")) (eq .status "True") }}{{ $finished = true }}{{ end -}}
{{- end -}}
{{- if and $finished
  (eq (get $labels "app.kubernetes.io/instance") $.Release.Name)
  (eq (get $labels "app.kubernetes.io/part-of") "quartet")
  (eq (get $labels "app.kubernetes.io/component") "orchestrator") -}}
{{- $_ := set $jobs (printf "%s %s" .metadata.creationTimestamp .metadata.name) . -}}
{{- end -}}
{{- end -}}
{{- $kept := list -}}
{{- range keys $jobs | sortAlpha | reverse -}}
{{- if lt (len $kept) (int $.Values.components.orchestrator.jobsHistoryLimit) }}{{ $kept = append $kept (get $jobs .) }}{{ end -}}
{{- end -}}
{{- $kept | toJson -}}
{{- end -}}

{{/*
A finished Job of the cluster as a manifest, without the labels and the selector that the cluster adds. `suspend` changes nothing for a
finished Job. It keeps a rollback that has to create the Job again from starting a second orchestrator, with the config of another run.
*/}}
{{- define "quartet.finishedJob" -}}
{{- $spec := omit (deepCopy .spec) "selector" -}}
{{- $_ := set $spec "suspend" true -}}
{{- $metadata := omit $spec.template.metadata "creationTimestamp" -}}
{{- $_ := set $metadata "labels" (omit $metadata.labels "controller-uid" "job-name" "batch.kubernetes.io/controller-uid" "batch.kubernetes.io/job-name") -}}
{{- $_ := set $spec.template "metadata" $metadata -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .metadata.name }}
  labels: {{- toYaml .metadata.labels | nindent 4 }}
spec: {{- toYaml $spec | nindent 2 }}
{{- end -}}

{{/* Name of the Job of the current config. */}}
{{- define "quartet.orchestratorJob" -}}
{{- $component := (include "quartet.components" . | fromJson).orchestrator -}}
{{- $unchangeable := print (include "quartet.pod" (dict "root" . "component" $component)) (include "quartet.podFailurePolicy" $component) -}}
{{- printf "%s-%s" $component.fullname ($unchangeable | sha256sum | trunc 8) -}}
{{- end -}}
