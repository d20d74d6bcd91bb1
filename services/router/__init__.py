"""A router process: OpenAI's API in front, workers over gRPC behind. Never imports torch.

http/       what a client sees      ──> text/       tokens to text and back
                                    ──> dispatch/   choosing and driving workers
__main__.py wires them; config.py has the options; torch_free.py keeps torch out
"""
