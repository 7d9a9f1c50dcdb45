{{- define "kvstore.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* The longest suffix that a name gets is "-redis-headless": 47 of 63 characters are the release's. */}}
{{- define "kvstore.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 47 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 47 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvstore.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* dict "root" $ "component" NAME */}}
{{- define "kvstore.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvstore.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvstore.labels" -}}
{{ include "kvstore.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: kvstore
helm.sh/chart: {{ include "kvstore.chart" .root }}
{{- end -}}

{{/* dict "root" $ "image" a values' image */}}
{{- define "kvstore.image" -}}
{{- $name := printf "%s%s" (ternary "" (printf "%s/" .image.registry) (empty .image.registry)) .image.repository -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "kvstore.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvstore.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The settings tree: what the values say of payloads and index, and over it what `settings` says. */}}
{{- define "kvstore.settings" -}}
{{- $tree := dict -}}
{{- with .Values.payloads.s3 -}}
{{- $url := printf "s3://%s/%s" .bucket .prefix -}}
{{- $options := list -}}
{{- with .endpoint }}{{ $options = append $options (printf "endpoint=%s" .) }}{{ end -}}
{{- with .region }}{{ $options = append $options (printf "region=%s" .) }}{{ end -}}
{{- if $options }}{{ $url = printf "%s?%s" $url (join "&" $options) }}{{ end -}}
{{- $_ := set $tree "payloads" $url -}}
{{- end -}}
{{- $_ := set $tree "index" (include "kvstore.redis.url" .) -}}
{{- with include "kvstore.redis.settings" . | fromYaml }}{{ $_ := set $tree "redis" . }}{{ end -}}
{{- mergeOverwrite $tree .Values.settings | toYaml -}}
{{- end -}}

{{- define "kvstore.env" -}}
{{ include "kvstore.redis.env" . }}
{{ include "kvstore.s3.env" . }}
{{- end -}}

{{- define "kvstore.s3.env" -}}
{{- with .Values.payloads.s3 }}
{{- if .existingSecret }}
- name: KVSTORE_S3__ACCESS_KEY_ID
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .accessKeyIdKey }}
- name: KVSTORE_S3__SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .secretAccessKeyKey }}
{{- end }}
{{- end }}
{{- end -}}
