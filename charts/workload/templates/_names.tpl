{{/* Every template takes (dict "root" $ "name" "component" "values" <workload values>). */}}
{{- define "workload.name" -}}
{{- printf "%s-%s" .root.Release.Name .name | trunc 55 | trimSuffix "-" -}}
{{- end -}}

{{- define "workload.selectorLabels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end -}}

{{- define "workload.labels" -}}
{{ include "workload.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: gem
app.kubernetes.io/component: {{ .root.Chart.Name }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "workload.image" -}}
{{- $image := .values.image -}}
{{- $repository := printf "%s/%s" $image.repository .root.Chart.Name -}}
{{- if $image.digest -}}{{ $repository }}@{{ $image.digest }}{{- else -}}{{ $repository }}:{{ $image.tag | default .root.Chart.AppVersion }}{{- end -}}
{{- end -}}

{{- define "workload.peer" -}}
{{- printf "%s-%s" .root.Release.Name .peer | trunc 55 | trimSuffix "-" -}}
{{- end -}}
