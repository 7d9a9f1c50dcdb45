{{/* What every pod that runs cache-admin has in common. */}}

{{/* A pod's labels and annotations. The chart's version isn't among them: a release that changes nothing else
     restarts nothing. dict "root" $ "component" NAME "annotations" more of them (optional) */}}
{{- define "kvstore.podMetadata" -}}
labels:
  {{- include "kvstore.selectorLabels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  app.kubernetes.io/part-of: kvstore
  kvstore/client: "true"
  {{- with merge (dict) .root.Values.podLabels .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $checksums := dict "checksum/settings" (include "kvstore.settings" .root | sha256sum) }}
{{- with .root.Values.payloads.s3 }}
{{- if and (eq $.root.Values.payloads.type "s3") .accessKeyId (not .existingSecret) }}
{{- /* Pods read keys as they start. So short that nobody can find the keys by it. */}}
{{- $_ := set $checksums "checksum/keys" (printf "%s\n%s" .accessKeyId .secretAccessKey | sha256sum | trunc 4 | printf "x%s") }}
{{- end }}
{{- end }}
annotations:
  {{- merge $checksums (default dict .annotations) .root.Values.podAnnotations .root.Values.commonAnnotations | toYaml | nindent 2 }}
{{- end -}}

{{/* The pod's spec but its containers. No token of the API's: nothing here asks it. No variables for each Service
     of the namespace: where one is called kvstore they would look like settings. */}}
{{- define "kvstore.podSpec" -}}
serviceAccountName: {{ include "kvstore.serviceAccountName" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- include "kvstore.imagePullSecrets" . }}
securityContext:
  {{- include "kvstore.podSecurityContext" . | nindent 2 }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  {{- include "kvstore.volumes" . | nindent 2 }}
{{- end -}}

{{/* The affinity of a pod beside the janitor: with a claim of one node, to that node. */}}
{{- define "kvstore.jobAffinity" -}}
{{- if and (include "kvstore.payloads.oneNode" .) (gt (int .Values.janitor.replicas) 0) -}}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "kvstore.selectorLabels" (dict "root" . "component" "janitor") | nindent 12 }}
{{- end -}}
{{- end -}}

{{/* The container but its name, command and resources. KVSTORE_SETTINGS also serves whoever runs cache-admin in it
     with kubectl exec. */}}
{{- define "kvstore.container" -}}
image: {{ include "kvstore.image" (dict "root" . "image" .Values.image) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - name: KVSTORE_SETTINGS
    value: /etc/kvstore/settings.yaml
  {{- include "kvstore.env" . | nindent 2 }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
securityContext:
  {{- include "kvstore.containerSecurityContext" . | nindent 2 }}
volumeMounts:
  {{- include "kvstore.volumeMounts" . | nindent 2 }}
{{- end -}}
