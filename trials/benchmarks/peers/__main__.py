"""Runs the comparison, and prints what trials.benchmarks.peers.report makes of it.

Every variant is run once in each round, one engine at a time, so that whatever else the machine does happens
to all. As root the run has mounts and a network of its own: small disks are then file systems, what goes
over loopback is its own, and LMCache finds its bucket by name.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.e2e.engine import ROOT
from tests.servers.s3.ceph import CephServer
from tests.servers.s3.servers import MotoServer, S3Server
from tools.models import build
from trials.benchmarks.bench_disk import machine
from trials.benchmarks.peers import lmcache, mooncake, variants
from trials.benchmarks.peers.measure import FAULTS, Plan, Reference, measure, suffer
from trials.benchmarks.peers.report import drawn, text
from trials.benchmarks.peers.variants import Variant
from trials.faults.peer_systems import versions

_ISOLATED = "PEERS_ISOLATED"
#: Names that LMCache may ask its buckets by.
_BUCKETS = [f"bucket-{number}.localhost" for number in range(1, 400)]
#: The first computes everything.
VARIANTS: list[type[Variant]] = [
    *(variants.Nothing, variants.Local, variants.Folder, variants.Bucket, variants.Fast, variants.Tiers),
    *(lmcache.Memory, lmcache.Native, lmcache.Resp, lmcache.S3, mooncake.Mooncake),
]


class NamedCeph(CephServer):
    """Takes a bucket's name from the host's name too."""

    def _make_cluster(self) -> None:
        super()._make_cluster()
        with self._config.open("a") as config:
            config.write("\nrgw dns name = localhost\n")


def isolated(stack: ExitStack) -> bool:
    """Begins this program again with mounts and a network of its own. Returns whether it has them."""
    if os.geteuid():
        return False
    if _ISOLATED not in os.environ:
        os.environ[_ISOLATED] = "yes"
        words = ["unshare", "--mount", "--net", sys.executable, "-m", __package__, *sys.argv[1:]]
        os.execvp(words[0], words)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        # SIOCSIFFLAGS: up and running.
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
    hosts = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-"))) / "hosts"
    # Long lines are cut.
    hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in ["localhost", *_BUCKETS]))
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    return True


class Run:
    """The variants, and what was found of each so far."""

    def __init__(self, plan: Plan, kinds: list[type[Variant]], say: Callable[[str], object]) -> None:
        self.plan, self.kinds, self._say = plan, kinds, say
        self.reference = Reference()
        self.found: dict[str, dict[str, Any]] = {
            kind.name: {"what": kind.what, "rounds": [], "faults": {}} for kind in kinds
        }
        for kind in kinds:
            if why := kind.missing():
                self._skip(kind, why)

    def round(self, number: int, s3: S3Server | None) -> None:
        # The tokens of the first are what the others are held against; those begin elsewhere each time.
        first, *rest = self.kinds
        turn = number * len(rest) // self.plan.rounds
        for kind in [first, *rest[turn:], *rest[:turn]]:
            if "skipped" in self.found[kind.name]:
                continue
            try:
                found = measure(kind, self.plan, number, s3, self.reference)
            except Exception as exc:
                self._skip(kind, f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}")
                self._say(str(exc)[-3000:])
                continue
            self.found[kind.name]["rounds"].append(found)
            times = {phase: [round(s, 3) for s in one["ttft_s"]] for phase, one in found["phases"].items()}
            self._say(f"round {number + 1}, {kind.name}: {times}")

    def faults(self, names: list[str], s3: S3Server | None) -> None:
        for kind in self.kinds:
            for name in names if kind.keeps and "skipped" not in self.found[kind.name] else ():
                try:
                    words = suffer(kind, name, self.plan, s3, self.reference)
                except Exception as exc:
                    words = f"not run: {type(exc).__name__}"
                    self._say(str(exc)[-3000:])
                self.found[kind.name]["faults"][name] = words
                self._say(f"{name}, {kind.name}: {words}")

    def _skip(self, kind: type[Variant], why: str) -> None:
        self.found[kind.name]["skipped"] = why
        self._say(f"{kind.name} is left out: {why}")


def run(plan: Plan, kinds: list[type[Variant]], faults: list[str], say: Callable[[str], object]) -> Any:
    """Measures all, and tells `say` of each when it is there. Returns the report."""
    began, circumstances = time.monotonic(), machine(Path("/tmp"))
    build(ROOT / ".cache" / "models", "text")
    made, shown = Run(plan, kinds, say), versions()
    for package in ("mooncake-transfer-engine-non-cuda",):
        shown[package] = metadata.version(package)
    with ExitStack() as stack:
        s3: S3Server | None = None
        if any(kind.uses_s3 for kind in kinds):
            s3 = stack.enter_context(MotoServer() if CephServer.missing() else NamedCeph())
            shown["S3 server"] = s3.kind
        for number in range(plan.rounds):
            made.round(number, s3)
        made.faults(faults, s3)
    return {
        "versions": {name: said for name, said in shown.items() if said != "not installed"},
        "machine": circumstances,
        "load after": machine(Path("/tmp"))["load"],
        "minutes": round((time.monotonic() - began) / 60, 1),
        **asdict(plan),
        "faults": faults,
        "variants": made.found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--prompts", type=int, default=Plan.prompts, help="in each round")
    parser.add_argument("--tokens", type=int, default=Plan.tokens, help="of each prompt")
    parser.add_argument("--variants", nargs="+", default=[""], metavar="WORD", help="words of their names")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS, metavar="FAULT")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    with ExitStack() as stack:
        plan = Plan(given.tokens, given.prompts, given.rounds, isolated(stack))
        kinds = VARIANTS[:1] + [
            kind for kind in VARIANTS[1:] if any(word in kind.name for word in given.variants)
        ]
        report = run(plan, kinds, given.faults, lambda line: print(line, flush=True))
    print(text(report))
    for file in filter(None, (given.json, given.svg)):
        file.parent.mkdir(parents=True, exist_ok=True)
    if given.json:
        given.json.write_text(json.dumps(report) + "\n")
    if given.svg:
        given.svg.write_text(drawn(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
