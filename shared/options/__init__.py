"""Options: one frozen dataclass per process, read once, and refused by name where a value cannot be.

flags, TWOSTROKE_… variables ──> config.py ──> a dataclass ──> to_environ ──> a child's variables

config.py    how a dataclass becomes flags and variables, and is read from them
peers.py     what routers and workers have in common: the cluster secret and mTLS;  worker.py  a worker of any role
checks.py    checks that several of them share
"""
