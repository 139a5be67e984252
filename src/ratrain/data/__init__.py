"""What the model learns from: corpus readers, tokenizer, memory-mapped token store, deterministic sampler.
No torch, no processes: a batch depends on seed and step only."""
