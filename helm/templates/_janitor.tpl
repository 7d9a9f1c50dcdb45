{{/* The janitors' affinity: what antiAffinity stands for, and what the values say besides. */}}
{{- define "kvstore.janitor.affinity" -}}
{{- $janitor := .Values.janitor -}}
{{- $affinity := deepCopy $janitor.affinity -}}
{{- $selector := dict "matchLabels" (include "kvstore.selectorLabels" (dict "root" . "component" "janitor") | fromYaml) -}}
{{- $term := dict "labelSelector" $selector "topologyKey" "kubernetes.io/hostname" -}}
{{- if eq $janitor.antiAffinity "soft" -}}
{{- $soft := list (dict "weight" 100 "podAffinityTerm" $term) -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $soft) -}}
{{- else if eq $janitor.antiAffinity "hard" -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- if $affinity }}{{ toYaml $affinity }}{{ end -}}
{{- end -}}
