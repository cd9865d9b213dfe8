{{- define "penstock.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The labels of the pods that compute, and of those that clients reach: the same ones without a router. */ -}}
{{- define "penstock.servers" -}}
{{ include "penstock.selector" . }}
{{- if .Values.router.enabled }}
app.kubernetes.io/component: server
{{- end }}
{{- end }}

{{- define "penstock.front" -}}
{{ include "penstock.selector" . }}
{{- if .Values.router.enabled }}
app.kubernetes.io/component: router
{{- end }}
{{- end }}

{{- define "penstock.kind" -}}
{{ ternary "StatefulSet" "Deployment" .Values.router.enabled }}
{{- end }}

{{- /* The parts of a pod's GPUs, each of which splits every layer that it has. */ -}}
{{- define "penstock.parts" -}}
{{ mul (.Values.flags.replicas | default 1) (index .Values.flags "pipeline-parallel-size" | default 1) }}
{{- end }}

{{- /* The most pods of servers that there will be. */ -}}
{{- define "penstock.most" -}}
{{ ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "penstock.claim" -}}
{{ .Values.weights.existing | default (include "penstock.name" .) }}
{{- end }}

{{- /* The arguments of a dict of flags: `--name=value`, a repeated flag for a list, and nothing for a flag that is off. */ -}}
{{- define "penstock.arguments" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- {{ printf "--%s" $name | quote }}
{{- end }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%v" $name . | quote }}
{{- end }}
{{- else if kindIs "float64" $value }}
- {{ printf "--%s=%s" $name (toJson $value) | quote }}
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end }}
