{{/* One sentence per line for each combination of values that can't work. */}}
{{- define "kvstore.validate.monitoring" -}}
{{- end -}}
