"""What the model learns from: corpus readers, tokenizer, memory-mapped token store, deterministic sampler.
No torch, no processes: a batch depends on seed and step only. `prepare` is the way in before a run, `store`
and `sampler` are all that a rank needs during one."""
