{{- define "vllm.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* dict "root" $ "component" NAME */}}
{{- define "vllm.selectorLabels" -}}
app.kubernetes.io/name: vllm
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "vllm.labels" -}}
{{ include "vllm.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* dict "image" a values' image "tag" what an empty tag means */}}
{{- define "vllm.imageName" -}}
{{- $name := printf "%s%s" (ternary "" (printf "%s/" .image.registry) (empty .image.registry)) .image.repository -}}
{{- if .image.digest }}{{ $name }}@{{ .image.digest }}{{ else }}{{ $name }}:{{ .image.tag | default .tag }}{{ end -}}
{{- end -}}

{{- define "vllm.image" -}}
{{- include "vllm.imageName" (dict "image" .Values.image "tag" (printf "v%s" .Chart.AppVersion)) -}}
{{- end -}}

{{- define "vllm.wheelsImage" -}}
{{- $install := .Values.kvstore.install -}}
{{- include "vllm.imageName" (dict "image" $install.image "tag" (regexReplaceAll "^.*==" $install.requirement "")) -}}
{{- end -}}

{{/* The pools that run, in the order of a request's way. */}}
{{- define "vllm.pools" -}}
{{- $found := list -}}
{{- range list "engines" "encode" "prefill" "decode" -}}
{{- if (get $.Values .).enabled }}{{ $found = append $found . }}{{ end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* Whether a request goes through several kinds of engine. */}}
{{- define "vllm.routed" -}}
{{- if or .Values.prefill.enabled .Values.encode.enabled }}true{{ end -}}
{{- end -}}

{{/* Name of a pool's Deployment and Service. dict "root" $ "pool" NAME */}}
{{- define "vllm.poolName" -}}
{{- include "vllm.fullname" .root -}}
{{- if or (ne .pool "engines") (include "vllm.routed" .root) }}-{{ .pool }}{{ end -}}
{{- end -}}

{{/* As the store's chart names what belongs to a release. */}}
{{- define "vllm.storeName" -}}
{{- $release := .Values.kvstore.release -}}
{{- ternary $release (printf "%s-kvstore" $release) (contains "kvstore" $release) | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{- define "vllm.storeConfigMap" -}}
{{- .Values.kvstore.configMap | default (printf "%s-vllm" (include "vllm.storeName" .)) -}}
{{- end -}}

{{- define "vllm.storeEnv" -}}
{{- if .Values.kvstore.env -}}
{{ toYaml .Values.kvstore.env }}
{{- else -}}
- name: KVSTORE_SETTINGS
  value: /etc/kvstore/settings.yaml
- name: KVSTORE_REDIS__PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "vllm.storeName" . }}-redis
      key: password
{{- end -}}
{{- end -}}

{{- define "vllm.storeVolumes" -}}
{{- if .Values.kvstore.volumes -}}
{{ toYaml .Values.kvstore.volumes }}
{{- else -}}
- name: kvstore
  projected:
    sources:
      - configMap:
          name: {{ include "vllm.storeConfigMap" . }}
{{- end -}}
{{- end -}}

{{- define "vllm.storeVolumeMounts" -}}
{{- if .Values.kvstore.volumeMounts -}}
{{ toYaml .Values.kvstore.volumeMounts }}
{{- else -}}
- name: kvstore
  mountPath: /etc/kvstore
  readOnly: true
{{- end -}}
{{- end -}}

{{/* Where the node's cache is mounted; empty: there is none, or nobody is to own it. */}}
{{- define "vllm.nodeCache" -}}
{{- $there := false -}}
{{- range .Values.kvstore.volumes }}{{ if and (eq .name "node-cache") .hostPath }}{{ $there = true }}{{ end }}{{ end -}}
{{- if and $there .Values.kvstore.ownNodeCache -}}
{{- range .Values.kvstore.volumeMounts }}{{ if eq .name "node-cache" }}{{ .mountPath }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}
