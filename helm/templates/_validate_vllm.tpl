{{/* One sentence per line for each combination of values that can't work. */}}
{{- define "kvstore.validate.vllm" -}}
{{- $vllm := .Values.vllm -}}
{{- if $vllm.enabled -}}
{{- $kinds := $vllm.kinds -}}
{{- $prefill := or (has "pd-prefill" $kinds) (has "epd-prefill" $kinds) }}
{{- if and $prefill (not (has "pd-decode" $kinds)) }}
vllm.kinds has engines that only prefill, and none that take over from them: add pd-decode.
{{- end }}
{{- if and (has "pd-decode" $kinds) (not $prefill) }}
vllm.kinds has pd-decode, and no engines that prefill for it: add pd-prefill (or epd-prefill).
{{- end }}
{{- $readers := list -}}
{{- range $kinds }}{{ if has . (list "ec" "kv-ec" "ec-consumer" "epd-language" "epd-prefill") }}{{ $readers = append $readers . }}{{ end }}{{ end -}}
{{- if and (has "ec-producer" $kinds) (not $readers) }}
vllm.kinds has ec-producer, and no engines that use what encoders store: add ec-consumer, epd-language or epd-prefill.
{{- end }}
{{- range list "offloading-tier" "multi" }}
{{- if and (has . $kinds) (not (int64 $vllm.offloadingTier.cpuGiB)) }}
vllm.kinds has {{ . }}, whose tier in the node's memory has no size: set vllm.offloadingTier.cpuGiB.
{{- end }}
{{- end }}
{{- if has .Release.Namespace $vllm.namespaces }}
vllm.namespaces names {{ .Release.Namespace }}, the release's own, which has the configs anyway: leave it out.
{{- end }}
{{- if and $vllm.namespaces (eq .Values.payloads.type "pvc") }}
payloads.type is pvc, and a claim belongs to one namespace: engines in {{ join ", " $vllm.namespaces }} can't mount it; use s3 or hostPath, or leave vllm.namespaces empty.
{{- end }}
{{- include "kvstore.validate.vllm.settings" . }}
{{- include "kvstore.validate.vllm.tier" . }}
{{- include "kvstore.validate.vllm.extraConfig" . }}
{{- end -}}
{{- end -}}

{{/* Settings of one kind that must be the same for all, or stand elsewhere. */}}
{{- define "kvstore.validate.vllm.settings" -}}
{{- range $group, $tree := .Values.vllm.settings }}
{{- range list "payloads" "index" "capacity_bytes" }}
{{- if hasKey $tree . }}
vllm.settings.{{ $group }}.{{ . }}: all engines use one store; payloads, redis and capacity are the chart's own values.
{{- end }}
{{- end }}
{{- if $tree.identity }}
vllm.settings.{{ $group }}.identity: engines with different identities share nothing; set it under settings.identity, for all.
{{- end }}
{{- range $part, $names := dict "redis" (list "password" "sentinel_password") "s3" (list "access_key_id" "secret_access_key" "session_token") }}
{{- range $names }}
{{- if hasKey (get $tree $part | default dict) . }}
vllm.settings.{{ $group }}.{{ $part }}.{{ . }} would stand in a ConfigMap: name a Secret (payloads.s3.existingSecret, redis.external.existingSecret).
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What KVStoreTier refuses at an engine's start (connectors/tier/identity.py). */}}
{{- define "kvstore.validate.vllm.tier" -}}
{{- if has "offloading-tier" .Values.vllm.kinds -}}
{{- $tree := mergeOverwrite (deepCopy .Values.settings) (deepCopy .Values.vllm.settings.tier) -}}
{{- $admission := $tree.admission | default dict -}}
{{- $default := dict "min_blocks" 1.0 "second_use" false "window_s" 86400.0 "sketch_bytes" 1048576.0 -}}
{{- range $key, $value := $admission }}
{{- if ne (toString $value) (toString (get $default $key)) }}
admission.{{ $key }} doesn't work under vLLM's offloading, which tells a tier nothing of prompts: take offloading-tier out of vllm.kinds, or set vllm.settings.tier.admission.{{ $key }} to {{ get $default $key }}.
{{- end }}
{{- end }}
{{- if dig "identity" "any_tp" false $tree }}
settings.identity.any_tp doesn't work under vLLM's offloading, whose chunks hold all workers' bytes as they are: take offloading-tier out of vllm.kinds.
{{- end }}
{{- if dig "kv" "save_decode" false $tree }}
kv.save_decode doesn't work under vLLM's offloading: set vllm.settings.tier.kv.save_decode to false, and "offload_prompt_only": false in vLLM's own config.
{{- end }}
{{- if gt (dig "kv" "min_load_blocks" 1 $tree | int64) 1 }}
kv.min_load_blocks doesn't work under vLLM's offloading: set vllm.settings.tier.kv.min_load_blocks to 1.
{{- end }}
{{- end -}}
{{- end -}}

{{- define "kvstore.validate.vllm.extraConfig" -}}
{{- $wanted := include "kvstore.vllm.wanted" . | fromYaml -}}
{{- $known := concat $wanted.kv $wanted.ec -}}
{{- range $config, $keys := .Values.vllm.extraConfig }}
{{- if not (has $config $known) }}
vllm.extraConfig.{{ $config }}: there is no such config among those that vllm.kinds asks for ({{ join ", " $known }}).
{{- end }}
{{- range $key, $value := $keys }}
{{- if has $key (list "kv_connector" "kv_connector_module_path" "kv_connector_extra_config" "kv_role" "kv_load_failure_policy" "ec_connector" "ec_connector_module_path" "ec_connector_extra_config" "ec_role") }}
vllm.extraConfig.{{ $config }}.{{ $key }} is the chart's own: choose another kind, or set what the store does under vllm.settings.
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
