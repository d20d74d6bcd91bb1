"""What the next step computes. Pure: state in, plan out; no clock, no thread, no torch.

in     sequences (add), requests for blocks (reserve, commit), aborts; the samples of the last step
out    a plan for the next step; events for those who wait

sequence.py        one output of one request: its tokens, how many are computed, its blocks
scheduler.py       seats, blocks and the token budget of a step, by arrival
lines.py           every unfinished sequence, and the line that it stands in
lookahead.py       the step after the one in flight, where it can be told already
limits.py          what is refused, because it can never be served
blocks.py          who owns which block
prefix_cache.py    which blocks can be found by their hash
outputs.py         what goes out for a token, and whether it is the last
plan.py            the values that go in and out
"""
