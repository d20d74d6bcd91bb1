"""`twostroke up`: the whole stack on one machine, supervised.

__main__.py ──> config.py (what is asked) ──> stack.py (which processes, told what; placement.py: on which cores and GPUs)
            └─> supervisor.py (start, restart, stop) ──> child.py (one process) ──> launch.py (dies with its parent)
                                                            └─> log_file.py, display.py: what is kept and shown of it
valkey.py: the embedded Redis
"""
