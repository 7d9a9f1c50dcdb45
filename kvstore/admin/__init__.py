"""What `cache-admin` does: functions that return frozen reports (schemas). No printing.

    cache        where settings come from, and the backends of one settings tree opened for people
    inventory    status, ls, namespaces, namespaces diff
    segments     show
    stats        stats, once and again and again
    top          top
    du           du
    events       events, as they were and as they come
    evictions    evict
    pins         pin, unpin
    quotas       quota, quota set, quota clear
    fsck         fsck: what it looks at in checking, entries and stock, what it does about it in mending
    gc           gc
    rebuild      rebuild; how a segment is committed from its payloads in recommit
    drop         drop, invalidate
    doctor       doctor, with the checks of the machine in machine, of payloads in storage_checks, of quotas
                 and upkeep in upkeep_checks
    engine       vllm-config
    plans        which segments export and warm move
    exports      export
    imports      import
    warming      warm
    benchmark    bench
    simulate     simulate, on traces, replay and replay_store, with plot
    whatif       whatif
    janitor      what serve does by itself: who leads in leadership, what is said of it in logbook, payloads
                 read in scrub
    serving      serve: what it sees in watching, surveying, noticing and history; metrics in exporter; HTTP
                 in listening; the page in page/
    probing      serve --probe
    tier         this node's fast tier
    payloads, records     payloads verified, and what the index knows of them restored
    tarball, parallel, progress    what these are made of

Each says in its first lines what it changes; what is not named for it changes nothing. What evicts, pins or
sets a quota only plans until it is told to apply.
"""

from kvstore.admin.benchmark import bench, shape_of
from kvstore.admin.cache import Cache, Sources, UnknownName
from kvstore.admin.doctor import doctor
from kvstore.admin.du import du
from kvstore.admin.engine import vllm_config
from kvstore.admin.events import events, follow_events
from kvstore.admin.evictions import evict, plan_keep, plan_segments, plan_unused
from kvstore.admin.exports import ArchiveFile, export
from kvstore.admin.imports import import_archive
from kvstore.admin.inventory import diff, ls, namespaces, status
from kvstore.admin.pins import choose, choose_prompt, pin, pinned, pins, unpin
from kvstore.admin.plans import plan
from kvstore.admin.quotas import quotas, set_quota
from kvstore.admin.segments import show
from kvstore.admin.simulate import simulate
from kvstore.admin.stats import stats, watch
from kvstore.admin.top import top
from kvstore.admin.warming import warm, warming_bytes
from kvstore.admin.whatif import whatif

__all__ = [
    "Sources",
    "Cache",
    "UnknownName",
    "status",
    "stats",
    "watch",
    "top",
    "ls",
    "show",
    "du",
    "events",
    "follow_events",
    "namespaces",
    "diff",
    "plan_segments",
    "plan_unused",
    "plan_keep",
    "evict",
    "pins",
    "pinned",
    "choose",
    "choose_prompt",
    "pin",
    "unpin",
    "quotas",
    "set_quota",
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
    "simulate",
    "whatif",
]
