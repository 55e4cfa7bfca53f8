{{- define "workload.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "workload.name" . }}
  labels: {{- include "workload.labels" . | nindent 4 }}
spec:
  {{- if eq .values.autoscaling.by "none" }}
  replicas: {{ .values.replicas }}
  {{- end }}
  selector: { matchLabels: { {{ include "workload.selectorLabels" . | replace "\n" ", " }} } }
  strategy: { type: RollingUpdate, rollingUpdate: { maxUnavailable: 0, maxSurge: 1 } }
  template:
    metadata:
      labels: {{- include "workload.labels" . | nindent 8 }}
      annotations: {{- toYaml (merge (dict "gem/values" (toJson .values | sha256sum)) (.annotations | default dict)) | nindent 8 }}
    spec:
      {{- include "workload.podSpec" . | nindent 6 }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: topology.kubernetes.io/zone
          whenUnsatisfiable: ScheduleAnyway
          labelSelector: { matchLabels: { {{ include "workload.selectorLabels" . | replace "\n" ", " }} } }
{{- end -}}

{{- define "workload.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "workload.name" . }}
  labels: {{- include "workload.labels" . | nindent 4 }}
spec:
  clusterIP: None
  selector: {{- include "workload.selectorLabels" . | nindent 4 }}
  ports:
    - { name: grpc, port: {{ .values.ports.grpc }}, targetPort: grpc, protocol: TCP }
{{- end -}}

{{- define "workload.serviceaccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "workload.name" . }}
  labels: {{- include "workload.labels" . | nindent 4 }}
automountServiceAccountToken: false
{{- end -}}

{{- define "workload.pdb" -}}
{{- if or (gt (int .values.replicas) 1) (and (ne .values.autoscaling.by "none") (gt (int .values.autoscaling.min) 1)) }}
apiVersion: {{ .root.Capabilities.APIVersions.Has "policy/v1" | ternary "policy/v1" "policy/v1beta1" }}
kind: PodDisruptionBudget
metadata:
  name: {{ include "workload.name" . }}
  labels: {{- include "workload.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector: { matchLabels: { {{ include "workload.selectorLabels" . | replace "\n" ", " }} } }
{{- end }}
{{- end -}}

{{- define "workload.autoscaler" -}}
{{- if eq .values.autoscaling.by "cpu" }}
apiVersion: {{ .root.Capabilities.APIVersions.Has "autoscaling/v2" | ternary "autoscaling/v2" "autoscaling/v2beta2" }}
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "workload.name" . }}
  labels: {{- include "workload.labels" . | nindent 4 }}
spec:
  scaleTargetRef: { apiVersion: apps/v1, kind: Deployment, name: {{ include "workload.name" . }} }
  minReplicas: {{ .values.autoscaling.min }}
  maxReplicas: {{ .values.autoscaling.max }}
  metrics:
    - type: Resource
      resource: { name: cpu, target: { type: Utilization, averageUtilization: {{ .values.autoscaling.targetCpu }} } }
{{- else if eq .values.autoscaling.by "queue" }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "workload.name" . }}
  labels: {{- include "workload.labels" . | nindent 4 }}
spec:
  scaleTargetRef: { apiVersion: apps/v1, kind: Deployment, name: {{ include "workload.name" . }} }
  minReplicaCount: {{ .values.autoscaling.min }}
  maxReplicaCount: {{ .values.autoscaling.max }}
  triggers:
    - type: redis-streams
      metadata:
        stream: {{ .values.autoscaling.stream }}
        consumerGroup: {{ .values.autoscaling.group }}
        lagCount: {{ .values.autoscaling.lagPerPod | quote }}
        activationLagCount: "0"
        addressFromEnv: {{ .root.Values.global.store.addressEnv }}
{{- end }}
{{- end -}}

{{- define "workload.networkpolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "workload.name" . }}
  labels: {{- include "workload.labels" . | nindent 4 }}
spec:
  podSelector: { matchLabels: { {{ include "workload.selectorLabels" . | replace "\n" ", " }} } }
  policyTypes: [Ingress, Egress]
  ingress:
    - from: [{ namespaceSelector: { matchLabels: { kubernetes.io/metadata.name: {{ .root.Values.global.monitoringNamespace }} } } }]
      ports: [{ port: metrics, protocol: TCP }]
    {{- range .values.callers }}
    - from: [{ podSelector: { matchLabels: { app.kubernetes.io/component: {{ . }}, app.kubernetes.io/part-of: gem } } }]
      ports: [{ port: grpc, protocol: TCP }]
    {{- end }}
  egress:
    - ports: [{ port: 53, protocol: UDP }, { port: 53, protocol: TCP }]
    - to: [{ namespaceSelector: { matchLabels: { kubernetes.io/metadata.name: {{ .root.Values.global.monitoringNamespace }} } } }]
      ports: [{ port: 4317, protocol: TCP }]
    {{- if .values.usesStore }}
    - ports: [{ port: {{ .root.Values.global.store.port }}, protocol: TCP }]
    {{- end }}
    {{- range .values.callees }}
    - to: [{ podSelector: { matchLabels: { app.kubernetes.io/component: {{ . }}, app.kubernetes.io/part-of: gem } } }]
    {{- end }}
{{- end -}}

{{- define "workload.servicemonitor" -}}
{{- if .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {{ include "workload.name" . }}
  labels: {{- include "workload.labels" . | nindent 4 }}
spec:
  selector: { matchLabels: { {{ include "workload.selectorLabels" . | replace "\n" ", " }} } }
  podMetricsEndpoints: [{ port: metrics, path: /metrics, interval: 30s }]
{{- end }}
{{- end -}}

{{/* Everything a long-running service has; batch workloads pick parts. */}}
{{- define "workload.all" -}}
{{- range $part := list "serviceaccount" "deployment" "service" "pdb" "autoscaler" "networkpolicy" "servicemonitor" }}
{{- if not (and (eq $part "service") (not $.values.ports.grpc)) }}
---
{{ include (printf "workload.%s" $part) $ }}
{{- end }}
{{- end }}
{{- end -}}
