"""Between processes: how gRPC servers and channels are made, and how our values and errors look on the wire.

    a call ──> channels.py (one per peer; the secret) ──> serving.py (TLS, cluster_secret.py, typed errors) ──> a servicer

conversions.py   requests and outputs to messages and back;  errors.py  errors to statuses and back
settings.py      limits and keep-alive, the same on both sides
"""
