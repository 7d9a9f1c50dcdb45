# Writes the users from the Secret's passwords, then becomes the server, which so gets the pod's signals.
set -eu
umask 077
# Probes and reload.sh have a user of their own, whose password lives and dies with this container: they go on
# working whatever becomes of the Secret, and no engine can be taken for them.
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > /run/redis/keeper
sh /etc/redis/users.sh
server=$(command -v valkey-server || command -v redis-server)
exec "$server" /etc/redis/redis.conf
