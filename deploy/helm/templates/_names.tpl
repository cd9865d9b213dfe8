{{- define "penstock.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Whether each server is a group of pods, whose ranks are on several nodes. */ -}}
{{- define "penstock.grouped" -}}
{{ if gt (int .Values.nodes.count) 1 }}true{{ end }}
{{- end }}

{{- /* The labels of the servers' pods, and of those that clients reach: the same ones without a router. */ -}}
{{- define "penstock.servers" -}}
{{ include "penstock.selector" . }}
{{- if or .Values.router.enabled (include "penstock.grouped" .) }}
app.kubernetes.io/component: server
{{- end }}
{{- end }}

{{- /* The labels of the pods that have only ranks. */ -}}
{{- define "penstock.nodes" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/component: node
{{- end }}

{{- define "penstock.front" -}}
{{- if .Values.router.enabled -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/component: router
{{- else -}}
{{ include "penstock.servers" . }}
{{- end }}
{{- end }}

{{- /* The object that makes the servers' pods. */ -}}
{{- define "penstock.workload" -}}
{{- if include "penstock.grouped" . }}
{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, name: {{ include "penstock.engines" . }}}
{{- else }}
{apiVersion: apps/v1, kind: {{ ternary "StatefulSet" "Deployment" .Values.router.enabled }}, name: {{ include "penstock.name" . }}}
{{- end }}
{{- end }}

{{- /* The headless service that names the servers' pods. A LeaderWorkerSet makes one of its own name. */ -}}
{{- define "penstock.engines" -}}
{{ include "penstock.name" . }}-engines
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
