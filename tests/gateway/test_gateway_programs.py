"""Programs in other languages, such as a loop of bash and curl, and a real model behind the gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentfly.core.errors import PrerequisiteError
from agentfly.core.trajectory import load_trajectories
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.training.rows import rows_from_trajectories

AGENT = r"""
set -euo pipefail
messages='{"role": "user", "content": "What is in stock?"}'
for turn in 1 2 3; do
    answer=$(curl -sSf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
        -H 'Content-Type: application/json' -d "{\"model\": \"any\", \"messages\": [$messages]}")
    said=$(sed -E 's/.*"content": "([^"]*)".*/\1/' <<< "$answer")
    messages="$messages, {\"role\": \"assistant\", \"content\": \"$said\"}"
    case $said in
        run:*) result=$(bash -c "${said#run:}");;
        *) break;;
    esac
    messages="$messages, {\"role\": \"user\", \"content\": \"$result\"}"
done
echo "$said"
"""

HARNESS = r"""
set -euo pipefail
post() { curl -sSf "$GATEWAY/$1" -H "Authorization: Bearer $GATEWAY_KEY" -d "$2"; }
told() { sed -E "s/.*\"$1\": \"([^\"]*)\".*/\1/" <<< "$end"; }
end=$(post rollouts "{\"rollout_id\": \"$ROLLOUT\"}")
OPENAI_BASE_URL=$(told base_url) OPENAI_API_KEY=$(told api_key) GATEWAY_KEY='' bash -c "$AGENT"
post "rollouts/$ROLLOUT/finish" '{"reward": 1}' > /dev/null
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="There is no curl. On Debian and Ubuntu: apt install curl")
def test_a_loop_of_bash_and_curl_is_trainable_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text("ANSWERS = ['run: expr 40 + 2', 'run: echo tea', '42 and tea']\n")
    command = [sys.executable, "-m", "agentfly", "gateway", "--script", "answers.py:ANSWERS", "--port", "0"]
    environment = {**os.environ, "GATEWAY_KEY": "sesame"}
    with subprocess.Popen(
        ["env", "--default-signal=INT", *command, "--key-env", "GATEWAY_KEY", "-o", "out.jsonl"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as gateway:
        try:
            assert gateway.stdout is not None
            url = gateway.stdout.readline().split()[-1]
            for attempt in range(2):
                said = subprocess.run(
                    ["bash", "-c", HARNESS],
                    env={**environment, "GATEWAY": url, "ROLLOUT": f"stock.{attempt}", "AGENT": AGENT},
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert (said.returncode, said.stdout) == (0, "42 and tea\n"), said.stderr
        finally:
            gateway.send_signal(signal.SIGINT)
            assert gateway.wait(30) == 130
    trajectories = list(load_trajectories(tmp_path / "out.jsonl"))
    assert [(one.rollout_id, one.group_id, one.attempt) for one in trajectories] == [
        ("stock.0", "stock", 0),
        ("stock.1", "stock", 1),
    ]
    batch = rows_from_trajectories(trajectories)
    assert (len(batch.rows), batch.excluded) == (2, {})
    written = ScriptedPolicy([]).tokenizer.decode(batch.rows[0].ids)
    assert written.count("<|im_end|>") == 6
    assert "run: expr 40 + 2<|im_end|>\n<|im_start|>user\n42<|im_end|>\n" in written


async def test_an_address_that_is_taken_is_told(serving: Any) -> None:
    async with serving(["hi"]) as (gateway, _):
        with pytest.raises(PrerequisiteError, match="another port"):
            async with serving(["hi"], port=gateway.port):
                pass


@pytest.mark.slow
async def test_what_a_model_samples_for_programs_is_what_the_record_scores(serving_any: Any) -> None:
    """The log-probs on record are those that the model gives the recorded ids: not one of them is out of place."""
    import torch

    from agentfly.policies.embedded.scoring import score_tokens
    from agentfly.policies.load import load_policy

    async with load_policy("tiny", dtype="float32") as policy, serving_any(policy, max_tokens=12) as (gateway, client):

        async def program(number: int) -> None:
            talk = client(f"task.{number}")
            messages: list[Any] = [{"role": "user", "content": f"What about the tea, number {number}?"}]
            for _ in range(3):
                answer = await talk.chat.completions.create(model="m", messages=messages, stream=bool(number % 2))
                if number % 2:
                    content = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
                else:
                    content = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "And?"}]

        await asyncio.gather(*(program(number) for number in range(6)))
        trajectories = [gateway.finish(f"task.{number}", reward=number) for number in range(6)]
        rows = rows_from_trajectories(trajectories).rows
        with torch.no_grad():
            scores = score_tokens(policy.model, [row.ids for row in rows], [row.targets for row in rows])
    assert [len(one.turns) for one in trajectories] == [3] * 6
    assert len(rows) == 6, "each program's three turns are one row"
    recorded = torch.tensor([logprob for row in rows for logprob in row.target_logprobs])
    torch.testing.assert_close(scores.logprobs.float(), recorded.float(), atol=1e-4, rtol=1e-4)
    assert len({row.group_id for row in rows}) == 1
