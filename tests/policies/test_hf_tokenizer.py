"""HFTokenizer: text stays text, control tokens stay control tokens, and a missing chat template is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentfly.core.errors import ChatFormatError, PrerequisiteError
from agentfly.policies.hf_tokenizer import HFTokenizer


def test_control_tokens_are_the_special_ones_and_those_of_the_template(tokenizer: HFTokenizer) -> None:
    assert set(tokenizer.control_tokens) == {"<|start|>", "<|end|>", "<tool_call>"}
    assert tokenizer.eos_ids == (tokenizer.control_tokens["<|end|>"],)


PIECES = st.sampled_from(["<|start|>", "<|end|>", "<tool_call>", "<|", "|>", "<|en", "d|>", " ", "    ", "\n"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.lists(PIECES | st.text(max_size=4), max_size=8).map("".join))
def test_no_text_becomes_a_control_token_and_all_of_it_is_kept(tokenizer: HFTokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert not set(ids) & set(tokenizer.control_tokens.values())
    assert tokenizer.decode(ids) == text


def test_added_tokens_that_are_no_control_tokens_are_used(
    hf_tokenizer: PreTrainedTokenizerFast, tokenizer: HFTokenizer
) -> None:
    assert tokenizer.encode_text("    ") == [hf_tokenizer.convert_tokens_to_ids("    ")]


@pytest.mark.parametrize("blanks", ["    ", "\n", "\t", "\n\n", " \n "])
def test_a_template_that_is_indented_makes_no_control_token_of_white_space(
    hf_tokenizer: PreTrainedTokenizerFast, blanks: str
) -> None:
    hf_tokenizer.add_tokens([blanks])
    hf_tokenizer.chat_template = f"{{% if true %}}{blanks}<tool_call>{{% endif %}}"
    tokenizer = HFTokenizer(hf_tokenizer)
    assert set(tokenizer.control_tokens) == {"<|start|>", "<|end|>", "<tool_call>"}
    assert tokenizer.decode(tokenizer.encode_text(f"a{blanks}b")) == f"a{blanks}b"


def test_the_code_of_a_template_makes_no_control_tokens_and_its_texts_do(
    hf_tokenizer: PreTrainedTokenizerFast,
) -> None:
    hf_tokenizer.add_tokens(["messages", "endfor", "<answer>", "<quoted>"])
    hf_tokenizer.chat_template = "{% for m in messages %}<answer>{{ '<quoted>' + m.content }}{% endfor %}"
    assert set(HFTokenizer(hf_tokenizer).control_tokens) == {"<|start|>", "<|end|>", "<answer>", "<quoted>"}


def test_every_one_of_several_templates_counts(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    hf_tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "<tool_call>{{ messages }}"}
    assert "<tool_call>" in HFTokenizer(hf_tokenizer).control_tokens


def test_the_tokenizer_it_is_made_of_is_left_as_it_was(
    hf_tokenizer: PreTrainedTokenizerFast, tokenizer: HFTokenizer
) -> None:
    tokenizer.encode_text("<|end|>")
    assert hf_tokenizer.encode("<|end|>", add_special_tokens=False) == list(tokenizer.eos_ids)


def test_decoding_shows_control_tokens_and_survives_invalid_bytes(tokenizer: HFTokenizer) -> None:
    control = tokenizer.control_tokens
    assert tokenizer.decode([control["<tool_call>"], *tokenizer.encode_text("é"), control["<|end|>"]]) == (
        "<tool_call>é<|end|>"
    )
    assert tokenizer.decode(tokenizer.encode_text("é")[:1]) == "\ufffd"


def test_a_vocabulary_that_spells_its_control_token_as_a_piece_is_kept_from_it() -> None:
    pieces = ["</s>", "<unk>", "<", "/", "s", ">", "a", "▁"]
    backend = Tokenizer(models.Unigram([(piece, 0.0 if index < 2 else -5.0) for index, piece in enumerate(pieces)], 1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"))
    ids = tokenizer.encode_text("a</s>a")
    assert not set(tokenizer.eos_ids) & set(ids)
    assert [pieces[token] for token in ids if pieces[token] != "▁"] == list("a</s>a")


def test_a_conversation_is_rendered_by_the_template(tokenizer: HFTokenizer) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def test_a_refusal_of_the_template_names_it(tokenizer: HFTokenizer) -> None:
    with pytest.raises(ChatFormatError, match="roles tool: no tools"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


def test_a_model_without_a_chat_template_is_told_so(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    hf_tokenizer.chat_template = None
    with pytest.raises(ChatFormatError, match="no chat template"):
        HFTokenizer(hf_tokenizer).apply_chat_template([{"role": "user", "content": "hi"}])


def test_it_loads_from_a_model_directory(hf_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    hf_tokenizer.save_pretrained(tmp_path)
    loaded = HFTokenizer.load(tmp_path)
    assert loaded.encode_text("a<|end|>") == HFTokenizer(hf_tokenizer).encode_text("a<|end|>")
    assert loaded.apply_chat_template([{"role": "user", "content": "x"}]) == "<|start|>user\nx<|end|>\n"


def test_a_directory_without_a_tokenizer_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="holds no tokenizer"):
        HFTokenizer.load(tmp_path)
