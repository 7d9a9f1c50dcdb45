"""VerdictsPart: verdicts about writers in Redis. The schema stands in kvstore.index.scripted.index."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from kvstore.index.contract import check_writers
from kvstore.index.numbers import real, whole
from kvstore.index.scripted.salts import SaltsPart
from kvstore.index.scripted.scripts import Script
from kvstore.index.scripted.values import key, understood
from kvstore.index.verdicts import (
    NAME_CHARS,
    STATES,
    VERDICT_S,
    VERDICTS_KEPT,
    Opinion,
    Verdict,
    VerdictState,
)
from kvstore.keys import NamespaceId, PlaceId, WriterId
from schemas.records import WRITER_ID_BYTES

_JUDGE = Script.load("judge")
_VERDICTS = Script.load("verdicts")
_HEAD = struct.Struct(">BI8s")


class VerdictsPart(SaltsPart):
    """The part of ScriptedIndex that keeps verdicts, under the namespace's own id."""

    @understood
    def verdicts(
        self, namespace: NamespaceId, writers: Sequence[WriterId] | None = None
    ) -> Mapping[WriterId, Verdict]:
        check_writers(writers or ())
        if writers is not None and not writers:
            return {}
        flat = self._client.run(_VERDICTS, key(namespace, "meta"), b"".join(writers or ()), VERDICT_S)
        found: dict[WriterId, Verdict] = {}
        for writer, value in zip(flat[::2], flat[1::2], strict=True):
            if len(writer) != WRITER_ID_BYTES or len(value) < _HEAD.size or value[0] >= len(STATES):
                continue  # whatever stands there, it is no verdict
            state, at, by = _HEAD.unpack_from(value)
            name = value[_HEAD.size :][: 4 * NAME_CHARS].decode("utf-8", "replace")[:NAME_CHARS]
            found[WriterId(writer)] = Verdict(STATES[state], real(at), PlaceId(by), name)
        return found

    @understood
    def judge(
        self,
        namespace: NamespaceId,
        writer: WriterId,
        opinion: Opinion,
        *,
        by: PlaceId,
        stands: bool,
        name: str = "",
    ) -> VerdictState:
        check_writers([writer, WriterId(by)])
        state = self._run(
            _JUDGE,
            namespace,
            writer,
            1 if opinion == "alike" else 0,
            by,
            1 if stands else 0,
            name[:NAME_CHARS],
            VERDICTS_KEPT,
            VERDICT_S,
        )
        return STATES[whole(state, most=len(STATES) - 1)]
