"""What is trained: counts and bytes from config.json (spec, no torch), Hugging Face modules cut into
blocks, weights in and out, and Baichuan2, the one family transformers does not ship. Knows nothing of
schedules or processes."""
