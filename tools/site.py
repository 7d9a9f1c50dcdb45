"""Hooks of the documentation site (mkdocs.yml).

The pages are written for two readers: a code host that shows single files, and the site. The hooks make up
for what differs on the site:

- pages that live outside docs/ (`ELSEWHERE`) are part of the site;
- links to anything else in the repository lead to `repo_url`, or, without one, become the file's name;
- a list may follow a paragraph without an empty line, as it may on code hosts.

A link to what doesn't exist is left as it is, and fails a strict build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

#: Pages of the site that are not in docs/: path in the repository -> path on the site.
ELSEWHERE = {"helm/README.md": "chart.md", "CHANGELOG.md": "changelog.md"}

_FENCE = re.compile(r" *(```+|~~~+)")
_LIST_ITEM = re.compile(r"(?:[-*+]|\d+\.) ")
#: Inline code, which is left alone, or an inline link.
_LINK = re.compile(
    r"(?P<code>`+)(?:(?!(?P=code)).)+(?P=code)(?!`)(?!\]\()|\[(?P<text>[^\]]*)\]\((?P<target>[^()\s]+)\)"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that live elsewhere."""
    for path, page in ELSEWHERE.items():
        if (ROOT / path).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns a page as MkDocs is to render it."""
    source = _in_repository(page.file.src_uri)
    pages = {file.src_uri for file in files if not file.inclusion.is_excluded()}
    base = f"{config.repo_url.rstrip('/')}/{config.extra['source_prefix']}" if config.repo_url else ""

    def moved(target: str, text: str) -> str | None:
        return relinked(target, text, source=source, page=page.file.src_uri, pages=pages, base=base)

    return "\n".join(_lines(markdown, moved))


def relinked(target: str, text: str, *, source: str, page: str, pages: set[str], base: str) -> str | None:
    """Returns what replaces `[text](target)` on the site; None: nothing does.

    `source` is the page's path in the repository and `page` its path on the site, `pages` are all pages of
    the site, and `base` is the address to which a path in the repository is appended, or "".
    """
    path, _, anchor = target.partition("#")
    if not path or re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    on_site = ELSEWHERE.get(wanted) or (wanted.removeprefix("docs/") if wanted.startswith("docs/") else None)
    if on_site in pages:
        way = posixpath.relpath(on_site, posixpath.dirname(page) or ".")
        return f"[{text}]({way}{'#' + anchor if anchor else ''})"
    if not (ROOT / wanted).exists():
        return None
    if base:
        return f"[{text}]({base}/{wanted}{'#' + anchor if anchor else ''})"
    plain = text.replace("`", "")
    return f"`{wanted}`" if plain in wanted else f"{text} (`{wanted}`)"


def _in_repository(page: str) -> str:
    return next((path for path, there in ELSEWHERE.items() if there == page), f"docs/{page}")


def _lines(markdown: str, moved: Callable[[str, str], str | None]) -> Iterator[str]:
    """Yields the page's lines with its links and lists made fit; leaves code alone."""

    def link(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        return moved(match["target"], match["text"]) or match[0]

    fence, before, in_list = "", "", False
    for line in markdown.split("\n"):
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            yield line
            before = line
            continue
        if line.startswith("    ") and not in_list and not before.strip():
            yield line  # indented code: a line after it is still behind an empty one
            continue
        item = _LIST_ITEM.match(line)
        # A list ends where text begins that is neither indented nor goes on with a paragraph.
        in_list = bool(item) or (in_list and (line.startswith(" ") or not line or bool(before.strip())))
        if found:
            fence = found[1]
            yield line
        else:
            if item and _is_text(before):
                yield ""
            yield _LINK.sub(link, line)
        before = line


def _is_text(line: str) -> bool:
    """Tells whether a list that begins after this line needs an empty line before it."""
    return bool(line.strip()) and not line.startswith((" ", "#", "|", ">")) and not _LIST_ITEM.match(line)


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """Leaves out edit links if there is no repository to edit."""
    if not config.repo_url:
        config.repo_url = None
    return config
