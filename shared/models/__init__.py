"""From `--model` to a decoder that computes. Files that need no torch come first; the router and `twostroke up` use these alone.

    locate.py                           `--model`, `--tokenizer` ──> `ModelFiles`: which files hold what, and that they are whole
    gguf.py, tokenizer.py               what a GGUF file says of itself; the tokenizer of either kind of model
    digest.py                           identity of configuration and weights
    fetch.py                            the default model

    config_cache.py                     a `ModelConfig` read at an earlier start, without importing transformers
    config.py, config_fields.py         `ModelFiles` ──> `ModelConfig`, or a refusal that names what is not supported
    checkpoint.py                       weights on disk as named tensors
    dtype.py                            what to compute in and to store
    rope.py                             frequencies of rotary embeddings
    loading.py                          `ModelConfig` and checkpoint ──> weights packed by a kernel backend ──> `Decoder`
    decoder.py                          token ids ──> hidden states ──> logits

Out go a `Decoder`, which the engine runs, a digest, by which workers know each other's models, and a tokenizer, for the router.
"""
