"""A prefill worker: the engine behind Prefill, and a sender of the KV blocks that it computes.

in     Prefill calls of routers
out    blocks and first tokens, to the decode worker that the call names

__main__.py    wires the parts
server.py      one call: submit, ship, release
shipment.py    what of a prompt has been computed, and what has been sent
"""
