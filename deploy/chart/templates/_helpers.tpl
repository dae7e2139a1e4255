{{- define "paceline.name" -}}
{{- if contains "paceline" .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-paceline" .Release.Name }}{{ end -}}
{{- end -}}

{{- define "paceline.labels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: shard
{{- end -}}

{{/* host:port of every shard, in order: PACELINE_SERVERS. */}}
{{- define "paceline.servers" -}}
{{- $name := include "paceline.name" . -}}
{{- range $i := until (int .Values.shards) -}}
{{- if $i }},{{ end -}}
{{ $name }}-{{ $i }}.{{ $name }}.{{ $.Release.Namespace }}.svc:7070
{{- end -}}
{{- end -}}

{{- define "paceline.shardSecret" -}}
{{- .Values.tls.shardSecret | default (printf "%s-shard" (include "paceline.name" .)) -}}
{{- end -}}

{{- define "paceline.workerSecret" -}}
{{- .Values.tls.workerSecret | default (printf "%s-worker" (include "paceline.name" .)) -}}
{{- end -}}
