{{/* One sentence per line for each combination of values that can't work. A URL is never quoted: it may hold a password. */}}
{{- define "kvstore.validate.redis" -}}
{{- if and .Values.redis.builtIn.enabled .Values.redis.external.url }}
redis.builtIn.enabled and redis.external.url are two Redis servers, and the index lives in one: set redis.builtIn.enabled=false, or leave redis.external.url empty.
{{- else if .Values.redis.builtIn.enabled }}
{{ include "kvstore.validate.redis.builtIn" . }}
{{- else if .Values.redis.external.url }}
{{ include "kvstore.validate.redis.external" . }}
{{- else }}
redis.builtIn.enabled is false and redis.external.url is empty: engines share an index in Redis, so enable the one or name the other (--set redis.external.url=redis://HOST:6379/0).
{{- end }}
{{- if and .Values.networkPolicy.egress.enabled (not .Values.networkPolicy.enabled) }}
networkPolicy.egress.enabled does nothing while networkPolicy.enabled is false: set both, or neither.
{{- end }}
{{- end -}}

{{- define "kvstore.validate.redis.builtIn" -}}
{{- with .Values.redis.external }}
{{- if or .username .existingSecret .sentinel.username .sentinel.passwordKey .tls.caSecret .tls.clientSecret (not .tls.verify) }}
redis.external has values but no url, and redis.builtIn is enabled: for the built-in Redis' passwords and certificate see redis.builtIn.auth and redis.builtIn.tls; for a Redis of your own set redis.external.url and redis.builtIn.enabled=false.
{{- end }}
{{- end }}
{{- with .Values.redis.builtIn }}
{{- if and .tls.enabled (not .tls.existingSecret) (not .tls.selfSigned) }}
redis.builtIn.tls.enabled wants a certificate: name a Secret with tls.crt, tls.key and ca.crt in redis.builtIn.tls.existingSecret, or set redis.builtIn.tls.selfSigned=true.
{{- end }}
{{- if and .tls.existingSecret .tls.selfSigned }}
redis.builtIn.tls.existingSecret and redis.builtIn.tls.selfSigned are two certificates: choose one.
{{- end }}
{{- if and (not .tls.enabled) (or .tls.existingSecret .tls.selfSigned) }}
redis.builtIn.tls has a certificate but is not enabled: set redis.builtIn.tls.enabled=true.
{{- end }}
{{- $keys := list .auth.passwordKey .auth.previousPasswordKey }}
{{- if .auth.reader.enabled }}{{ $keys = append $keys .auth.reader.passwordKey }}{{ end }}
{{- if ne (len $keys) (len (uniq $keys)) }}
redis.builtIn.auth names one key of the Secret twice: passwordKey, previousPasswordKey and reader.passwordKey must differ.
{{- end }}
{{- $limit := include "kvstore.redis.limit" $ | int64 }}
{{- $maxmemory := include "kvstore.redis.maxmemory" $ | int64 }}
{{- if and (not $limit) (not .maxmemory) }}
redis.builtIn.resources has no memory limit and redis.builtIn.maxmemory is empty: without a bound Redis fills the node; set one of them.
{{- else if lt $maxmemory 33554432 }}
redis.builtIn.maxmemory would be {{ $maxmemory }} bytes, and Redis needs 32Mi to hold anything: raise redis.builtIn.resources.limits.memory (such as 2Gi), or set redis.builtIn.maxmemory.
{{- end }}
{{- if and $limit (gt (mul $maxmemory 10) (mul $limit 9)) }}
redis.builtIn.maxmemory is more than nine tenths of the memory limit: the kernel would kill Redis before it is full. Lower it, or raise redis.builtIn.resources.limits.memory.
{{- end }}
{{- if and .persistence.enabled (lt (include "kvstore.bytes" .persistence.size | int64) (mul $maxmemory 2)) }}
redis.builtIn.persistence.size is less than twice maxmemory ({{ $maxmemory }} bytes): while the append-only file is rewritten the old one and the new one are on the volume. Raise it.
{{- end }}
{{- $own := dict "aclfile" "auth" "requirepass" "auth" "user" "auth" "port" "tls" "bind" "networkPolicy" "protected-mode" "networkPolicy" "dir" "persistence" "appendonly" "persistence" "daemonize" "image" "maxmemory" "maxmemory" "maxmemory-policy" "" "hash-max-listpack-entries" "" "hash-max-listpack-value" "" "hash-max-ziplist-entries" "" "hash-max-ziplist-value" "" "replicaof" "" "slaveof" "" "cluster-enabled" "" "databases" "" "include" "" "loadmodule" "" "rename-command" "" "unixsocket" "" }}
{{- range $name, $value := .config }}
{{- $low := lower $name }}
{{- if or (hasKey $own $low) (hasPrefix "tls-" $low) }}
{{- $other := get $own $low | default (ternary "tls" "" (hasPrefix "tls-" $low)) }}
redis.builtIn.config.{{ $name }}: {{ if $other }}{{ if eq $other "networkPolicy" }}see networkPolicy{{ else }}see redis.builtIn.{{ $other }}{{ end }}{{ else }}kvstore needs it as the chart has it{{ end }}; take it out of config.
{{- else if not (regexMatch "^[a-z][a-z0-9-]*$" $name) }}
redis.builtIn.config has a key that is no directive of redis.conf: names are lower-case letters, digits and dashes.
{{- else if contains "\n" (toString $value) }}
redis.builtIn.config.{{ $name }} has a value of several lines: what stands in the second would be another directive; give each a key of its own.
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.validate.redis.external" -}}
{{- $location := include "kvstore.redis.location" . | fromJson }}
{{- $host := "([A-Za-z0-9._-]+|\\[[0-9A-Fa-f:.]+\\])(:[0-9]{1,5})?" }}
{{- $sentinel := hasSuffix "+sentinel" $location.scheme }}
{{- with .Values.redis.external }}
{{- if contains "@" .url }}
redis.external.url holds a user or a password, and it lands in a ConfigMap: put the name into redis.external.username and the password into a Secret that redis.external.existingSecret names.
{{- else if not (has $location.scheme (list "redis" "rediss" "redis+sentinel" "rediss+sentinel")) }}
redis.external.url begins with none of redis://, rediss:// (TLS), redis+sentinel:// and rediss+sentinel://.
{{- else if regexMatch "[?#]" .url }}
redis.external.url takes no options after a "?" or "#": what there is to set stands under redis.external and settings.redis.
{{- else if not (regexMatch (printf "^%s(,%s)*$" $host $host) (join "," $location.hosts)) }}
redis.external.url names no host, or one that is no host: write {{ $location.scheme }}://HOST:PORT, several separated by commas.
{{- else if $sentinel }}
{{- if or (not $location.path) (not (first $location.path)) (and (eq (len $location.path) 1) (regexMatch "^[0-9]+$" (first $location.path))) }}
redis.external.url doesn't name the master as its Sentinels know it: write {{ $location.scheme }}://HOST:26379,HOST:26379/MASTER/0.
{{- else if not (regexMatch "^[A-Za-z0-9._-]+(/[0-9]*)?$" (join "/" $location.path)) }}
redis.external.url has something else than MASTER/DB after its hosts: write {{ $location.scheme }}://HOST:26379,HOST:26379/MASTER/0.
{{- end }}
{{- else if not (regexMatch "^[0-9]*$" (join "/" $location.path)) }}
redis.external.url has something else than a database's number after its hosts: write {{ $location.scheme }}://HOST:6379/0{{ if contains "sentinel" (lower .url) }}; Sentinels are asked with redis+sentinel://{{ end }}.
{{- else if and (gt (len $location.hosts) 1) (gt (join "" $location.path | int) 0) }}
redis.external.url names several hosts, which are nodes of a Cluster, and a database: a Cluster has no database but 0.
{{- end }}
{{- if and (or .tls.caSecret .tls.clientSecret (not .tls.verify)) (not (hasPrefix "rediss" $location.scheme)) }}
redis.external.tls is set, but redis.external.url has no TLS: it begins with rediss:// or rediss+sentinel://, or leave redis.external.tls alone.
{{- end }}
{{- if and (not $sentinel) (or .sentinel.username .sentinel.passwordKey) }}
redis.external.sentinel is set, but redis.external.url names no Sentinels: it begins with redis+sentinel:// or rediss+sentinel://.
{{- end }}
{{- if and .username (not .existingSecret) }}
redis.external.username has no password: put it into a Secret and name that in redis.external.existingSecret.
{{- end }}
{{- if and .sentinel.passwordKey (not .existingSecret) }}
redis.external.sentinel.passwordKey is a key of redis.external.existingSecret, which is empty: name the Secret.
{{- end }}
{{- if and .sentinel.username (not .sentinel.passwordKey) }}
redis.external.sentinel.username has no password: put it into the Secret of redis.external.existingSecret and name its key in redis.external.sentinel.passwordKey.
{{- end }}
{{- if and .existingSecret (not .passwordKey) (not .sentinel.passwordKey) }}
redis.external.existingSecret is named, and none of its keys: set redis.external.passwordKey, or leave existingSecret empty.
{{- end }}
{{- end }}
{{- end -}}
