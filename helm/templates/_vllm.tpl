{{/*
Configs of vLLM's connectors, and what an engine's pod needs to use them.

Each config names /etc/kvstore/settings.yaml, so that what is secret comes from the environment. `recompute` is
vLLM's word for: what can't be loaded is computed; its default ends the request.

For a chart of your own that has this one as a dependency: kvstore.engine.labels, .env, .volumes and
.volumeMounts, with .Subcharts.kvstore as the argument (docs/vllm-on-kubernetes.md).
*/}}

{{- define "kvstore.vllm.name" -}}
{{ include "kvstore.fullname" . }}-vllm
{{- end -}}

{{/* Kind of engine -> the configs that it takes. */}}
{{- define "kvstore.vllm.kinds" -}}
kv: {kv: kv}
ec: {ec: ec}
kv-ec: {kv: kv, ec: ec}
pd-prefill: {kv: pd-prefill}
pd-decode: {kv: pd-decode}
ec-producer: {ec: ec-producer}
ec-consumer: {ec: ec-consumer}
epd-language: {kv: kv, ec: ec-consumer}
epd-prefill: {kv: pd-prefill, ec: ec-consumer}
offloading-tier: {kv: offloading-tier}
multi: {kv: multi}
{{- end -}}

{{/* Config -> the group under vllm.settings that is its own. */}}
{{- define "kvstore.vllm.groups" -}}
pd-prefill: prefill
pd-decode: decode
ec-producer: encoder
offloading-tier: tier
{{- end -}}

{{/* The configs of the kinds that are asked for: {kv: [...], ec: [...]}. */}}
{{- define "kvstore.vllm.wanted" -}}
{{- $kinds := include "kvstore.vllm.kinds" . | fromYaml -}}
{{- $kv := list -}}
{{- $ec := list -}}
{{- range $kind := .Values.vllm.kinds -}}
{{- with get $kinds $kind -}}
{{- with .kv }}{{ $kv = append $kv . }}{{ end -}}
{{- with .ec }}{{ $ec = append $ec . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- dict "kv" (uniq $kv) "ec" (uniq $ec) | toYaml -}}
{{- end -}}

{{/* The settings file that a config names. dict "root" $ "config" NAME */}}
{{- define "kvstore.vllm.settingsFile" -}}
{{- $group := get (include "kvstore.vllm.groups" .root | fromYaml) .config -}}
{{- if and $group (get .root.Values.vllm.settings $group) -}}
settings-{{ $group }}.yaml
{{- else -}}
settings.yaml
{{- end -}}
{{- end -}}

{{/* A transfer config. dict "root" $ "config" NAME */}}
{{- define "kvstore.vllm.config" -}}
{{- $extra := get .root.Values.vllm.extraConfig .config | default dict -}}
{{- $settings := printf "/etc/kvstore/%s" (include "kvstore.vllm.settingsFile" .) -}}
{{- $bytes := mul (int64 .root.Values.vllm.offloadingTier.cpuGiB) 1073741824 -}}
{{- $chunk := int64 .root.Values.vllm.offloadingTier.blocksPerChunk -}}
{{- $store := dict "kv_connector" "KVStoreConnector" "kv_connector_module_path" "connectors.kv" "kv_role" "kv_both"
      "kv_load_failure_policy" "recompute" "kv_connector_extra_config" (dict "settings" $settings) -}}
{{- $made := $store -}}
{{- if eq .config "pd-decode" -}}
{{- $_ := set $made "kv_role" "kv_consumer" -}}
{{- else if eq .config "offloading-tier" -}}
{{- $tier := dict "type" "KVStoreTier" "module_path" "connectors.tier" "settings" $settings -}}
{{- $made = dict "kv_connector" "OffloadingConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute"
      "kv_connector_extra_config" (dict "spec_name" "TieringOffloadingSpec" "cpu_bytes_to_use" $bytes
        "blocks_per_chunk" $chunk "secondary_tiers" (list $tier)) -}}
{{- else if eq .config "multi" -}}
{{- $near := dict "kv_connector" "OffloadingConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute"
      "kv_connector_extra_config" (dict "cpu_bytes_to_use" $bytes "blocks_per_chunk" $chunk) -}}
{{- $made = dict "kv_connector" "MultiConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute"
      "kv_connector_extra_config" (dict "connectors" (list $store $near)) -}}
{{- else if hasPrefix "ec" .config -}}
{{- $role := get (dict "ec" "ec_both" "ec-producer" "ec_producer" "ec-consumer" "ec_consumer") .config -}}
{{- $made = dict "ec_connector" "ECStoreConnector" "ec_connector_module_path" "connectors.ec" "ec_role" $role
      "ec_connector_extra_config" (dict "settings" $settings) -}}
{{- end -}}
{{- merge $made $extra | toRawJson -}}
{{- end -}}

