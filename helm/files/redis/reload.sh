# Takes over passwords and certificates that changed in the Secrets, without a restart:
#   kubectl exec RELEASE-redis-0 -- sh /etc/redis/reload.sh
# The kubelet brings a changed Secret into the pod within about a minute and a half. Redis 7.0 closes connections
# at that, which engines make anew at once; later ones and Valkey only those whose user has changed.
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
