"""A proxy for encoders apart (docs/epd.md): E -> PD, or E -> P -> D. Round robin, no authentication.

    python epd_proxy.py --port 8000 --encode http://E1:8001,http://E2:8001 \
        [--prefill http://P:8002] --decode http://D:8003

Each image, video and audio clip of a chat request goes to an encoder as a request of its own. The answer says
under which name the item is in the store, and what describes it to a model that need not see it. Then the
request goes on, with descriptions in place of media where there are any, and with the encoders' answers in
`ec_transfer_params`. Where an encoder fails, the next engine encodes.

An engine that has only a description, and can't get hold of the item, answers 500. Then the item is encoded
once more, and the media themselves are sent. Clients' `uuid`s are dropped: vLLM's own hashes name the items.
"""

import argparse
import asyncio
import copy
import itertools
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

#: How an item is sent, and how its description is.
DESCRIBED_AS = {
    "image_url": "image_embeds",
    "video_url": "video_embeds",
    "audio_url": "audio_embeds",
    "input_audio": "audio_embeds",
}
#: They change an encoder's output, and vLLM's name of it.
OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
PATH = "/v1/chat/completions"

Json = dict[str, Any]


class Unavailable(Exception):
    """An engine failed this request alone: vLLM's answer to an encoder output that could not be had."""


class Proxy:
    """One event loop's; any number of requests at a time."""

    session: ClientSession

    def __init__(self, encode: list[str], prefill: list[str], decode: list[str]) -> None:
        self.encode, self.decode = itertools.cycle(encode), itertools.cycle(decode)
        self.prefill = itertools.cycle(prefill) if prefill else None

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        # Only this proxy may ask for a hand-off: a client could have any prompt stored.
        body.pop("kv_transfer_params", None)
        items = list(media(body))
        for content, at in items:
            content[at].pop("uuid", None)
        for described in (True, False):
            said = await asyncio.gather(*(self.encoded(body, content[at]) for content, at in items))
            sent = prepared(body, said, described=described)
            try:
                if self.prefill is not None:
                    sent |= await self.handle(next(self.prefill), sent)
                return await self.forward(request, sent)
            except Unavailable as exc:
                if not described or sent["messages"] == body["messages"]:
                    return web.Response(status=500, body=exc.args[0], content_type="application/json")
                logging.warning("an encoder output was not to be had; once more, with the media")
        raise AssertionError("unreachable")

    async def encoded(self, body: Json, item: Json) -> Json:
        """Returns an encoder's answer about one item; empty if it fails."""
        # The salt keeps outputs of requests apart: the encoder must have the same.
        ask = {name: body[name] for name in ("model", *OPTIONS, "cache_salt") if name in body}
        ask |= {"messages": [{"role": "user", "content": [item]}], "max_tokens": 1}
        try:
            async with self.session.post(next(self.encode) + PATH, json=ask, raise_for_status=True) as answer:
                return (await answer.json()).get("ec_transfer_params") or {}
        except (ClientError, TimeoutError, ValueError) as exc:
            logging.warning("encoder: %r", exc)
            return {}

    async def handle(self, url: str, sent: Json) -> Json:
        """Returns the handle of the prompt's KV as a part of a request; empty if there is none."""
        ask = {**sent, "stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        for name in ("stream_options", "max_completion_tokens"):
            ask.pop(name, None)
        async with self.session.post(url + PATH, json=ask) as answer:
            if answer.status == 500:
                raise Unavailable(await answer.read())
            answer.raise_for_status()
            handle = (await answer.json()).get("kv_transfer_params")
        return {"kv_transfer_params": handle} if handle else {}

    async def forward(self, request: web.Request, sent: Json) -> web.StreamResponse:
        async with self.session.post(next(self.decode) + PATH, json=sent) as answer:
            if answer.status == 500:
                raise Unavailable(await answer.read())
            headers = {"Content-Type": answer.headers["Content-Type"]}
            reply = web.StreamResponse(status=answer.status, headers=headers)
            await reply.prepare(request)
            async for chunk in answer.content.iter_any():
                await reply.write(chunk)
            return reply

    async def connected(self, _: web.Application) -> AsyncIterator[None]:
        # vLLM drops idle connections after 5 s; a client must do so first.
        connector = TCPConnector(limit=0, keepalive_timeout=2)
        async with ClientSession(connector=connector, timeout=ClientTimeout(connect=5)) as self.session:
            yield


def media(body: Json) -> Iterator[tuple[list[Any], int]]:
    """Yields a message's content, and the position of an item in it."""
    for message in body["messages"]:
        if isinstance(content := message.get("content"), list):
            for at, part in enumerate(content):
                if part.get("type") in DESCRIBED_AS:
                    yield content, at


def prepared(body: Json, said: list[Json], *, described: bool) -> Json:
    """Returns the request for an engine that loads its items; `said` holds the encoders' answer for each."""
    made: Json = copy.deepcopy(body)
    # vLLM derives other names from a given one and such options, so then the media must be sent.
    described = described and not any(name in body for name in OPTIONS)
    params: Json = {}
    for (content, at), items in zip(list(media(made)), said, strict=True):
        params |= items
        for name, entry in items.items():
            if described and entry.get("metadata"):
                kind = DESCRIBED_AS[content[at]["type"]]
                content[at] = {"type": kind, kind: entry["metadata"], "uuid": name}
    if params:
        made["ec_transfer_params"] = (body.get("ec_transfer_params") or {}) | params
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for name, needed in (("--encode", True), ("--prefill", False), ("--decode", True)):
        parser.add_argument(name, required=needed, default=[], type=lambda urls: urls.split(","))
    options = parser.parse_args()
    proxy = Proxy(options.encode, options.prefill, options.decode)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post(PATH, proxy.chat)
    app.cleanup_ctx.append(proxy.connected)
    web.run_app(app, host=options.host, port=options.port, print=None)


if __name__ == "__main__":
    main()
