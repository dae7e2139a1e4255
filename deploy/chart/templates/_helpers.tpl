{{- define "paceline.name" -}}
{{- if contains "paceline" .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-paceline" .Release.Name }}{{ end -}}
{{- end -}}

{{- define "paceline.labels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: shard
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

{{/* The shard's own page, over TLS where there is TLS: it costs no process, as an exec probe would. */}}
{{- define "paceline.probe" -}}
httpGet: {path: /healthz, port: metrics, scheme: {{ ternary "HTTPS" "HTTP" .Values.tls.enabled }}}
{{- end -}}
