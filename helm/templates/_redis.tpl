{{/* What the other templates ask of Redis: its URL, settings, environment and files. */}}
{{- define "kvstore.redis.url" -}}
redis://{{ include "kvstore.fullname" . }}-redis:6379/0
{{- end -}}

{{- define "kvstore.redis.settings" -}}
{}
{{- end -}}

{{- define "kvstore.redis.env" -}}
- name: KVSTORE_REDIS__PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "kvstore.fullname" . }}-redis
      key: password
{{- end -}}

{{- define "kvstore.redis.volumes" -}}
{{- end -}}

{{- define "kvstore.redis.volumeMounts" -}}
{{- end -}}
