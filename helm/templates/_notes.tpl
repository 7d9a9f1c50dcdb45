{{/* What of the chosen values is not secure, not durable, or does not work everywhere: a line each. */}}
{{- define "kvstore.notes.warnings" -}}
{{- include "kvstore.notes.redis" . }}
{{- include "kvstore.notes.payloads" . }}
{{- include "kvstore.notes.pods" . }}
{{- end -}}

{{- define "kvstore.notes.redis" -}}
{{- $redis := .Values.redis }}
{{- if $redis.builtIn.enabled }}
{{- if not $redis.builtIn.persistence.enabled }}
- redis.builtIn.persistence.enabled is false: a restart of Redis empties the index. Engines then miss until it is filled anew; cache-admin rebuild --apply restores it.
{{- end }}
{{- if not $redis.builtIn.tls.enabled }}
- redis.builtIn.tls.enabled is false: passwords and the index pass through the cluster's network in clear text.
{{- end }}
{{- if not $redis.builtIn.auth.existingSecret }}
- redis.builtIn.auth.existingSecret is empty: the password was made by helm. Tools that render without asking the cluster (Argo CD, helm template) would make another one each time.
{{- end }}
{{- else }}
{{- if not (regexMatch "^rediss" $redis.external.url) }}
- redis.external.url is without TLS (rediss://): passwords and the index pass through the network in clear text.
{{- else if not $redis.external.tls.verify }}
- redis.external.tls.verify is false: whoever answers in Redis' place is believed.
{{- end }}
{{- if not $redis.external.existingSecret }}
- redis.external.existingSecret is empty: no password is sent to Redis.
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.notes.payloads" -}}
{{- $payloads := .Values.payloads }}
{{- if and .Values.signing.existingSecret (eq .Values.signing.unsigned "accept") }}
- signing.unsigned is accept: whoever may write to the payloads can still plant some. Set it to refuse once every engine signs.
{{- end }}
{{- if eq $payloads.type "s3" }}
{{- if not (or $payloads.s3.region $payloads.s3.endpoint) }}
- payloads.s3.region is empty: a bucket elsewhere than in us-east-1 is not reached, unless AWS_DEFAULT_REGION in the pods of janitors and engines names its region, as IRSA's webhook has it.
{{- end }}
{{- if hasPrefix "http://" $payloads.s3.endpoint }}
- payloads.s3.endpoint is without TLS (https://): prompts' KV and images' embeddings pass through the network in clear text.
{{- end }}
{{- if not (dig "s3" "tls_verify" true .Values.settings) }}
- settings.s3.tls_verify is false: whoever answers in the bucket's place is believed.
{{- end }}
{{- if $payloads.s3.accessKeyId }}
- payloads.s3.accessKeyId is among the values, which helm keeps: use payloads.s3.existingSecret.
{{- end }}
{{- else if eq $payloads.type "hostPath" }}
- payloads.type is hostPath: the cache is as durable as that folder, and namespaces under the baseline or restricted pod security standard refuse its pods.
{{- else if not (has "ReadWriteMany" $payloads.pvc.accessModes) }}
- payloads.pvc.accessModes has no ReadWriteMany: engines can use the claim on one node only.
{{- end }}
{{- with $payloads.nodeCache }}
{{- if .enabled }}
- payloads.nodeCache is a hostPath in engines' pods: namespaces under the baseline or restricted pod security standard refuse them, and the engines' user must be able to write to {{ .path }} on the nodes.
{{- if eq .write "back" }}
- payloads.nodeCache.write is back: what a node has not uploaded yet is lost with its disk.
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.notes.pods" -}}
{{- if not .Values.networkPolicy.enabled }}
- networkPolicy.enabled is false: every pod of the cluster can connect to the janitor{{ if .Values.redis.builtIn.enabled }} and to Redis{{ end }}.
{{- end }}
{{- $guarded := or .Values.janitor.password.existingSecret .Values.janitor.tls.clientCASecret }}
{{- if and $guarded (not .Values.janitor.tls.existingSecret) }}
- janitor.tls.existingSecret is empty: the password passes through the cluster's network in clear text.
{{- end }}
{{- if and (ne .Values.service.type "ClusterIP") (not $guarded) }}
- service.type is {{ .Values.service.type }}: the page and the metrics, which ask for no password, can be reached from outside the cluster.
{{- end }}
{{- if not .Values.gc.enabled }}
- gc.enabled is false: payloads of writers that died stay until somebody runs cache-admin fsck --list --apply.
{{- else if not .Values.gc.delete }}
- gc.delete is false: the CronJob says what could be deleted, and deletes none of it.
{{- end }}
{{- if not .Values.fsck.enabled }}
- fsck.enabled is false: nobody looks whether all that the index names is there.
{{- end }}
{{- end -}}
