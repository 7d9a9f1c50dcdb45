"""A proxy for encoder, prefill and decode apart: E -> PD, or E -> P -> D. An example, used by a test too.

    python epd_proxy.py --port 8000 --encode http://E1:8001,http://E2:8001 \
        [--prefill http://P:8002] --decode http://D:8003

Per chat request: every image, video and audio clip goes to an encoder as a request of its own; the answers
say under which name an item is in the store, and what describes it to a model that need not see it. Then
the request goes on, with descriptions in place of media where there are any, and with what the encoders
said in `ec_transfer_params`.

Nothing depends on the encoders: one that fails leaves its items to the next engine, which computes them.
An engine that has an item's description only, and can't get hold of the item, answers 500; then the item is
encoded once more and the media themselves are sent.

Names are vLLM's own hashes of the content. Clients' `uuid`s are dropped: what they name is theirs to choose.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
from collections.abc import Iterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

log = logging.getLogger("epd_proxy")

#: How an item is sent, and how its description is.
DESCRIBED_AS = {
    "image_url": "image_embeds",
    "video_url": "video_embeds",
    "audio_url": "audio_embeds",
    "input_audio": "audio_embeds",
}
#: What changes an encoder's output, and vLLM's name of it.
OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")
#: What keeps outputs of requests apart: the encoder must have the same.
SALT = "cache_salt"
#: What vLLM's P/D connectors expect of the request to a prefill engine.
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

    def __init__(self, encode: list[str], prefill: list[str], decode: list[str]) -> None:
        self._encode, self._decode = itertools.cycle(encode), itertools.cycle(decode)
        self._prefill = itertools.cycle(prefill) if prefill else None
        self._session: ClientSession | None = None

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """The one route that does anything."""
        body = without_uuids(await request.json())
        # Only this proxy may ask for a hand-off: a client could have any prompt stored.
        body.pop("kv_transfer_params", None)
        for described in (True, False):
            said = await asyncio.gather(*(self._encoded(body, item) for item in media(body)))
            sent = prepared(body, said, described=described)
            try:
                if self._prefill is not None:
                    sent = await self._prefilled(sent)
                return await self._forward(request, sent, next(self._decode))
            except Unavailable as exc:
                if not described or sent["messages"] == body["messages"]:
                    return web.Response(status=500, body=exc.answer, content_type="application/json")
                log.warning("an encoder output was not to be had; once more, with the media")
        raise AssertionError("unreachable")

    async def _encoded(self, body: Json, item: Json) -> Json:
        """What an encoder says of one item; nothing if it fails."""
        ask: Json = {
            "model": body.get("model"),
            "messages": [{"role": "user", "content": [item]}],
            "max_tokens": 1,
            **{name: body[name] for name in (*OPTIONS, SALT) if name in body},
        }
        url = next(self._encode)
        try:
            async with self._open().post(f"{url}/v1/chat/completions", json=ask) as answer:
                answer.raise_for_status()
                return (await answer.json()).get("ec_transfer_params") or {}
        except (ClientError, TimeoutError, ValueError) as exc:
            log.warning("encoder %s: %r", url, exc)
            return {}

    async def _prefilled(self, sent: Json) -> Json:
        """The request as the decode engine gets it: with the handle of the prompt's KV."""
        assert self._prefill is not None
        ask = {**sent, "stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        ask.pop("stream_options", None)
        if "max_completion_tokens" in ask:
            ask["max_completion_tokens"] = 1
        async with self._open().post(f"{next(self._prefill)}/v1/chat/completions", json=ask) as answer:
            if answer.status == 500:
                raise Unavailable(await answer.read())
            answer.raise_for_status()
            handle = (await answer.json()).get("kv_transfer_params")
        return {**sent, "kv_transfer_params": handle} if handle else sent

    async def _forward(self, request: web.Request, sent: Json, url: str) -> web.StreamResponse:
        async with self._open().post(f"{url}/v1/chat/completions", json=sent) as answer:
            if answer.status == 500:
                raise Unavailable(await answer.read())
            reply = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
            )
            await reply.prepare(request)
            async for chunk in answer.content.iter_any():
                await reply.write(chunk)
            await reply.write_eof()
            return reply

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


class Unavailable(Exception):
    """An engine failed the request alone: vLLM's answer to an encoder output that could not be had."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


def parts(body: Json) -> Iterator[tuple[list[Any], int]]:
    """Where in the messages an item stands: a message's content, and the position in it."""
    for message in body["messages"]:
        if isinstance(content := message.get("content"), list):
            for at, part in enumerate(content):
                if part.get("type") in DESCRIBED_AS:
                    yield content, at


def media(body: Json) -> list[Json]:
    """The items of a request, in order."""
    return [content[at] for content, at in parts(body)]


def without_uuids(body: Json) -> Json:
    """The request without its clients' names for items."""
    made: Json = json.loads(json.dumps(body))
    for content, at in parts(made):
        content[at].pop("uuid", None)
    return made


def prepared(body: Json, said: list[Json], *, described: bool) -> Json:
    """The request for an engine that loads its items; `said` holds an encoder's answer for each of them."""
    made: Json = json.loads(json.dumps(body))
    # vLLM derives other names from a given one and such options, so then the media must be sent.
    described = described and not any(name in body for name in OPTIONS)
    for (content, at), items in zip(list(parts(made)), said, strict=True):
        for name, entry in items.items():
            if described and entry.get("metadata"):
                kind = DESCRIBED_AS[content[at]["type"]]
                content[at] = {"type": kind, kind: entry["metadata"], "uuid": name}
    if params := {name: entry for items in said for name, entry in items.items()}:
        made["ec_transfer_params"] = {**(body.get("ec_transfer_params") or {}), **params}
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for name, needed in (("--encode", True), ("--prefill", False), ("--decode", True)):
        parser.add_argument(name, required=needed, default=[], type=lambda urls: urls.split(","))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(options.encode, options.prefill, options.decode)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", proxy.chat)
    app.on_cleanup.append(proxy.close)
    web.run_app(app, host=options.host, port=options.port, print=None)


if __name__ == "__main__":
    main()
