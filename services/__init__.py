"""One package per process: router, prefill, decode, and local (`twostroke up`, which starts the others). None imports another.

cli.py is the `twostroke` command.
"""
