{{/* One sentence per line for each combination of values that can't work. */}}
{{- define "kvstore.validate.monitoring" -}}
{{- $monitoring := .Values.monitoring -}}
{{- $rule := $monitoring.prometheusRule -}}
{{- if and $monitoring.serviceMonitor.enabled $monitoring.podMonitor.enabled }}
monitoring.serviceMonitor and monitoring.podMonitor are both enabled: every janitor would be scraped twice; enable one of them.
{{- end }}
{{- if and (or $monitoring.serviceMonitor.enabled $monitoring.podMonitor.enabled) (eq (int .Values.janitor.replicas) 0) }}
monitoring.{{ ternary "serviceMonitor" "podMonitor" $monitoring.serviceMonitor.enabled }} is enabled, but janitor.replicas is 0: there is nothing to scrape; raise it, or switch the monitor off.
{{- end }}
{{- range $name, $values := pick $monitoring "serviceMonitor" "podMonitor" "engines" -}}
{{- if gt (include "kvstore.monitoring.milliseconds" $values.scrapeTimeout | int64) (include "kvstore.monitoring.milliseconds" $values.interval | int64) }}
monitoring.{{ $name }}.scrapeTimeout ({{ $values.scrapeTimeout }}) is longer than monitoring.{{ $name }}.interval ({{ $values.interval }}): Prometheus refuses that; lower it.
{{- end }}
{{- if and $rule.enabled $values.enabled (gt (include "kvstore.monitoring.milliseconds" $values.interval | int64) 120000) }}
monitoring.{{ $name }}.interval ({{ $values.interval }}) is longer than 2m, but monitoring.prometheusRule is enabled: its alerts look at windows of five minutes, in which two scrapes must fit; lower it.
{{- end }}
{{- end }}
{{- if and $rule.enabled (not $rule.serverMatcher) (not $monitoring.serviceMonitor.enabled) (not $monitoring.podMonitor.enabled) }}
monitoring.prometheusRule is enabled, but neither monitoring.serviceMonitor nor monitoring.podMonitor: nothing gives the janitors' series the label that the rules select them by. Enable one of them, or say in monitoring.prometheusRule.serverMatcher how your Prometheus calls them, such as job="kvstore".
{{- end }}
{{- if and $rule.enabled $rule.cronJobs (not .Values.fsck.enabled) (not .Values.gc.enabled) }}
monitoring.prometheusRule.cronJobs is true, but fsck and gc are both disabled: there is no CronJob to watch.
{{- end }}
{{- if and $rule.enabled .Values.follow.enabled (le (float64 $rule.thresholds.followSeconds) (mulf 2 .Values.follow.every)) }}
monitoring.prometheusRule.thresholds.followSeconds ({{ $rule.thresholds.followSeconds }}) is not above twice follow.every ({{ .Values.follow.every }}): KVStoreFollowLate would fire between two looks; raise it.
{{- end }}
{{- $known := list -}}
{{- range (.Files.Get "files/alerts.yaml" | fromYaml).groups -}}
{{- range .rules }}{{ with .alert }}{{ $known = append $known . }}{{ end }}{{ end -}}
{{- end -}}
{{- range $rule.disabled -}}
{{- if not (has . $known) }}
monitoring.prometheusRule.disabled names {{ . | quote }}, which is no alert of this chart; its alerts are {{ join ", " $known }}.
{{- end }}
{{- end }}
{{- end -}}

{{/* A duration as the values have it. */}}
{{- define "kvstore.monitoring.milliseconds" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- mul $number (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) (regexFind "[a-z]+$" .)) -}}
{{- end -}}
