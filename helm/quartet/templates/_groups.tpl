{{/* Worker groups: components with several nodes. torchrun starts the ranks of each pod, and rank 0 serves the calls. */}}

{{/* Name of the Service that gives the pods of a group their DNS names. The controller of a LeaderWorkerSet creates it. */}}
{{- define "quartet.groupService" -}}
{{ .fullname }}-nodes
{{- end -}}

{{/* Variables that name the node of a pod. A LeaderWorkerSet sets its own. */}}
{{- define "quartet.groupEnvironment" -}}
{{- if eq .workload "StatefulSet" -}}
- name: NODE_RANK
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
{{- end -}}
{{- end -}}

{{/*
Command of a pod of a group. Arguments: root and component. The rendezvous is static, so rank 0 is always in the first pod, where
the Service points. Ranks that see another one end do the same, and each torchrun starts its ranks again, at most maxRestarts times.
*/}}
{{- define "quartet.torchrun" -}}
{{- $component := .component -}}{{- $groups := .root.Values.workerGroups -}}
{{- $rank := "$(NODE_RANK)" -}}
{{- $address := printf "%s-0.%s" $component.fullname (include "quartet.groupService" $component) -}}
{{- if eq $component.workload "LeaderWorkerSet" }}{{ $rank = "$(LWS_WORKER_INDEX)" }}{{ $address = "$(LWS_LEADER_ADDRESS)" }}{{ end -}}
{{- list "tini" "--" "torchrun" (printf "--nnodes=%d" (int $component.nodes)) (printf "--nproc-per-node=%d" (int $component.ranks))
  (printf "--node-rank=%s" $rank) (printf "--master-addr=%s" $address) (printf "--master-port=%d" (int $groups.port))
  (printf "--max-restarts=%d" (int $groups.maxRestarts)) "--module" "quartet.services" | toYaml -}}
{{- end -}}

{{/* Probe of a pod of a StatefulSet. Only the first pod serves calls; the probes of the others succeed. */}}
{{- define "quartet.groupProbe" -}}
exec: {command: [sh, -c, 'test "$NODE_RANK" != 0 || exec python -m quartet.rpc.health 127.0.0.1:9101']}
{{- end -}}
