{{- /* The pod of the servers, or that of the router in front of them. Takes a dict of `root`, the chart's context, and `isRouter`. */ -}}
{{- define "penstock.pod" -}}
{{- $values := .root.Values }}
{{- $gpus := ternary 0 (int $values.gpus) .isRouter }}
{{- $flags := ternary $values.router.flags $values.flags .isRouter }}
{{- $protocol := ternary "http" "https" (empty $values.router.tls.secret) }}
metadata:
  labels: {{- merge (dict) (include (ternary "penstock.front" "penstock.servers" .isRouter) .root | fromYaml) $values.podLabels | toYaml | nindent 4 }}
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
  containers:
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
        - --num-shard={{ div $gpus (include "penstock.parts" .root) }}
        {{- end }}
        {{- if $values.apiKeys.secret }}
        - --api-key-file=/etc/penstock/api-keys
        {{- end }}
        {{- if $values.router.enabled }}
        - --engine-secret-file=/etc/penstock-engine/secret/engine-secret
        {{- if .isRouter }}
        {{- range $number := until (int (include "penstock.most" .root)) }}
        - --replica={{ $protocol }}://{{ include "penstock.name" $.root }}-{{ $number }}.{{ include "penstock.name" $.root }}-engines.{{ $.root.Release.Namespace }}.svc:3001
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
        {{- include "penstock.arguments" $flags | trim | nindent 8 }}
      {{- if or $values.hubToken.secret $values.env }}
      env:
        {{- with $values.hubToken.secret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: HF_TOKEN}}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
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
      {{- $resources := deepCopy (ternary $values.router.resources $values.resources .isRouter) }}
      {{- if $gpus }}
      {{- $resources = mergeOverwrite $resources (dict "limits" (dict $values.gpuResource $gpus)) }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: data, mountPath: /data}
        - {name: tmp, mountPath: /tmp}
        {{- if gt $gpus 1 }}
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
    {{- with $values.apiKeys.secret }}
    - {name: api-keys, secret: {secretName: {{ . | quote }}, items: [{key: api-keys, path: api-keys}], defaultMode: 0440}}
    {{- end }}
    {{- if $values.router.enabled }}
    - {name: engine-secret, secret: {secretName: {{ $values.router.secret | quote }}, items: [{key: engine-secret, path: engine-secret}], defaultMode: 0440}}
    {{- with $values.router.tls.secret }}
    - {name: engine-tls, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
    {{- end }}
    {{- end }}
  {{- if not .isRouter }}
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
