"""A request that fails inside of a reward or an environment is named for what it asked."""
# ruff: noqa: E501 (a table)

from __future__ import annotations

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES

HEAD = """Traceback (most recent call last):
  File "/app/train_grpo.py", line 80, in <module>
    trainer.train()
"""
REWARD = """  File "/opt/venv/lib/python3.12/site-packages/trl/trainer/grpo_trainer.py", line 1100, in _calculate_rewards
    output_reward_func = reward_func(prompts=prompts, completions=completions)
  File "/app/scoring.py", line 33, in judge_quality
    answer = client.post(URL, json=question)
"""
ROLLOUT = """  File "/opt/venv/lib/python3.12/site-packages/trl/trainer/grpo_trainer.py", line 1500, in _generate
    result = rollout_func(prompts, self)
  File "/app/worlds/shop_env.py", line 31, in step
    answer = client.post(URL, json=action)
"""
HTTPX = """  File "/opt/venv/lib/python3.12/site-packages/httpx/_client.py", line 1144, in post
    return self.request(
"""
OPENAI = """  File "/opt/venv/lib/python3.12/site-packages/openai/_base_client.py", line 1000, in request
    raise error
"""
CASES = {
    "reward-timeout": HEAD + REWARD + HTTPX + "httpx.ReadTimeout: The read operation timed out\n",
    "reward-server-unreachable": HEAD
    + REWARD
    + HTTPX
    + "httpx.ConnectError: All connection attempts failed\n",
    "external-api-rate-limited": HEAD
    + REWARD
    + OPENAI
    + "openai.RateLimitError: Error code: 429 - {'error': {'message': 'Rate limit reached'}}\n",
    "environment-failed": HEAD
    + ROLLOUT
    + HTTPX
    + "httpx.ConnectError: [Errno 111] Connection refused\n",
}  # fmt: skip


def first_cause(log: str) -> str:
    view = read_text(log, config=None)
    (finding, *_) = as_json(diagnose(view, RULES), view)["findings"]
    return finding["causes"][0]["name"]


@pytest.mark.parametrize("name", CASES)
def test_what_was_asked_is_named(name: str) -> None:
    assert first_cause(CASES[name]) == name


def test_a_time_limit_that_no_client_raised_is_no_request() -> None:
    log = HEAD + REWARD.replace("client.post(URL, json=question)", "raise TimeoutError('slow')")
    assert first_cause(log + "TimeoutError: slow\n") == "reward-fn-failing"
