{{/* Who may do what in the built-in Redis; users.sh adds the passwords' hashes after "on". */}}
{{- define "kvstore.redis.users" -}}
{{- /* Commands that look. A script may run no more than its caller, so these with eval change nothing. */ -}}
{{- $looks := list "eval" "evalsha" "ping" "time" "info" "exists" "get" "getrange" "bitcount" "hexists" "hget" "hgetall" "hlen" "hmget" "hrandfield" "hscan" "smembers" "xrange" "xrevrange" "zcard" "zcount" "zmscore" "zrange" "zrevrange" "zscan" "zscore" "pttl" "type" "object|encoding" -}}
{{- $changes := list "set" "setrange" "bitfield" "del" "unlink" "rename" "expire" "hset" "hdel" "hincrby" "sadd" "srem" "zadd" "zincrby" "zrem" "zremrangebyrank" "zremrangebyscore" "zunionstore" "xadd" -}}
{{- /*
Nobody can be the default user, who is off and has no password. It keeps its rights because Redis replays the
append-only file as this user and checks them once more at each EXEC: without them a restart loses every change
that a script made.
*/ -}}
user default off resetpass ~* &* +@all
user keeper on -@all +ping +acl|load {{- if .Values.redis.builtIn.tls.enabled }} +config|set{{ end }}
user kvstore on ~kvs:* -@all{{ range $looks }} +{{ . }}{{ end }}{{ range $changes }} +{{ . }}{{ end }}
{{- if .Values.redis.builtIn.auth.reader.enabled }}
user reader on ~kvs:* -@all{{ range $looks }} +{{ . }}{{ end }}
{{- end }}
{{- end -}}

{{- define "kvstore.redis.conf" -}}
{{- with .Values.redis.builtIn -}}
bind * -::*
{{- if .tls.enabled }}
port 0
tls-port 6379
tls-cert-file /run/secrets/redis-tls/tls.crt
tls-key-file /run/secrets/redis-tls/tls.key
tls-ca-cert-file /run/secrets/redis-tls/ca.crt
# Clients show a password; a certificate of theirs is not asked for.
tls-auth-clients no
tls-protocols "TLSv1.2 TLSv1.3"
{{- else }}
port 6379
{{- end }}
protected-mode yes
aclfile /run/redis/users.acl
acllog-max-len 64
databases 1
daemonize no
dir /data
tcp-keepalive 60
timeout 0

# Full is an error that kvstore knows what to do about. Any other policy would drop parts of the index behind
# its back.
maxmemory {{ include "kvstore.redis.maxmemory" $ }}
maxmemory-policy noeviction

# A bucket is a hash of 32 to 64 entries, up to 128 by chance, of 16 bytes each: in this encoding a block takes
# some 45 bytes, in the other 2.5 times as much.
hash-max-listpack-entries 128
hash-max-listpack-value 64

# What is freed is freed by another thread: no request waits for a large key's end.
lazyfree-lazy-eviction yes
lazyfree-lazy-expire yes
lazyfree-lazy-server-del yes
lazyfree-lazy-user-del yes
lazyfree-lazy-user-flush yes

{{- if .persistence.enabled }}

# The log of changes, on the disk within a second or two. What a crash loses of it are segments that engines
# save again; nothing wrong can come of it.
appendonly yes
appendfsync everysec
# While a child writes the new file, the disk is busy, and waiting for it would be the engines' waiting.
no-appendfsync-on-rewrite yes
auto-aof-rewrite-percentage 100
auto-aof-rewrite-min-size 256mb
aof-use-rdb-preamble yes
aof-load-truncated yes
{{- else }}

appendonly no
{{- end }}
# No snapshots besides.
save ""

# Whoever asks and doesn't read is let go before the answers fill the memory.
client-output-buffer-limit normal 256mb 64mb 30
client-query-buffer-limit 64mb
{{- range $name, $value := .config }}
{{- range (kindIs "slice" $value | ternary $value (list $value)) }}
{{ $name }} {{ if kindIs "bool" . }}{{ ternary "yes" "no" . }}{{ else if kindIs "float64" . }}{{ ternary (. | int64 | toString) (toString .) (eq (floor .) .) }}{{ else }}{{ eq (toString .) "" | ternary "\"\"" . }}{{ end }}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}
