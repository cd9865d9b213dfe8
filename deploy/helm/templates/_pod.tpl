{{- /* The pod of the servers, of the router in front of them, or of a node that has ranks of a server. Takes a dict of `root`, the
chart's context, and `labels`, the name of the template of its labels. */ -}}
{{- define "penstock.pod" -}}
{{- $values := .root.Values }}
{{- $isNode := eq .labels "penstock.nodes" }}
{{- $isRouter := and $values.router.enabled (eq .labels "penstock.front") }}
{{- $isGrouped := and (gt (int $values.nodes.count) 1) (not $isRouter) }}
{{- $gpus := ternary 0 (int $values.gpus) $isRouter }}
metadata:
  labels: {{- merge (dict) (include .labels .root | fromYaml) $values.podLabels | toYaml | nindent 4 }}
  {{- with $values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add $values.endpointRemovalSeconds $values.gracefulTerminationSeconds 15 }}
  {{- if and $isGrouped (not $isNode) }}
  initContainers: # a sidecar: it starts before the server and ends after it
    {{- include "penstock.node" (dict "root" .root "isSidecar" true) | trim | nindent 4 }}
  {{- end }}
  containers:
    {{- if $isNode }}
    {{- include "penstock.node" (dict "root" .root "isSidecar" false) | trim | nindent 4 }}
    {{- else }}
    {{- include "penstock.container" (dict "root" .root "isRouter" $isRouter) | trim | nindent 4 }}
    {{- end }}
  volumes:
    {{- if eq $values.weights.kind "claim" }}
    - {name: data, persistentVolumeClaim: {claimName: {{ include "penstock.claim" .root | quote }}}}
    {{- else }}
    - {name: data, emptyDir: {}}
    {{- end }}
    - {name: tmp, emptyDir: {}}
    {{- if gt $gpus 1 }}
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: 1Gi}} # for NCCL
    {{- end }}
    {{- if eq $values.weights.kind "image" }}
    - {name: model, image: {reference: {{ $values.weights.image | quote }}, pullPolicy: {{ $values.image.pullPolicy }}}}
    {{- end }}
    {{- if not $isNode }}
    {{- with $values.apiKeys.secret }}
    - {name: api-keys, secret: {secretName: {{ . | quote }}, items: [{key: api-keys, path: api-keys}], defaultMode: 0440}}
    {{- end }}
    {{- if $values.router.enabled }}
    - {name: engine-secret, secret: {secretName: {{ $values.router.secret | quote }}, items: [{key: engine-secret, path: engine-secret}], defaultMode: 0440}}
    {{- with $values.router.tls.secret }}
    - {name: engine-tls, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
    {{- end }}
    {{- end }}
    {{- end }}
    {{- if $isGrouped }}
    - {name: node-secret, secret: {secretName: {{ $values.nodes.secret | quote }}, items: [{key: node-secret, path: node-secret}], defaultMode: 0440}}
    {{- end }}
  {{- if not $isRouter }}
  {{- with $values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- $tolerations := $values.tolerations }}
  {{- if and $values.gpuTaint $gpus }}
  {{- $tolerations = append $tolerations (dict "key" $values.gpuTaint "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- with $tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
