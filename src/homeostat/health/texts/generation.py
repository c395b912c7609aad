"""Error texts of the family generation: what engines print when they cannot sample."""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts.parts import (
    AFTERMATH,
    READ_FIRST_ERROR,
    SMALLER_ENGINE,
    advice,
    change,
    safe,
)
from homeostat.health.texts.trouble import Trouble

_ILLEGAL = (
    "an illegal memory access was encountered",
    "CUDA error: misaligned address",
    "Memory access fault by GPU node",
    "cudaErrorIllegalAddress",
    "warp illegal address",
)
_ENGINE = ("vllm/", "sglang/", "sgl_kernel", "flashinfer", "TP0]", "EngineCore", "vllm_rollout")
_REQUESTS = ("/generate", "/v1/completions", "/v1/chat/completions", "in generate", "rollout")

TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        code="ERR250",
        name="vllm-illegal-memory-access",
        family=Family.GENERATION,
        texts=_ILLEGAL,
        context=_ENGINE,
        within=30,
        what="A kernel of the inference engine touched memory that is not its own.",
        why="CUDA reports it later than it happens, so the frame shown is rarely the guilty one. "
        "An attention kernel that does not fit this length or card, or a card that is full, are "
        "the usual reasons.",
        causes=(
            Cause("vllm-illegal-memory-access", "The engine's frames stand around it."),
            Cause("cuda-illegal-access", "CUDA_LAUNCH_BLOCKING=1 shows the true kernel."),
        ),
        fixes=(
            advice(
                "another attention backend, or a newer engine",
                "vLLM 0.6.3 and older read out of bounds on long prompts.",
                vllm="--attention-backend",
                sglang="--attention-backend",
                slime="--sglang-attention-backend",
            ),
            SMALLER_ENGINE,
            safe("engine.enforce_eager", "true", "Rules out graphs that replay freed memory."),
            advice("CUDA_LAUNCH_BLOCKING=1", "For one run: the traceback is then true."),
        ),
        explains=("ERR001", "ERR106", "ERR251", *AFTERMATH),
    ),
    Trouble(
        code="ERR251",
        name="cuda-illegal-access",
        family=Family.GENERATION,
        texts=(*_ILLEGAL, "CUDA error: unspecified launch failure"),
        what="A GPU kernel touched memory that is not its own.",
        why="CUDA reports it later than it happens. Indices beyond a tensor, a custom kernel that "
        "does not fit this shape, or a card that is full are the usual reasons.",
        fixes=(
            advice("CUDA_LAUNCH_BLOCKING=1", "For one run: the traceback is then true."),
            advice("compute-sanitizer --tool memcheck", "Names the kernel and the address."),
            safe(
                "model.attention",
                "another kernel",
                "Rules the attention kernel out.",
                transformers="attn_implementation=sdpa",
            ),
        ),
        explains=("ERR001", "ERR106", *AFTERMATH),
    ),
    Trouble(
        code="ERR252",
        name="prompt-exceeds-context",
        family=Family.GENERATION,
        texts=(
            "is longer than the maximum model length of",
            "maximum context length is * tokens. However",
            "maximum context length is * tokens && requested",
            "is longer than the model's context length",
            "exceeds the maximum allowed length",
            "is too long and exceeds limit of",
            "longer than the maximum model length",
            "exceed the model's maximum context length",
        ),
        what="A prompt, or a prompt plus its answer, is longer than the engine's context.",
        why="The engine's maximal length is set below what the data needs, or a conversation has "
        "grown over its turns. Such requests are refused: their samples are missing or empty.",
        fixes=(
            advice(
                "filter or cut prompts, or a longer context",
                "Context must hold the longest prompt plus max_new_tokens.",
                verl="data.max_prompt_length, data.filter_overlong_prompts, data.truncation",
                trl="vllm_max_model_length",
                vllm="--max-model-len",
                sglang="--context-length",
                slime="--rollout-max-context-len, --rollout-max-prompt-len",
                openrlhf="--data.max_len",
            ),
            change("data.overlong", "drop", "Leaves prompts out that cannot be answered."),
        ),
        explains=("ERR132", "ERR140", "ERR267"),
    ),
    Trouble(
        code="ERR253",
        name="context-beyond-model",
        family=Family.GENERATION,
        texts=(
            "is greater than the derived max_model_len",
            "User-specified context_length * is greater than the derived context_length",
        ),
        what="The engine is asked for a longer context than the model was made for.",
        why="Position embeddings end at the model's own maximum; beyond it the output degrades or "
        "kernels read out of bounds.",
        fixes=(
            advice(
                "a length up to the model's, or rope scaling in its config",
                "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 only silences the check.",
                vllm="--max-model-len",
                sglang="--context-length",
                verl="data.max_prompt_length, data.max_response_length",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR254",
        name="engine-died",
        family=Family.GENERATION,
        confidence=Confidence.HEURISTIC,
        texts=(
            "EngineDeadError",
            "EngineCore encountered an issue",
            "EngineCore encountered a fatal error",
            "AsyncEngineDeadError",
            "Background loop has errored already",
            "MQEngineDeadError",
            "Scheduler hit an exception",
            "EngineCore hit an exception",
            "Engine loop is not running",
        ),
        what="The inference engine ended with an error.",
        why="This is its farewell; the reason stands above it, in the engine's own traceback.",
        causes=(
            Cause("engine-died", "The engine says so."),
            Cause("worker-died-unknown", "Nothing in this log says why."),
        ),
        fixes=(
            READ_FIRST_ERROR,
            safe("engine.max_restarts", "1 or more", "A dead engine is started again."),
        ),
        explains=("ERR132", "ERR140"),
    ),
    Trouble(
        code="ERR255",
        name="engine-failed-to-start",
        family=Family.GENERATION,
        confidence=Confidence.HEURISTIC,
        texts=(
            "Engine core initialization failed",
            "WorkerProc initialization failed",
            "WorkerProc failed to start",
            "Engine process failed to start",
            "Failed core proc(s)",
            "Failed to initialize vLLM",
            "Server process terminated unexpectedly",
            "Initialization failed. controller_init_state",
        ),
        what="The inference engine did not start.",
        why="The reason stands above, in a worker's traceback: memory, a port, an unsupported "
        "model or a broken install.",
        causes=(
            Cause("engine-failed-to-start", "The engine says so."),
            Cause("kv-cache-no-room", "The most frequent reason."),
        ),
        fixes=(READ_FIRST_ERROR,),
        explains=("ERR132", "ERR140", "ERR254"),
    ),
    Trouble(
        code="ERR256",
        name="inference-server-unresponsive",
        family=Family.GENERATION,
        confidence=Confidence.INFERRED,
        texts=(
            "ServerDisconnectedError",
            "ReadTimeout",
            "Read timed out",
            "Server disconnected without sending a response",
            "ClientConnectorError: Cannot connect to host",
            "APIConnectionError",
            "openai.APITimeoutError",
        ),
        context=_REQUESTS,
        within=12,
        unless=("huggingface.co", "hf-mirror", "wandb", "/retrieve", "sandbox"),
        what="A request for a completion was not answered.",
        why="The server died, is overloaded, or sits in a weight update; the limit of the "
        "client may also be shorter than a long generation.",
        fixes=(
            advice("read the server's own log at that time", "Did it crash, or was it busy?"),
            safe(
                "engine.max_concurrency",
                "lower",
                "Requests then wait in the client, without a running clock.",
                slime="--sglang-server-concurrency",
                miles="--sglang-server-concurrency",
            ),
            safe(
                "rollout.deadline_s", "longer than the longest generation", "Do not give up early."
            ),
        ),
        explains=("ERR132", "ERR140"),
    ),
    Trouble(
        code="ERR257",
        name="inference-server-unresponsive",
        family=Family.GENERATION,
        texts=(
            "Watchdog timeout (self.watchdog_timeout",
            "Watchdog timeout (watchdog_timeout",
            "couldn't get a response from detokenizer",
            "Health check failed. Server couldn't",
        ),
        what="The SGLang server hung: its scheduler or detokenizer no longer answers.",
        why="A forward pass that never ends (a collective that not all ranks joined, a kernel that "
        "hangs) or a first batch that compiles for longer than the watchdog waits.",
        causes=(
            Cause("inference-server-unresponsive", "Its own watchdog fired."),
            Cause("nccl-timeout", "Ranks of the engine may wait for each other."),
        ),
        fixes=(
            advice(
                "a longer watchdog, if the first batch compiles",
                "Else py-spy dump the scheduler to see where it waits.",
                sglang="--watchdog-timeout",
                slime="--sglang-watchdog-timeout",
            ),
            advice(
                "switch overlap scheduling and custom all-reduce off, to prove it",
                "Both have hung before.",
                sglang="--disable-overlap-schedule, --disable-custom-all-reduce",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR258",
        name="guided-decoding-failed",
        family=Family.GENERATION,
        texts=(
            "Failed to advance FSM",
            "Failed to convert the grammar",
            "features not supported by xgrammar",
            "Invalid grammar specification",
            "Grammar compilation failed",
            "Unsupported JSON schema",
            "Grammar accept_token failed",
        ),
        what="Constrained decoding failed: the grammar or schema cannot be used.",
        why="The backend does not support a feature of the schema, or the tokenizer's vocabulary "
        "does not fit the grammar's. For RL note that a constrained sampler is not the policy.",
        fixes=(
            advice(
                "a simpler schema, or another backend",
                "guidance and outlines support other features than xgrammar.",
                vllm="--structured-outputs-config.backend",
                sglang="--grammar-backend",
            ),
        ),
    ),
    Trouble(
        code="ERR259",
        name="token-id-beyond-vocabulary",
        family=Family.GENERATION,
        texts=("Token id * is out of vocabulary", "is out of vocabulary && token"),
        what="A token id is larger than the model's vocabulary.",
        why="Tokenizer and model do not belong together, tokens were added to one and not the "
        "other, or a sampled id fell into the padded part of the embedding.",
        fixes=(
            advice(
                "the tokenizer of this very checkpoint", "Compare len(tokenizer) and vocab_size."
            ),
            advice("model.resize_token_embeddings(len(tokenizer))", "After adding tokens."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR260",
        name="logprobs-limit",
        family=Family.GENERATION,
        texts=(
            "which is greater than max allowed",
            "Requested sample logprobs of",
            "Requested prompt logprobs of",
        ),
        what="More log-probabilities per token were asked for than the engine allows.",
        why="vLLM limits them to 20 unless told otherwise; RL needs only the sampled token's.",
        fixes=(
            advice(
                "logprobs=0 or 1, or a higher limit",
                "0 returns just the sampled token's.",
                vllm="--max-logprobs",
            ),
        ),
    ),
    Trouble(
        code="ERR261",
        name="prefill-budget-too-small",
        family=Family.GENERATION,
        texts=(
            "max_num_batched_tokens (*) is smaller than max_model_len",
            "max_num_batched_tokens (*) must be greater than or equal to max_num_seqs",
        ),
        what="The engine's token budget per step is smaller than its longest sequence.",
        why="Without chunked prefill a prompt must fit into one step.",
        fixes=(
            safe(
                "engine.max_batched_tokens",
                "at least the maximal length, or chunked prefill",
                "A prompt must fit.",
                verl="actor_rollout_ref.rollout.max_num_batched_tokens, "
                "actor_rollout_ref.rollout.enable_chunked_prefill",
                vllm="--max-num-batched-tokens, --enable-chunked-prefill",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR262",
        name="engine-does-not-know-model",
        family=Family.GENERATION,
        texts=(
            "Model architectures * are not supported for now",
            "Model architectures * failed to be inspected",
            "has no vLLM implementation and the Transformers implementation is not compatible",
            "Unsupported architectures:",
        ),
        what="The engine does not know this model class.",
        why="The model is newer than the engine, or its config names a class of its own.",
        fixes=(
            advice("a newer engine", "New models need it, often from their first week."),
            advice(
                "the Transformers backend of the engine",
                "Slower, but takes any model that supports it.",
                vllm="--model-impl=transformers",
                sglang="--model-impl=transformers",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR263",
        name="image-token-count-mismatch",
        family=Family.GENERATION,
        texts=(
            "Attempted to assign * multimodal tokens to * placeholders",
            "multimodal tokens to && placeholders",
            "Image features and image tokens do not match",
            "Videos features and video tokens do not match",
            "Mismatch in `image` token count between text and `input_ids`",
            "prompt placeholders, but instead found",
        ),
        what="The prompt has another number of image tokens than there are image features.",
        why="The prompt was cut in the middle of an image, image placeholders were expanded twice, "
        "or engine and trainer process images with different size limits.",
        fixes=(
            advice(
                "do not truncate prompts with images; filter them",
                "Half an image is no image.",
                verl="data.truncation=error, data.filter_overlong_prompts=True",
            ),
            advice("the same min_pixels and max_pixels on both sides", "They set the count."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR264",
        name="no-eos",
        family=Family.GENERATION,
        level=Level.WARN,
        texts=(
            "tokenizer has no eos token",
            "tokenizer does not have an eos token",
            "Tokenizer has no eos_token",
            "eos_token_id is not set",
            "no stop token is configured",
        ),
        what="There is no end-of-sequence token: answers can only end at the length limit.",
        why="The checkpoint's tokenizer or generation config names none, so the engine samples "
        "on to the cap: slow steps, truncated answers.",
        fixes=(
            safe(
                "rollout.stop_token_ids",
                "the chat template's end-of-turn token",
                "For example <|im_end|> or <|eot_id|>.",
                slime="--rollout-stop-token-ids, --rollout-stop",
                miles="--rollout-stop-token-ids, --rollout-stop",
                trl="generation_kwargs",
            ),
        ),
    ),
    Trouble(
        code="ERR267",
        name="no-room-for-answer",
        family=Family.GENERATION,
        texts=(
            "max_tokens must be at least 1",
            "`max_new_tokens` must be greater than 0",
            "max_new_tokens must be at least 0",
            "Input length of input_ids is *, but `max_length` is set to",
        ),
        what="No tokens are left for an answer.",
        why="What remains of the context after the prompt, or the configured limit, is zero.",
        causes=(
            Cause("no-room-for-answer", "The limit is below one."),
            Cause("prompt-exceeds-context", "The prompt takes all of the context."),
        ),
        fixes=(
            change("rollout.max_new_tokens", "above 0", "Counts the answer alone."),
            advice(
                "max_new_tokens, not max_length, for generate()", "The latter counts the prompt."
            ),
        ),
    ),
    Trouble(
        code="ERR271",
        name="engine-step-timeout",
        family=Family.GENERATION,
        confidence=Confidence.INFERRED,
        texts=(
            "RPC call to execute_model timed out",
            "RPC call to sample_tokens timed out",
            "TimeoutError: RPC call to",
            "Engine iteration timed out. This should never happen",
            "AsyncEngineRPCTimeout",
        ),
        what="A step of the engine's workers never came back.",
        why="A worker died or waits in a collective, a first step compiles for long, or the "
        "host is out of CPU.",
        fixes=(
            safe("engine.enforce_eager", "true", "No compilation within a step."),
            advice("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "Longer, for the first step of a giant."),
            advice("dmesg, and the worker's own log", "Was one killed?"),
        ),
        explains=("ERR254", "ERR132", "ERR140"),
    ),
    Trouble(
        code="ERR272",
        name="engine-serves-another-model",
        family=Family.GENERATION,
        texts=(
            "The model `*` does not exist",
            "The model '*' does not exist",
            "The model * does not exist && NotFoundError",
        ),
        what="The server does not serve the model that the request names.",
        why="A server answers only to the name or path that it was started with, or to the name "
        "that it was told to go by. Often it is the server of an earlier run.",
        fixes=(
            advice("curl http://HOST:PORT/v1/models", "Shows what it really serves."),
            advice(
                "the same path for trainer and server",
                "Or give the server the name that requests use.",
                vllm="--served-model-name",
                sglang="--served-model-name",
            ),
        ),
    ),
)
