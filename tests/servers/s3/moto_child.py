"""The process of a MotoServer: moto's own server, but one request at a time.

Its imitation of S3 is not made for threads: now and then, of two that meet over one key, one gets an internal
error, and of two conditional writes both succeed.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import run_simple


class OneAtATime:
    """Bodies arrive side by side, before the lock: a slow or hanging one holds nobody up."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        source = environ["wsgi.input"]
        if environ.pop("HTTP_TRANSFER_ENCODING", None):
            body = source.read()
        else:
            length = int(environ.get("CONTENT_LENGTH") or 0)
            body = source.read(length)
            if len(body) < length:
                # Its sender is gone; moto would take what came for all of it.
                start_response("400 Bad Request", [])
                return []
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        with self._lock:
            answer = self._app(environ, start_response)
            try:
                return list(answer)
            finally:
                if hasattr(answer, "close"):
                    answer.close()


def main(port: int) -> None:
    app = OneAtATime(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", port, app, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(int(sys.argv[1]))
