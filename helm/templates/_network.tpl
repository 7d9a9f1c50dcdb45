{{/* Selects the release's own pods that open the store. */}}
{{- define "kvstore.network.ours" -}}
matchLabels:
  app.kubernetes.io/name: {{ include "kvstore.name" . | quote }}
  app.kubernetes.io/instance: {{ .Release.Name | quote }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [janitor, follow, fsck, gc, pack, test]
{{- end -}}

{{/* The port of a URL of HTTP; 443 without one. */}}
{{- define "kvstore.network.port" -}}
{{- $named := regexFind ":[0-9]+/?$" . | trimPrefix ":" | trimSuffix "/" -}}
{{- $named | default (hasPrefix "http:" . | ternary "80" "443") -}}
{{- end -}}
