"""A decode worker: the engine behind Generate and StopChoice, and a receiver of prompts' KV blocks.

in     Generate streams of routers; blocks and first tokens of prefill workers
out    tokens

__main__.py    wires the parts; `--colocated` leaves the receiver out
config.py      its options
server.py      wire to engine and back
"""
