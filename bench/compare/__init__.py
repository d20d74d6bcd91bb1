"""One sitting: the same work on every engine of this machine, one after another.

config.py ─> engines.py (how each is started) ─> engine_process.py (start, ready, stop) ─> compare.py (warm up, measure)
                                                                                              └─> comparison.py (side by side)
stack.py   Twostroke alone, for measurements that look inside while it serves
peers/     thin HTTP servers around engines that bring none
"""
