# Runs one command as the user of the probes: sh cli.sh PING
set -eu
REDISCLI_AUTH=$(cat /run/redis/keeper)
# Redis' client reads the one, Valkey's the other.
export REDISCLI_AUTH VALKEYCLI_AUTH="$REDISCLI_AUTH"
# The server is this very pod: there is nothing to check, and while certificates change nothing to check it by.
if [ -f /run/secrets/redis-tls/tls.crt ]; then set -- --tls --insecure "$@"; fi
exec "$(command -v valkey-cli || command -v redis-cli)" --user keeper --no-auth-warning -h 127.0.0.1 -p 6379 "$@"
