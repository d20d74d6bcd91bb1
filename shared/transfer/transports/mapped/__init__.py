"""Shared memory and CUDA IPC: two processes of one machine and one user, of which one writes into the other's pool.

    memory.py      what the two kinds of memory have in common
    shm.py         main memory, by memfd          cuda_ipc.py, cuda_device.py    GPU memory, by the CUDA driver
    socket.py      the unix socket between the two: greeting, orders, answers, and whose it is
    receiver.py    hands the pools out, bars an ended attempt's writer before its blocks go back
    link.py        maps the pools, copies, answers each bar with the proof that nothing more is written

In: an offer with the socket's path. Out: bytes in place, and fences.
"""
