"""What clients feel when a worker is killed: `python -m bench.failover`.

__main__.py ─> rounds.py (run, kill, compare) ─> token_stream.py (every token of a stream, and when it came)
                    └─> workers.py (who is alive, who is busy, and the end of one)
"""
