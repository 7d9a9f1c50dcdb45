{{/* What opens the store needs: its settings, credentials and files. */}}

{{/* Where payloads are mounted that are no bucket's. Their folder is one below, since a volume's root has a
     lost+found. The same in engines. */}}
{{- define "kvstore.payloads.mountPath" -}}
/var/lib/kvstore
{{- end -}}

{{- define "kvstore.nodeCache.mountPath" -}}
/var/cache/kvstore
{{- end -}}

{{/* The same in engines, whose other files are one volume at /etc/kvstore: which keys the Secret has is not known
     here. */}}
{{- define "kvstore.signing.mountPath" -}}
/etc/kvstore-keys
{{- end -}}

{{- define "kvstore.payloads.claimName" -}}
{{- default (printf "%s-payloads" (include "kvstore.fullname" .)) .Values.payloads.pvc.existingClaim -}}
{{- end -}}

{{/* "yes" if the payloads are a claim that one node has at a time. */}}
{{- define "kvstore.payloads.oneNode" -}}
{{- if and (eq .Values.payloads.type "pvc") (not (has "ReadWriteMany" .Values.payloads.pvc.accessModes)) -}}
yes
{{- end -}}
{{- end -}}

{{- define "kvstore.payloads.url" -}}
{{- if eq .Values.payloads.type "s3" -}}
{{- $s3 := .Values.payloads.s3 -}}
{{- $options := list -}}
{{- with $s3.endpoint }}{{ $options = append $options (printf "endpoint=%s" (trimSuffix "/" .)) }}{{ end -}}
{{- with $s3.region }}{{ $options = append $options (printf "region=%s" .) }}{{ end -}}
{{- printf "s3://%s/%s" $s3.bucket (trimAll "/" $s3.prefix) -}}
{{- if $options }}{{ printf "?%s" (join "&" $options) }}{{ end -}}
{{- else -}}
{{- printf "file://%s/payloads" (include "kvstore.payloads.mountPath" .) -}}
{{- end -}}
{{- end -}}

{{/* The settings tree, as YAML: what the values say, and over it what `settings` says. For the janitor and the
     cron jobs, which see the shared payloads alone. No secret is in it: those are kvstore.env. */}}
{{- define "kvstore.settings" -}}
{{- $tree := dict "payloads" (include "kvstore.payloads.url" .) "index" (include "kvstore.redis.url" .) -}}
{{- $_ := set $tree "capacity_bytes" (include "kvstore.bytes" .Values.capacity | int64) -}}
{{- with include "kvstore.redis.settings" . | fromYaml }}{{ $_ := set $tree "redis" . }}{{ end -}}
{{- with include "kvstore.s3.settings" . | fromYaml }}{{ $_ := set $tree "s3" . }}{{ end -}}
{{- with .Values.signing }}
{{- if .existingSecret -}}
{{- $signing := dict "keys" (include "kvstore.signing.mountPath" $) "key" .key "unsigned" .unsigned "encrypt" .encrypt -}}
{{- $_ := set $tree "signing" $signing -}}
{{- end -}}
{{- end -}}
{{- mergeOverwrite $tree (deepCopy .Values.settings) | toYaml -}}
{{- end -}}

{{/* The same for engines, which have the node's cache in front of the payloads that all nodes share. */}}
{{- define "kvstore.engineSettings" -}}
{{- $tree := include "kvstore.settings" . | fromYaml -}}
{{- with .Values.payloads.nodeCache }}
{{- if .enabled -}}
{{- $fast := dict "fast" (printf "file://%s" (include "kvstore.nodeCache.mountPath" $)) -}}
{{- $_ := set $fast "slow" $tree.payloads -}}
{{- $_ := set $fast "fast_capacity" (include "kvstore.bytes" .capacity | int64) -}}
{{- $_ := set $fast "write" .write -}}
{{- $_ := set $tree "payloads" $fast -}}
{{- end -}}
{{- end -}}
{{- toYaml $tree -}}
{{- end -}}

{{/* Credentials, for whatever opens the store: the janitor, the cron jobs, engines. */}}
{{- define "kvstore.env" -}}
{{- printf "%s\n%s" (include "kvstore.redis.env" . | trim) (include "kvstore.s3.env" . | trim) | trim -}}
{{- end -}}

{{- define "kvstore.s3.secretName" -}}
{{- $s3 := .Values.payloads.s3 -}}
{{- if $s3.existingSecret -}}
{{- $s3.existingSecret -}}
{{- else if $s3.accessKeyId -}}
{{- include "kvstore.fullname" . }}-s3
{{- end -}}
{{- end -}}

