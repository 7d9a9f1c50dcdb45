# Whether it answers at all: LOADING and BUSY are answers, and a restart would only begin anew.
case "$(sh /etc/redis/cli.sh PING)" in
  # Whether a certificate is taken over says nothing about the server; the next probe tries again.
  PONG) sh /etc/redis/certificate.sh > /dev/null 2>&1 || true ;;
  *LOADING* | *BUSY*) ;;
  *) exit 1 ;;
esac
