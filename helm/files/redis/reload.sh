# Takes over passwords and certificates that changed in the Secrets, without a restart and without closing a
# connection:   kubectl exec <release>-redis-0 -- sh /etc/redis/reload.sh
# The kubelet brings a changed Secret into the pod within about a minute and a half.
set -eu
sh /etc/redis/users.sh
answer=$(sh /etc/redis/cli.sh ACL LOAD)
echo "users: $answer"
if [ "$answer" != OK ]; then exit 1; fi
if [ -f /run/secrets/redis-tls/tls.crt ]; then
  answer=$(sh /etc/redis/cli.sh CONFIG SET tls-cert-file /run/secrets/redis-tls/tls.crt \
    tls-key-file /run/secrets/redis-tls/tls.key tls-ca-cert-file /run/secrets/redis-tls/ca.crt)
  echo "certificate: $answer"
  if [ "$answer" != OK ]; then exit 1; fi
fi
