{{/* One sentence per line: what can't work about janitors, their pods and the cron jobs. */}}
{{- define "kvstore.validate.janitor" -}}
{{- $janitor := .Values.janitor }}
{{- if and $janitor.tls.clientCASecret (not $janitor.tls.existingSecret) }}
janitor.tls.clientCASecret is set, and janitor.tls.existingSecret is not: only TLS asks clients for certificates; name a Secret with the janitors' own.
{{- end }}
{{- range $name, $values := pick .Values.monitoring "serviceMonitor" "podMonitor" }}
{{- if and $values.enabled $janitor.tls.clientCASecret (not $janitor.password.existingSecret) (not (hasKey $values.tlsConfig "cert")) }}
monitoring.{{ $name }} is enabled, janitor.tls.clientCASecret is set, and there is no janitor.password: Prometheus would be turned away; give monitoring.{{ $name }}.tlsConfig a cert and a keySecret.
{{- end }}
{{- if and $values.tlsConfig (not $janitor.tls.existingSecret) }}
monitoring.{{ $name }}.tlsConfig is set, and janitor.tls.existingSecret is not: the janitors speak no TLS; take one of them out, or name the other.
{{- end }}
{{- end }}
{{- if and (eq (int $janitor.replicas) 0) .Values.monitoring.prometheusRule.enabled }}
monitoring.prometheusRule.enabled is true, and janitor.replicas is 0: its alerts are about metrics that nobody would show; keep a janitor, or take the rules out.
{{- end }}
{{- range $name := list "janitor" "fsck" "gc" "follow" }}
{{- $resources := (index $.Values $name).resources }}
{{- $limit := dig "limits" "memory" "" $resources | toString }}
{{- $request := dig "requests" "memory" "" $resources | toString }}
{{- if and $limit (gt (include "kvstore.bytes" $request | int64) (include "kvstore.bytes" $limit | int64)) }}
{{ $name }}.resources.requests.memory ({{ $request }}) is more than its limit ({{ $limit }}): raise the limit.
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.validate.pods" -}}
{{- $reserved := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "app.kubernetes.io/part-of" "helm.sh/chart" "kvstore/client" }}
{{- $groups := dict "commonLabels" .Values.commonLabels "podLabels" .Values.podLabels "redis.builtIn.podLabels" .Values.redis.builtIn.podLabels }}
{{- range $group, $labels := $groups }}
{{- range $label, $_ := $labels }}
{{- if has $label $reserved }}
{{ $group }} has {{ $label }}, which the chart sets: Services and policies find pods by it; choose another name.
{{- end }}
{{- end }}
{{- end }}
{{- range $annotation, $_ := .Values.commonAnnotations }}
{{- if hasPrefix "helm.sh/hook" $annotation }}
commonAnnotations has {{ $annotation }}: everything would be a hook, which helm neither upgrades nor uninstalls; take it out.
{{- end }}
{{- end }}
{{- $context := .Values.podSecurityContext }}
{{- if and $context.runAsNonRoot (hasKey $context "runAsUser") (eq (int $context.runAsUser) 0) }}
podSecurityContext.runAsUser is 0, and runAsNonRoot is true: the kubelet would refuse to start the pods; name the user that engines write as, or another one with a group that may delete what they write.
{{- end }}
{{- range $variable := .Values.extraEnv }}
{{- if regexMatch "^KVSTORE_(PAYLOADS|INDEX|SETTINGS|CAPACITY_BYTES|REDIS__|S3__)" $variable.name }}
extraEnv has {{ $variable.name }}, which outranks the settings in the chart's pods and not in engines: use payloads, redis, capacity and settings instead.
{{- else if and (hasKey $variable "value") (regexMatch "(?i)(password|secret|token|access_key)" $variable.name) }}
extraEnv has {{ $variable.name }} with its value, which everybody who may see the pods can read: take it from a Secret, with valueFrom.secretKeyRef.
{{- end }}
{{- end }}
{{- $volumes := list }}
{{- range $volume := include "kvstore.ownVolumes" . | fromYamlArray }}
{{- if kindIs "map" $volume }}{{ $volumes = append $volumes $volume.name }}{{ end }}
{{- end }}
{{- $extra := list }}
{{- range $volume := .Values.extraVolumes }}
{{- if has $volume.name (concat $volumes $extra (list "serve-tls" "serve-ca" "serve-password")) }}
extraVolumes has {{ $volume.name }}, which the chart has as well: choose another name.
{{- end }}
{{- $extra = append $extra $volume.name }}
{{- end }}
{{- range $mount := .Values.extraVolumeMounts }}
{{- if not (has $mount.name (concat $volumes $extra)) }}
extraVolumeMounts names the volume {{ $mount.name }}, which is none: add it to extraVolumes.
{{- end }}
{{- if has (trimSuffix "/" $mount.mountPath) (list "" "/tmp" "/etc/kvstore" "/etc/kvstore/settings.yaml" "/etc/kvstore/tls" "/var/lib/kvstore") }}
extraVolumeMounts mounts {{ $mount.name }} at {{ $mount.mountPath }}, which the chart needs itself: choose another path.
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.validate.jobs" -}}
{{- range $name := list "fsck" "gc" }}
{{- $job := index $.Values $name }}
{{- if not (regexMatch "^(@(yearly|annually|monthly|weekly|daily|midnight|hourly)|[^[:space:]]+([[:space:]]+[^[:space:]]+){4})$" (trim $job.schedule)) }}
{{ $name }}.schedule is {{ $job.schedule }}: it has five fields, minute, hour, day, month and weekday, such as 23 4 * * 0, or is @daily or @weekly.
{{- else if contains "TZ=" $job.schedule }}
{{ $name }}.schedule names a time zone: that is {{ $name }}.timeZone.
{{- end }}
{{- end }}
{{- $fsck := .Values.fsck }}
{{- $gc := .Values.gc }}
{{- if and $fsck.quick $fsck.readDataPercent }}
fsck.quick is true, and fsck.readDataPercent is {{ $fsck.readDataPercent }}: a quick look reads nothing; take one of them out.
{{- end }}
{{- if and $fsck.enabled $fsck.repair $gc.enabled $gc.delete (eq (trim $fsck.schedule) (trim $gc.schedule)) (eq $fsck.timeZone $gc.timeZone) }}
fsck.repair and gc.delete run at the same time ({{ $gc.schedule }}): one would list again what the other deletes; give them different schedules.
{{- end }}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?[smhdw]$" $gc.olderThan) }}
gc.olderThan is {{ $gc.olderThan }}: it is an age such as 30m, 24h or 7d.
{{- else }}
{{- $units := dict "s" 1 "m" 60 "h" 3600 "d" 86400 "w" 604800 }}
{{- $seconds := mulf (regexFind "^[0-9.]+" $gc.olderThan | float64) (get $units (regexFind "[smhdw]$" $gc.olderThan)) }}
{{- if lt (int64 $seconds) 600 }}
gc.olderThan is {{ $gc.olderThan }}: what is younger than 10 minutes may still be committed, and fsck refuses to delete it; take 24h.
{{- end }}
{{- end }}
{{- end -}}
