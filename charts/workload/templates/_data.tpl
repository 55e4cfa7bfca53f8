{{/* The volume with tables and models, where they are on one. */}}
{{- define "workload.data" -}}
{{- with .Values.global.dataClaim }}
extraVolumes: [{ name: data, persistentVolumeClaim: { claimName: {{ . }} } }]
extraMounts: [{ name: data, mountPath: /data }]
{{- end }}
{{- end -}}
