"""What any process of ours needs around its work, and what it may use of its machine. Torch-free.

telemetry.py   logs and metrics                     readiness.py     how far the start has come, for a supervisor
tasks.py       no background task ends unseen       listener.py      listening sockets;  own_address.py  how others reach them
malloc.py      the C library keeps large buffers    cpus.py          processors, and cgroup.py: what the container allows
"""
