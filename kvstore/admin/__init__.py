"""What `cache-admin` does: functions that return frozen reports (schemas). No printing.

    cache        where settings come from, and the backends of one settings tree opened for people
    inventory    status, ls, namespaces, namespaces diff
    segments     show
    doctor       doctor, with the checks of the machine in machine, of payloads in storage_checks
    engine       vllm-config
    plans        which segments export and warm move
    exports      export
    imports      import
    warming      warm
    benchmark    bench
    tier         this node's fast tier
    payloads, records     payloads verified, and what the index knows of them restored
    tarball, parallel, progress    what these are made of

Read-only, except that the doctor's `ping` and the bench write and delete what they have written, that an
import saves, and that warming fills this node's fast tier.
"""

from kvstore.admin.benchmark import bench, shape_of
from kvstore.admin.cache import Cache, Sources, UnknownName
from kvstore.admin.doctor import doctor
from kvstore.admin.engine import vllm_config
from kvstore.admin.exports import ArchiveFile, export
from kvstore.admin.imports import import_archive
from kvstore.admin.inventory import diff, ls, namespaces, status
from kvstore.admin.plans import plan
from kvstore.admin.segments import show
from kvstore.admin.warming import warm, warming_bytes

__all__ = [
    "Sources",
    "Cache",
    "UnknownName",
    "status",
    "ls",
    "show",
    "namespaces",
    "diff",
    "doctor",
    "vllm_config",
    "plan",
    "ArchiveFile",
    "export",
    "import_archive",
    "warm",
    "warming_bytes",
    "bench",
    "shape_of",
]
