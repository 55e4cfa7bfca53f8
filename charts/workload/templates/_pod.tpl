{{- define "workload.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "workload.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* Where things are, for every process of the platform. */}}
{{- define "workload.sharedEnv" -}}
{{- $global := .root.Values.global -}}
- { name: OTEL_SERVICE_NAME, value: {{ .root.Chart.Name }} }
{{- if .values.usesSpec }}
- { name: GEM_SPEC, value: /etc/gem/spec.yaml }
{{- end }}
{{- if .values.usesStore }}
- name: GEM_STORE
  valueFrom: { secretKeyRef: { name: {{ $global.store.secretName }}, key: {{ $global.store.urlKey }} } }
{{- end }}
{{- with $global.otlpEndpoint }}
- { name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }} }
{{- end }}
- { name: OTEL_TRACES_SAMPLER_ARG, value: {{ $global.traceRatio | quote }} }
- { name: HOSTNAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
- { name: OMP_WAIT_POLICY, value: PASSIVE }
- { name: GEM_METRICS_LISTEN, value: "0.0.0.0:{{ .values.ports.metrics }}" }
{{- if .values.ports.grpc }}
- { name: GEM_LISTEN, value: "0.0.0.0:{{ .values.ports.grpc }}" }
{{- end }}
{{- range $peer := .values.callees }}
- { name: GEM_{{ $peer | upper }}{{ if eq $peer "vertical" }}S{{ end }}, value: {{ include "workload.target" (dict "root" $.root "peer" $peer) | quote }} }
{{- end }}
{{- range $name, $value := .values.env }}
- { name: {{ $name }}, value: {{ $value | quote }} }
{{- end }}
{{- end -}}

{{/* gRPC balances over the pods of a headless service. */}}
{{- define "workload.target" -}}
{{- if eq .peer "vertical" -}}{{ .root.Values.global.verticalTargets | default (printf "dns:///%s:80" (include "workload.peer" .)) }}
{{- else -}}dns:///{{ include "workload.peer" . }}:7000{{- end -}}
{{- end -}}

{{- define "workload.pool" -}}
{{- $pool := index .root.Values.global.nodePools .values.nodePool | required (printf "global.nodePools has no pool named %s" .values.nodePool) -}}
{{- with $pool.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pool.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pool.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "workload.volumes" -}}
- { name: tmp, emptyDir: {} }
- { name: spec, configMap: { name: {{ .root.Values.global.specConfigMap }} } }
{{- end -}}

{{- define "workload.mounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: spec, mountPath: /etc/gem, readOnly: true }
{{- end -}}

{{- define "workload.container" -}}
- name: {{ .name }}
  image: {{ include "workload.image" . }}
  imagePullPolicy: IfNotPresent
  command: [python, -m, {{ .values.module }}]
  {{- with .values.args }}
  args: {{- toYaml . | nindent 4 }}
  {{- end }}
  env: {{- include "workload.sharedEnv" . | nindent 4 }}
  ports:
    {{- if .values.ports.grpc }}
    - { name: grpc, containerPort: {{ .values.ports.grpc }}, protocol: TCP }
    {{- end }}
    - { name: metrics, containerPort: {{ .values.ports.metrics }}, protocol: TCP }
  {{- if .values.ports.grpc }}
  {{- include "workload.probes" . | nindent 2 }}
  {{- end }}
  resources: {{- toYaml .values.resources | nindent 4 }}
  securityContext: {{- include "workload.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "workload.mounts" . | nindent 4 }}
    {{- with .extraMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{/* Servers before 1.24 know no gRPC probes: there a pod is ready when its port answers. */}}
{{- define "workload.probes" -}}
{{- $port := .values.ports.grpc -}}
{{- $ready := dict "grpc" (dict "port" $port "service" "readiness") -}}
{{- $alive := dict "grpc" (dict "port" $port "service" "liveness") -}}
{{- if semverCompare "<1.24-0" .root.Capabilities.KubeVersion.Version -}}
{{- $ready = dict "tcpSocket" (dict "port" $port) -}}
{{- $alive = $ready -}}
{{- end -}}
startupProbe: {{- toYaml (merge (dict "periodSeconds" 5 "failureThreshold" (div .values.startupSeconds 5)) $ready) | nindent 2 }}
readinessProbe: {{- toYaml (merge (dict "periodSeconds" 5) $ready) | nindent 2 }}
livenessProbe: {{- toYaml (merge (dict "periodSeconds" 10 "failureThreshold" 6) $alive) | nindent 2 }}
{{- end -}}

{{- define "workload.podSpec" -}}
serviceAccountName: {{ include "workload.name" . }}
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds }}
securityContext: {{- include "workload.podSecurity" . | nindent 2 }}
{{- include "workload.pool" . }}
containers: {{- include "workload.container" . | nindent 2 }}
volumes:
  {{- include "workload.volumes" . | nindent 2 }}
  {{- with .extraVolumes }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}
