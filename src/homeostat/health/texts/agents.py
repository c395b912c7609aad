"""Error texts of the family agents: tools, sandboxes and the services that episodes talk to."""

from __future__ import annotations

from homeostat.health.finding import Cause, Family, Level
from homeostat.health.texts import counts
from homeostat.health.texts.parts import advice, safe
from homeostat.health.texts.trouble import Trouble

_PARSE = (
    "Error in extracting tool call from response",
    "Failed to parse tool call",
    "Failed to decode tool call",
    "tool call && JSONDecodeError",
)
_UNKNOWN_TOOL = ("tool * not found", "Unknown tool", "is not a valid tool")
_MANY = 20

TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        code="ERR780",
        name="tool-call-parse-failed",
        family=Family.AGENTS,
        level=Level.WARN,
        texts=_PARSE,
        when=counts.at_least(_MANY, *_PARSE),
        what="Many tool calls of the model cannot be parsed.",
        why="A few are the model's mistakes and part of learning. So many mean that the parser "
        "does not fit the format of this model's template, or that answers are cut off in a call.",
        causes=(
            Cause("tool-call-parse-failed", "The parser's own errors."),
            Cause("chat-template-mismatch", "Each model family writes calls in its own way."),
        ),
        fixes=(
            advice(
                "the parser of this model family",
                "hermes for Qwen 2.5, qwen3_coder, llama3_json, deepseek_v3, ...",
                verl="actor_rollout_ref.rollout.multi_turn.format",
                vllm="--tool-call-parser",
                sglang="--tool-call-parser",
            ),
            advice("more tokens per turn", "A call that is cut cannot be parsed."),
        ),
    ),
    Trouble(
        code="ERR781",
        name="sandbox-unreachable",
        family=Family.AGENTS,
        texts=(
            "sandbox && Gateway Timeout",
            "sandbox && Connection refused",
            "sandbox && Max retries exceeded",
            "sandbox && Read timed out",
            "Failed to create sandbox",
            "Failed to start sandbox",
            "SandboxError",
            "Cannot connect to the Docker daemon",
            "docker.errors.DockerException",
            "docker.errors.APIError",
        ),
        what="The sandbox that runs the model's code does not answer.",
        why="The service is down or overloaded. Every program then scores zero, which looks like a "
        "policy that cannot program.",
        causes=(
            Cause("sandbox-unreachable", "Its own errors."),
            Cause("tool-server-failed", "Tools that need it fail with it."),
        ),
        fixes=(
            advice(
                "more sandbox workers, or fewer calls at once",
                "Latency grows without bound past their capacity.",
                verl="reward.sandbox_fusion.max_concurrent",
            ),
            advice("count a failed call as missing, not as zero", "Zero teaches the wrong thing."),
            safe("rewards.timeout_s", "longer than a program may run", "Do not give up early."),
        ),
    ),
    Trouble(
        code="ERR782",
        name="tool-server-failed",
        family=Family.AGENTS,
        texts=(
            "Max retries exceeded with url: /retrieve",
            "Max retries exceeded with url: /search",
            "Max retries exceeded with url: /execute",
            "Max retries exceeded with url: /run_code",
            "McpError",
            "mcp.shared.exceptions",
            "MCP server && failed",
            "MCP && Connection closed",
            "retriever && Connection refused",
        ),
        what="A tool's server does not answer the episodes' calls.",
        why="It was not started, listens on another port or is overloaded: the model sees errors "
        "in place of results.",
        fixes=(
            advice(
                "start the tool's server first and call it once by hand", "From a worker's node."
            ),
            advice("limit calls at once, retry with a pause", "A burst of all episodes hits it."),
        ),
        explains=("ERR117", "ERR256"),
    ),
    Trouble(
        code="ERR783",
        name="tool-unknown",
        family=Family.AGENTS,
        level=Level.WARN,
        texts=_UNKNOWN_TOOL,
        when=counts.at_least(_MANY, *_UNKNOWN_TOOL),
        what="The model often calls tools that do not exist.",
        why="A few are normal early. So many mean that the prompt does not list the tools, or "
        "lists them under other names than the environment knows.",
        fixes=(
            advice("pass the tools to the chat template", "apply_chat_template(..., tools=...)."),
            advice("answer with the list of tools", "The model can then correct itself."),
        ),
    ),
    Trouble(
        code="ERR784",
        name="event-loop-mixed",
        family=Family.AGENTS,
        texts=(
            "attached to a different loop",
            "is bound to a different event loop",
            "asyncio.run() cannot be called from a running event loop",
            "This event loop is already running",
            "RuntimeError: Event loop is closed",
        ),
        what="Asynchronous code was used across event loops.",
        why="A client, lock or queue belongs to the loop in which it was made. Made at import, in "
        "another thread or in a former asyncio.run, it fails in the rollout's loop.",
        fixes=(
            advice("make clients and locks inside the coroutine that uses them", "One loop each."),
            advice("await in place of asyncio.run() inside async code", "The loop already runs."),
        ),
    ),
    Trouble(
        code="ERR785",
        name="external-api-rate-limited",
        family=Family.AGENTS,
        level=Level.WARN,
        texts=(
            "openai.RateLimitError",
            "anthropic.RateLimitError",
            "RateLimitError: Error code: 429",
            "Rate limit reached for",
            "429 Too Many Requests && completions",
        ),
        what="A judge's or tool's API refuses calls because there are too many.",
        why="All samples of a step are scored at once. Calls that fail become zero rewards or "
        "missing ones.",
        fixes=(
            safe("rewards.workers", "lower", "Fewer calls at once."),
            safe("rewards.timeout_s", "longer", "Leaves time for retries with a pause."),
            advice("host the judge yourself", "A small model on one card is often enough."),
        ),
    ),
    Trouble(
        code="ERR786",
        name="environment-failed",
        family=Family.AGENTS,
        texts=(
            "environment reset failed",
            "env.reset() failed",
            "Failed to reset environment",
            "env worker && died",
            "Environment * crashed",
            "Playwright && Target closed",
            "TargetClosedError",
            "net::ERR_CONNECTION_REFUSED",
        ),
        what="An episode's environment failed, not the policy in it.",
        why="A browser, simulator or service behind it ended. Its episodes have no meaningful "
        "reward.",
        fixes=(
            advice("leave failed episodes out of the batch", "A zero would blame the policy."),
            advice("restart the environment's worker, and give it more memory", "Browsers leak."),
        ),
    ),
)
