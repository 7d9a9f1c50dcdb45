"""A proxy for prefill and decode apart. An example for docs/pd.md, used by a test too.

    python pd_proxy.py --port 8000 --prefill http://P1:8100,http://P2:8100 --decode http://D:8200

Each request goes to a prefill engine first, for one token, and its answer's `kv_transfer_params` go on with
the request to a decode engine, whose answer is the client's. Any proxy made for vLLM's NIXL connector does
the same. Nothing depends on the prefill engines: where one fails, the decode engine computes the prompt.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

log = logging.getLogger("pd_proxy")

ROUTES = ("/v1/completions", "/v1/chat/completions")
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Json = dict[str, Any]


class Proxy:
    """One event loop's; any number of requests at a time."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)
        self._session: ClientSession | None = None

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Prefill, then decode."""
        body: Json = await request.json()
        # Only this proxy may ask for a hand-off: a client could have any prompt stored. What a client says of
        # its session counts when the whole request ends, so it goes to the decode engine.
        sent = body.pop("kv_transfer_params", None)
        hints = {"kv_hints": sent["kv_hints"]} if isinstance(sent, dict) and "kv_hints" in sent else {}
        handle = await self._prefilled(request.path, body)
        if params := {**(handle or {}), **hints}:
            body = {**body, "kv_transfer_params": params}
        async with self._open().post(next(self._decode) + request.path, json=body) as answer:
            kind = {"Content-Type": answer.headers["Content-Type"]}
            reply = web.StreamResponse(status=answer.status, headers=kind)
            await reply.prepare(request)
            async for chunk in answer.content.iter_any():
                await reply.write(chunk)
            await reply.write_eof()
            return reply

    async def _prefilled(self, path: str, body: Json) -> Json | None:
        """The handle of the prompt's KV; None if there is none."""
        ask = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        for name in ("stream_options", "min_tokens"):
            ask.pop(name, None)
        if "max_completion_tokens" in ask:
            ask["max_completion_tokens"] = 1
        url = next(self._prefill)
        try:
            async with self._open().post(url + path, json=ask) as answer:
                answer.raise_for_status()
                handle: Json | None = (await answer.json()).get("kv_transfer_params")
                return handle
        except (ClientError, TimeoutError, ValueError) as exc:
            log.warning("prefill at %s: %r", url, exc)
            return None

    def _open(self) -> ClientSession:
        if self._session is None:
            # vLLM drops idle connections after 5 s; a client must do so first.
            connector = TCPConnector(limit=0, keepalive_timeout=2)
            self._session = ClientSession(connector=connector, timeout=ClientTimeout(total=None, connect=5))
        return self._session

    async def close(self, _: web.Application) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for name in ("--prefill", "--decode"):
        parser.add_argument(name, required=True, type=lambda urls: urls.split(","))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(options.prefill, options.decode)
    app = web.Application(client_max_size=1 << 30)
    for path in ROUTES:
        app.router.add_post(path, proxy.serve)
    app.on_cleanup.append(proxy.close)
    web.run_app(app, host=options.host, port=options.port, print=None)


if __name__ == "__main__":
    main()
