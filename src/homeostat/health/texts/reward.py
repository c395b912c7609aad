"""Error texts of the family reward: reward functions, verifiers, reward servers, sandboxes."""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts.conditions import first_failures
from homeostat.health.texts.parts import advice, change, safe
from homeostat.health.texts.trouble import Trouble

# Frames of the trainers that call a user's reward function.
_CALLERS = (
    "_calculate_rewards",
    "reward_func(",
    "reward_fn(",
    "compute_score",
    "reward_manager",
    "_compute_rewards",
    "custom_rm",
    "batched_rm",
    "async_rm",
    "rm_hub",
    "reward_loop",
    "compute_reward",
    "workers/reward",
    "get_reward(",
    "rewards.py",
)

_FUNCTION = (
    Trouble(
        code="ERR500",
        name="reward-fn-signature",
        family=Family.REWARD,
        texts=(
            "unexpected keyword argument 'completion_ids'",
            "unexpected keyword argument 'completions'",
            "unexpected keyword argument 'trainer_state'",
            "unexpected keyword argument 'solution_str'",
            "unexpected keyword argument 'ground_truth'",
            "unexpected keyword argument 'extra_info'",
            "unexpected keyword argument 'data_source'",
            "reward* got an unexpected keyword argument",
            "compute_score() got an unexpected keyword argument",
            "compute_score() missing",
            "reward* missing * required positional argument",
            "reward* missing * required keyword-only argument",
            "reward* takes * positional argument",
        ),
        what="The reward function does not accept what the trainer calls it with.",
        why=(
            "Trainers hand over prompts, completions, their token ids and every dataset "
            "column by keyword; a function that names only some of them rejects the rest, or "
            "misses one that the rows lack."
        ),
        fixes=(
            advice(
                "",
                (
                    "Add **kwargs to the function's parameters and give defaults to what may "
                    "be missing."
                ),
                trl="reward_funcs",
                axolotl="trl.reward_funcs",
                verl="reward.custom_reward_function.path",
                openrlhf="--reward.remote_url",
                slime="--custom-rm-path",
            ),
            advice(
                "",
                (
                    "For a missing argument: add the column to the dataset and keep it "
                    "(remove_unused_columns: false)."
                ),
            ),
        ),
        explains=("ERR322", "ERR326", "ERR408", "ERR502", "ERR501", "ERR517"),
    ),
    Trouble(
        code="ERR517",
        name="reward-fn-signature",
        family=Family.REWARD,
        texts=(
            "got an unexpected keyword argument",
            "missing 1 required positional argument",
            "missing 2 required positional arguments",
            "missing 1 required keyword-only argument",
            "positional arguments but * were given",
            "positional argument but * were given",
        ),
        context=_CALLERS,
        within=4,
        what="The reward function does not accept what the trainer calls it with.",
        why=(
            "Trainers hand over prompts, completions and every dataset column by keyword; a "
            "function that names only some of them rejects the rest."
        ),
        fixes=(
            advice(
                "",
                (
                    "Add **kwargs to the function's parameters and give defaults to what may "
                    "be missing."
                ),
                trl="reward_funcs",
                axolotl="trl.reward_funcs",
                verl="reward.custom_reward_function.path",
                slime="--custom-rm-path",
            ),
        ),
        confidence=Confidence.INFERRED,
        explains=("ERR322", "ERR326", "ERR408", "ERR502"),
    ),
    Trouble(
        code="ERR501",
        name="reward-fn-not-importable",
        family=Family.REWARD,
        texts=(
            "No module named 'custom_module'",
            "on <module 'custom_module'",
            "Reward function file * not found",
            "Reward function * not found in",
            "Error loading module from",
            "Reward function * not found",
            "Can't pickle * reward",
            "Can't get attribute * reward",
            "Could not import reward",
            "Failed to import reward",
            "reward* && ModuleNotFoundError",
            "cannot import name * from 'rewards'",
            "No module named 'rewards'",
            "No module named 'reward'",
            "No module named 'my_reward",
            "No module named 'reward_",
        ),
        what="The reward function cannot be imported or unpickled where it is called.",
        why=(
            "Workers import the function by its module's name: a script's own function, a "
            "file loaded under a made-up name or a folder outside PYTHONPATH does not exist "
            "there."
        ),
        fixes=(
            advice(
                "",
                (
                    "Put the function into a module that every worker can import (installed, "
                    'or on PYTHONPATH of the workers), and try `python -c "import <module>"` '
                    "in the same environment."
                ),
                verl="reward.custom_reward_function.path",
                axolotl="trl.reward_funcs",
                slime="--custom-rm-path",
            ),
            advice(
                "",
                (
                    "For Ray: runtime_env.working_dir or env_vars PYTHONPATH; upgrade the "
                    "trainer where it loads the file under a name of its own."
                ),
            ),
        ),
        explains=("ERR300", "ERR307", "ERR324", "ERR351", "ERR424", "ERR502"),
    ),
    Trouble(
        code="ERR520",
        name="reward-fn-not-importable",
        family=Family.REWARD,
        texts=("unable to load strategy", "unable to load prompt strategy"),
        context=("is not callable", "ModuleNotFoundError", "ImportError"),
        what="A module that the config names (rewards, or the data's transform) cannot be "
        "imported.",
        why="What cannot be imported is passed on as None, and fails only where it is called. "
        "The module's folder is not on PYTHONPATH, or the module itself fails to import.",
        fixes=(
            advice(
                'python -c "import <module>", from the folder that training starts in',
                "Shows the error that was swallowed.",
                axolotl="trl.reward_funcs",
            ),
        ),
        explains=("ERR300", "ERR324", "ERR502"),
    ),
    Trouble(
        code="ERR518",
        name="reward-fn-not-importable",
        family=Family.REWARD,
        texts=(
            "is not a local folder and is not a valid model identifier",
            "Repo id must be in the form",
            "RepositoryNotFoundError",
            "401 Client Error",
            "404 Client Error",
            "HFValidationError",
        ),
        context=(
            "is a pre-trained model path - if this is unexpected",
            "loading reward model",
            "reward_funcs",
        ),
        within=20,
        what=(
            "The name of a reward function was taken for a reward model, which the hub does "
            "not have."
        ),
        why=(
            "What cannot be imported as a function is tried as a model name. Usually the "
            "import of the reward module failed, and its own error was swallowed."
        ),
        fixes=(
            advice(
                "",
                (
                    'Import the module by hand (`python -c "import rewards"`) and repair '
                    "what it says; set PYTHONPATH to its folder."
                ),
                axolotl="trl.reward_funcs",
                trl="reward_funcs",
            ),
            advice("", "Upgrade the trainer: newer ones show the original import error."),
        ),
        explains=("ERR350", "ERR351", "ERR352"),
    ),
    Trouble(
        code="ERR502",
        name="reward-fn-failing",
        family=Family.REWARD,
        texts=(
            "KeyError:",
            "IndexError:",
            "AttributeError:",
            "ValueError:",
            "ZeroDivisionError",
            "NameError:",
            "UnboundLocalError:",
            "TypeError:",
            "re.error:",
            "SyntaxError:",
            "AssertionError",
            "RecursionError",
        ),
        context=_CALLERS,
        within=4,
        what="The reward function raised an exception.",
        why=(
            "It met an answer or a row that it was not written for: no match in the text, an "
            "empty answer, a column that is None or missing."
        ),
        causes=(
            Cause(
                "reward-fn-failing",
                "the traceback ends in or just below the call of a reward function",
            ),
            Cause(
                "dataset-column-missing",
                ("a KeyError or NoneType there usually is a missing column"),
            ),
        ),
        fixes=(
            advice(
                "",
                (
                    "Make the function return 0 (or None) for answers that it cannot score, "
                    "and try it by hand on an empty, a cut-off and an odd answer."
                ),
            ),
            advice(
                "",
                "Keep the columns that it reads (remove_unused_columns: false).",
                trl="remove_unused_columns",
                axolotl="remove_unused_columns",
            ),
        ),
        confidence=Confidence.INFERRED,
        explains=("ERR461", "ERR422"),
    ),
    Trouble(
        code="ERR503",
        name="reward-fn-failing",
        family=Family.REWARD,
        texts=(
            "Error in reward function",
            "Error in reward_fn",
            "Error computing reward",
            "Exception in reward",
            "reward function raised",
            "Error in compute_score",
            "Reward function error",
            "Error occurred in reward",
            "failed to compute reward",
        ),
        unless=("reward_extra_info",),
        what="A reward function fails for some answers; the run goes on with a default score.",
        why=(
            "The exception is caught and printed. Answers that could not be scored get 0 or "
            "no reward, which teaches the wrong thing if it happens often."
        ),
        fixes=(
            advice(
                "",
                (
                    "Repair what the message names, and count how often it comes: a few odd "
                    "answers are harmless."
                ),
            ),
        ),
        level=Level.WARN,
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR504",
        name="reward-count-mismatch",
        family=Family.REWARD,
        texts=(
            "must return the same number of rewards",
            "returned * rewards, but",
            "returned * rewards for",
            "number of rewards * does not match",
            "len(rewards) ==",
            "expected * rewards, got",
            "The expanded size of the tensor",
            "size of tensor a * must match the size of tensor b",
            "could not be broadcast together",
        ),
        context=(*_CALLERS, "rewards_per_func", "returned * rewards", "number of rewards"),
        within=6,
        what="The reward function gave another number of rewards than there are completions.",
        why=(
            "It must return one number per completion of the batch, in order; one per "
            "prompt, or one number alone, is too few."
        ),
        fixes=(advice("", "Return a list with one number (or None) for each completion."),),
        explains=("ERR502",),
    ),
    Trouble(
        code="ERR505",
        name="reward-fn-returns-none",
        family=Family.REWARD,
        texts=("All reward functions returned None", "reward functions returned None for"),
        what="Every reward function returned None for a sample: it has no reward at all.",
        why=(
            'None means "does not apply"; where all say so, nothing scores that answer. '
            "Usually the column that decides (task, data source) is missing or spelt "
            "differently."
        ),
        fixes=(
            advice(
                "",
                (
                    "Make sure that at least one function scores every row, and that the "
                    "deciding column reaches it."
                ),
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR506",
        name="benign-reward-extra-info-missing",
        family=Family.REWARD,
        texts=(
            "Error in reward_fn: 'reward_extra_info'",
            "reward_extra_info && Error in reward",
            "reward_extra_info && not found",
            "reward_extra_info && missing",
        ),
        what=(
            "The reward manager gave scores without extra information; the scores are used "
            "all the same."
        ),
        why=(
            "The trainer first asks for a dictionary with reward_extra_info, and falls back "
            "to the plain tensor."
        ),
        fixes=(
            advice(
                "",
                (
                    "Nothing needs to be done; return a dict with reward_tensor and "
                    "reward_extra_info to silence it."
                ),
            ),
        ),
        level=Level.INFO,
    ),
    Trouble(
        code="ERR514",
        name="reward-fn-async-mismatch",
        family=Family.REWARD,
        texts=(
            "coroutine '*reward* was never awaited",
            "coroutine '*score* was never awaited",
            "coroutine '*rm* was never awaited",
            "can't be used in 'await' expression",
        ),
        context=(*_CALLERS, "was never awaited", "reward"),
        within=8,
        what="An async reward function is called like an ordinary one, or the other way round.",
        why=(
            "The trainer awaits the function (or does not), and the function is of the other kind."
        ),
        fixes=(
            advice(
                "",
                (
                    "Write it as `async def` where the trainer awaits it (slime, miles, "
                    "verl's reward loop), plain `def` elsewhere."
                ),
                slime="--custom-rm-path",
                miles="--custom-rm-path",
            ),
        ),
        explains=("ERR502",),
    ),
    Trouble(
        code="ERR515",
        name="reward-fn-not-for-data",
        family=Family.REWARD,
        texts=(
            "Reward function is not implemented for data_source",
            "NotImplementedError* data_source",
            "Unknown data_source",
            "Unknown rm_type",
            "rm_type * not",
            "rm_type * is not",
            "Rule-based RM for * is not implemented",
        ),
        what="No reward function is registered for this data source.",
        why=(
            "The built-in scorer picks a function by the row's data_source (or rm_type), and "
            "does not know this one."
        ),
        fixes=(
            advice(
                "",
                "Give your own function, or set the column to a known source.",
                verl="reward.custom_reward_function.path",
                slime="--custom-rm-path",
                miles="--custom-rm-path",
            ),
        ),
        explains=("ERR502",),
    ),
    Trouble(
        code="ERR516",
        name="reward-weights-count",
        family=Family.REWARD,
        texts=(
            "Number of reward weights * must match number of reward functions",
            "number of reward weights * must match",
            "reward processing classes must match",
            "reward_weights * length",
        ),
        what="There are not as many reward weights as reward functions.",
        why="Each function needs exactly one weight.",
        fixes=(
            change(
                "rewards.functions",
                "one weight each",
                "Give one weight per function, in order.",
                trl="reward_weights",
                axolotl="trl.reward_weights",
                ms_swift="--reward_weights",
            ),
        ),
    ),
)

_OUTSIDE = (
    Trouble(
        code="ERR507",
        name="reward-timeout",
        family=Family.REWARD,
        texts=(
            "Global timeout in reward computing",
            "reward* && timed out",
            "reward* && TimeoutError",
            "reward computation timed out",
            "Timeout in reward",
            "Setting all as 0",
        ),
        what="Computing rewards took too long; what was not ready got 0 or nothing.",
        why=(
            "The function, its verifier or its server is slower than the limit; answers "
            "without a score teach the wrong thing."
        ),
        fixes=(
            safe("rewards.workers", "more", "Score answers in parallel."),
            safe(
                "rewards.timeout_s",
                "longer",
                "Give slow answers more time.",
            ),
            advice(
                "",
                (
                    "Bound the work per answer: length of code output, number of test cases, "
                    "size of expressions."
                ),
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR519",
        name="verifier-timeouts",
        family=Family.REWARD,
        texts=("Timeout during comparison", "Timeout during parsing", "math_verify* && Timeout"),
        what="The math verifier gave up on single answers; usual now and then.",
        why="Odd expressions take long to simplify; they count as wrong.",
        fixes=(advice("", "Nothing, unless it comes for a large share of the answers."),),
        level=Level.INFO,
    ),
    Trouble(
        code="ERR508",
        name="verifier-in-thread",
        family=Family.REWARD,
        texts=(
            "signal only works in main thread",
            "Math-Verify 'parse' function doesn't support threaded environment",
            "doesn't support threaded environment",
        ),
        what="A verifier that limits its time with signals is called from a thread.",
        why=(
            "Python's signals work in the main thread only; math_verify raises there, and "
            "every answer may count as wrong."
        ),
        fixes=(
            advice(
                "",
                (
                    "Call it with parsing_timeout=None and timeout_seconds=None, or in "
                    "processes in place of threads; put your own limit around it."
                ),
            ),
            safe("rewards.workers", "2", "Our rewards run in processes of their own."),
        ),
    ),
    Trouble(
        code="ERR509",
        name="reward-server-unreachable",
        family=Family.REWARD,
        texts=(
            "Connection refused",
            "Max retries exceeded",
            "ConnectionError",
            "Cannot connect to host",
            "ReadTimeout",
            "502 Bad Gateway",
            "503 Service Unavailable",
            "Request error, please check",
            "ClientConnectorError",
        ),
        context=(
            "remote_rm",
            "rm_url",
            "get_reward",
            "reward_server",
            "reward server",
            "reward_model_url",
            "/reward",
            "remote reward",
            "reward model server",
        ),
        within=6,
        what="The reward server does not answer.",
        why=(
            "It is not started, listens on another host or port, was killed, or a proxy "
            "stands between."
        ),
        fixes=(
            advice(
                "",
                (
                    "Start it first and try its URL with curl from a worker node; check "
                    "host, port and no_proxy."
                ),
                openrlhf="--reward.remote_url",
                lightrft="--remote_rm_url",
                slime="--rm-url",
                miles="--rm-url",
            ),
        ),
        explains=("ERR502", "ERR507"),
    ),
    Trouble(
        code="ERR511",
        name="verifier-cannot-parse-gold",
        family=Family.REWARD,
        texts=(
            "Failed to parse gold solution",
            "We did not manage to extract a gold in the correct format",
            "gold answer could not be parsed",
            "unable to parse ground truth",
            "Failed to parse ground truth",
        ),
        what="The verifier cannot read expected answers of the dataset.",
        why=(
            "The gold answer is not in the form that it parses (LaTeX without its dollar "
            "signs or \\boxed{}, text around a number): such rows cannot be scored."
        ),
        causes=(
            Cause("verifier-cannot-parse-gold", "the expected answer itself fails to parse"),
            Cause(
                "verifier-format-mismatch", "the form that the verifier expects is not the data's"
            ),
        ),
        fixes=(
            advice(
                "",
                (
                    "Write the gold answers in the form that the verifier expects, or "
                    "configure its extraction; drop rows that fail."
                ),
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR512",
        name="verifier-dependency-broken",
        family=Family.REWARD,
        texts=(
            "ANTLR runtime and generated code versions disagree",
            "requires the antlr4 Python package",
            "Could not deserialize ATN with version",
            "LaTeX parsing requires the antlr4",
            "No module named 'antlr4",
        ),
        what="The LaTeX parser of the math verifier does not work with the installed antlr4.",
        why=(
            "omegaconf, sympy and latex2sympy pin different antlr4 runtimes. Parsing fails, "
            "so right answers count as wrong."
        ),
        causes=(
            Cause("verifier-dependency-broken", "the parser itself cannot run"),
            Cause("dependency-conflict", "two packages need different antlr4 versions"),
        ),
        fixes=(
            advice(
                "",
                (
                    "Install the runtime that the verifier's package asks for (`pip install "
                    "'math-verify[antlr4_13_2]'` or antlr4_9_3 beside hydra), and test one "
                    "parse."
                ),
            ),
        ),
        level=Level.WARN,
        explains=("ERR300",),
    ),
)

TROUBLES: tuple[Trouble, ...] = first_failures(_FUNCTION + _OUTSIDE, run_goes_on=("ERR508",))
