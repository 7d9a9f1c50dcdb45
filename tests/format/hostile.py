"""Headers with right checksums that cost their reader all they can: by whoever may write payloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvstore.format import segment as codec

#: A number that Python still converts, at 4299 digits.
HUGE = "9" * 4299


def sealed(text: bytes) -> bytes:
    """A header of this JSON, with its checksum."""
    padded = -(-(8 + len(text)) // codec.ALIGN) * codec.ALIGN
    head = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)
    return head[: codec._SEAL] + codec._header_checksum(head) + head[codec._SEAL + 16 :]


def header(namespace: str, namespace_id: str, slots: str, tensors: str, more: dict[str, str]) -> bytes:
    metadata: dict[str, Any] = {
        "xxh3": "0" * 16, "format": "1", "segment": "0" * 16, "namespace_id": namespace_id,
        "namespace": namespace, "kind": "kv", "rank": "0", "ranks": "1", "codec": "none", "depth": "0",
        "created_s": "0", "writer": "B", "slots": slots, **more,
    }  # fmt: skip
    return sealed(('{"__metadata__":' + json.dumps(metadata, separators=(",", ":")) + tensors + "}").encode())


def slot(shape: str = "[0]", number: int = 0) -> str:
    key = f"{number:036x}"
    return f'{{"key":"{key}","codec":"none","dtype":"U8","shape":{shape},"raw_bytes":0,"xxh3":"{"0" * 16}"}}'


def tensor(shape: str = "[0]", number: int = 0) -> str:
    return f',"{number:036x}":{{"dtype":"U8","shape":{shape},"data_offsets":[0,0]}}'


def _many(item: str, nbytes: int) -> str:
    return ",".join([item] * (nbytes // (len(item) + 1)))


Made = Callable[[int], tuple[str, str, dict[str, str]]]

#: What a header of about so many bytes holds: slots, tensors, more metadata.
HOSTILE: dict[str, Made] = {
    "a shape of huge numbers": lambda n: (
        f"[{slot(f'[{_many(HUGE, n // 2)}]')}]", tensor(f"[{_many(HUGE, n // 2)}]"), {},
    ),
    "a shape of many numbers": lambda n: (
        f"[{slot(f'[{_many(str(1 << 39), n // 2)}]')}]", tensor(f"[{_many(str(1 << 39), n // 2)}]"), {},
    ),
    "huge numbers": lambda n: (f"[{slot()}]", f',"a":[{_many(HUGE, n)}]', {}),
    "one number": lambda n: (f"[{slot()}]", f',"a":{"9" * n}', {}),
    "slots that are none": lambda n: (f"[{_many('{}', n)}]", "", {}),
    "numbers for slots": lambda n: (f"[{_many('0', n)}]", "", {}),
    "members of a slot": lambda n: (
        "[{" + ",".join(f'"{i:x}":0' for i in range(n // 12)) + "}]", "", {},
    ),
    "members of the metadata": lambda n: (f"[{slot()}]", "", {f"{i:x}": "1" for i in range(n // 14)}),
    "tensors": lambda n: (f"[{slot()}]", "".join(f',"{i:x}":0' for i in range(n // 9)), {}),
    "nesting": lambda n: (f"[{slot()}]", f',"a":[{_many("[" * 150 + "]" * 150, n)}]', {}),
    "depth": lambda n: (f"[{slot()}]", ',"a":' + "[" * n, {}),
    "floats": lambda n: (f"[{slot()}]", f',"a":[{_many("2.2250738585072011e-308", n)}]', {}),
    "a long float": lambda n: (f"[{slot()}]", ',"a":0.' + "7" * n, {}),
    "escapes": lambda n: (f"[{slot()}]", ',"a":"' + "\\u0041" * (n // 6) + '"', {}),
    "commas in disguise": lambda n: ("[0" + "\\u002c0" * (n // 8) + "]", "", {}),
}  # fmt: skip
