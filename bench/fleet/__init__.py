"""What a thousand workers cost a router: their heartbeats, choosing among them, and finding who holds a prompt's prefix.

__main__.py       `python -m bench.fleet`: the router's side, with a real Valkey
fake_workers.py   a process that registers many workers, which have caches and report loads, and serve nothing
"""
