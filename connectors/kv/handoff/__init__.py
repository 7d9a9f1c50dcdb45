"""Disaggregated prefill through the store: one engine computes a prompt, another goes on from there.

The request parameters are those of vLLM's NIXL connector, so that its proxies work with this one:

    prefill engine   {"do_remote_decode": true}: stores all of the prompt, and answers with a handle
    decode engine    {"do_remote_prefill": true, ...}, which is that handle: waits until the whole prompt is
                     in the index, loads it and computes the last token; if it doesn't come in time, computes
                     the rest

A hand-off uses ordinary blocks under their ordinary names. So a stored prompt is handed over without moving a
byte, and a prompt that no decode engine asks for is evicted like any other. Only the last block may be
partial. Its name is vLLM's hash of it as if it were full, but of fewer tokens and with a mark. So the name
differs from that of every full block and says how many tokens count. The rest of its page is never read,
because the engine writes each of these positions before it attends to it.

The table says how much of N prompt tokens is handed over:

    full attention            N; vLLM computes the last token once more
    windows, chunks           N, of which N - 1 are loaded: for less, a window would need one more on its left
    states (Mamba, ...)       N - 1: a state can't be taken back by a token, so the prefill engine drops the
                              prompt's last one, as vLLM's own P/D connectors do
    drafting heads that look  likewise, one less than they look ahead
    ahead more than a token

Any client of such an engine can have a prompt stored by asking for it, past `admission`. It can keep the
prompt's blocks for up to `kv.handoff_wait_s`. So an engine hands over only if its settings say so.

    handoffs     the connector's calls, with the prefill engine's side
    receiving    the decode engine's side
    prompts      the names of a prompt's blocks

No call here blocks: call threads ask the index, one question at a time, with growing pauses.
"""
