"""Training, loading and saving tokenizers, and what transformers makes of the saved folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.data import tokenizer as module
from ratrain.data.tokenizer import END_TOKEN, load_tokenizer, save_tokenizer, train_tokenizer
from ratrain.errors import UserError

SAMPLE = Path(json.decoder.__file__).read_text()
TOKENIZER = train_tokenizer([SAMPLE], 300)


def test_training_is_reproducible_and_knows_its_end_token() -> None:
    again = train_tokenizer([SAMPLE], 300)
    assert again.fingerprint == TOKENIZER.fingerprint
    assert (TOKENIZER.vocab_size, TOKENIZER.end_id, TOKENIZER.end_token) == (300, 0, END_TOKEN)
    assert train_tokenizer([SAMPLE], 310).fingerprint != TOKENIZER.fingerprint


@given(st.text(max_size=200))
@settings(max_examples=50, deadline=None)
def test_no_text_is_lost(text: str) -> None:
    (ids,) = TOKENIZER.encode([text])
    assert TOKENIZER.backend.decode(ids.tolist()) == text


def test_text_that_spells_the_end_token_does_not_end_the_document() -> None:
    (ids,) = TOKENIZER.encode([f"before {END_TOKEN} after"])
    assert TOKENIZER.end_id not in ids
    assert TOKENIZER.backend.decode(ids.tolist()) == f"before {END_TOKEN} after"


def test_long_texts_in_pieces_give_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n \n".join([SAMPLE, "x\n\ny\n\r\n z!\n\n=\r\n\na\n\tb", SAMPLE])
    (whole,) = TOKENIZER.encode([text])
    monkeypatch.setattr(module, "_PIECE", 40)
    assert len(module._pieces(text)) > 20
    (in_pieces, empty) = TOKENIZER.encode([text, ""])
    np.testing.assert_array_equal(in_pieces, whole)
    assert len(empty) == 0


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(UserError, match=r"vocabulary size 256 is too small.*257"):
        train_tokenizer([SAMPLE], 256)


def test_saved_and_loaded_is_the_same_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZER, tmp_path / "t")
    for path in (tmp_path / "t", tmp_path / "t" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert (loaded.fingerprint, loaded.end_id) == (TOKENIZER.fingerprint, TOKENIZER.end_id)


def test_a_folder_is_copied_with_its_companions(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZER, tmp_path / "theirs")
    (tmp_path / "theirs" / "chat_template.jinja").write_text("{{ messages }}")
    config = {"eos_token": {"content": "</f>"}, "model_max_length": 77}
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="end token '</f>' is not in the vocabulary"):
        load_tokenizer(tmp_path / "theirs")
    config["eos_token"] = {"content": "e"}
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path / "theirs")
    assert loaded.end_id == TOKENIZER.backend.token_to_id("e")

    save_tokenizer(loaded, tmp_path / "ours", like=tmp_path / "theirs")
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()


def test_hidden_truncation_and_padding_of_a_published_file_are_switched_off(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZER, tmp_path)
    loaded = load_tokenizer(tmp_path)
    loaded.backend.enable_truncation(5)
    loaded.backend.enable_padding(length=9)
    loaded.backend.save(str(tmp_path / "tokenizer.json"))
    (long, short) = load_tokenizer(tmp_path).encode([SAMPLE, "a"])
    assert len(long) == len(TOKENIZER.encode([SAMPLE])[0]) and len(short) == 1


def test_missing_damaged_and_nameless_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    save_tokenizer(TOKENIZER, tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace(END_TOKEN, "<|odd|>"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="names no end token"):
        load_tokenizer(tmp_path)
    file.write_text('{"model": 1}')
    with pytest.raises(UserError, match="damaged or unknown") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", [None, "llama", "qwen2", "mistral"])
def test_transformers_loads_the_folder_beside_any_model(tmp_path: Path, model_type: str | None) -> None:
    """Beside a config.json, as in an export: AutoTokenizer chooses its class by the model type."""
    from transformers import AutoTokenizer

    save_tokenizer(TOKENIZER, tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n    if x >= 12345:\n\treturn  'é🙂' \n\n\n# it's\r\n"
    assert theirs(text)["input_ids"] == TOKENIZER.encode([text])[0].tolist()
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert len(theirs) == TOKENIZER.vocab_size
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == TOKENIZER.end_id
