"""From a request to its outputs, over whichever workers serve it. Knows no HTTP and no text.

in    Request        backend.py (the seam to http) ──> dispatcher.py (ready models, canaries) ──> generation.py (one per request)
      attempts       failover.py places, retries and continues ──> attempt.py (one Generate) ──> prefill_leg.py (its prefill)
      workers        fleet.py (alive, resting, load) ──> pools.py (by model and weights) ──> placement.py (pure costs)
out   Output         choices.py (each token once, in order) ──> outputs.py (a bounded queue) ──> the reader
beside               legs.py (a call and how it fails), silence.py (a peer that says nothing), rests.py, retries.py, budget.py,
                     client_errors.py (what a client is told), model_pool.py, metrics.py
"""
