"""A proxy for prefill and decode apart (docs/pd.md): round robin, no health checks, no authentication.

    python pd_proxy.py --port 8000 --prefill http://P1:8100,http://P2:8100 --decode http://D:8200

Each request goes to a prefill engine first, for one token. The `kv_transfer_params` of its answer go on with
the request to a decode engine. Where a prefill engine fails, the decode engine computes the prompt.
"""

import argparse
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)


class Proxy:
    """One event loop's; any number of requests at a time."""

    session: ClientSession

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self.prefill, self.decode = itertools.cycle(prefill), itertools.cycle(decode)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        # Only this proxy may ask for a hand-off: a client could have any prompt stored. Hints about a session
        # count when the whole request ends, so they go to the decode engine.
        sent = body.pop("kv_transfer_params", None)
        hints = {"kv_hints": sent["kv_hints"]} if isinstance(sent, dict) and "kv_hints" in sent else {}
        if params := await self.handle(request.path, body) | hints:
            body["kv_transfer_params"] = params
        async with self.session.post(next(self.decode) + request.path, json=body) as answer:
            headers = {"Content-Type": answer.headers["Content-Type"]}
            reply = web.StreamResponse(status=answer.status, headers=headers)
            await reply.prepare(request)
            async for chunk in answer.content.iter_any():
                await reply.write(chunk)
            return reply

    async def handle(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the handle of the prompt's KV; empty if there is none."""
        ask = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        for name in ("stream_options", "min_tokens", "max_completion_tokens"):
            ask.pop(name, None)
        try:
            async with self.session.post(
                next(self.prefill) + path, json=ask, raise_for_status=True
            ) as answer:
                return (await answer.json()).get("kv_transfer_params") or {}
        except (ClientError, TimeoutError, ValueError) as exc:
            logging.warning("prefill: %r", exc)
            return {}

    async def connected(self, _: web.Application) -> AsyncIterator[None]:
        # vLLM drops idle connections after 5 s; a client must do so first.
        connector = TCPConnector(limit=0, keepalive_timeout=2)
        async with ClientSession(connector=connector, timeout=ClientTimeout(connect=5)) as self.session:
            yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for name in ("--prefill", "--decode"):
        parser.add_argument(name, required=True, type=lambda urls: urls.split(","))
    options = parser.parse_args()
    proxy, app = Proxy(options.prefill, options.decode), web.Application(client_max_size=1 << 30)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, proxy.serve)
    app.cleanup_ctx.append(proxy.connected)
    web.run_app(app, host=options.host, port=options.port, print=None)


if __name__ == "__main__":
    main()
