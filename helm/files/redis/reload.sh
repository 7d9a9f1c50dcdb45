# Takes over passwords that changed in the Secret, and at once what certificate.sh would, without a restart:
#   kubectl exec RELEASE-redis-0 -- sh /etc/redis/reload.sh
# The kubelet brings a changed Secret into the pod within about a minute and a half. Redis 7.0 closes connections
# at that, which engines make anew at once; later ones and Valkey only those whose user has changed.
set -eu
sh /etc/redis/users.sh
answer=$(sh /etc/redis/cli.sh ACL LOAD)
echo "users: $answer"
if [ "$answer" != OK ]; then exit 1; fi
rm -f /run/redis/certificate
sh /etc/redis/certificate.sh
