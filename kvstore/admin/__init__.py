"""What `cache-admin` knows: functions that return frozen reports (schemas.reports). No printing.

    cache        where settings come from, and the backends of one settings tree opened for people
    inventory    status, ls, namespaces, namespaces diff
    segments     show
    doctor       doctor, with the checks of the machine in machine
    engine       vllm-config

Everything here is read-only, except that the doctor's `ping` writes and deletes a probe.
"""

from kvstore.admin.cache import Cache, Sources, UnknownName
from kvstore.admin.doctor import doctor
from kvstore.admin.engine import vllm_config
from kvstore.admin.inventory import diff, ls, namespaces, status
from kvstore.admin.segments import show

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
]
