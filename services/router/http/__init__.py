"""What a client sees: OpenAI's API over HTTP, within bounds. Knows text and the dispatch's `Backend`; holds no worker.

in    connection     server.py (uvicorn, draining) ──> protocol.py (bounds before any key) ──> middleware.py (id, deadline, key)
      request        app.py (routes) ──> frontend.py reads (limits.py, schemas.py) ──> completions.py, chat.py, tokens.py
      model          catalog.py: the served models, each with its tokenizer
      generation     prompts.py, messages.py ──> run.py (one per request) ──> fanout.py merges a generation per prompt
out   answer         render.py, growing_lists.py (chunks, whole answers) ──> sse.py or json_response.py; errors.py for every refusal
beside               models.py, probes.py; metrics.py

`RequestContext` (context.py) goes with a request from its head to its last byte. `while_wanted` (connection.py) ends its work when
the client leaves, the deadline passes, or the server (stopping.py) ends what is left.
"""
