{{- /* The container of a server, or of the router in front of them. Takes a dict of `root`, the chart's context, and `isRouter`. */ -}}
{{- define "penstock.container" -}}
{{- $values := .root.Values }}
{{- $gpus := ternary 0 (int $values.gpus) .isRouter }}
{{- $flags := ternary $values.router.flags $values.flags .isRouter }}
{{- $isGrouped := and (gt (int $values.nodes.count) 1) (not .isRouter) }}
{{- $workload := include "penstock.workload" .root | fromYaml }}
{{- $protocol := ternary "http" "https" (empty $values.router.tls.secret) }}
- name: penstock
  image: {{ printf "%s:%s" $values.image.repository $values.image.tag | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  args:
    {{- if .isRouter }}
    - route
    {{- end }}
    - --hostname=0.0.0.0 # Kubernetes sets HOSTNAME to the pod's name
    - --port=8080 # the user need not be allowed to listen on port 80
    - --graceful-termination-timeout={{ $values.gracefulTerminationSeconds }}
    {{- with $values.model }}
    - {{ printf "--model-id=%s" . | quote }}
    {{- end }}
    {{- if $gpus }}
    - --num-shard={{ div (mul $gpus $values.nodes.count) (include "penstock.parts" .root) }}
    {{- end }}
    {{- if $values.apiKeys.secret }}
    - --api-key-file=/etc/penstock/api-keys
    {{- end }}
    {{- if $isGrouped }}
    - --node-secret-file=/etc/penstock-node/node-secret
    {{- range $number := until (int $values.nodes.count) }}
    - --ranks-on=node://$(POD_NAME){{ ternary (printf "-%d" $number) "" (gt $number 0) }}.{{ include "penstock.engines" $.root }}.{{ $.root.Release.Namespace }}.svc:7000
    {{- end }}
    {{- if $gpus }}
    - --unencrypted-gpus
    {{- end }}
    {{- end }}
    {{- if $values.router.enabled }}
    - --engine-secret-file=/etc/penstock-engine/secret/engine-secret
    {{- if .isRouter }}
    {{- range $number := until (int (include "penstock.most" .root)) }}
    - --replica={{ $protocol }}://{{ $workload.name }}-{{ $number }}.{{ include "penstock.engines" $.root }}.{{ $.root.Release.Namespace }}.svc:3001
    {{- end }}
    {{- else }}
    - --engine-listen=0.0.0.0:3001
    {{- end }}
    {{- if $values.router.tls.secret }}
    - --engine-tls-cert=/etc/penstock-engine/tls/tls.crt
    - --engine-tls-key=/etc/penstock-engine/tls/tls.key
    - --engine-tls-ca=/etc/penstock-engine/tls/ca.crt
    {{- else }}
    - --engine-without-tls
    {{- end }}
    {{- end }}
    {{- include "penstock.arguments" $flags | trim | nindent 4 }}
  {{- if or $values.hubToken.secret $values.env $isGrouped }}
  env:
    {{- if $isGrouped }}
    - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    {{- end }}
    {{- with $values.hubToken.secret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: HF_TOKEN}}
    {{- end }}
    {{- with $values.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  ports:
    - {name: http, containerPort: 8080}
    {{- if and $values.router.enabled (not .isRouter) }}
    - {name: engine, containerPort: 3001}
    {{- end }}
  # docs/operations.md, "Health". The port answers once the model is loaded, or once the router has found a server.
  startupProbe: {httpGet: {path: /health/live, port: http}, periodSeconds: 5, failureThreshold: {{ div (add $values.startSeconds 4) 5 }}}
  readinessProbe: {httpGet: {path: /health/ready, port: http}, periodSeconds: 5}
  livenessProbe: {httpGet: {path: /health/live, port: http}, periodSeconds: 10, timeoutSeconds: 5}
  lifecycle: {preStop: {sleep: {seconds: {{ $values.endpointRemovalSeconds }}}}}
  {{- if .isRouter }}
  resources: {{- toYaml $values.router.resources | nindent 4 }}
  {{- else if $isGrouped }}
  resources: {{- toYaml $values.nodes.serverResources | nindent 4 }}
  {{- else }}
  resources: {{- include "penstock.ranks" .root | nindent 4 }}
  {{- end }}
  securityContext: {{- include "penstock.privileges" . | nindent 4 }}
  volumeMounts:
    - {name: data, mountPath: /data}
    - {name: tmp, mountPath: /tmp}
    {{- if and (gt $gpus 1) (not $isGrouped) }}
    - {name: shared-memory, mountPath: /dev/shm}
    {{- end }}
    {{- if eq $values.weights.kind "image" }}
    - {name: model, mountPath: /model, readOnly: true}
    {{- end }}
    {{- if $values.apiKeys.secret }}
    - {name: api-keys, mountPath: /etc/penstock, readOnly: true}
    {{- end }}
    {{- if $values.router.enabled }}
    - {name: engine-secret, mountPath: /etc/penstock-engine/secret, readOnly: true}
    {{- if $values.router.tls.secret }}
    - {name: engine-tls, mountPath: /etc/penstock-engine/tls, readOnly: true}
    {{- end }}
    {{- end }}
    {{- if $isGrouped }}
    - {name: node-secret, mountPath: /etc/penstock-node, readOnly: true}
    {{- end }}
{{- end }}

{{- /* The container that has ranks of a server, in its own pod or beside the server. */ -}}
{{- define "penstock.node" -}}
{{- $values := .root.Values }}
- name: node
  image: {{ printf "%s:%s" $values.image.repository $values.image.tag | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  args:
    - node
    - --listen=$(POD_IP):7000
    - --secret-file=/etc/penstock-node/node-secret
    - --json-output
    {{- if $values.gpus }}
    - --unencrypted-gpus
    {{- end }}
  env:
    - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    {{- with $values.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if .isSidecar }}
  restartPolicy: Always
  {{- else }}
  # The pods of a group stop together. The server needs its ranks until its last request has ended.
  lifecycle: {preStop: {sleep: {seconds: {{ add $values.endpointRemovalSeconds $values.gracefulTerminationSeconds }}}}}
  {{- end }}
  resources: {{- include "penstock.ranks" .root | nindent 4 }}
  securityContext: {{- include "penstock.privileges" . | nindent 4 }}
  volumeMounts:
    - {name: data, mountPath: /data}
    - {name: tmp, mountPath: /tmp}
    {{- if gt (int $values.gpus) 1 }}
    - {name: shared-memory, mountPath: /dev/shm}
    {{- end }}
    {{- if eq $values.weights.kind "image" }}
    - {name: model, mountPath: /model, readOnly: true}
    {{- end }}
    - {name: node-secret, mountPath: /etc/penstock-node, readOnly: true}
{{- end }}

{{- /* The resources of a container that has ranks. */ -}}
{{- define "penstock.ranks" -}}
{{- $resources := deepCopy .Values.resources }}
{{- with int .Values.gpus }}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict $.Values.gpuResource .)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "penstock.privileges" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
