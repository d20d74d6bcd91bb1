"""How bytes get from a sender's pool into a receiver's.

    interface.py   the classes of a transport, at each end, and the words for them
    chunks.py      how blocks are cut into chunks; a chunk's ranges, size and checksum
    heads.py       pools that hold only some of the KV heads
    grpc.py        bytes in the message: works everywhere
    mapped/        shared memory and CUDA IPC: the sender writes into the receiver's pool
    group/         NCCL and gloo: a communicator of the two processes

In: a chunk's header to fill in, a pool and block ids (`Writer.ship`). Out: the bytes in the receiver's reserved blocks, or beside
them for the receiver to check and put there (`Landing.payload`), and the proof that no more are written (`Landing.fence`).
"""
