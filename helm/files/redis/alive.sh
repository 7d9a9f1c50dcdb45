# Whether it answers at all: LOADING and BUSY are answers, and a restart would only begin anew.
case "$(sh /etc/redis/cli.sh PING)" in
  PONG | *LOADING* | *BUSY*) ;;
  *) exit 1 ;;
esac
