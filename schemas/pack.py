"""Prefix packs: the file that names prompts, and what the manifest of a pack says of those that it holds.

A pack is an archive (schemas.archive) of one namespace whose manifest has the member `pack`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from schemas.base import MAX_NUMBER, StrictModel

#: Most prompts of a file, and of a pack.
MOST_PROMPTS = 4096

PromptName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]


class PromptEntry(StrictModel):
    """One prompt of the file: a name, and one of text, file, messages and tokens."""

    name: PromptName
    text: str | None = Field(default=None, min_length=1)
    #: A file with the text, from the prompts' file on.
    file: str | None = Field(default=None, min_length=1)
    #: Messages from which the chat template makes the prompt. Instead of `content` a message may name a
    #: `file`.
    messages: tuple[dict[str, Any], ...] | None = Field(default=None, min_length=1, max_length=1024)
    #: Definitions of tools, for the chat template.
    tools: tuple[dict[str, Any], ...] | None = Field(default=None, min_length=1, max_length=1024)
    tokens: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [self.text, self.file, self.messages, self.tokens]
        if sum(one is not None for one in given) != 1:
            raise ValueError(f"prompt {self.name!r} needs exactly one of text, file, messages and tokens")
        if self.tools is not None and self.messages is None:
            raise ValueError(f"prompt {self.name!r} has tools without messages: leave them out")
        return self


class PromptFile(StrictModel):
    """The file that names prompts."""

    prompts: tuple[PromptEntry, ...] = Field(min_length=1, max_length=MOST_PROMPTS)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [one.name for one in self.prompts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several prompts are called {', '.join(twice)}; give each its own name")
        return self


class PackedPrompt(StrictModel):
    """A pack's entry of one prompt."""

    name: PromptName
    tokens: int = Field(ge=1, lt=MAX_NUMBER)
    #: The first 16 bytes of the hash of each full block, in hex, one after the other: the index knows blocks
    #: by these bytes, but for their group.
    blocks: str = Field(pattern=r"^([0-9a-f]{32})+$")

    @property
    def hashes(self) -> list[bytes]:
        """The hashes of its blocks, as far as they are kept."""
        packed = bytes.fromhex(self.blocks)
        return [packed[start : start + 16] for start in range(0, len(packed), 16)]


class Pack(StrictModel):
    """The manifest that makes an archive a pack."""

    format: Literal[1] = 1
    #: Release of vLLM that computed it.
    engine: str = Field(max_length=256)
    prompts: tuple[PackedPrompt, ...] = Field(min_length=1, max_length=MOST_PROMPTS)
    #: Id of the key that signs the manifest, and the MAC of its canonical JSON with "" in this place, in hex;
    #: both are "" if nothing signs it.
    key: str = Field(default="", max_length=32)
    mac: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
