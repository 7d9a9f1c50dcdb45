"""Reading Markdown for tests of the documentation: fences, inline code, links, anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

_FENCE = re.compile(r"^( *)(```+|~~~+) *([\w-]*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?:(?: {4}[^\n]*|[ \t]*)(?:\n|\Z))+")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]: +(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


@dataclass(frozen=True)
class Fence:
    """A fenced block: its language, or "", and its lines without their indentation."""

    language: str
    text: str
    end: int


@cache
def fences(text: str) -> tuple[Fence, ...]:
    return tuple(_fences(text))


def _fences(text: str) -> Iterator[Fence]:
    for found in _FENCE.finditer(text):
        indent = len(found[1])
        body = "".join(line[indent:] for line in found[4].splitlines(keepends=True))
        yield Fence(found[3], body, found.end())


def blocks(text: str) -> Iterator[str]:
    """Code that may hold commands: fences but those of outputs, and indented code."""
    for fence in fences(text):
        if fence.language not in ("text", "json", "yaml", "python", "promql"):
            yield fence.text
    for found in _INDENTED.finditer(_FENCE.sub("", text)):
        if found[0].strip():
            yield "\n".join(line[4:] for line in found[0].splitlines())


@cache
def prose(text: str) -> str:
    """Without fences, comments and indented code."""
    return _INDENTED.sub("\n", _COMMENT.sub("", _FENCE.sub("", text)))


@cache
def inline_code(text: str) -> tuple[str, ...]:
    return tuple(" ".join(found[2].split()) for found in _CODE.finditer(prose(text)))


def links(text: str) -> Iterator[str]:
    """Targets of links and images, outside of code."""
    # Code in a link's text stays a link.
    plain = _CODE.sub(lambda found: "x" * len(found[0]), prose(text))
    yield from _LINK.findall(plain)
    yield from _REFERENCE.findall(plain)


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as code hosts make them."""
    found: dict[str, int] = {}
    made = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        made.add(f"{slug}-{count}" if count else slug)
    return made
