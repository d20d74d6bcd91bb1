"""KV blocks from a prefill worker to a decode worker.

    handoff      what is agreed about one prompt: reserve, push, commit, release. Knows no transport by name but to choose one
    transports   how bytes get from one pool into another: gRPC messages, mapped memory, a communicator of two

In come a prompt's blocks and first tokens (`Sender`, used by the prefill service); out comes a sequence that may run
(`Receiver`, used by the decode service). `handoff` stands on `transports`, never the other way round.
"""
