"""NCCL and gloo: a communicator of one sender and one receiver, over which numbered messages go beside their gRPC headers.

    communicator.py    the process group of the two, on a thread of its own, and the rendezvous where they meet
    receiver.py        serves the rendezvous (Join), takes messages in order into staging memory
    link.py            joins, gathers blocks into staging memory, announces and sends them

In: a Join call. Out: a chunk's bytes in staging memory at the receiver, which checks them and writes its own blocks.
"""
