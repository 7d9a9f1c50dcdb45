{{/* One sentence per line for each combination of values that can't work. */}}
{{- define "kvstore.validate.core" -}}
{{- range $part := list "names" "s3" "credentials" "claim" "hostPath" "nodeCache" "signing" "settings" "janitor" "pods" "jobs" }}
{{ include (printf "kvstore.validate.%s" $part) $ }}
{{- end }}
{{- end -}}

{{/* Helm lets a release be called 1, or a.b: a Service can't be. */}}
{{- define "kvstore.validate.names" -}}
{{- $full := include "kvstore.fullname" . }}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $full) }}
{{ ternary "fullnameOverride" "the release" (eq $full .Values.fullnameOverride) }} is called {{ ternary $full .Release.Name (eq $full .Values.fullnameOverride) }}, and Services with it, whose names begin with a letter and have no dot: set fullnameOverride to a name such as kvstore-1.
{{- end }}
{{- if eq (toString .Values.enabled) "false" }}
enabled is false, which says something only to a larger chart that names it in the condition of this dependency: name it there, or install nothing.
{{- end }}
{{- end -}}

{{- define "kvstore.validate.s3" -}}
{{- $type := .Values.payloads.type }}
{{- $s3 := .Values.payloads.s3 }}
{{- if ne $type "s3" }}
{{- if $s3.bucket }}
payloads.s3.bucket is {{ $s3.bucket }}, and payloads.type is {{ $type }}: leave payloads.type at s3, or take the bucket out.
{{- end }}
{{- else if not $s3.bucket }}
payloads.s3.bucket is empty: name the bucket that holds the cache, which must exist (--set payloads.s3.bucket=my-bucket), or choose another payloads.type (pvc, hostPath).
{{- else if not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]{1,62}$" $s3.bucket) }}
payloads.s3.bucket is {{ $s3.bucket }}: it is the bucket's name alone (my-bucket); what stands before the objects' names is payloads.s3.prefix, the server payloads.s3.endpoint.
{{- end }}
{{- if eq $type "s3" }}
{{- if or (not (regexMatch "^[A-Za-z0-9!_.*'()/-]*$" $s3.prefix)) (contains "//" $s3.prefix) (contains "/." (printf "/%s" $s3.prefix)) }}
payloads.s3.prefix is {{ $s3.prefix }}: it is made of letters, digits and - _ . / only, as in team/cache.
{{- end }}
{{- if and $s3.endpoint (not (regexMatch "^https?://[^/@?#[:space:]]+/?$" $s3.endpoint)) }}
payloads.s3.endpoint has to be http://HOST:PORT or https://HOST:PORT, without path or credentials; for AWS leave it empty.
{{- end }}
{{- if and $s3.webIdentity.stsEndpoint (not (regexMatch "^https?://[^@[:space:]]+$" $s3.webIdentity.stsEndpoint)) }}
payloads.s3.webIdentity.stsEndpoint has to be http://HOST:PORT or https://HOST:PORT, without credentials; for AWS leave it empty.
{{- end }}
{{- if and $s3.webIdentity.stsEndpoint (not $s3.webIdentity.roleArn) }}
payloads.s3.webIdentity.stsEndpoint is set without a role: name the role in payloads.s3.webIdentity.roleArn, or take the endpoint out.
{{- end }}
{{- if and $s3.ca.secret $s3.ca.configMap }}
payloads.s3.ca.secret and payloads.s3.ca.configMap are both set: the certificates come from one of them.
{{- end }}
{{- if and (or $s3.ca.secret $s3.ca.configMap) (hasPrefix "http://" $s3.endpoint) }}
payloads.s3.ca names certificates to trust, and payloads.s3.endpoint is http://, without TLS: write https://, or take payloads.s3.ca out.
{{- end }}
{{- end }}
{{- end -}}

{{/* One source of credentials: two of them would be a riddle. */}}
{{- define "kvstore.validate.credentials" -}}
{{- $s3 := .Values.payloads.s3 }}
{{- $inline := or $s3.accessKeyId $s3.secretAccessKey }}
{{- $static := or $s3.existingSecret $inline }}
{{- $annotated := hasKey .Values.serviceAccount.annotations "eks.amazonaws.com/role-arn" }}
{{- $azure := hasKey .Values.serviceAccount.annotations "azure.workload.identity/client-id" }}
{{- if ne (empty $s3.accessKeyId) (empty $s3.secretAccessKey) }}
payloads.s3.accessKeyId and payloads.s3.secretAccessKey go together: give both, or neither.
{{- end }}
{{- if and $s3.existingSecret $inline }}
payloads.s3.existingSecret and payloads.s3.accessKeyId are both set: keep the Secret, and take accessKeyId and secretAccessKey out.
{{- end }}
{{- if and $s3.sessionTokenKey (not $s3.existingSecret) }}
payloads.s3.sessionTokenKey names a key of payloads.s3.existingSecret, which is empty: name the Secret.
{{- end }}
{{- if and $static $s3.webIdentity.roleArn }}
payloads.s3.webIdentity.roleArn and an access key are both set: an access key outranks a role, so take one of them out.
{{- end }}
{{- if and $static $annotated }}
serviceAccount.annotations has eks.amazonaws.com/role-arn, and payloads.s3 an access key, which would outrank the role: take one of them out.
{{- end }}
{{- if and $annotated $s3.webIdentity.roleArn }}
serviceAccount.annotations has eks.amazonaws.com/role-arn, and payloads.s3.webIdentity.roleArn is set: both take on a role with the pod's token, so keep one (the annotation on EKS, webIdentity elsewhere).
{{- end }}
{{- if and $azure (ne (toString (get .Values.podLabels "azure.workload.identity/use")) "true") }}
serviceAccount.annotations has azure.workload.identity/client-id, which does nothing for pods without the label: set podLabels."azure.workload.identity/use" to "true".
{{- end }}
{{- if and (not .Values.serviceAccount.create) .Values.serviceAccount.annotations }}
serviceAccount.annotations are set, and serviceAccount.create is false: annotate the existing account yourself, or let the chart make one.
{{- end }}
{{- end -}}

{{- define "kvstore.validate.claim" -}}
{{- $pvc := .Values.payloads.pvc }}
{{- $capacity := include "kvstore.bytes" .Values.capacity | int64 }}
{{- if lt $capacity 1048576 }}
capacity is {{ .Values.capacity }}: it is a size of at least 1 MiB, such as 500GiB or 20TiB.
{{- end }}
{{- if ne .Values.payloads.type "pvc" }}
{{- if $pvc.existingClaim }}
payloads.pvc.existingClaim is {{ $pvc.existingClaim }}, and payloads.type is {{ .Values.payloads.type }}: set payloads.type to pvc, or take the claim out.
{{- end }}
{{- else }}
{{- if and $pvc.existingClaim $pvc.storageClass }}
payloads.pvc.storageClass is for a claim that the chart makes, and payloads.pvc.existingClaim names one that exists: take one of them out.
{{- end }}
{{- if not $pvc.existingClaim }}
{{- $size := include "kvstore.bytes" $pvc.size | int64 }}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?([KMGTP]i?|k)?$" $pvc.size) }}
payloads.pvc.size is {{ $pvc.size }}: it is a quantity as Kubernetes writes it, such as 500Gi or 2Ti.
{{- else if gt $capacity $size }}
capacity ({{ .Values.capacity }}) is larger than payloads.pvc.size ({{ $pvc.size }}): the volume would be full before anything is evicted; make the claim larger, by a fifth or so, or the capacity smaller.
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.validate.hostPath" -}}
{{- $path := trimSuffix "/" .Values.payloads.hostPath.path }}
{{- if ne .Values.payloads.type "hostPath" }}
{{- if $path }}
payloads.hostPath.path is {{ $path }}, and payloads.type is {{ .Values.payloads.type }}: set payloads.type to hostPath, or take the path out.
{{- end }}
{{- else }}
{{- if not $path }}
payloads.hostPath.path is empty: name the folder that holds the cache, such as /mnt/nfs/kvstore.
{{- else if include "kvstore.systemFolder" $path }}
payloads.hostPath.path is {{ $path }}, which is the node's own: name a folder for the cache alone, such as /mnt/nfs/kvstore.
{{- end }}
{{- if not .Values.payloads.hostPath.sameOnAllNodes }}
payloads.type is hostPath: if the folder is one storage on every node (NFS, Lustre), or if there is one node, say payloads.hostPath.sameOnAllNodes=true. A disk of each node's own can't hold the payloads, because under one index nodes would evict each other's segments as missing; take a bucket, with payloads.nodeCache in front.
{{- end }}
{{- end }}
{{- end -}}

{{/* "yes" for a folder that no volume should be. */}}
{{- define "kvstore.systemFolder" -}}
{{- if or (has . (list "" "/var" "/var/lib" "/var/cache" "/home" "/tmp")) (regexMatch "^/(etc|usr|bin|sbin|lib|lib64|boot|dev|proc|sys|run|root|var/run|var/lib/(kubelet|containerd|docker|etcd))(/|$)" .) (contains "/../" (printf "%s/" .)) -}}
yes
{{- end -}}
{{- end -}}

{{- define "kvstore.validate.nodeCache" -}}
{{- $cache := .Values.payloads.nodeCache }}
{{- if $cache.enabled }}
{{- $bytes := include "kvstore.bytes" $cache.capacity | int64 }}
{{- $segment := include "kvstore.bytes" (dig "segment" "target_bytes" 33554432 .Values.settings) | int64 }}
{{- $errand := include "kvstore.bytes" (dig "transfers" "errand_bytes" 268435456 .Values.settings) | int64 }}
{{- $path := trimSuffix "/" $cache.path }}
{{- if lt $bytes 1048576 }}
payloads.nodeCache.capacity is {{ $cache.capacity }}: it is a size such as 50GiB.
{{- else if lt $bytes $segment }}
payloads.nodeCache.capacity ({{ $cache.capacity }}) is smaller than one segment (settings.segment.target_bytes, {{ $segment }} bytes): nothing would fit in.
{{- end }}
{{- if lt $errand $segment }}
settings.transfers.errand_bytes ({{ $errand }}) is smaller than one segment (settings.segment.target_bytes, {{ $segment }} bytes): the node's cache would never be filled.
{{- end }}
{{- if include "kvstore.systemFolder" $path }}
payloads.nodeCache.path is {{ $path | default "/" }}, which is the node's own: name a folder for the cache alone, such as /var/cache/kvstore.
{{- end }}
{{- if eq .Values.payloads.type "hostPath" }}
{{- $shared := trimSuffix "/" .Values.payloads.hostPath.path }}
{{- if and $shared (or (hasPrefix (printf "%s/" $shared) (printf "%s/" $path)) (hasPrefix (printf "%s/" $path) (printf "%s/" $shared))) }}
payloads.nodeCache.path ({{ $path }}) and payloads.hostPath.path ({{ $shared }}) are the same folder, or one is inside the other: the cache is on the node's own disk.
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What the store itself would refuse as it starts, and what isn't to be set there. */}}
{{- define "kvstore.validate.signing" -}}
{{- $signing := .Values.signing }}
{{- if ne (empty $signing.existingSecret) (empty $signing.key) }}
signing.existingSecret (a Secret of keys) and signing.key (the id of one in it) go together: give both, or neither.
{{- end }}
{{- if and $signing.encrypt (not $signing.existingSecret) }}
signing.encrypt needs keys: name their Secret in signing.existingSecret, and the one that writes in signing.key.
{{- end }}
{{- end -}}

{{- define "kvstore.validate.settings" -}}
{{- $settings := .Values.settings }}
{{- $elsewhere := dict "payloads" "payloads" "index" "redis" "capacity_bytes" "capacity" "signing" "signing" }}
{{- range $key, $place := $elsewhere }}
{{- if hasKey $settings $key }}
settings.{{ $key }} is set by values of its own: use {{ $place }}, so that janitors, cron jobs and engines agree.
{{- end }}
{{- end }}
{{- range $path := list "redis.username" "redis.password" "redis.sentinel_username" "redis.sentinel_password" "s3.access_key_id" "s3.secret_access_key" "s3.session_token" }}
{{- $parts := splitList "." $path }}
{{- if hasKey (get $settings (first $parts) | default dict) (last $parts) }}
settings.{{ $path }} would stand in a ConfigMap that everybody may read: credentials are in Secrets, which {{ ternary "redis.builtIn.auth.existingSecret or redis.external.existingSecret names" "payloads.s3.existingSecret names" (eq (first $parts) "redis") }}.
{{- end }}
{{- end }}
{{- range $path := list "redis.tls_ca" "redis.tls_cert" "redis.tls_key" "s3.tls_ca" }}
{{- $parts := splitList "." $path }}
{{- if hasKey (get $settings (first $parts) | default dict) (last $parts) }}
settings.{{ $path }} names a file that has to be in the pods: use {{ ternary "redis.external.tls or redis.builtIn.tls" "payloads.s3.ca" (eq (first $parts) "redis") }}, which mounts it as well.
{{- end }}
{{- end }}
{{- $match := dig "kv" "match_ttl_s" 10 $settings | float64 }}
{{- $load := dig "kv" "load_deadline_s" 30 $settings | float64 }}
{{- $grace := dig "grace_s" 120 $settings | float64 }}
{{- if gt (addf $match $load) $grace }}
settings.kv.match_ttl_s ({{ $match }}) and settings.kv.load_deadline_s ({{ $load }}) add up to more than settings.grace_s ({{ $grace }}): what is evicted after a match would vanish under its load; raise grace_s.
{{- end }}
{{- $backoff := dig "breaker" "backoff_s" 0.5 $settings | float64 }}
{{- $most := dig "breaker" "max_backoff_s" 10 $settings | float64 }}
{{- if gt $backoff $most }}
settings.breaker.backoff_s ({{ $backoff }}) is larger than settings.breaker.max_backoff_s ({{ $most }}): it is the first of pauses that grow up to that.
{{- end }}
{{- end -}}
