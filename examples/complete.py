"""Completes a line of Python with an exported model: plain transformers, nothing of RATrain."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()


def main(folder: str, prompt: str = "    def __init__(self") -> None:
    """Prints `prompt` with the model's continuation up to the end of the line."""
    if not Path(folder).is_dir():
        raise SystemExit(f"{folder}: no exported model; run ratrain export first")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(out[0][inputs["input_ids"].shape[1] :])
    print(f"prompt:     {prompt}")
    print(f"completion: {prompt}{text.splitlines()[0] if text else ''}")


if __name__ == "__main__":
    main(*sys.argv[1:])
