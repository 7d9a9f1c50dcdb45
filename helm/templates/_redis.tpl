{{/* What the other templates ask of Redis: its URL, settings, environment and files; the built-in one and
an external one answer alike. Nothing in here is secret: passwords come from a Secret by reference. */}}

{{- define "kvstore.redis.name" -}}
{{ include "kvstore.fullname" . }}-redis
{{- end -}}

{{/* Of the built-in Redis: the Secret with its passwords, and the one with its certificate. */}}
{{- define "kvstore.redis.secret" -}}
{{ .Values.redis.builtIn.auth.existingSecret | default (include "kvstore.redis.name" .) }}
{{- end -}}

{{- define "kvstore.redis.tlsSecret" -}}
{{ .Values.redis.builtIn.tls.existingSecret | default (printf "%s-tls" (include "kvstore.redis.name" .)) }}
{{- end -}}

{{/* The URL's parts, as JSON: scheme, hosts (list), path (list), ports (list). Of an external Redis only. */}}
{{- define "kvstore.redis.location" -}}
{{- $url := .Values.redis.external.url -}}
{{- $scheme := regexFind "^[a-z+]+" $url -}}
{{- $rest := regexReplaceAll "^[a-z+]*(://)?" $url "" -}}
{{- $parts := splitList "/" $rest -}}
{{- $ports := list -}}
{{- range $host := splitList "," (first $parts) -}}
{{- $port := regexFind ":[0-9]+$" $host | trimPrefix ":" -}}
{{- $ports = append $ports (int ($port | default (ternary "26379" "6379" (hasSuffix "+sentinel" $scheme)))) -}}
{{- end -}}
{{- dict "scheme" $scheme "hosts" (splitList "," (first $parts)) "path" (rest $parts) "ports" (uniq $ports) | toJson -}}
{{- end -}}

{{- define "kvstore.redis.url" -}}
{{- if .Values.redis.builtIn.enabled -}}
{{ ternary "rediss" "redis" .Values.redis.builtIn.tls.enabled }}://{{ include "kvstore.redis.name" . }}.{{ .Release.Namespace }}.svc:6379/0
{{- else -}}
{{ .Values.redis.external.url }}
{{- end -}}
{{- end -}}

{{/* The subtree `redis` of the settings (schemas/settings/). */}}
{{- define "kvstore.redis.settings" -}}
{{- $folder := "/etc/kvstore/tls/redis" -}}
{{- $tree := dict -}}
{{- if .Values.redis.builtIn.enabled -}}
{{- $_ := set $tree "username" "kvstore" -}}
{{- if .Values.redis.builtIn.tls.enabled }}{{ $_ := set $tree "tls_ca" (printf "%s/ca.crt" $folder) }}{{ end -}}
{{- else -}}
{{- with .Values.redis.external -}}
{{- with .username }}{{ $_ := set $tree "username" . }}{{ end -}}
{{- with .sentinel.username }}{{ $_ := set $tree "sentinel_username" . }}{{ end -}}
{{- if .tls.caSecret }}{{ $_ := set $tree "tls_ca" (printf "%s/ca.crt" $folder) }}{{ end -}}
{{- if .tls.clientSecret -}}
{{- $_ := set $tree "tls_cert" (printf "%s/tls.crt" $folder) -}}
{{- $_ := set $tree "tls_key" (printf "%s/tls.key" $folder) -}}
{{- end -}}
{{- if not .tls.verify }}{{ $_ := set $tree "tls_verify" false }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $tree -}}
{{- end -}}

{{/* Environment of whatever opens the index. */}}
{{- define "kvstore.redis.env" -}}
{{- if .Values.redis.builtIn.enabled -}}
{{ include "kvstore.redis.secretEnv" (list "KVSTORE_REDIS__PASSWORD" (include "kvstore.redis.secret" .) .Values.redis.builtIn.auth.passwordKey) }}
{{- else -}}
{{- $entries := list -}}
{{- with .Values.redis.external -}}
{{- if and .existingSecret .passwordKey -}}
{{- $entries = append $entries (include "kvstore.redis.secretEnv" (list "KVSTORE_REDIS__PASSWORD" .existingSecret .passwordKey)) -}}
{{- end -}}
{{- if and .existingSecret .sentinel.passwordKey -}}
{{- $entries = append $entries (include "kvstore.redis.secretEnv" (list "KVSTORE_REDIS__SENTINEL_PASSWORD" .existingSecret .sentinel.passwordKey)) -}}
{{- end -}}
{{- end -}}
{{- join "\n" $entries -}}
{{- end -}}
{{- end -}}

{{/* list VARIABLE SECRET KEY */}}
{{- define "kvstore.redis.secretEnv" -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef:
      name: {{ index . 1 | quote }}
      key: {{ index . 2 | quote }}
{{- end -}}

{{/* Certificates. Of the built-in Redis' Secret a client gets the authority alone, and never the server's key. */}}
{{- define "kvstore.redis.volumes" -}}
{{- $sources := list -}}
{{- if .Values.redis.builtIn.enabled -}}
{{- if .Values.redis.builtIn.tls.enabled -}}
{{- $sources = append $sources (list (include "kvstore.redis.tlsSecret" .) (dict "ca.crt" "ca.crt")) -}}
{{- end -}}
{{- else -}}
{{- with .Values.redis.external.tls -}}
{{- if .caSecret }}{{ $sources = append $sources (list .caSecret (dict .caKey "ca.crt")) }}{{ end -}}
{{- if .clientSecret }}{{ $sources = append $sources (list .clientSecret (dict "tls.crt" "tls.crt" "tls.key" "tls.key")) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if $sources -}}
- name: redis-tls
  projected:
    defaultMode: 0440
    sources:
      {{- range $sources }}
      - secret:
          name: {{ index . 0 | quote }}
          items:
            {{- range $key, $path := index . 1 }}
            - key: {{ $key | quote }}
              path: {{ $path }}
            {{- end }}
      {{- end }}
{{- end -}}
{{- end -}}

{{- define "kvstore.redis.volumeMounts" -}}
{{- if include "kvstore.redis.volumes" . -}}
- name: redis-tls
  mountPath: /etc/kvstore/tls/redis
  readOnly: true
{{- end -}}
{{- end -}}

{{/* The memory limit of the built-in Redis in bytes; 0: none. */}}
{{- define "kvstore.redis.limit" -}}
{{- $limits := (.Values.redis.builtIn.resources).limits | default dict -}}
{{- include "kvstore.bytes" (get $limits "memory" | default "0") -}}
{{- end -}}

{{/*
maxmemory in bytes: a third of the limit. Of 2.6 million blocks Redis counts 86 MB and has 133 MB (buckets grow
by a few bytes at a time, so the allocator's pages have gaps), and with two savers at work 244 MB while a child
rewrites the append-only file: blocks are spread over all buckets, so nearly every page is written meanwhile, and
then exists twice. A Redis that the kernel ends for that would begin the same rewrite again after its restart.
*/}}
{{- define "kvstore.redis.maxmemory" -}}
{{- with .Values.redis.builtIn -}}
{{- if .maxmemory -}}
{{- include "kvstore.bytes" .maxmemory -}}
{{- else -}}
{{- div (mul (include "kvstore.redis.limit" $ | int64) (.maxmemoryPercent | int64)) 100 -}}
{{- end -}}
{{- end -}}
{{- end -}}
