"""Ceph's RADOS Gateway, a production S3 server, as small as it goes.

One monitor, one storage daemon on a sparse file and one gateway. No manager: it gathers statistics and
balances, which nobody asks of one daemon, and takes more memory than the three together.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import uuid
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from tests.servers.redis import ServerError, _free_port, spawn_tied
from tests.servers.s3.bucket import Credentials
from tests.servers.s3.servers import START_TIMEOUT_S, S3Server, clean_environment, find_binary, wait_for

_BINARIES = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "monmaptool")

_CONFIG = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}
public addr = 127.0.0.1
public network = 127.0.0.0/8
ms bind ipv6 = false
# Between the daemons, nobody asks for keys; encryption, which the gateway defaults to, would need some.
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
# A cluster of one.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 5000
# The disk is shared with everything else on the machine: how full it is says nothing about this cluster.
mon data avail warn = 1
mon data avail crit = 0
# Nothing outside the folder, and no user to become.
run dir = {folder}
crash dir = {folder}
admin socket =
pid file =
keyring = {folder}/keyring
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
setuser match path =

[mon]
mon data = {folder}/mon
# Nobody is there to agree with: a change need not wait for others to come.
paxos propose interval = 0.01
paxos min wait = 0.01
mon tick interval = 1
mon memory autotune = false

[osd]
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = 20G
bluestore block create = true
bluestore fsck on mkfs = false
# How long each open and close of the file may wait for its thread; a start has a dozen of them.
bdev aio poll ms = 10
# One family of columns instead of a dozen, each with buffers of its own.
bluestore rocksdb cf = false
bluestore cache autotune = false
bluestore cache size = 16M
osd op num shards = 1
osd op num threads per shard = 2
osd mclock skip benchmark = true
osd class update on start = false
# For file systems with short names, such as ext4.
osd max object name len = 256
osd max object namespace len = 64
debug rocksdb = 0/0

[client]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw thread pool size = 64
rgw run sync thread = false
rgw user max buckets = 100000
# What is deleted makes room within seconds, not hours.
rgw gc obj min wait = 5
rgw gc processor period = 10
"""


class CephServer(S3Server):
    """Checks signatures and permissions, honours conditions, survives `kill` with all it acknowledged."""

    kind = "ceph"

    def __init__(self) -> None:
        super().__init__()
        if missing := self.missing():
            raise ServerError(f"{', '.join(missing)} not found: run `make setup`, which reports why")
        self._owner = Credentials("owner", secrets.token_hex(16))
        self._stranger: Credentials | None = None
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._osd_uuid = str(uuid.uuid4())

    @staticmethod
    def missing() -> list[str]:
        """The programs it needs that this machine lacks."""
        return [name for name in _BINARIES if find_binary(name) is None]

    @property
    def owner(self) -> Credentials:
        return self._owner

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return list(self._daemons.values())

    @property
    def gateway(self) -> subprocess.Popen[bytes]:
        return self._daemons["radosgw"]

    def stranger(self) -> Credentials:
        if self._stranger is None:
            stranger = Credentials("stranger", secrets.token_hex(16))
            self._create_user(stranger)
            self._stranger = stranger
        return self._stranger

    @property
    def _config(self) -> Path:
        return self.folder / "ceph.conf"

    def _spawn(self) -> None:
        self._daemons = {name: each for name, each in self._daemons.items() if each.poll() is None}
        new = not self._config.exists()
        if new:
            self._make_cluster()
        self._launch("ceph-mon", "-i", "a")
        # The first call is answered once the monitor has elected itself.
        if new:
            self._call("ceph", "osd", "new", self._osd_uuid)
            self._call("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", self._osd_uuid)
        else:
            # After a kill the monitor knows nothing of it, and would send clients where nobody listens.
            self._call("ceph", "osd", "down", "0")
        self._launch("ceph-osd", "-i", "0")
        # Who asks before it is up waits for the next of their rare looks: five seconds, not a tenth of one.
        if not wait_for(lambda: "1 up" in self._call("ceph", "osd", "stat"), lambda: self.running):
            raise ServerError(f"the storage daemon did not come up; the logs:\n{self.log()}")
        if new:
            # Before the gateway, which would make the same pools at the same time.
            self._create_user(self._owner)
        self._launch("radosgw", "-n", "client.rgw")

    def _make_cluster(self) -> None:
        folder, mon_port, fsid = self.folder, _free_port(), str(uuid.uuid4())
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        (folder / "keyring").touch()
        self._config.write_text(_CONFIG.format(folder=folder, fsid=fsid, mon_port=mon_port, port=self.port))
        members = str(folder / "monmap")
        self._call(
            "monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", members
        )
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", members)

    def _create_user(self, user: Credentials) -> None:
        self._call(
            *("radosgw-admin", "-n", "client.rgw", "user", "create"),
            *(f"--uid={user.access_key}", f"--display-name={user.access_key}"),
            *(f"--access-key={user.access_key}", f"--secret-key={user.secret_key}"),
        )

    def _launch(self, name: str, *arguments: str) -> None:
        """Does nothing if it runs."""
        if name not in self._daemons:
            command = [str(find_binary(name)), *arguments, "-f", "-c", str(self._config)]
            self._daemons[name] = spawn_tied(command, self.folder / f"{name}.out.log", clean_environment())

    def _call(self, name: str, *arguments: str) -> str:
        step = f"{name} {' '.join(arguments[:4])}"
        try:
            done = subprocess.run(
                [str(find_binary(name)), *arguments, "-c", str(self._config)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=clean_environment(),
                timeout=START_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as exc:
            raise ServerError(f"{step} took over {START_TIMEOUT_S} s; the logs:\n{self.log()}") from exc
        if done.returncode:
            raise ServerError(f"{step} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
        return done.stdout

    def _answers(self) -> bool:
        return wait_for(self._takes_requests, lambda: self.running)

    def _takes_requests(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), 5).close()
        # Nobody else on this port would know our owner.
        try:
            self.client().list_buckets()
        except (BotoCoreError, ClientError):
            return False
        return True

    def _forget(self) -> None:
        super()._forget()
        self._daemons.clear()
        self._stranger = None


def can_install() -> bool:
    """Whether `make setup` installs Ceph on this machine: as root, with apt."""
    return os.geteuid() == 0 and find_binary("apt-get") is not None