{{- define "kvstore.s3.settings" -}}
{{- $s3 := .Values.payloads.s3 -}}
{{- $found := dict -}}
{{- if eq .Values.payloads.type "s3" -}}
{{- if or $s3.ca.secret $s3.ca.configMap }}{{ $_ := set $found "tls_ca" "/etc/kvstore/tls/s3/ca.crt" }}{{ end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{- define "kvstore.s3.env" -}}
{{- $s3 := .Values.payloads.s3 -}}
{{- if eq .Values.payloads.type "s3" -}}
{{- with include "kvstore.s3.secretName" . -}}
- name: KVSTORE_S3__ACCESS_KEY_ID
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: {{ $s3.accessKeyIdKey | quote }}
- name: KVSTORE_S3__SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: {{ $s3.secretAccessKeyKey | quote }}
{{- with $s3.sessionTokenKey }}
- name: KVSTORE_S3__SESSION_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $s3.existingSecret | quote }}
      key: {{ . | quote }}
{{- end }}
{{- end -}}
{{- with $s3.webIdentity.roleArn -}}
- name: AWS_ROLE_ARN
  value: {{ . | quote }}
- name: AWS_WEB_IDENTITY_TOKEN_FILE
  value: /var/run/secrets/kvstore/token
{{- with $s3.webIdentity.stsEndpoint }}
- name: AWS_ENDPOINT_URL_STS
  value: {{ . | quote }}
{{- end }}
{{- with $s3.region }}
- name: AWS_REGION
  value: {{ . | quote }}
{{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Files that whatever opens the store needs besides its settings: CA certificates, a token, the payloads. */}}
{{- define "kvstore.storeVolumes" -}}
{{- with include "kvstore.redis.volumes" . | trim }}
{{ . }}
{{- end }}
{{- with .Values.signing.existingSecret }}
- name: signing-keys
  secret:
    secretName: {{ . | quote }}
    defaultMode: 288
{{- end }}
{{- $payloads := .Values.payloads }}
{{- if eq $payloads.type "s3" }}
{{- if $payloads.s3.ca.secret }}
- name: s3-ca
  secret:
    secretName: {{ $payloads.s3.ca.secret | quote }}
    items:
      - key: {{ $payloads.s3.ca.key | quote }}
        path: ca.crt
{{- else if $payloads.s3.ca.configMap }}
- name: s3-ca
  configMap:
    name: {{ $payloads.s3.ca.configMap | quote }}
    items:
      - key: {{ $payloads.s3.ca.key | quote }}
        path: ca.crt
{{- end }}
{{- if $payloads.s3.webIdentity.roleArn }}
- name: s3-token
  projected:
    sources:
      - serviceAccountToken:
          path: token
          audience: {{ $payloads.s3.webIdentity.audience | quote }}
          expirationSeconds: 3600
{{- end }}
{{- else if eq $payloads.type "pvc" }}
- name: payloads
  persistentVolumeClaim:
    claimName: {{ include "kvstore.payloads.claimName" . | quote }}
{{- else }}
- name: payloads
  hostPath:
    path: {{ $payloads.hostPath.path | quote }}
    type: {{ $payloads.hostPath.type }}
{{- end }}
{{- end -}}

{{- define "kvstore.storeVolumeMounts" -}}
{{- with include "kvstore.redis.volumeMounts" . | trim }}
{{ . }}
{{- end }}
{{- if .Values.signing.existingSecret }}
- name: signing-keys
  mountPath: {{ include "kvstore.signing.mountPath" . }}
  readOnly: true
{{- end }}
{{- $payloads := .Values.payloads }}
{{- if eq $payloads.type "s3" }}
{{- if or $payloads.s3.ca.secret $payloads.s3.ca.configMap }}
- name: s3-ca
  mountPath: /etc/kvstore/tls/s3
  readOnly: true
{{- end }}
{{- if $payloads.s3.webIdentity.roleArn }}
- name: s3-token
  mountPath: /var/run/secrets/kvstore
  readOnly: true
{{- end }}
{{- else }}
- name: payloads
  mountPath: {{ include "kvstore.payloads.mountPath" . }}
{{- end }}
{{- end -}}

{{/* For engines: the files, and the node's cache. Their settings are in connector configs. */}}
{{- define "kvstore.engineVolumes" -}}
{{- include "kvstore.storeVolumes" . }}
{{- with .Values.payloads.nodeCache }}
{{- if .enabled }}
- name: node-cache
  hostPath:
    path: {{ .path | quote }}
    type: DirectoryOrCreate
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.engineVolumeMounts" -}}
{{- include "kvstore.storeVolumeMounts" . }}
{{- if .Values.payloads.nodeCache.enabled }}
- name: node-cache
  mountPath: {{ include "kvstore.nodeCache.mountPath" . }}
{{- end }}
{{- end -}}

{{/* For pods of the chart: the settings and /tmp as well. */}}
{{- define "kvstore.volumes" -}}
{{- include "kvstore.ownVolumes" . }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* /tmp is of the size that its pod asks for as tmpSize, beside Values; small otherwise. */}}
{{- define "kvstore.ownVolumes" -}}
- name: settings
  configMap:
    name: {{ include "kvstore.fullname" . }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .tmpSize | default "64Mi" }}
{{- include "kvstore.storeVolumes" . }}
{{- end -}}

{{/* The settings are one file by subPath, so that certificates can be mounted beside it: a changed ConfigMap
     restarts the pods by its checksum. */}}
{{- define "kvstore.volumeMounts" -}}
- name: settings
  mountPath: /etc/kvstore/settings.yaml
  subPath: settings.yaml
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- include "kvstore.storeVolumeMounts" . }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}
