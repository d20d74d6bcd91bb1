"""What a prefill and a decode process have in common.

worker.py     from options to a registered worker, and from SIGTERM to its end
streams.py    from the engine's thread to the coroutine that serves a request
heartbeat.py  signs of life within a stream, so that a router notices an event loop that is stuck
"""
