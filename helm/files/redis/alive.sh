# Whether it answers at all: LOADING and BUSY are answers, and a restart would only begin anew.
case "$(sh /etc/redis/cli.sh PING)" in
  PONG | *LOADING* | *BUSY*) ;;
  *) exit 1 ;;
esac
# Whether that succeeds says nothing about the server; the next probe tries again.
sh /etc/redis/certificate.sh > /dev/null 2>&1 || true