{{/* What an engine of a kind is given, as a file for --config. dict "root" $ "kind" NAME */}}
{{- define "kvstore.vllm.flags" -}}
{{- $configs := get (include "kvstore.vllm.kinds" .root | fromYaml) .kind -}}
{{- with $configs.kv }}
kv-transfer-config: '{{ include "kvstore.vllm.config" (dict "root" $.root "config" .) | replace "'" "''" }}'
{{- end -}}
{{- with $configs.ec }}
ec-transfer-config: '{{ include "kvstore.vllm.config" (dict "root" $.root "config" .) | replace "'" "''" }}'
{{- end -}}
{{- end -}}

{{/* Settings, as YAML: those of all engines, and over them a group's own. dict "root" $ "group" NAME or "" */}}
{{- define "kvstore.vllm.settings" -}}
{{- $tree := include "kvstore.engineSettings" .root | fromYaml -}}
{{- if .group -}}
{{- $tree = mergeOverwrite $tree (deepCopy (get .root.Values.vllm.settings .group)) -}}
{{- end -}}
{{- toYaml $tree -}}
{{- end -}}

{{/* Everything the ConfigMap holds. */}}
{{- define "kvstore.vllm.data" -}}
settings.yaml: |
  {{- include "kvstore.vllm.settings" (dict "root" $ "group" "") | nindent 2 }}
{{- $wanted := include "kvstore.vllm.wanted" $ | fromYaml }}
{{- $configs := concat $wanted.kv $wanted.ec }}
{{- range $config, $group := include "kvstore.vllm.groups" $ | fromYaml }}
{{- if and (get $.Values.vllm.settings $group) (has $config $configs) }}
settings-{{ $group }}.yaml: |
  {{- include "kvstore.vllm.settings" (dict "root" $ "group" $group) | nindent 2 }}
{{- end }}
{{- end }}
{{- range $config := $configs }}
{{ $config }}.json: |
  {{ include "kvstore.vllm.config" (dict "root" $ "config" $config) }}
{{- end }}
{{- range $kind := $.Values.vllm.kinds }}
{{ $kind }}.yaml: |
  {{- include "kvstore.vllm.flags" (dict "root" $ "kind" $kind) | trim | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The service account whose role opens the bucket; empty where keys do, or no role is bound to it. */}}
{{- define "kvstore.engine.serviceAccountName" -}}
{{- $s3 := .Values.payloads.s3 -}}
{{- if and (eq .Values.payloads.type "s3") (not (include "kvstore.s3.secretName" .)) -}}
{{- if or .Values.serviceAccount.annotations $s3.webIdentity.roleArn -}}
{{- include "kvstore.serviceAccountName" . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What an engine's pod takes from its namespace, besides the chart's own ConfigMap: "secret/NAME" or
     "configmap/NAME" -> the keys of it that are used, as JSON. Others there may be are none of an engine's business:
     the server's key, the passwords of other users. Of the Secret of signing keys all are: no key is named. */}}
{{- define "kvstore.engine.objects" -}}
{{- $found := dict -}}
{{- range include "kvstore.engine.env" . | fromYamlArray -}}
{{- with dig "valueFrom" "secretKeyRef" dict . -}}
{{- $object := printf "secret/%s" .name -}}
{{- $_ := set $found $object (append (get $found $object | default list) .key) -}}
{{- end -}}
{{- end -}}
{{- range include "kvstore.engine.volumes" . | fromYamlArray -}}
{{- range dig "projected" "sources" list . -}}
{{- range $kind, $source := pick . "secret" "configMap" -}}
{{- $object := printf "%s/%s" (lower $kind) $source.name -}}
{{- range $source.items -}}
{{- $_ := set $found $object (append (get $found $object | default list) .key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $object, $keys := $found }}{{ $_ := set $found $object ($keys | uniq | sortAlpha) }}{{ end -}}
{{- with .Values.signing.existingSecret }}{{ $_ := set $found (printf "secret/%s" .) list }}{{ end -}}
{{- toJson $found -}}
{{- end -}}

{{/* A program for jq: an object for another namespace, with the keys that are named and no other, or with all of them
     if none is. A Secret is Opaque, since other types want keys that engines don't. dict "object" "secret/NAME" or "configmap/NAME" "keys" a list */}}
{{- define "kvstore.engine.copy" -}}
{{- $keys := list -}}
{{- range .keys }}{{ $keys = append $keys (toRawJson .) }}{{ end -}}
{apiVersion, kind,{{ if hasPrefix "secret/" .object }} type: "Opaque",{{ end }} metadata: {name: .metadata.name}, data: {{ if $keys }}(.data | with_entries(select(.key == ({{ join ", " $keys }})))){{ else }}.data{{ end }}}
{{- end -}}

{{- define "kvstore.engine.labels" -}}
kvstore/client: "true"
{{- end -}}

{{- define "kvstore.engine.env" -}}
- name: KVSTORE_SETTINGS
  value: /etc/kvstore/settings.yaml
{{ include "kvstore.env" . | trim }}
{{- end -}}

{{/*
The configs and the certificates are one volume: inside a ConfigMap's volume no other can be mounted, since there
is no folder to mount it on and none can be made. So the volumes for below /etc/kvstore are taken apart, and go in
as sources. The others (payloads, a token, the node's cache) follow as they are.
*/}}
{{- define "kvstore.engine.files" -}}
{{- $sources := list (dict "configMap" (dict "name" (include "kvstore.vllm.name" .))) -}}
{{- $mounts := list (dict "name" "kvstore" "mountPath" "/etc/kvstore" "readOnly" true) -}}
{{- $places := dict -}}
{{- range include "kvstore.engineVolumeMounts" . | fromYamlArray -}}
{{- if hasPrefix "/etc/kvstore/" .mountPath -}}
{{- $_ := set $places .name (trimPrefix "/etc/kvstore/" .mountPath) -}}
{{- else -}}
{{- $mounts = append $mounts . -}}
{{- end -}}
{{- end -}}
{{- $volumes := list -}}
{{- range $volume := include "kvstore.engineVolumes" . | fromYamlArray -}}
{{- $place := get $places $volume.name -}}
{{- if $place -}}
{{- $parts := dig "projected" "sources" (list (omit $volume "name")) $volume -}}
{{- range $part := $parts }}{{ range $kind, $object := $part -}}
{{- $items := list -}}
{{- range $object.items -}}
{{- $item := dict "key" .key "path" (printf "%s/%s" $place .path) -}}
{{- if hasSuffix ".key" .path }}{{ $_ := set $item "mode" 288 }}{{ end -}}
{{- $items = append $items $item -}}
{{- end -}}
{{- $name := $object.name | default $object.secretName -}}
{{- $sources = append $sources (dict $kind (dict "name" $name "items" $items)) -}}
{{- end }}{{ end -}}
{{- else -}}
{{- $volumes = append $volumes $volume -}}
{{- end -}}
{{- end -}}
{{- $volumes = prepend $volumes (dict "name" "kvstore" "projected" (dict "sources" $sources)) -}}
{{- dict "volumes" $volumes "volumeMounts" $mounts | toYaml -}}
{{- end -}}

{{- define "kvstore.engine.volumes" -}}
{{- get (include "kvstore.engine.files" . | fromYaml) "volumes" | toYaml -}}
{{- end -}}

{{- define "kvstore.engine.volumeMounts" -}}
{{- get (include "kvstore.engine.files" . | fromYaml) "volumeMounts" | toYaml -}}
{{- end -}}
