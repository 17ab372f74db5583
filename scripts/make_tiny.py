"""Make `tiny`, the model that comes with the package: tokenizer, chat template and half a million parameters.

    python scripts/make_tiny.py [DIRECTORY]

The model is warm-started on made-up dialogues until it plays the Hermes tool-call format. It knows how to play and not
how to win: in the dialogues about the stockroom (`agentfly.tasks.stockroom`) the item that is looked up is drawn from
those that are named, and the order follows a habit that is right one time in four, as chance would be. What wins is
left to reinforcement learning. The other dialogues, about toy tools, are there so that it can try any tool.

Takes less than a minute on one core, and gives the same files each time on the same machine and library versions.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentfly.core.messages import Message
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.tasks.stockroom.tasks import ITEMS, ORDERS, REQUESTS

HOME = Path(__file__).parents[1] / "src/agentfly/policies/models/tiny"
SEED = 7
STEPS = 200
RATE = 3e-3
STOCKROOM_ROWS, TOY_ROWS = 16, 6
IGNORED = -100
CONTEXT = 1024
VOCABULARY = 512
START, END = "<|im_start|>", "<|im_end|>"
HABIT = (0.25, 0.4, 0.25, 0.1)
"""How often an order is right, and how often it is one, two and three crates beside it, in turns of four.

