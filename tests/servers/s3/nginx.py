"""nginx as the far end of a benchmark: it reads and writes whole objects faster than any S3 server, so
what is measured is the client.

Not an S3 server: it checks no signature, has no listing, no conditions and no multipart uploads, and a
bucket is a folder.
"""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.servers.redis import ServerError, _free_port, end_process, spawn_tied
from tests.servers.s3.servers import clean_environment, find_binary, wait_for

# One process: with a master, its workers would outlive a kill of it. One core feeds more than the rest of
# a small machine can take.
_CONFIG = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  server_tokens off;
  default_type application/octet-stream;
  sendfile on;
  sendfile_max_chunk 2m;
  tcp_nodelay on;
  keepalive_requests 1000000000;
  client_max_body_size 0;
  client_body_buffer_size 128k;
  # A PUT is renamed into place, which takes a file system in common.
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  # Clients want one in the answer to a PUT, too, where nginx gives none.
  map $request_method $etag {{ PUT '"put"'; default $sent_http_etag; }}
  add_header ETag $etag;
  server {{
    listen 127.0.0.1:{port}{tls};
    root {root};
    etag on;
    location / {{ dav_methods PUT DELETE; create_full_put_path on; }}
  }}
}}
"""


class NginxServer:
    """GET (ranges too), HEAD, PUT and DELETE of the files below `root`, which is in memory where /dev/shm is.

    It ends with the thread that started it, however that one ends.
    """

    def __init__(self, *, tls: bool = False) -> None:
        binary = find_binary("nginx")
        if binary is None:
            raise ServerError("nginx not found: run `make setup`, which reports why")
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        memory = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(
            prefix="kvs-", dir=memory if os.access(memory, os.W_OK) else None, ignore_cleanup_errors=True
        )
        self.port = _free_port()
        self._tls = tls
        self.root.mkdir()
        if tls:
            self._make_certificate()

    @property
    def root(self) -> Path:
        return Path(self._folder.name) / "root"

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def ca(self) -> Path:
        """With TLS, the certificate to trust, in PEM."""
        return Path(self._folder.name) / "ca.pem"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Returns once it answers; does nothing if it runs."""
        if not self.running:
            folder = Path(self._folder.name)
            config = folder / "nginx.conf"
            tls = (
                f" ssl; ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem"
                if self._tls
                else ""
            )
            config.write_text(_CONFIG.format(folder=folder, root=self.root, port=self.port, tls=tls))
            # As root it would give its workers to a user who may not read the folder.
            user = ["-g", "user root;"] if os.geteuid() == 0 else []
            command = [self._binary, "-p", str(folder), "-c", str(config), "-e", f"{folder}/error.log", *user]
            self._process = spawn_tied(command, folder / "out.log", clean_environment())
            if not wait_for(self._answers, lambda: self.running):
                self.close()
                raise ServerError("nginx did not start")
        return self

    def close(self) -> None:
        """Ends it, with all it held."""
        if self._process is not None:
            end_process(self._process, signal.SIGKILL)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_certificate(self) -> None:
        """An authority and a certificate of it: not every client takes an authority's own for a server's."""
        folder = self._folder.name
        key = ["-newkey", "rsa:2048", "-nodes", "-days", "2"]
        ca = ["-subj", "/CN=kvstore test", "-keyout", f"{folder}/ca-key.pem", "-out", str(self.ca)]
        leaf = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        leaf += ["-addext", "basicConstraints=CA:FALSE", "-keyout", f"{folder}/key.pem"]
        leaf += ["-out", f"{folder}/cert.pem", "-CA", str(self.ca), "-CAkey", f"{folder}/ca-key.pem"]
        for command in (["-x509", *key, *ca], ["-x509", *key, *leaf]):
            subprocess.run(["openssl", "req", *command], check=True, capture_output=True, timeout=30)

    def _answers(self) -> bool:
        # Nobody else on this port would have this file.
        token = self.root / f"started-{self.pid}"
        token.touch()
        try:
            trust = ssl.create_default_context(cafile=str(self.ca)) if self._tls else None
            with urllib.request.urlopen(f"{self.endpoint}/{token.name}", timeout=5, context=trust) as answer:
                return bool(answer.status == 200)
        finally:
            token.unlink()
