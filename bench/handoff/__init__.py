"""What handing a prompt over costs.

__main__.py     `python -m bench.handoff`: its share of the time to the first token, by prompt length and transport
transports.py   `python -m bench.handoff.transports`: bytes per second between two processes, beside what the machine can do
"""
