{{/*
What happens when a node is drained, a pod is preempted, or a pod is deleted: ADR 65. Every step that is committed survives, so evictions
are allowed, one pod of a component at a time.
*/}}

{{/* Budget of a component. Empty if it has none. */}}
{{- define "quartet.disruptionBudget" -}}
{{- $budget := .podDisruptionBudget -}}
{{- $unavailable := int $budget.maxUnavailable -}}
{{- if not $budget.enabled -}}
{{- else if ne (default "" .workload) "Job" -}}
maxUnavailable: {{ $unavailable }}
# Unhealthy pods may always be evicted.
unhealthyPodEvictionPolicy: AlwaysAllow
{{- else if eq $unavailable 0 -}}
# The controller cannot count maxUnavailable for the pod of a Job, and would refuse every eviction. So there is a budget only if that
# is intended.
minAvailable: 1
unhealthyPodEvictionPolicy: AlwaysAllow
{{- end -}}
{{- end -}}

{{/* A pod that is evicted, preempted, or stopped by SIGTERM (status 143) is replaced, and does not count as a failure of the Job. Argument: the container. */}}
{{- define "quartet.podFailurePolicy" -}}
podFailurePolicy:
  rules:
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    - action: Ignore
      onExitCodes: {containerName: {{ .name }}, operator: In, values: [143]}
{{- end -}}
