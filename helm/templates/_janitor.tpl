{{/* What `cache-admin serve` is told of who may ask, and by what name. */}}
{{- define "kvstore.janitor.access" -}}
{{- $name := include "kvstore.fullname" . -}}
{{- $service := printf "%s.%s" $name .Release.Namespace -}}
{{- range concat (list $name $service (printf "%s.svc" $service) (printf "%s.svc.cluster.local" $service)) .Values.janitor.hosts | uniq }}
- --host
- {{ . | quote }}
{{- end }}
{{- with .Values.janitor.tls }}
{{- if .existingSecret }}
- --tls
- /etc/kvstore-serve/tls
{{- end }}
{{- if .clientCASecret }}
- --client-ca
- {{ printf "/etc/kvstore-serve/ca/%s" .clientCAKey | quote }}
{{- end }}
{{- end }}
{{- with .Values.janitor.password }}
{{- if .existingSecret }}
- --password-file
- {{ printf "/etc/kvstore-serve/password/%s" .key | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The Secrets that this takes, as {NAME OF VOLUME: {secret, keys}}. Folders, so that what is renewed arrives. */}}
{{- define "kvstore.janitor.secrets" -}}
{{- $found := dict -}}
{{- with .Values.janitor.tls -}}
{{- if .existingSecret }}{{ $_ := set $found "tls" (dict "secret" .existingSecret "keys" (list "tls.crt" "tls.key")) }}{{ end -}}
{{- if .clientCASecret }}{{ $_ := set $found "ca" (dict "secret" .clientCASecret "keys" (list .clientCAKey)) }}{{ end -}}
{{- end -}}
{{- with .Values.janitor.password -}}
{{- if .existingSecret }}{{ $_ := set $found "password" (dict "secret" .existingSecret "keys" (list .key)) }}{{ end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{- define "kvstore.janitor.secretVolumes" -}}
{{- range $name, $from := include "kvstore.janitor.secrets" . | fromYaml }}
- name: serve-{{ $name }}
  secret:
    secretName: {{ $from.secret | quote }}
    items:
      {{- range $from.keys }}
      - key: {{ . | quote }}
        path: {{ . | quote }}
      {{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.janitor.secretMounts" -}}
{{- range $name, $from := include "kvstore.janitor.secrets" . | fromYaml }}
- name: serve-{{ $name }}
  mountPath: /etc/kvstore-serve/{{ $name }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* The scheme of the janitors' port. */}}
{{- define "kvstore.janitor.scheme" -}}
{{- ternary "https" "http" (not (empty .Values.janitor.tls.existingSecret)) -}}
{{- end -}}
