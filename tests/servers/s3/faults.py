"""What can go wrong between a client and an S3 server, and when."""

from __future__ import annotations

from dataclasses import dataclass

#: Faults that are answers of the proxy's own: the first line, the body's type, and an S3 error code or the
#: body itself. The server never sees the request. A HEAD gets no body.
ANSWERS: dict[str, tuple[str, str, str]] = {
    "status500": ("500 Internal Server Error", "application/xml", "InternalError"),
    "status503": ("503 Slow Down", "application/xml", "SlowDown"),
    "forbid": ("403 Forbidden", "application/xml", "AccessDenied"),
    "no_bucket": ("404 Not Found", "application/xml", "NoSuchBucket"),
    "no_key": ("404 Not Found", "application/xml", "NoSuchKey"),
    # As from something that is not an S3 server at all.
    "html404": ("404 Not Found", "text/html", "<html><body><h1>404 Not Found</h1><hr></body></html>"),
}

#: Every fault, with the stages of a request at which it can happen.
FAULTS: dict[str, frozenset[str]] = {
    # Before the server sees anything of the request. `hang`: no answer until the client gives up or all is
    # healed. `reset_before`: a connection reset for an answer. `delay`: `seconds` of waiting, then all goes
    # its way.
    **{name: frozenset({"request"}) for name in (*ANSWERS, "hang", "reset_before", "delay")},
    # In a body, the request's if it has one, else the answer's: half of it, then nothing more (`hang_body`)
    # or a connection reset (`reset`); or all of it, at `bytes_per_s` (`slow`).
    **{name: frozenset({"upload", "download"}) for name in ("hang_body", "reset", "slow")},
    # In the body of a GET's answer: it ends half-way, against its Content-Length (`truncate`); it is half as
    # long, and its headers agree (`short`); the byte in its middle is another one (`flip`).
    **{name: frozenset({"download"}) for name in ("truncate", "short", "flip")},
    # The server did what it was asked to; the client gets a connection reset.
    "lost_answer": frozenset({"answer"}),
}


@dataclass
class Rule:
    """When a fault happens. Its counts are the proxy's, under its lock."""

    fault: str
    methods: frozenset[str] | None
    key: str
    times: int | None
    skip: int
    probability: float
    seconds: float
    bytes_per_s: float
    #: Requests per second to which it does not happen.
    beyond_per_s: float = 0.0
    #: How many more of them there may be, as of that time.
    _left: float = 0.0
    _counted_s: float = 0.0

    def spares(self, now_s: float) -> bool:
        """Whether a request now is one of those. Who asked for less before may ask for a tenth of a second's
        at once."""
        rate = self.beyond_per_s
        self._left = min(max(1.0, rate / 10), self._left + (now_s - self._counted_s) * rate)
        self._counted_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass
class Exchange:
    """A request and what became of it. Its connection's thread writes to it, for as long as it goes on."""

    method: str
    #: Percent-decoded, without the query.
    path: str
    query: str
    #: The Range header, as in `bytes=0-9`.
    range: str | None
    #: What the client was told; None when it was told nothing.
    status: int | None = None
    #: Of the bodies: what came from the client, and what went to it.
    bytes_in: int = 0
    bytes_out: int = 0
    fault: str | None = None
