"""The load generator: OpenAI-compatible requests, and what their arrivals say.

config.py ─> session.py ─> workloads.py ─> client.py ─> exchange.py ─> the server
                               │              └─ completions, a stamp for each piece
text.py (prompts) ─────────────┘                    └─> measures.py ─> report.py
progress.py shows the user how far it is
"""
