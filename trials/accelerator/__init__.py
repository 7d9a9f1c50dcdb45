"""A fake accelerator whose streams an adversary runs in any legal order, and engines over it that check what
they read.

    device.py    streams, events, device and pinned tensors, the adversary
    contents.py  what every position's KV must be: a function of the tokens up to it
    layouts.py   the KV caches that vLLM makes: kinds of layers, dtypes, orders of dimensions
    runner.py    vLLM's model runners as a connector sees them, V1 and V2, with a model that checks
    promises.py  what every slot that is saved must be
    plan.py      how a run goes: batches in flight, ranks, drafts, hand-offs, late reads, ...
    configs.py   the same in vLLM's words
    engine.py    vLLM's own scheduler over it all, with requests that come, are aborted and preempted
    beside.py    another connector, which loads by RDMA
    items.py     encoder outputs
    faults.py    faults to plant, each at a place where something waits today
    __main__.py  a sweep over layouts and seeds, as a table

What it can't show: locks of a driver, buses, stalls of an allocator, the speed of kernels.
"""
