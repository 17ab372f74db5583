"""Parameters of a call: their names, of which one that is misspelled would be ignored by many endpoints in silence."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from agentfly.errors import UsageError

_KNOWN = """
    add_generation_prompt add_special_tokens allowed_token_ids audio bad_words best_of cache_salt chat_template
    chat_template_kwargs continue_final_message documents echo frequency_penalty function_call functions
    guided_choice guided_grammar guided_json guided_regex ignore_eos include_stop_str_in_output length_penalty
    logit_bias logprobs max_completion_tokens max_tokens messages metadata min_p min_tokens mm_processor_kwargs
    modalities model models n parallel_tool_calls prediction presence_penalty priority prompt prompt_cache_key
    prompt_logprobs reasoning_effort repetition_penalty request_id response_format return_token_ids
    return_tokens_as_token_ids safety_identifier seed service_tier skip_special_tokens
    spaces_between_special_tokens stop stop_token_ids store stream stream_options structured_outputs suffix
    temperature tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens use_beam_search user verbosity
    vllm_xargs web_search_options
"""
"""Names that OpenAI's API and vLLM take. Others are sent too, because each endpoint may have some of its own."""

_ALIKE = 0.85  # max_token and max_tokens are more alike than that, top_k and top_p are not


def require_spelled(names: Iterable[str], otherwise: str = "") -> None:
    """See that no parameter's name is one that endpoints know but for a slip.

    Args:
        names: the names.
        otherwise: what to do where the endpoint has such a parameter all the same.

    Raises:
        UsageError: one is; the message names the nearest.
    """
    known = _KNOWN.split()
    for name in names:
        if name not in known and (nearest := get_close_matches(name, known, 1, _ALIKE)):
            raise UsageError(f"{name} is no parameter of a call. Did you mean {nearest[0]!r}?{otherwise}")
