# Whether it serves. While it loads its file it says LOADING, and engines are better off without it.
[ "$(sh /etc/redis/cli.sh PING)" = PONG ]
