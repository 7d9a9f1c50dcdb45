"""A trial of the connectors' copies on a CUDA device, with torch and triton alone.

    python3 -m trials.gpu [--json FILE] [--only SECTION ...] [--fake]

    machine.py   the device, or the fake accelerator in its place; waits that can be left out
    pools.py     pages as vLLM lays them out, on either, and what copies of them must give, by hand
    copies.py    right bytes: each layout and dtype, a pool beyond 2^31 bytes, the kernel beside torch
    order.py     saves and loads beside a step that is held up, and faults that must show
    memory.py    page-locked arenas; threads that sleep while they wait
    figures.py   GB/s beside a bare copy, launches, the engine's thread, steps beside copies
    report.py    rows, the table, the JSON

`--fake` runs all of it on a CPU: what it finds of order counts, its figures don't. No module here imports
vLLM or a dependency of the project but numpy. layouts.json is the geometry of vLLM's own layouts; a test
compares the two.
"""
