{{/* Longer than a limit it is cut, with a hash, so that two of them stay two. dict "name" NAME "limit" letters */}}
{{- define "vllm.cut" -}}
{{- $name := .name -}}
{{- if gt (len $name) .limit -}}
{{- $name = printf "%s-%s" ($name | trunc (sub .limit 7 | int) | trimSuffix "-") ($name | sha256sum | trunc 6) -}}
{{- end -}}
{{- $name | trimSuffix "-" -}}
{{- end -}}

{{- define "vllm.fullname" -}}
{{- include "vllm.cut" (dict "name" (default .Release.Name .Values.fullnameOverride) "limit" 50) -}}
{{- end -}}

{{/* dict "root" $ "component" NAME */}}
{{- define "vllm.selectorLabels" -}}
app.kubernetes.io/name: vllm
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
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
{{- $name := ternary $release (printf "%s-kvstore" $release) (contains "kvstore" $release) -}}
{{- include "vllm.cut" (dict "name" $name "limit" 44) -}}
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
      name: {{ printf "%s-redis" (include "vllm.storeName" .) | quote }}
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
          name: {{ include "vllm.storeConfigMap" . | quote }}
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

{{/* The volumes with which a pod may be evicted so that its node can go, as the cluster autoscaler wants them named: what
     it writes on the node's disk, and the store's folders there. Of extraVolumes' hostPaths nobody knows. */}}
{{- define "vllm.evictable" -}}
{{- $found := list -}}
{{- range include "vllm.storeVolumes" . | fromYamlArray -}}
{{- if .hostPath }}{{ $found = append $found .name }}{{ end -}}
{{- end -}}
{{- range concat (include "vllm.storeVolumes" . | fromYamlArray) (include "vllm.volumes" . | fromYamlArray) -}}
{{- if and (hasKey . "emptyDir") (ne (dig "emptyDir" "medium" "" .) "Memory") }}{{ $found = append $found .name }}{{ end -}}
{{- end -}}
{{- dict "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes" (join "," $found) | toYaml -}}
{{- end -}}

{{/* Where the node's cache is mounted; empty: there is none, or nobody is to own it. */}}
{{- define "vllm.nodeCache" -}}
{{- $there := false -}}
{{- range .Values.kvstore.volumes }}{{ if and (eq .name "node-cache") .hostPath }}{{ $there = true }}{{ end }}{{ end -}}
{{- if and $there .Values.kvstore.ownNodeCache -}}
{{- range .Values.kvstore.volumeMounts }}{{ if eq .name "node-cache" }}{{ .mountPath }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}
