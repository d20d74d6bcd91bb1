"""What everything else is built on: values and errors, without torch and without anything else of ours.

request.py          what is asked (Request, SamplingParams) and what comes out (Output, Token)
worker_info.py      what a worker says of itself, and whether two of them can exchange blocks
block_hash.py       the name of a full KV block;  blocks_of.py counts blocks
errors.py           every error that crosses a boundary;  exit_codes.py  how a process ends
address.py          host:port, IPv6 included
cache_dir.py        where what can be made again is kept;  version.py
"""
