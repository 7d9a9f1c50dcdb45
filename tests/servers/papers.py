"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


class Papers:
    """An authority, and what it certifies: `folder[NAME.crt]` with its `folder[NAME.key]`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._make("ca")

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    def server(self, name: str = "server", hosts: Sequence[str] = ()) -> None:
        """Makes a server's, for 127.0.0.1 and the hosts."""
        names = ["IP:127.0.0.1", *(f"DNS:{host}" for host in hosts)]
        self._make(name, "-addext", f"subjectAltName={','.join(names)}")

    def client(self, name: str = "client") -> None:
        """Makes a client's."""
        self._make(name)

    def _make(self, name: str, *extra: str) -> None:
        words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        words += ["-days", "2", "-subj", f"/CN={name}"]
        words += ["-keyout", self[f"{name}.key"], "-out", self[f"{name}.crt"]]
        if name != "ca":
            words += ["-CA", self["ca.crt"], "-CAkey", self["ca.key"], "-addext", "basicConstraints=CA:FALSE"]
        openssl(*words, *extra)


def openssl(*words: str) -> None:
    """Runs openssl."""
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30)