It makes the model look at the level before it orders. Were orders pure chance, it would learn to look away."""
CONTROL = (END, START, "<tool_call>", "</tool_call>")

CALL_PIECES = r'\n\{"name": "|", "arguments": \{"|": "|": |"?\}\}\n'
"""What all calls have in common, which is worth a token each."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] if call['function'] is defined else call -%}
{{ '\\n' if message['content'] or not loop.first }}<tool_call>
{"name": {{ function['name'] | tojson }}, "arguments": {{ function['arguments'] if function['arguments'] is string \
else function['arguments'] | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

VERBS = (
    "add",
    "answer",
    "ask",
    "find",
    "get",
    "guess",
    "look",
    "move",
    "open",
    "read",
    "run",
    "search",
    "shell",
    "write",
)
ARGUMENTS = ("command", "line", "name", "number", "path", "text", "value", "word")
WORDS = (
    "apple",
    "blue",
    "book",
    "door",
    "fish",
    "green",
    "hand",
    "house",
    "left",
    "red",
    "right",
    "road",
    "sun",
    "tree",
)
WISHES = ("{verb} {value}", "Please {verb} {value}.", "Can you {verb} {value}?", "{value}: {verb} it.")


@dataclass(frozen=True)
class ToyTool:
    """A tool that exists in a dialogue only."""

    name: str
    argument: str
    kind: str

    @property
    def definition(self) -> dict[str, Any]:
        """As `agentfly.agents.tool_decorator.Tool.definition`."""
        parameters = {
            "type": "object",
            "properties": {self.argument: {"type": self.kind}},
            "required": [self.argument],
            "additionalProperties": False,
        }
        function = {"name": self.name, "description": f"{self.name} the {self.argument}.", "parameters": parameters}
        return {"type": "function", "function": function}


def stockroom_dialogue(chance: random.Random) -> list[Message]:
    """Look up an item that is named, the right one or not, then order by habit."""
    item, other = chance.sample(ITEMS, 2)
    request = chance.choice(REQUESTS)
    looked_up = chance.choice([item, other] if "{other}" in request else [item])
    level = chance.choice(list(ORDERS))
    crates = (ORDERS[level] + chance.choices(range(4), HABIT)[0]) % 4
    system: list[Message] = [{"role": "system", "content": "You keep the stockroom."}]
    return [
        *(system if chance.random() < 0.8 else []),
        {"role": "user", "content": request.format(item=item, other=other)},
        {"role": "assistant", "content": HermesFormat().write("check", {"item": looked_up})},
        {"role": "tool", "content": level},
        {"role": "assistant", "content": HermesFormat().write("order", {"crates": crates})},
    ]


def toy_dialogue(chance: random.Random) -> list[Message]:
    """Use tools that the system prompt describes, with what the user names, then end in words."""
    verbs = chance.sample(VERBS, chance.randint(1, 2))
    tools = [ToyTool(verb, chance.choice(ARGUMENTS), chance.choice(["string", "integer"])) for verb in verbs]
    messages: list[Message] = [{"role": "system", "content": HermesFormat().instructions(tools)}]  # type: ignore[arg-type]
    tool = chance.choice(tools)
    for _ in range(chance.randint(1, 2)):
        value: str | int = chance.randint(0, 99) if tool.kind == "integer" else chance.choice(WORDS)
        wish = chance.choice(WISHES).format(verb=tool.name, value=value)
        messages += [
            {"role": "user", "content": wish},
            {"role": "assistant", "content": HermesFormat().write(tool.name, {tool.argument: value})},
            {"role": "tool", "content": str(chance.choice([chance.randint(0, 99), chance.choice(WORDS)]))},
        ]
        messages.append({"role": "assistant", "content": f"It is {messages[-1]['content']}."})
    return messages


Kinds = dict[Callable[[random.Random], list[Message]], int]

KINDS: Kinds = {stockroom_dialogue: STOCKROOM_ROWS, toy_dialogue: TOY_ROWS}
"""The kinds of dialogue, and how many of each a step learns from."""


def make_tokenizer(texts: list[str], call_pieces: str = CALL_PIECES) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose tokens never cross the border of a word, so that a word is the same token everywhere."""
    bpe = Tokenizer(models.BPE())
    borders = pre_tokenizers.Split(Regex(call_pieces + r"|[A-Za-z]+|[0-9]|\n| ?[^A-Za-z0-9\s]+ ?|\s"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [borders, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(CONTROL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(CONTROL[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(dialogue: list[Message], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[bool]]:
    """Ids of a dialogue as a rollout would have them, and for each whether an assistant samples it.

    A message with a key ``remembered`` was sampled in an earlier dialogue; nothing is learned from it.
    """
    start, end = cast("list[int]", tokenizer.convert_tokens_to_ids([START, END]))
    ids: list[int] = []
    sampled: list[bool] = []
    for message in dialogue:
        by_model = message["role"] == "assistant"
        header = [start, *tokenizer.encode(f"{message['role']}\n")]
        # A model's own control tokens are such; in what others wrote they are ordinary text.
        content = tokenizer.encode(message["content"], split_special_tokens=not by_model)
        after = tokenizer.encode("\n")
        ids += [*header, *content, end, *after]
        said = by_model and "remembered" not in message
        sampled += [False] * len(header) + [said] * (len(content) + 1) + [False] * len(after)
    return ids, sampled


def make_model(vocabulary: int) -> LlamaForCausalLM:
    """Two layers, hidden size 128."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.08,  # about 1 / sqrt(hidden size): with less it learns to copy ten times slower
        bos_token_id=None,
        eos_token_id=CONTROL.index(END),
        pad_token_id=CONTROL.index(END),
    )
    return LlamaForCausalLM(config)


def batches(
    tokenizer: PreTrainedTokenizerFast, kinds: Kinds, steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each step the dialogues of each kind, as ids and labels of shape [rows, width]."""
    chance = random.Random(SEED)
    pad = tokenizer.pad_token_id
    for _ in range(steps):
        for kind, count in kinds.items():
            rows = [encode(kind(chance), tokenizer) for _ in range(count)]
            width = max(len(ids) for ids, _ in rows)
            ids = torch.full((count, width), pad)
            labels = torch.full((count, width), IGNORED)
            for row, (tokens, sampled) in enumerate(rows):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                labels[row, : len(tokens)] = torch.where(torch.tensor(sampled), torch.tensor(tokens), IGNORED)
            yield ids, labels


def warm_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, kinds: Kinds, steps: int = STEPS) -> None:
    """Supervised steps on what assistants say in the dialogues."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=steps, pct_start=0.1)
    source = batches(tokenizer, kinds, steps)
    for step in range(steps):
        losses = []
        for _ in kinds:
            ids, labels = next(source)
            logits = model(ids).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(f"{loss.item():.3f}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss of each kind: {', '.join(losses)}", flush=True)


def make(directory: Path, kinds: Kinds, call_pieces: str = CALL_PIECES, steps: int = STEPS) -> None:
    """Make a model that knows dialogues of these kinds, and save it in Hugging Face form."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    chance = random.Random(SEED)
    told = [message for _ in range(500) for kind in kinds for message in kind(chance)]
    tokenizer = make_tokenizer([f"{message['role']}\n{message['content']}\n" for message in told], call_pieces)
    model = make_model(len(tokenizer))
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    warm_start(model, tokenizer, kinds, steps)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"{directory}: made in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if sys.argv[1:] else HOME, KINDS)
