{{/* Name of every object. The pods' names, with a hyphen and a number behind it, have to be DNS labels. */}}
{{- define "paceline.name" -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if not (contains "paceline" $name) }}{{ $name = printf "%s-paceline" $name }}{{ end -}}
{{- if gt (len $name) 50 }}{{ $name = printf "%s-%s" ($name | trunc 41 | trimSuffix "-") (sha256sum $name | trunc 8) }}{{ end -}}
{{- $name -}}
{{- end -}}

{{- define "paceline.labels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: shard
{{- end -}}

{{/* A value as text: whole numbers of a file with values are floating-point numbers here, 1e+06 from a million on. */}}
{{- define "paceline.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* Labels or annotations of the values, each one a string. */}}
{{- define "paceline.strings" -}}
{{- range $key, $value := . }}
{{ $key | quote }}: {{ include "paceline.text" $value | quote }}
{{- end }}
{{- end -}}

{{/* Metadata of an object: dict "root" $ "name" NAME, and "annotations" and "labels" of its own. */}}
{{- define "paceline.metadata" -}}
name: {{ .name }}
labels:
  {{- include "paceline.labels" .root | nindent 2 }}
  {{- with include "paceline.strings" .labels | trim }}{{ . | nindent 2 }}{{ end }}
{{- $annotations := merge (dict) (.annotations | default dict) .root.Values.annotations }}
{{- if $annotations }}
annotations:
  {{- with include "paceline.strings" $annotations | trim }}{{ . | nindent 2 }}{{ end }}
{{- end }}
{{- end -}}

{{- define "paceline.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ include "paceline.text" .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* host:port of every shard, in order, as a pod of the same namespace names them: PACELINE_SERVERS. */}}
{{- define "paceline.servers" -}}
{{- $name := include "paceline.name" . -}}
{{- range $i := until (int .Values.shards) -}}
{{- if $i }},{{ end -}}
{{ $name }}-{{ $i }}.{{ $name }}:7070
{{- end -}}
{{- end -}}

{{- define "paceline.shardSecret" -}}
{{- .Values.tls.shardSecret | default (printf "%s-shard" (include "paceline.name" .)) -}}
{{- end -}}

{{- define "paceline.workerSecret" -}}
{{- .Values.tls.workerSecret | default (printf "%s-worker" (include "paceline.name" .)) -}}
{{- end -}}

{{/* The secret with the token: beside the certificates, except where cert-manager makes these. */}}
{{- define "paceline.tokenSecret" -}}
{{- if .Values.tls.certManager.enabled -}}
{{ .Values.tls.certManager.tokenSecret | default (printf "%s-token" (include "paceline.name" .)) }}
{{- else -}}
{{ include "paceline.workerSecret" . }}
{{- end -}}
{{- end -}}

{{/* Names of the files with certificate and key; dict "root" $ "role" ROLE, server or client. */}}
{{- define "paceline.certificate" -}}
{{ ternary "tls.crt" (printf "%s.pem" .role) .root.Values.tls.certManager.enabled }}
{{- end -}}
{{- define "paceline.key" -}}
{{ ternary "tls.key" (printf "%s.key" .role) .root.Values.tls.certManager.enabled }}
{{- end -}}
{{- define "paceline.ca" -}}
{{ ternary "ca.crt" "ca.pem" .Values.tls.certManager.enabled }}
{{- end -}}

{{/* What an upgrade keeps, by the name of its value: a running job depends on it, or Kubernetes refuses another one. */}}
{{- define "paceline.fixed" -}}
persistence.enabled: {{ .Values.persistence.enabled }}
{{- if .Values.persistence.enabled }}
persistence.size: {{ .Values.persistence.size }}
persistence.storageClass: {{ if kindIs "invalid" .Values.persistence.storageClass }}null{{ else }}{{ .Values.persistence.storageClass | quote }}{{ end }}
{{- end }}
tls.enabled: {{ .Values.tls.enabled }}
protocol: {{ index .Chart.Annotations "paceline.dev/protocol" | quote }}
journal: {{ index .Chart.Annotations "paceline.dev/journal" | quote }}
{{- end -}}

{{/* Place of the standbys' register; kubernetes://NAME: the Leases of register.yaml; empty without standbys. */}}
{{- define "paceline.register" -}}
{{- if .Values.standby.enabled -}}
{{- $default := ternary "/var/lib/paceline-register" (printf "kubernetes://%s" (include "paceline.name" .)) (ne .Values.standby.registerClaim "") -}}
{{ .Values.standby.register | default $default }}
{{- end -}}
{{- end -}}
