"""A recording from a time on: only what was asked for since then, as if nothing had been before."""

from __future__ import annotations

from dataclasses import replace

from kvstore.admin.simulate.traces import BadTrace, Trace


def since(trace: Trace, from_s: float) -> Trace:
    """Returns the requests from `from_s` (the recording's own time) on, with their blocks numbered anew. What
    computing took counts from before as well. Raises BadTrace if there are none."""
    number: dict[int, int] = {}
    later = Trace(spaces=trace.spaces, costs=trace.costs, skipped=trace.skipped)
    for request in trace.requests:
        if request.at_s < from_s:
            continue
        chain = [number.setdefault(block, len(number)) for block in request.chain]
        later.requests.append(replace(request, chain=chain))
        later.references += len(chain)
    if not later.requests:
        raise BadTrace("no request was recorded since then")
    later.space_of = [trace.space_of[block] for block in number]
    later.said = [said for said in trace.said if said.at_s >= from_s]
    later.spans = {
        name: (max(first, from_s), last) for name, (first, last) in trace.spans.items() if last >= from_s
    }
    return later
