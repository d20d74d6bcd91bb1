"""The engine: from requests to tokens, on one device. It knows no wire.

in     requests, to be computed (submit) or handed over by a prefill worker (reserve, commit); aborts, releases, stopped choices
out    events to one listener: outputs, progress of prompts, failures; grants to those that asked for blocks

load.py        a worker's options ─> a runner that has done its first step
engine.py      the loop: schedule ─> launch ─> wait ─> update ─> events
schedule/      what the next step computes, and who owns which block: pure, without torch
compute/       how a step is computed: batch, forward pass, samples
memory/        where KV blocks lie, and how many fit
watchdog.py    ends a process whose step does not end
threads.py     which threads compute
metrics.py     what Prometheus is told of steps
"""
