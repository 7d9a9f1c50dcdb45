"""Prefetch: brings payloads to the node's folder, for requests that wait for their turn and for sessions that
a client says go on."""
