{{/*
What monitoring's templates share.

None of them asks .Capabilities.APIVersions whether the Prometheus Operator's CRDs are there. `helm template`, with which
GitOps tools render, knows only what is built into helm, so a template that renders nothing without the CRD would leave
their users without monitors and without a word, and one that fails would refuse users who have it. Whoever switches a
monitor on means it; where the CRD is missing, the API server refuses the release and names the kind.
*/}}

{{/* What this cache is called in metrics. */}}
{{- define "kvstore.monitoring.release" -}}
{{ .Values.monitoring.release | default (printf "%s/%s" .Release.Namespace .Release.Name) }}
{{- end -}}

{{/* Metadata of a monitor. dict "root" $ "values" its values "name" NAME "component" NAME */}}
{{- define "kvstore.monitoring.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .values.namespace | default .root.Release.Namespace | quote }}
labels:
  {{- merge (dict) .values.labels (include "kvstore.labels" (dict "root" .root "component" .component) | fromYaml) | toYaml | nindent 2 }}
{{- with merge (dict) (.values.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where and how a target is scraped. A label that a sample has and Prometheus wants for itself would be renamed, not
     taken: no label of kvstore's is one that it wants. dict "root" $ "values" a monitor's values "port" NAME "path" PATH
     "metricRelabelings" those that go before the values' (optional) */}}
{{- define "kvstore.monitoring.endpoint" -}}
port: {{ .port }}
path: {{ .path }}
interval: {{ .values.interval }}
scrapeTimeout: {{ .values.scrapeTimeout }}
relabelings:
  - targetLabel: release
    replacement: {{ include "kvstore.monitoring.release" .root }}
  {{- with .values.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with concat (.metricRelabelings | default list) .values.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The rules with all that the release says of them, as {groups: [...]}. */}}
{{- define "kvstore.monitoring.rules" -}}
{{- $values := .Values.monitoring.prometheusRule -}}
{{- $ours := printf "release=%q" (include "kvstore.monitoring.release" .) -}}
{{- $words := dict
      "servers" ($values.serverMatcher | default $ours)
      "engines" ($values.engineMatcher | default (ternary $ours "" .Values.monitoring.engines.enabled))
      "release" (include "kvstore.monitoring.release" .)
      "namespace" .Release.Namespace
      "fullname" (include "kvstore.fullname" .) -}}
{{- range $name, $value := $values.thresholds }}{{ $_ := set $words $name ($value | toString) }}{{ end -}}
{{- $text := .Files.Get "files/alerts.yaml" -}}
{{- range $name, $value := $words }}{{ $text = replace (printf "@%s@" $name) $value $text }}{{ end -}}
{{- $holds := dict "cronJobs" $values.cronJobs "follow" .Values.follow.enabled -}}
{{- $groups := list -}}
{{- range $group := (fromYaml $text).groups -}}
{{- $rules := list -}}
{{- range $rule := $group.rules -}}
{{- if and (or (not $rule.when) (get $holds ($rule.when | default ""))) (not (has ($rule.alert | default "") $values.disabled)) -}}
{{- $kept := omit $rule "when" -}}
{{- if $rule.alert -}}
{{- $_ := set $kept "labels" (mergeOverwrite (dict "release" $words.release) $rule.labels $values.alertLabels) -}}
{{- $_ := set $kept "annotations" (merge (dict "runbook_url" (printf "%s#%s" $values.runbooks (lower $rule.alert))) $rule.annotations) -}}
{{- end -}}
{{- $rules = append $rules $kept -}}
{{- end -}}
{{- end -}}
{{- if $rules }}{{ $groups = append $groups (dict "name" $group.name "rules" $rules) }}{{ end -}}
{{- end -}}
{{- dict "groups" $groups | toYaml -}}
{{- end -}}

{{/* How a janitor is asked, where not everybody may. dict "root" $ "values" a monitor's values */}}
{{- define "kvstore.monitoring.access" -}}
{{- $janitor := .root.Values.janitor -}}
{{- with $janitor.tls.existingSecret }}
scheme: https
tlsConfig:
  {{- if $.values.tlsConfig }}
  {{- toYaml $.values.tlsConfig | nindent 2 }}
  {{- else }}
  serverName: {{ printf "%s.%s.svc" (include "kvstore.fullname" $.root) $.root.Release.Namespace | quote }}
  ca:
    secret:
      name: {{ . | quote }}
      key: ca.crt
  {{- end }}
{{- end }}
{{- with $janitor.password }}
{{- if .existingSecret }}
authorization:
  credentials:
    name: {{ .existingSecret | quote }}
    key: {{ .key | quote }}
{{- end }}
{{- end }}
{{- end -}}
