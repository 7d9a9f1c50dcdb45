{{- define "kvstore.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/*
The longest suffix that a name gets is "-dashboard-overview", of 63 characters; names of CronJobs ("-fsck") and
StatefulSets ("-redis") end within 52, since what they make has names of its own. That leaves 44. A longer name is
cut, with a hash, so that two of them stay two.
*/}}
{{- define "kvstore.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- if gt (len $full) 44 -}}
{{- $full = printf "%s-%s" ($full | trunc 37 | trimSuffix "-") ($full | sha256sum | trunc 6) -}}
{{- end -}}
{{- $full | trimSuffix "-" -}}
{{- end -}}

{{- define "kvstore.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvstore.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvstore.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What never changes between versions, as selectors can't. dict "root" $ "component" NAME */}}
{{- define "kvstore.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvstore.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* dict "root" $ "component" NAME */}}
{{- define "kvstore.labels" -}}
{{ include "kvstore.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: kvstore
helm.sh/chart: {{ include "kvstore.chart" .root }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Namespace, labels and annotations of an object. The namespace is said because `helm template -n X | kubectl apply`
     would otherwise put it where kubectl's context happens to be. dict "root" $ "component" NAME "annotations" more of
     them (optional) "namespace" where it isn't the release's (optional) */}}
{{- define "kvstore.metadata" -}}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
labels:
  {{- include "kvstore.labels" . | nindent 2 }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* dict "root" $ "image" a values' image */}}
{{- define "kvstore.image" -}}
{{- $name := printf "%s%s" (ternary "" (printf "%s/" (trimSuffix "/" .image.registry)) (empty .image.registry)) .image.repository -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* "imagePullSecrets:", or nothing. */}}
{{- define "kvstore.imagePullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.podSecurityContext" -}}
{{- toYaml .Values.podSecurityContext -}}
{{- end -}}

{{- define "kvstore.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* A size in bytes: of a number, of 50GiB as the settings have it, or of 50Gi as Kubernetes does. 0 is none. */}}
{{- define "kvstore.bytes" -}}
{{- if not (kindIs "string" .) -}}
{{- int64 . -}}
{{- else if regexMatch "^[0-9]+([.][0-9]+)?([kKmMgGtTpP][iI]?)?[bB]?$" . -}}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" . | float64 -}}
{{- $unit := regexFind "[A-Za-z]*$" . | lower | trimSuffix "b" -}}
{{- $power := index (dict "" 0 "k" 1 "m" 2 "g" 3 "t" 4 "p" 5) (trimSuffix "i" $unit) -}}
{{- range until $power }}{{ $number = mulf $number (ternary 1024 1000 (hasSuffix "i" $unit)) }}{{ end -}}
{{- floor $number | int64 -}}
{{- else -}}
0
{{- end -}}
{{- end -}}
