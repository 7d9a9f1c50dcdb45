{{/* One sentence per line for each combination of values that can't work. */}}
{{- define "kvstore.validate.core" -}}
{{- if and (eq .Values.payloads.type "s3") (not .Values.payloads.s3.bucket) }}
payloads.s3.bucket is empty: name the bucket that holds the cache, which must exist (--set payloads.s3.bucket=my-bucket).
{{- end }}
{{- end -}}
