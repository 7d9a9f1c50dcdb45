# Writes /run/redis/users.acl: the rules of the file `users`, each user with the hashes of the passwords that it
# has now. No password stands in there, nor in any argument.
set -eu
umask 077

# hashes FILE...: "#<sha256>" of each that is there. A trailing newline is part of a password, as it is for the
# engines, which get it from the same Secret.
hashes() {
  for file in "$@"; do
    if [ -s "$file" ]; then printf '#%s ' "$(sha256sum < "$file" | cut -c 1-64)"; fi
  done
}

cp /etc/redis/users /run/redis/users.new
for user in keeper kvstore reader; do
  grep -q "^user $user " /etc/redis/users || continue
  case $user in
    keeper) found=$(hashes /run/redis/keeper) ;;
    kvstore) found=$(hashes /run/secrets/redis/kvstore /run/secrets/redis/kvstore-previous) ;;
    reader) found=$(hashes /run/secrets/redis/reader) ;;
  esac
  if [ -z "$found" ]; then
    echo "the Secret has no password for user $user, or an empty one" >&2
    exit 1
  fi
  sed "s/^user $user on /&$found/" /run/redis/users.new > /run/redis/users.next
  mv /run/redis/users.next /run/redis/users.new
done
mv /run/redis/users.new /run/redis/users.acl
