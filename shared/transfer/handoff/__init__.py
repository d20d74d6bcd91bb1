"""The handoff of one prompt: the messages, what they promise, and the choice of transport.

    prefill worker                                decode worker
    sender.py    one object per attempt  ─gRPC─>  service.py    messages to calls
    links.py     one link per receiver            receiver.py   reservations, leases, checks, commit
                                                  manifest.py   what a commit may claim
                                                  acceptors.py  what is offered, best first
    setup.py     which transports this worker takes part in;  metrics.py  what both tell Prometheus

In: `open`, `push`…, `commit` or `abort`, for one attempt. Out, at the receiver: a committed sequence in the engine, its first
tokens, and every block given back of what was not committed.
"""
